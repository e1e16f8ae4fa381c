//! The log while the store is open.

use std::sync::Arc;

use super::entry::{Change, Entry};
use super::header::{self, LogPlace, SuperblockId};
use super::memory::{LogMemory, Survives};

/// A log that changes are published to.
#[derive(Debug)]
pub(crate) struct Log {
    memory: Arc<dyn LogMemory>,
    capacity: u64,
    /// The number of the oldest entry.
    head: u64,
    /// The number of the next entry.
    tail: u64,
    /// Entries up to this one are in the trees in memory: all of them, except during a replay.
    applied: u64,
    /// Room for changes that have begun.
    reserved: u64,
    /// The commit in flight: entries before this one, and its superblock.
    sealed: Option<(u64, SuperblockId)>,
}

impl Log {
    /// Begins an empty log that builds on `base`. `has_loss`: another log should have been there.
    pub(crate) fn create(
        memory: Arc<dyn LogMemory>,
        uuid: &[u8; 16],
        place: &LogPlace,
        base: SuperblockId,
        has_loss: bool,
    ) -> Self {
        header::format(memory.as_ref(), uuid, place, base, has_loss);
        let capacity = header::capacity(memory.as_ref());
        Self { memory, capacity, head: 0, tail: 0, applied: 0, reserved: 0, sealed: None }
    }

    /// Resumes the log of a process that has died, whose entries are to be replayed: `entries` from
    /// number `head` on. The log builds on `base` alone: no commit is in flight.
    pub(crate) fn resume(
        memory: Arc<dyn LogMemory>,
        (head, entries): (u64, u64),
        base: SuperblockId,
    ) -> Self {
        header::set_base(memory.as_ref(), base);
        let capacity = header::capacity(memory.as_ref());
        let tail = head.saturating_add(entries);
        Self { memory, capacity, head, tail, applied: head, reserved: 0, sealed: None }
    }

    /// The events that the memory survives.
    pub(crate) fn survives(&self) -> Survives {
        self.memory.survives()
    }

    /// Discards the memory.
    pub(crate) fn discard(self) {
        self.memory.discard();
    }

    /// Entries that could still be reserved.
    pub(crate) fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.len()).saturating_sub(self.reserved)
    }

    /// Entries in the log.
    pub(crate) fn len(&self) -> u64 {
        self.tail.saturating_sub(self.head)
    }

    /// Whether it is time for a commit.
    pub(crate) fn is_half_full(&self) -> bool {
        self.len() >= self.capacity / 2
    }

    /// Keeps room for so many entries; the caller has asked for [`room`](Self::room).
    pub(crate) fn reserve(&mut self, entries: u64) {
        self.reserved = self.reserved.saturating_add(entries);
    }

    /// Gives reserved room back.
    pub(crate) fn release(&mut self, entries: u64) {
        self.reserved = self.reserved.saturating_sub(entries);
    }

    /// Publishes changes of the open transaction, all of them or none. Their room was reserved, and
    /// is so no more.
    pub(crate) fn publish(&mut self, generation: u64, changes: impl IntoIterator<Item = Change>) {
        let mut tail = self.tail;
        for change in changes {
            header::put(self.memory.as_ref(), tail, self.capacity, &Entry { generation, change });
            tail = tail.saturating_add(1);
        }
        header::set_tail(self.memory.as_ref(), tail);
        self.release(tail.saturating_sub(self.tail));
        self.tail = tail;
        self.applied = tail;
    }

    /// During a replay: entries up to this one are in the trees.
    pub(crate) fn set_applied(&mut self, sequence: u64) {
        self.applied = sequence;
    }

    /// A commit begins that writes this superblock. To be called before it is written.
    pub(crate) fn seal(&mut self, next: SuperblockId) {
        header::set_next(self.memory.as_ref(), next);
        self.sealed = Some((self.applied, next));
    }

    /// The commit is durable: its entries are dropped.
    pub(crate) fn durable(&mut self) {
        let Some((head, base)) = self.sealed.take() else { return };
        header::set_base(self.memory.as_ref(), base);
        header::set_head(self.memory.as_ref(), head);
        self.head = head;
    }

    /// Drops entries before this one: a commit that is on the disk has them.
    pub(crate) fn skip_to(&mut self, sequence: u64) {
        header::set_head(self.memory.as_ref(), sequence);
        self.head = sequence;
        self.applied = sequence;
    }
}
