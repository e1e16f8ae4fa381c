//! Switches that turn rules off, for simulations.

/// A rule of this crate that a store can neglect. Their numbers are those of decision 83.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// 1: the intent of a write has been written before its data is.
    IntentFirst,
    /// 2: the intent of a write is durable before its data is written.
    IntentDurable,
    /// 3: writes to a block follow each other.
    Exclusion,
    /// 4: data is durable before its tag is written. Neglected: no flush before tags.
    DataThenTag,
    /// 5: tags are durable before the slots of their intents are used again.
    TagThenReuse,
    /// 6: the writes of an era have ended before its slots are used again.
    Drain,
    /// 7: a flush is answered when data and tags are durable. Neglected: when both are written.
    Flush,
    /// 8: data is checked and written from one private copy.
    PrivateCopy,
    /// 9: a block that does not match is read again, without writes to it, before it is called bad.
    ReadAgain,
    /// 10: an intent counts if it is newer than the tag. Neglected: each one counts.
    NewerOnly,
    /// 11: at the start the store is flushed before blocks are compared with intents.
    FlushFirst,
    /// 12: a block that matches nothing is bad. Neglected: its checksum is computed anew.
    TornIsBad,
    /// 13: a store that has failed is read anew before it is written again. Neglected: it is
    /// written again at once.
    OpenAgain,
    /// 14: a store that has failed is opened again once its user is gone. Neglected: as soon as it
    /// has no channel.
    UserGone,
}

impl Rule {
    /// All rules that can be neglected.
    pub const ALL: [Self; 14] = [
        Self::IntentFirst,
        Self::IntentDurable,
        Self::Exclusion,
        Self::DataThenTag,
        Self::TagThenReuse,
        Self::Drain,
        Self::Flush,
        Self::PrivateCopy,
        Self::ReadAgain,
        Self::NewerOnly,
        Self::FlushFirst,
        Self::TornIsBad,
        Self::OpenAgain,
        Self::UserGone,
    ];
}

/// The rule that a store neglects: none, unless a simulation says so.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Neglected(pub(crate) Option<Rule>);

impl Neglected {
    /// Whether `rule` is kept.
    #[inline]
    pub(crate) fn keeps(self, rule: Rule) -> bool {
        self.0 != Some(rule)
    }
}
