//! Blocks of a volume that are in between: allocated and being written, or being
//! compared. Nobody else may map, regenerate or allocate there meanwhile.

use sidecore_extent::BlockRange;
use sidecore_volume::Grant;

use crate::mail::GrantId;

/// What a volume's blocks are held for.
#[derive(Debug)]
enum Held {
    /// A guest's data is being written to these.
    Grant(Grant),
    /// An operation of the operator's is at work.
    Operation,
}

/// All that is in between, in one volume: a few at a time.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    held: Vec<(GrantId, BlockRange, Held)>,
    next: u64,
}

impl Grants {
    /// Keeps a grant until its data is written.
    pub(crate) fn add(&mut self, grant: Grant) -> GrantId {
        let range = grant.range();
        self.hold_for(range, Held::Grant(grant))
    }

    /// Holds `range` for an operation.
    pub(crate) fn hold(&mut self, range: BlockRange) -> GrantId {
        self.hold_for(range, Held::Operation)
    }

    fn hold_for(&mut self, range: BlockRange, held: Held) -> GrantId {
        let id = GrantId(self.next);
        self.next = self.next.wrapping_add(1);
        self.held.push((id, range, held));
        id
    }

    /// Ends it; a grant is handed back.
    pub(crate) fn remove(&mut self, id: GrantId) -> Option<Grant> {
        let index = self.held.iter().position(|(held, ..)| *held == id)?;
        match self.held.swap_remove(index).2 {
            Held::Grant(grant) => Some(grant),
            Held::Operation => None,
        }
    }

    /// The first blocks of `range` that are held.
    pub(crate) fn conflict(&self, range: BlockRange) -> Option<BlockRange> {
        let conflicts = self.held.iter().filter_map(|(_, held, _)| held.intersect(range));
        conflicts.min_by_key(|conflict| conflict.first)
    }

    /// The grants that nobody will end any more.
    pub(crate) fn take_all(&mut self) -> Vec<Grant> {
        let grants = self.held.drain(..).filter_map(|(_, _, held)| match held {
            Held::Grant(grant) => Some(grant),
            Held::Operation => None,
        });
        grants.collect()
    }
}
