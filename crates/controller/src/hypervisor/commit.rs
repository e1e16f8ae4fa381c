//! Commits make changes in memory durable. Guests' flushes that arrive while a transaction is being
//! written are served together by the next one.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sidecore_block::BlockError;
use sidecore_volume::{Disk, VolumeId, Volumes};

use super::{Hypervisor, State};
use crate::mail::{Answer, ReplyTo};

/// Requests for a commit.
#[derive(Default)]
pub(crate) struct CommitQueue {
    inner: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Default)]
struct Wanted {
    /// Guests' flushes.
    flushes: Vec<ReplyTo>,
    /// Operations of the operator.
    operations: Vec<SyncSender<Result<(), String>>>,
    /// A request needs the space that a commit frees.
    now: bool,
    /// A question waits for tree nodes.
    wants_retry: bool,
    /// When the first change after the last commit was made.
    dirty_since: Option<Instant>,
    stop: bool,
}

/// The next action of the committing thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextCommit {
    /// Commit.
    Now,
    /// Nothing to commit: retry the questions that wait for an epoch.
    Later,
    /// Commit a last time and end.
    Stop,
}

impl CommitQueue {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a guest's flush. It fails after [`stop`](Self::stop), because nothing is committed
    /// then.
    pub(crate) fn ask(&self, reply_to: ReplyTo) {
        let mut wanted = self.wanted();
        if wanted.stop {
            drop(wanted);
            reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        }
        wanted.flushes.push(reply_to);
        self.changed.notify_all();
    }

    /// Queues an operation for the next commit that begins after this call; after
    /// [`stop`](Self::stop), its reply is dropped.
    pub(crate) fn ask_for_operation(&self, reply: SyncSender<Result<(), String>>) {
        let mut wanted = self.wanted();
        if !wanted.stop {
            wanted.operations.push(reply);
            self.changed.notify_all();
        }
    }

    /// Requests a commit soon.
    pub(crate) fn want(&self) {
        self.wanted().now = true;
        self.changed.notify_all();
    }

    /// Wakes the committing thread for a question that waits for nodes of an epoch.
    pub(super) fn retry_soon(&self) {
        self.wanted().wants_retry = true;
        self.changed.notify_all();
    }

    /// Starts the commit interval after a change that no request waits for.
    pub(crate) fn note_change(&self) {
        let mut wanted = self.wanted();
        if wanted.dirty_since.is_none() {
            wanted.dirty_since = Some(Instant::now());
            self.changed.notify_all();
        }
    }

    /// Ends the committing thread after one last commit.
    pub(crate) fn stop(&self) {
        self.wanted().stop = true;
        self.changed.notify_all();
    }

    /// Waits for the next action: a requested commit, or one that is overdue by `interval`; after
    /// at most `patience`.
    pub(crate) fn wait(&self, interval: Duration, patience: Option<Duration>) -> NextCommit {
        let mut wanted = self.wanted();
        loop {
            if wanted.stop {
                return NextCommit::Stop;
            }
            if wanted.now || !wanted.flushes.is_empty() || !wanted.operations.is_empty() {
                return NextCommit::Now;
            }
            let overdue = wanted.dirty_since.map(|since| interval.saturating_sub(since.elapsed()));
            if overdue == Some(Duration::ZERO) {
                return NextCommit::Now;
            }
            if std::mem::take(&mut wanted.wants_retry) {
                return NextCommit::Later;
            }
            let timeout = overdue.into_iter().chain(patience).min();
            wanted = match timeout {
                None => self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => {
                    let (next, waited) = self
                        .changed
                        .wait_timeout(wanted, timeout)
                        .unwrap_or_else(PoisonError::into_inner);
                    if waited.timed_out()
                        && patience.is_some()
                        && overdue.is_none_or(|overdue| overdue > timeout)
                    {
                        return NextCommit::Later;
                    }
                    next
                }
            };
        }
    }
}

/// Whether the error is a lack of space, which may be temporary.
fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::StorageFull
}

