//! The fence by the reservations of the store's disks.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sidecore_linux::{DiskReservation, ReservationError, ReservedDisk, stacked_on};
use sidecore_ownership::{Acquisition, Found, Member, Order, Reply};

use crate::{Claim, Fence, LockFence, NotesFile, Others};

/// A fence by persistent reservations, for candidates on several hosts.
///
/// The owner's host alone is registered at the store's disks: they refuse the writes of all others,
/// also of a host that was paused and does not know that it was replaced. Former daemons of this
/// host are fenced by locks, because the disks cannot tell them from this one
/// (docs/decisions/0085-reservations.md).
#[derive(Debug)]
pub struct ReservationFence {
    /// Whole SCSI or NVMe disks.
    pub disks: Vec<PathBuf>,
    /// An order that takes longer has failed.
    pub time_limit: Duration,
    /// For former daemons of this host.
    pub local: LockFence,
    /// What this host has sent.
    pub notes: NotesFile,
    /// The attempt that has not ended, also not in time.
    pub late: LateAttempt,
    /// Takes what an operator should know.
    pub tell: fn(&str),
}

/// An attempt whose order hangs in the kernel. There is no second one beside it.
#[derive(Debug, Default)]
pub struct LateAttempt(Mutex<Option<(Receiver<()>, Arc<Attempt>)>>);

/// What is known of an attempt while it goes on.
#[derive(Debug, Default)]
struct Attempt {
    is_given_up: AtomicBool,
    /// What it waits for.
    at: Mutex<String>,
}

impl Attempt {
    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    fn waits_for(&self, what: &Path) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        *at = what.display().to_string();
    }

    fn too_late(&self, limit: Duration) -> String {
        let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        format!(
            "{at} has not answered within {} s: look at the disk, its path and the kernel's log; \
             the attempt is waited for, and the next one follows",
            limit.as_secs_f32()
        )
    }
}

impl LateAttempt {
    /// Does work on a thread of its own, and waits for a limited time. `work` ends early if the
    /// attempt is given up.
    fn run(
        &self,
        limit: Duration,
        work: impl FnOnce(&Attempt) -> Result<(), String> + Send + 'static,
    ) -> Result<(), String> {
        let mut late = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((end, attempt)) = late.take()
            && end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout)
        {
            let why = attempt.too_late(limit);
            *late = Some((end, attempt));
            return Err(why);
        }
        let attempt = Arc::new(Attempt::default());
        let known = Arc::clone(&attempt);
        let ((result, answer), (ends, end)) = (channel(), channel::<()>());
        let run = move || {
            let _ = result.send(work(&attempt));
            drop(ends);
        };
        let thread = std::thread::Builder::new().name("reservation".to_owned()).spawn(run);
        thread.map_err(|error| format!("no thread for it: {error}"))?;
        answer.recv_timeout(limit).unwrap_or_else(|_| {
            known.is_given_up.store(true, Ordering::Relaxed);
            let why = known.too_late(limit);
            *late = Some((end, known));
            Err(why)
        })
    }
}

impl ReservationFence {
    /// Fails if a disk knows no reservations, or does not answer. `unused` is a random number.
    ///
    /// # Errors
    /// The reason, with the disk's name.
    pub fn probe(disks: &[PathBuf], unused: u64, limit: Duration) -> Result<(), String> {
        let disks = disks.to_vec();
        LateAttempt::default().run(limit, move |attempt| {
            for path in &disks {
                attempt.waits_for(path);
                let probed = ReservedDisk::open(path).and_then(|disk| disk.probe(unused));
                probed.map_err(|error| error.to_string())?;
            }
            Ok(())
        })
    }
}

impl Fence for ReservationFence {
    fn fence(&self, claim: &Claim, others: Others<'_>) -> Result<(), String> {
        let Others { suspects, former } = others;
        let work = Work {
            disks: self.disks.clone(),
            local: self.local.clone(),
            notes: self.notes.clone(),
            claim: claim.clone(),
            others: suspects.iter().chain(former).cloned().collect(),
            tell: self.tell,
        };
        self.late.run(self.time_limit, move |attempt| work.run(attempt))
    }

    fn watch(&self, me: &Member) -> Option<Watch> {
        let disks = self.disks.iter().map(|path| (path.clone(), None)).collect();
        Some(Watch { key: me.reservation_key(), disks })
    }
}

/// Sees whether another host has fenced this one.
#[derive(Debug)]
pub struct Watch {
    key: u64,
    /// Opened once: udev looks at a disk again after each close.
    disks: Vec<(PathBuf, Option<ReservedDisk>)>,
}

impl Watch {
    /// The time between two looks while the store is served.
    pub const PERIOD: Duration = Duration::from_secs(1);

