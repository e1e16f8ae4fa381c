//! The owner in the superblock: a tripwire for a store that several hosts reach.
//!
//! Leases and fences see to it that one host at a time serves a store. If they fail, two programs
//! write metadata to one disk. The tripwire bounds the damage:
//!
//! * an owner writes its epoch to both generations of the superblock before it serves the store, so
//!   that neither copy that a former owner can still write is the newest;
//! * each commit of an owner reads the superblocks before it writes nodes, and again before it
//!   writes its own. If another program has written since, the commit fails and the owner has to
//!   end.
//!
//! It is no fence: guests' data passes by it, and a program can be paused after its look.

use std::fmt;

use crate::commit::CommitError;
use crate::disk::Disk;
use crate::geometry::SLOTS;
use crate::limits::NODE_BYTES;
use crate::log::SuperblockId;
use crate::superblock::{Superblock, slot_offset_bytes, slots_of};

/// An owner of a store, by the epoch in which it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The series that the epoch belongs to. Epochs of two series cannot be compared.
    pub series: u64,
    /// Larger than the epochs of all former owners of the series; never 0.
    pub epoch: u64,
}

impl Owner {
    pub(crate) const fn is_newer_than(&self, other: &Self) -> bool {
        self.series == other.series && self.epoch > other.epoch
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {} of series {:016x}", self.epoch, self.series)
    }
}

/// Notices that another program has written the superblock since this owner has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tripwire {
    pub(crate) owner: Owner,
    /// The durable superblock of this owner.
    pub(crate) durable: SuperblockId,
    /// The superblock that the commit writes: it may have been written in part before.
    pub(crate) next: SuperblockId,
}

impl Tripwire {
    /// Fails if another program has written to the store.
    pub(crate) fn check(&self, disk: &mut dyn Disk) -> Result<(), CommitError> {
        let mut bytes = vec![0; NODE_BYTES];
        for slot in 0..SLOTS {
            disk.read(slot_offset_bytes(slot), &mut bytes).map_err(CommitError::of_flush)?;
            // A slot that is damaged, or torn by a write of this moment, says nothing.
            if let Ok(found) = Superblock::decode(&bytes, slot) {
                self.check_slot(slot, &found)?;
            }
        }
        Ok(())
    }

    fn check_slot(&self, slot: u32, found: &Superblock) -> Result<(), CommitError> {
        if let Some(owner) = found.owner.filter(|owner| owner.is_newer_than(&self.owner)) {
            return Err(self.tripped(&format!("a daemon in {owner} has written to it")));
        }
        let is_this_owners = [self.durable, self.next].contains(&found.id());
        let is_newer = found.generation > self.durable.generation;
        // A write that the disk has lost leaves an older one of this owner.
        let is_in_the_way =
            slots_of(self.durable.generation).contains(&slot) && found.owner != Some(self.owner);
        if !is_this_owners && (is_newer || is_in_the_way) {
            let what = format!("generation {} is another program's", found.generation);
            return Err(self.tripped(&what));
        }
        Ok(())
    }

    fn tripped(&self, what: &str) -> CommitError {
        let owner = self.owner;
        CommitError::tripped(format!(
            "the store has another owner than {owner}: {what}; make sure that the fence of \
             `sidecore own` works, and run `sidecore volume check` when no daemon serves the store"
        ))
    }
}
