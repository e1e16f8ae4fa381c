//! Switches that turn rules off, for simulations.

/// A rule of this crate that a mirror can neglect. Their numbers are those of decision 77, which
/// has further rules with tests of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// 1: a write is answered when each leg in sync has it. Neglected: when one has.
    AllLegs,
    /// 2: a region is marked dirty, durably, before the first write to it.
    MarkFirst,
    /// 3: a flush is answered when each leg in sync has flushed. Neglected: when one has.
    FlushAll,
    /// 4: a leg that failed is out of sync, durably, before a request that it missed is answered.
    OutFirst,
    /// 5: a leg with an older epoch is not in sync. Neglected: a leg is in sync if it says so.
    Epoch,
    /// 6: after an unclean end one leg is in sync. Neglected: all that were.
    OneLeg,
    /// 7: the legs are flushed before marks are cleared.
    FlushThenClear,
    /// 8: no marks are cleared while a leg is behind.
    KeepMarks,
    /// 9: a region's writes have ended before its mark is cleared, or the region copied.
    Drain,
    /// 10: fewer than a majority do not go on without permission.
    Permission,
    /// 11: all legs are written from one private copy. Neglected: from the guest's memory.
    PrivateCopy,
    /// 12: overlapping writes follow each other.
    Overlap,
    /// 13: a leg is flushed before it is in sync.
    FlushThenSync,
    /// 17: a store is a leg only if its own random number is the one that the epoch has for the
    /// leg. Neglected: if it says the number of a leg.
    Identity,
    /// 18: an operator's permission ends with the first attempt at an epoch that needs none.
    /// Neglected: it is valid for good.
    PermitOnce,
    /// 19: a leg whose epoch the newest one does not descend from is refused, also if it is behind.
    /// Neglected: only if it was in sync.
    Descent,
}

impl Rule {
    /// All rules that can be neglected.
    pub const ALL: [Self; 16] = [
        Self::AllLegs,
        Self::MarkFirst,
        Self::FlushAll,
        Self::OutFirst,
        Self::Epoch,
        Self::OneLeg,
        Self::FlushThenClear,
        Self::KeepMarks,
        Self::Drain,
        Self::Permission,
        Self::PrivateCopy,
        Self::Overlap,
        Self::FlushThenSync,
        Self::Identity,
        Self::PermitOnce,
        Self::Descent,
    ];
}

/// The rule that a mirror neglects: none, unless a simulation says so.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Neglected(pub(crate) Option<Rule>);

impl Neglected {
    /// Whether `rule` is kept.
    pub(crate) fn keeps(self, rule: Rule) -> bool {
        self.0 != Some(rule)
    }
}