impl Hypervisor {
    /// Makes all changes until now durable, and answers all flushes and operations queued until
    /// now. Only one thread may commit.
    ///
    /// A commit that the store has no space for is kept, and tried again at the next call.
    ///
    /// # Errors
    /// The store's error. Unless it is full, the metadata cannot be changed afterwards.
    pub(crate) fn commit(&self, disk: &mut dyn Disk) -> io::Result<()> {
        // Later requests wait for the next commit.
        let (flushes, operations) = {
            let mut wanted = self.commits.wanted();
            wanted.now = false;
            wanted.dirty_since = None;
            (std::mem::take(&mut wanted.flushes), std::mem::take(&mut wanted.operations))
        };
        let transaction = {
            let mut state = self.state();
            let transaction = state.transaction;
            state.transaction = transaction.saturating_add(1);
            transaction
        };
        let generation = self.state().volumes.generation();
        let result = self.write_transactions(transaction, disk);
        self.note_result(&result, transaction);
        let has_emptied_the_log = {
            let state = self.state();
            state.volumes.generation() > generation && state.volumes.log_survives().is_some()
        };
        // Questions that wait for room in the log have it now. If the commit failed, questions that
        // wait for space would wait forever: serving them again gives them an error.
        if result.is_err() || has_emptied_the_log {
            let waiting = std::mem::take(&mut self.state().for_space);
            for message in waiting {
                self.serve(message, disk);
            }
        }
        self.show_withheld(&result, disk);
        for reply_to in flushes {
            reply_to.reply(match &result {
                Ok(()) => Answer::Done,
                Err(error) if is_full(error) => Answer::Failed(BlockError::NoSpace),
                Err(_) => Answer::Failed(BlockError::EIO),
            });
        }
        for reply in operations {
            // The caller may have stopped waiting.
            let _ = reply.send(result.as_ref().map_err(ToString::to_string).copied());
        }
        result
    }