    /// Looks at all disks. A disk that fails says nothing about other hosts. It may hang.
    ///
    /// # Errors
    /// This host's writes fail, because another one has the reservation.
    pub fn look(&mut self) -> Result<(), String> {
        for (path, disk) in &mut self.disks {
            if disk.is_none() {
                *disk = ReservedDisk::open(path).ok();
            }
            // The holder may reserve again.
            let held = disk.as_ref().map(|disk| disk.reserve(self.key));
            match held {
                Some(Err(ReservationError::Conflict(_))) => {
                    return Err(format!(
                        "{} has refused this host's reservation: another host has fenced this \
                         owner",
                        path.display()
                    ));
                }
                Some(Err(_)) => *disk = None,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The work of one attempt.
struct Work {
    disks: Vec<PathBuf>,
    local: LockFence,
    notes: NotesFile,
    claim: Claim,
    /// The daemons that may be registered.
    others: Vec<Member>,
    tell: fn(&str),
}

impl Work {
    fn run(&self, attempt: &Attempt) -> Result<(), String> {
        // A registration lets the whole host write. So nothing of it may be in flight, also if the
        // daemon that sent it was fenced before, and no other may begin.
        for path in &self.disks {
            attempt.waits_for(path);
            if let Some(over) = stacked_on(path) {
                return Err(format!(
                    "{} is on {}, and the kernel can write through it at any time: serve the whole \
                     disk, and nothing on it",
                    over.display(),
                    path.display()
                ));
            }
        }
        let _lock = self.local.quiet()?;
        self.disks.iter().try_for_each(|path| {
            attempt.waits_for(path);
            self.acquire(path, attempt)
        })
    }

    /// Gets the reservation of a disk.
    fn acquire(&self, path: &Path, attempt: &Attempt) -> Result<(), String> {
        let disk = ReservedDisk::open(path).map_err(|error| error.to_string())?;
        let (name, me) = (path.display().to_string(), &self.claim.me);
        let mut acquisition = Acquisition::new(&name, me, &self.others, self.notes.read()?);
        let mut is_verified = true;
        while let Some(order) = acquisition.order() {
            if attempt.is_given_up() || self.claim.has_ended() {
                // The end of the last order is known.
                self.notes.write(acquisition.notes())?;
                return Err(format!("the attempt at {name} was given up"));
            }
            let reply = self.carry_out(&disk, order);
            is_verified &= reply != Reply::Read(None);
            acquisition.replied(reply);
        }
        if !is_verified && !UNVERIFIED.swap(true, Ordering::Relaxed) {
            (self.tell)(&format!(
                "this kernel does not show the keys of {name}: the fence believes the disk's \
                 answers, and does not look whether they are true (Linux 6.19 or later does)"
            ));
        }
        acquisition.result().cloned().unwrap_or(Ok(()))
    }

    fn carry_out(&self, disk: &ReservedDisk, order: Order) -> Reply {
        let done = match order {
            Order::Note(notes) => {
                return self.notes.write(&notes).map_or_else(Reply::Failed, |()| Reply::Done);
            }
            Order::Recall => {
                return self.notes.recall().map_or_else(Reply::Failed, Reply::Recalled);
            }
            Order::Register { old, new } => disk.register(old, new),
            Order::PreemptAndAbort { victim, mine } => disk.preempt_and_abort(victim, mine),
            Order::Reserve { key } => disk.reserve(key),
            Order::Read => match disk.read() {
                Ok(found) => return Reply::Read(found.map(found_of)),
                Err(error) => Err(error),
            },
        };
        match done {
            Ok(()) => Reply::Done,
            Err(ReservationError::Conflict(_)) => Reply::Conflict,
            Err(error) => Reply::Failed(error.to_string()),
        }
    }
}

/// Whether an operator was told that the fence is not verified: once is enough.
static UNVERIFIED: AtomicBool = AtomicBool::new(false);

fn found_of(disk: DiskReservation) -> Found {
    let DiskReservation { keys, holder, is_write_exclusive } = disk;
    Found { keys, holder, is_write_exclusive }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn an_attempt_that_hangs_fails_in_time_and_has_no_second_one_beside_it() {
        let late = LateAttempt::default();
        let (go, wait) = channel::<()>();
        let (told, tells) = channel();
        let error = late.run(SHORT, move |attempt| {
            attempt.waits_for("/dev/slow".as_ref());
            let _ = wait.recv();
            told.send(attempt.is_given_up()).unwrap();
            Ok(())
        });
        assert!(error.unwrap_err().contains("/dev/slow has not answered within"));
        let error = late.run(SHORT, |_| panic!("a second one")).unwrap_err();
        assert!(error.contains("/dev/slow has not answered within"), "{error}");
        drop(go);
        assert_eq!(late.run(LONG, |_| Ok(())), Ok(()));
        assert!(tells.recv().unwrap(), "it was not told that it had been given up");
        assert_eq!(late.run(LONG, |_| Err("why".to_owned())), Err("why".to_owned()));
    }

    #[test]
    fn a_disk_without_reservations_is_refused_before_a_takeover() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = ReservationFence::probe(&[file.path().to_owned()], 5, LONG).unwrap_err();
        assert!(error.contains("is no block device"), "{error}");
        let error = ReservationFence::probe(&["/no/such".into()], 5, LONG).unwrap_err();
        assert!(error.contains("cannot open /no/such"), "{error}");
    }
}
