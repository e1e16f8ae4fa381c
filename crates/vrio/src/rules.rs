//! Switches that turn rules off, for simulations.

/// A rule of docs/decisions/0040-remote-sessions.md that an engine can neglect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// 1: a client asks for no more frames than its receive ring holds.
    ReceiveRing,
    /// 1: limits are absolute numbers. Neglected, the IOhost announces differences.
    AbsoluteLimits,
    /// 2: a request that was executed is not executed again.
    AtMostOnce,
    /// 2: frames of an earlier attempt are not put into an answer, and a read is repaired by
    /// blocks.
    Attempts,
    /// 2: a new session waits until the store has nothing of the old one.
    Drain,
    /// 3: a request that overlaps an unanswered write is held back.
    Overlap,
    /// 4: a request that the store has is acknowledged.
    Acknowledge,
    /// 5: errors do not come from a count of tries.
    OwnersErrors,
    /// 6: a buffer holds zeros before the store is asked to fill it.
    CleanBuffers,
    /// 7: a write with FUA is durable when it is answered.
    WriteThrough,
    /// 7: a new version of the list of devices is looked at.
    Versions,
    /// 8: answered writes that no flush covers are sent again.
    Replay,
    /// 8: they are sent in the order of their answers.
    ReplayOrder,
    /// 8: they are sent before all other requests.
    ReplayFirst,
    /// 8: a flush covers the writes that were answered before it, and no others.
    FlushCovers,
    /// 8: answered writes of a user that is gone are not sent again, and neither are unanswered
    /// ones.
    GoneUsers,
    /// While a device has unfinished requests on a sidecore, its next ones go there (vRIO, 4.1).
    /// The exports of the IOhost keep it.
    Steering,
}

impl Rule {
    /// All rules that can be neglected.
    pub const ALL: [Self; 17] = [
        Self::ReceiveRing,
        Self::AbsoluteLimits,
        Self::AtMostOnce,
        Self::Attempts,
        Self::Drain,
        Self::Overlap,
        Self::Acknowledge,
        Self::OwnersErrors,
        Self::CleanBuffers,
        Self::WriteThrough,
        Self::Versions,
        Self::Replay,
        Self::ReplayOrder,
        Self::ReplayFirst,
        Self::FlushCovers,
        Self::GoneUsers,
        Self::Steering,
    ];
}

/// The rule that an engine neglects: none, unless a simulation says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neglected {
    #[cfg(feature = "neglect")]
    rule: Option<Rule>,
}

impl Neglected {
    /// Neglects this rule.
    #[cfg(feature = "neglect")]
    #[must_use]
    pub const fn only(rule: Rule) -> Self {
        Self { rule: Some(rule) }
    }

    /// Whether `rule` is kept.
    #[inline]
    #[must_use]
    pub fn keeps(self, rule: Rule) -> bool {
        #[cfg(feature = "neglect")]
        let keeps = self.rule != Some(rule);
        #[cfg(not(feature = "neglect"))]
        let keeps = {
            let _ = rule;
            true
        };
        keeps
    }
}
