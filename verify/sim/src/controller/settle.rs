//! The hypervisor side's steps, and the changes and requests that wait for them.

use std::io;

use sidecore_controller::Change;
use sidecore_volume::Disk;

use super::Bug;
use super::register::Moment;
use super::world::World;
use crate::history::{Step, System as _};
use crate::volumes::find;

/// Rounds within which all requests in flight must end.
const PATIENCE: u32 = 20_000;

/// A change to a volume whose end the operator waits for.
pub(super) struct Settling {
    pub(super) change: Change,
    pub(super) volume: u64,
    pub(super) begun: Moment,
    /// The current commit makes the change durable.
    pub(super) is_in_commit: bool,
}

impl World {
    /// Takes a step of the hypervisor side.
    pub(super) fn serve(&mut self) -> Step {
        let controller = self.controller.clone();
        controller.step(&mut DuringWork { world: self });
        // A guest's flush may have failed, which makes the store read-only as a failed commit does.
        self.has_failed |= controller.health(None).read_only.is_some();
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// Commits.
    pub(super) fn commit(&mut self) -> Step {
        if self.is_committing || self.has_failed {
            return Ok(());
        }
        self.note("commit");
        for settling in &mut self.settling {
            settling.is_in_commit = self.controller.has_passed(settling.change);
        }
        let commits = self.controller.report().counts.commits;
        if self.random.once_in(self.tuning.commits_per_failure) {
            let succeeds = self.random.below(16);
            if self.random.once_in(2) {
                self.disk.fail_after(Some(succeeds));
            } else {
                self.disk.full_after(Some(succeeds));
            }
        }
        let controller = self.controller.clone();
        self.is_committing = true;
        let result = controller.commit_on(&mut DuringWork { world: self });
        self.is_committing = false;
        // The planned failure may also have hit a request of a guest.
        self.disk.fail_after(None);
        self.disk.full_after(None);
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        let report = controller.report();
        self.has_failed = report.read_only.is_some();
        if let Err(error) = result {
            self.note(format!("commit: {error}"));
            return Ok(());
        }
        self.note("commit is safe");
        let position = self.disk.position();
        if report.counts.commits > commits {
            self.first_commit.get_or_insert(position);
        }
        let settled: Vec<_> =
            self.settling.extract_if(.., |settling| settling.is_in_commit).collect();
        for settling in settled {
            self.settled(&settling, position);
        }
        Ok(())
    }

    /// Notes that the operator was told of the change's end.
    pub(super) fn settled(&mut self, settling: &Settling, position: usize) {
        let now = self.now();
        if let Some(volume) = self.model.volumes.get_mut(&settling.volume) {
            volume.secure_itself(Moment { clock: settling.begun.clock + 1, ..now }, position);
        }
    }

    /// Runs until no request is in flight.
    pub(super) fn drain(&mut self) -> Step {
        let mut rounds = 0;
        while !self.requests.pending.is_empty() {
            rounds += 1;
            if rounds > PATIENCE {
                let report = self.controller.report();
                let waiting = self.requests.pending.values().take(4).map(ToString::to_string);
                let waiting = waiting.collect::<Vec<_>>().join(", ");
                return Err(format!(
                    "{} requests do not end: {waiting}; {report:?}",
                    self.requests.pending.len()
                ));
            }
            self.poll_all()?;
            self.serve()?;
            // The controller retries on a store that was full without being asked.
            let is_full = self.controller.health(None).full.is_some();
            if (self.controller.wants_commit() || is_full) && self.random.once_in(4) {
                if self.has_failed {
                    // Like the committing thread, which reports the failure to the requests that
                    // wait.
                    let _ = self.controller.clone().commit_on(&mut self.store.clone());
                }
                self.commit()?;
            }
        }
        Ok(())
    }

    /// Checks that every block is accounted for.
    pub(super) fn check(&mut self) -> Step {
        self.note("check");
        find::check_report(&self.controller.check_on(&mut self.disk.clone()), false)
    }

    /// Takes steps in the middle of the controller's work.
    fn meanwhile(&mut self) {
        self.depth += 1;
        while self.depth < 4
            && self.wrong.is_none()
            && self.random.once_in(self.tuning.writes_per_meanwhile)
        {
            if let Err(wrong) = self.step() {
                self.wrong = Some(wrong);
            }
        }
        self.depth -= 1;
    }
}

/// The store as the hypervisor side uses it without holding locks: for writes.
struct DuringWork<'a> {
    world: &'a mut World,
}

impl Disk for DuringWork<'_> {
    fn size_bytes(&self) -> u64 {
        self.world.store.size_bytes()
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.world.store.read(offset_bytes, buffer)
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.world.meanwhile();
        // Outside of a commit, the hypervisor side writes only fresh blocks.
        if self.world.bug == Some(Bug::UnfilledBlocks) && !self.world.is_committing {
            return Ok(());
        }
        let result = self.world.store.write(offset_bytes, data);
        self.world.meanwhile();
        result.inspect_err(|_| self.world.store.note_fault())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.world.meanwhile();
        let result = self.world.store.flush();
        self.world.meanwhile();
        result.inspect_err(|_| self.world.store.note_fault())
    }

    fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.world.meanwhile();
        self.world.store.discard(offset_bytes, len_bytes)
    }
}
