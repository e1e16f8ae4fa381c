//! The bad blocks that a stage has found, for reports.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_telemetry::counters;

use crate::sums::Sums;

counters! {
    /// The counters of a channel that checks blocks. Its sidecore alone writes them, any thread may
    /// read them.
    ///
    /// They lie on cache lines that no other sidecore writes to.
    #[repr(align(128))]
    pub struct FindingsStats;

    /// The counters of a stage that checks blocks at one moment: the sum over all channels that it
    /// ever had.
    pub struct FindingsCounts;

    /// Reads of blocks whose bytes do not have their checksum, for none of the other reasons: torn
    /// writes, and noise.
    pub checksum: Counter = "checksum_total",
    /// Reads of blocks that hold older bytes: the store has lost a write.
    pub stale: Counter = "stale_total",
    /// Reads of blocks that hold the bytes of another block.
    pub misdirected: Counter = "misdirected_total",
    /// Reads of blocks whose checksum was lost.
    pub unknown: Counter = "unknown_total",
}

/// The reason why a block is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadBlock {
    /// Its bytes do not have its checksum.
    Checksum,
    /// It has older bytes.
    Stale,
    /// It has the bytes of another block.
    Misdirected,
    /// Its checksum was lost.
    Unknown,
}

impl BadBlock {
    /// The word for it in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Checksum => "checksum",
            Self::Stale => "stale",
            Self::Misdirected => "misdirected",
            Self::Unknown => "unknown",
        }
    }
}

impl FindingsStats {
    /// Counts the read of a bad block. Only the channel's sidecore may call it.
    pub fn count(&self, kind: BadBlock) {
        let counter = match kind {
            BadBlock::Checksum => &self.checksum,
            BadBlock::Stale => &self.stale,
            BadBlock::Misdirected => &self.misdirected,
            BadBlock::Unknown => &self.unknown,
        };
        counter.add(1);
    }
}

impl FindingsCounts {
    /// All reads of bad blocks.
    #[must_use]
    pub const fn total(&self) -> u64 {
        let some = self.checksum.saturating_add(self.stale);
        some.saturating_add(self.misdirected).saturating_add(self.unknown)
    }
}

/// The first findings are all in the log, and of the others those that double their number.
const LOGGED: u64 = 16;

/// The bad blocks that a stage has found.
#[derive(Debug)]
pub struct Findings {
    store: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    channels: Sums<FindingsStats>,
    seen: u64,
    /// The last one: its kind, and its first byte.
    last: Option<(BadBlock, u64)>,
    failure: Option<&'static str>,
}

impl Findings {
    /// No findings in the store called `store`.
    #[must_use]
    pub fn new(store: &str) -> Self {
        Self { store: store.to_owned(), state: Mutex::default() }
    }

    /// The counters for one more channel. Their last owner but this is the channel.
    #[must_use]
    pub fn open_channel(&self) -> Arc<FindingsStats> {
        self.lock().channels.open()
    }

    /// The counts of now.
    #[must_use]
    pub fn counts(&self) -> FindingsCounts {
        self.lock().channels.counts()
    }

    /// Notes a bad block, and writes it to the log: not each one, so that a guest that reads it
    /// again and again does not fill the log.
    #[cold]
    pub fn note(&self, kind: BadBlock, block: u64, offset_bytes: u64) {
        let seen = {
            let mut state = self.lock();
            state.seen = state.seen.saturating_add(1);
            state.last = Some((kind, offset_bytes));
            state.seen
        };
        if seen <= LOGGED || seen.is_power_of_two() {
            tracing::error!(
                store = self.store,
                block,
                offset_bytes,
                kind = kind.word(),
                seen,
                "a block is bad: its read fails"
            );
        }
    }

    /// Notes that nothing is written any more, for this reason.
    #[cold]
    pub fn fail(&self, reason: &'static str) {
        if self.lock().failure.replace(reason).is_none() {
            tracing::error!(store = self.store, "all writes and flushes fail: {reason}");
        }
    }

    /// The problem that an operator should know of, if there is one.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let state = self.lock();
        if let Some(reason) = state.failure {
            return Some(format!(
                "all writes and flushes fail: {reason}; restart the daemon, which opens the store \
                 again"
            ));
        }
        let (kind, offset_bytes) = state.last?;
        Some(format!(
            "{} reads have met bad blocks, the last one at byte {offset_bytes} ({}); restore these \
             blocks, or write them anew",
            state.seen,
            kind.word()
        ))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_counted_by_kind_and_the_last_one_is_named() {
        let findings = Findings::new("disk");
        assert_eq!(findings.problem(), None);
        let channel = findings.open_channel();
        for (block, kind) in [
            (7, BadBlock::Checksum),
            (8, BadBlock::Stale),
            (9, BadBlock::Misdirected),
            (9, BadBlock::Unknown),
            (9, BadBlock::Stale),
        ] {
            channel.count(kind);
            findings.note(kind, block, block * 4096);
        }
        let counts = FindingsCounts { checksum: 1, stale: 2, misdirected: 1, unknown: 1 };
        assert_eq!((findings.counts(), findings.counts().total()), (counts, 5));
        let problem = findings.problem().unwrap();
        assert!(problem.starts_with("5 reads") && problem.contains("byte 36864 (stale)"));
        findings.fail("a checkpoint has failed");
        assert!(findings.problem().unwrap().contains("a checkpoint has failed; restart"));
    }
}
