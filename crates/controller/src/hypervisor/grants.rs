//! Locked blocks of a volume: allocated and being written, or being compared. Until they are
//! unlocked, other requests must not map, regenerate or allocate there.

use sidecore_extent::BlockRange;
use sidecore_volume::Grant;

use crate::mail::GrantId;

/// The reason that a volume's blocks are locked.
#[derive(Debug)]
enum Locked {
    /// A guest's data is being written to the granted blocks.
    Grant(Grant),
    /// An operation of the operator uses the blocks.
    Operation,
}

/// All locked ranges of one volume: a few at a time.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    locked: Vec<(GrantId, BlockRange, Locked)>,
    next: u64,
}

impl Grants {
    /// Locks the blocks of a grant until its data is written.
    pub(crate) fn add(&mut self, grant: Grant) -> GrantId {
        let range = grant.range();
        self.lock_for(range, Locked::Grant(grant))
    }

    /// Locks `range` for an operation.
    pub(crate) fn lock(&mut self, range: BlockRange) -> GrantId {
        self.lock_for(range, Locked::Operation)
    }

    fn lock_for(&mut self, range: BlockRange, locked: Locked) -> GrantId {
        let id = GrantId(self.next);
        self.next = self.next.wrapping_add(1);
        self.locked.push((id, range, locked));
        id
    }

    /// Unlocks a range; returns its grant, if it has one.
    pub(crate) fn remove(&mut self, id: GrantId) -> Option<Grant> {
        let index = self.locked.iter().position(|(locked, ..)| *locked == id)?;
        match self.locked.swap_remove(index).2 {
            Locked::Grant(grant) => Some(grant),
            Locked::Operation => None,
        }
    }

    /// The first locked blocks of `range`.
    pub(crate) fn conflict(&self, range: BlockRange) -> Option<BlockRange> {
        let conflicts = self.locked.iter().filter_map(|(_, locked, _)| locked.intersect(range));
        conflicts.min_by_key(|conflict| conflict.first)
    }

    /// Removes all locks of a closed volume; returns the grants, which no channel will end.
    pub(crate) fn take_all(&mut self) -> Vec<Grant> {
        let grants = self.locked.drain(..).filter_map(|(_, _, locked)| match locked {
            Locked::Grant(grant) => Some(grant),
            Locked::Operation => None,
        });
        grants.collect()
    }
}