    /// Writes the sealed transaction, if the store had no space for it before, and then the changes
    /// until now.
    fn write_transactions(&self, transaction: u64, disk: &mut dyn Disk) -> io::Result<()> {
        loop {
            let (commit, is_kept) = {
                let mut state = self.state();
                let is_kept = state.volumes.has_kept_commit();
                (state.volumes.begin_commit(), is_kept)
            };
            let Some(commit) = commit else { return self.flush(transaction, disk) };
            let written = commit.write(disk);
            let told = written.as_ref().map_err(|error| {
                let kind =
                    if error.is_full() { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
                io::Error::new(kind, error.to_string())
            });
            let told = told.copied();
            if let Err(error) = &written
                && error.is_tripped()
                && let Some(ownership) = &self.ownership
            {
                (ownership.lost)(&error.to_string());
            }
            let mut state = self.state();
            let freed = state.volumes.end_commit(commit, written);
            state.limbo.free_later(freed, &self.epochs);
            self.serve_sizes(&mut state);
            drop(state);
            self.stats.commits.add(1);
            if told.is_err() || !is_kept {
                return told;
            }
        }
    }

    /// The used share of the store in percent, if it is nearly full.
    pub(crate) fn too_full(&self, volumes: &Volumes) -> Option<u8> {
        let space = volumes.space();
        let used = u128::from(space.total.saturating_sub(space.free)).saturating_mul(100);
        let percent = used.checked_div(u128::from(space.total)).unwrap_or(0);
        let percent = u8::try_from(percent).unwrap_or(100);
        (percent >= self.warn_used_percent && self.warn_used_percent < 100).then_some(percent)
    }

    /// Adds an event when the store becomes nearly full, and when that ends.
    pub(crate) fn note_fullness(&self) {
        let percent = self.too_full(&self.state().volumes);
        let before = self.is_nearly_full.swap(percent.is_some(), Ordering::AcqRel);
        match percent {
            Some(percent) if !before => {
                let warn = self.warn_used_percent;
                let what = format!(
                    "{percent} % of the store are in use, which is nearly full (from {warn} % on)"
                );
                self.events.note(&self.name, what);
            }
            None if before => {
                self.events.note(&self.name, "the store is no longer nearly full".to_owned())
            }
            _ => {}
        }
    }

    /// Allocates the store's space for the next nodes. If that fails, no fresh blocks are
    /// allocated, so that the remaining space is there for deletes and discards.
    pub(crate) fn back_reserve(&self, disk: &mut dyn Disk) {
        let (ranges, block_bytes) = {
            let state = self.state();
            (state.volumes.unbacked(), u64::from(state.volumes.block_bytes()))
        };
        let mut backed = Vec::new();
        let mut full = None;
        for range in &ranges {
            let bytes = |blocks: u64| blocks.saturating_mul(block_bytes);
            match disk.allocate(bytes(range.first.0), bytes(range.count)) {
                Ok(()) => backed.push(*range),
                Err(error) => {
                    full = Some(error.to_string());
                    break;
                }
            }
        }
        let was_full = {
            let mut state = self.state();
            let was_full = state.volumes.disk_is_full().is_some();
            state.volumes.set_backed(&backed, full.clone());
            was_full && state.volumes.disk_is_full().is_none()
        };
        if was_full {
            self.events.note(&self.name, "the store has space for metadata again".to_owned());
        }
        if let Some(why) = &full {
            let what = format!(
                "the store has no space for the metadata's reserve, fresh blocks are not written: \
                 {why}"
            );
            self.events.note(&self.name, what);
            // Tries again after the commit interval.
            self.commits.note_change();
        }
    }

    /// Flushes the store when there is nothing to commit.
    fn flush(&self, transaction: u64, disk: &mut dyn Disk) -> io::Result<()> {
        let refused =
            self.state().volumes.cannot_commit().map(|why| io::Error::other(why.to_owned()));
        if let Some(error) = refused.filter(|_| self.has_uncommitted(transaction)) {
            return Err(error);
        }
        disk.flush().inspect_err(|error| self.flush_failed(error))
    }

    /// Stops further commits: the store may have lost earlier writes, and no commit may build on
    /// them.
    pub(super) fn flush_failed(&self, error: &io::Error) {
        self.state().volumes.flush_failed(error);
        self.events.note(
            &self.name,
            format!(
                "the store could not be flushed, so no volume can be changed until the controller \
                 is opened again: {error}"
            ),
        );
    }

    /// Publishes a commit's result, and adds an event for the operator.
    fn note_result(&self, result: &io::Result<()>, transaction: u64) {
        let was_full = self.is_full.swap(result.as_ref().is_err_and(is_full), Ordering::AcqRel);
        match result {
            Ok(()) => {
                self.durable.store(transaction, Ordering::Release);
                if was_full {
                    self.events.note(
                        &self.name,
                        "the store has space again: the kept changes are durable".to_owned(),
                    );
                }
            }
            Err(error) if is_full(error) => {
                // Tries again after the commit interval.
                self.commits.note_change();
                let what = format!(
                    "the store is full, so changes are kept in memory until it has space: {error}"
                );
                self.events.note(&self.name, what);
            }
            Err(error) => {
                let what = format!(
                    "the metadata could not be written, so no volume can be changed until the \
                     controller is opened again: {error}"
                );
                self.events.note(&self.name, what);
            }
        }
    }

    /// Serves the volume sizes that have become durable.
    fn serve_sizes(&self, state: &mut State) {
        let durable = state.volumes.generation();
        let changed = std::mem::take(&mut state.sizes);
        let (durable_now, later) =
            changed.into_iter().partition(|(_, (generation, _))| *generation <= durable);
        state.sizes = later;
        let durable_now: BTreeMap<VolumeId, (u64, u64)> = durable_now;
        for id in durable_now.into_keys() {
            let blocks = state.served_blocks(id);
            let Some(open) = state.open.get_mut(&id) else { continue };
            open.tree.resize(blocks);
            let retired = open.tree.take_retired();
            state.limbo.retire(retired, &self.epochs);
        }
    }

    /// Marks the store as closed in order, with the next commit.
    pub(crate) fn close(&self) {
        self.state().volumes.close();
    }

    /// Whether a volume has changes up to `transaction` that no commit has made durable.
    fn has_uncommitted(&self, transaction: u64) -> bool {
        let durable = self.durable.load(Ordering::Acquire);
        let changed = |changed: u64| changed > durable && changed <= transaction;
        self.state().open.values().any(|open| changed(open.state.changed.load(Ordering::Acquire)))
    }
}
