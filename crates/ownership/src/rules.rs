//! Switches that turn rules off, for simulations.

/// A rule of this crate that a [`Daemon`](crate::Daemon) can neglect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Lease time counts from before the request was sent. Neglected: from its answer.
    SentAt,
    /// Lease time is shortened by the drift of the clocks.
    Drift,
    /// A renewal is confirmed by a read in the same Raft term.
    Term,
    /// The owner serves until its lease ends. Neglected: until etcd says that the lease is gone.
    LeaseEnd,
    /// Answers of another cluster are not taken.
    Cluster,
    /// Suspects are fenced before the store is opened.
    Fence,
    /// A fence that failed is tried again. Neglected: the store is opened.
    FenceResult,
    /// All suspects are fenced. Neglected: the owner in the record.
    AllSuspects,
    /// An epoch that is not above the record's is refused.
    Epoch,
    /// A store whose record is not that of the ledger is refused.
    Shared,
    /// The owner key is released after the store was closed.
    CloseFirst,
}

impl Rule {
    /// All rules that can be neglected.
    pub const ALL: [Self; 11] = [
        Self::SentAt,
        Self::Drift,
        Self::Term,
        Self::LeaseEnd,
        Self::Cluster,
        Self::Fence,
        Self::FenceResult,
        Self::AllSuspects,
        Self::Epoch,
        Self::Shared,
        Self::CloseFirst,
    ];
}

/// The rule that a daemon neglects: none, unless a simulation says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Neglected {
    #[cfg(feature = "neglect")]
    rule: Option<Rule>,
}

impl Neglected {
    #[cfg(feature = "neglect")]
    pub(crate) const fn only(rule: Rule) -> Self {
        Self { rule: Some(rule) }
    }

    /// Whether `rule` is kept.
    #[cfg(feature = "neglect")]
    pub(crate) fn keeps(self, rule: Rule) -> bool {
        self.rule != Some(rule)
    }

    #[cfg(not(feature = "neglect"))]
    pub(crate) const fn keeps(self, _: Rule) -> bool {
        true
    }
}
