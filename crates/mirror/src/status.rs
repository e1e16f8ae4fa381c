//! The state of a mirror, for reports.

use crate::epoch::StoreId;
use crate::error::Waits;
use crate::legs::{LegSet, MAX_LEGS};

/// The state of a leg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LegState {
    /// It is no member.
    #[default]
    None,
    /// Its store is not there.
    Missing,
    /// It has failed a request; attach its store to use it again.
    Failed,
    /// It has missed writes, and waits to be copied to.
    Behind,
    /// It is being copied to.
    Copying,
    /// It has all answered writes.
    InSync,
}

/// The state of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The epoch that is in force.
    pub epoch: u64,
    /// The legs of the mirror.
    pub members: LegSet,
    /// Numbers that were those of legs once: headers of former legs have them.
    pub former: LegSet,
    /// The store that each number is, or was last.
    pub stores: [StoreId; MAX_LEGS],
    /// By number.
    pub legs: [LegState; MAX_LEGS],
    /// Why a leg has failed, by number.
    pub reasons: [Option<String>; MAX_LEGS],
    /// The leg that is read.
    pub read: Option<usize>,
    /// Why requests wait, if they do.
    pub waits: Option<Waits>,
    /// Regions in which legs may differ.
    pub dirty_regions: usize,
    /// Regions that the leg that is copied to has yet to get.
    pub regions_to_copy: usize,
    /// Regions copied since the mirror was opened.
    pub copied_regions: u64,
    /// Bytes of these regions.
    pub copied_bytes: u64,
    /// Failures of legs since the mirror was opened.
    pub failures: u64,
    /// Reads that one leg has failed and another one answered.
    pub read_errors: u64,
}

impl Status {
    /// Why the mirror is not as it should be; `None` if all of its legs are in sync.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if let Some(waits) = &self.waits {
            return Some(format!("the mirror waits: {waits}"));
        }
        let is_behind =
            |leg: &usize| self.legs.get(*leg).is_some_and(|state| *state != LegState::InSync);
        let behind = self.members.numbers().filter(is_behind);
        let behind = behind.map(LegSet::of).fold(LegSet::EMPTY, LegSet::with);
        let are = if behind.len() == 1 { "is" } else { "are" };
        let text = || format!("{behind} of the mirror {are} not in sync");
        (!behind.is_empty()).then(text)
    }
}
