//! The bad blocks that a stage has found, for reports.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
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
    /// Reads of bad blocks.
    seen: AtomicU64,
    /// Blocks that are bad now. Less than none for a moment, if one is mended before it is noted.
    bad: AtomicI64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    channels: Sums<FindingsStats>,
    /// The last one, unless it was mended: its kind, and its first byte.
    last: Option<(BadBlock, u64)>,
    failure: Option<String>,
}

impl Findings {
    /// No findings in the store called `store`.
    #[must_use]
    pub fn new(store: &str) -> Self {
        let (seen, bad) = (AtomicU64::new(0), AtomicI64::new(0));
        Self { store: store.to_owned(), seen, bad, state: Mutex::default() }
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

    /// Notes a read of a bad block, which is a new one or was bad before, and writes it to the log:
    /// not each one, so that a guest that reads it again and again does not fill the log. Never
    /// waits.
    #[cold]
    pub fn note(&self, kind: BadBlock, (block, offset_bytes): (u64, u64), is_new: bool) {
        let seen = self.seen.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.bad.fetch_add(i64::from(is_new), Ordering::Relaxed);
        // Otherwise a report is being made, or another block is the last one.
        if let Ok(mut state) = self.state.try_lock() {
            state.last = Some((kind, offset_bytes));
        }
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

    /// Whether a block is bad.
    #[must_use]
    #[inline]
    pub fn has_bad(&self) -> bool {
        self.bad.load(Ordering::Relaxed) != 0
    }

    /// Notes that the block at this byte, which was bad, no longer is. Never waits.
    #[cold]
    pub fn mended(&self, offset_bytes: u64) {
        self.bad.fetch_sub(1, Ordering::Relaxed);
        if let Ok(mut state) = self.state.try_lock() {
            state.last = state.last.filter(|(_, last)| *last != offset_bytes);
        }
    }

    /// Notes why all requests of some kind fail from now on, and the remedy.
    #[cold]
    pub fn fail(&self, problem: String) {
        let is_new = {
            let mut state = self.lock();
            let is_new = state.failure.as_ref() != Some(&problem);
            state.failure = Some(problem.clone());
            is_new
        };
        if is_new {
            tracing::error!(store = self.store, "{problem}");
        }
    }

    /// Notes that requests are carried out again.
    #[cold]
    pub fn recover(&self) {
        if self.lock().failure.take().is_some() {
            tracing::info!(store = self.store, "requests are carried out again");
        }
    }

    /// The problem that an operator should know of, if there is one.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let state = self.lock();
        if state.failure.is_some() {
            return state.failure.clone();
        }
        let count = self.bad.load(Ordering::Relaxed);
        if count <= 0 {
            return None;
        }
        let last = state.last.map_or(", which the log names".to_owned(), |(kind, offset_bytes)| {
            format!(", the last one at byte {offset_bytes} ({})", kind.word())
        });
        Some(format!("bad blocks: {count}{last}; restore what they held, or write them anew"))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_are_counted_by_kind_and_the_last_one_is_named_until_it_is_mended() {
        let findings = Findings::new("disk");
        assert_eq!(findings.problem(), None);
        let channel = findings.open_channel();
        for (block, kind, is_new) in [
            (7, BadBlock::Checksum, true),
            (8, BadBlock::Stale, true),
            (9, BadBlock::Misdirected, true),
            (9, BadBlock::Unknown, false),
            (9, BadBlock::Stale, false),
        ] {
            channel.count(kind);
            findings.note(kind, (block, block * 4096), is_new);
        }
        let counts = FindingsCounts { checksum: 1, stale: 2, misdirected: 1, unknown: 1 };
        assert_eq!((findings.counts(), findings.counts().total()), (counts, 5));
        let problem = findings.problem().unwrap();
        assert!(problem.starts_with("bad blocks: 3, ") && problem.contains("byte 36864 (stale)"));
        findings.fail("all writes fail".to_owned());
        assert_eq!(findings.problem().as_deref(), Some("all writes fail"));
        findings.recover();
        assert_eq!(findings.problem(), Some(problem));
        findings.mended(9 * 4096);
        assert!(findings.problem().unwrap().starts_with("bad blocks: 2, which the log names"));
        findings.mended(8 * 4096);
        findings.mended(7 * 4096);
        assert_eq!(findings.problem(), None);
    }

    #[test]
    fn a_block_that_is_mended_before_it_is_noted_is_no_warning() {
        let findings = Findings::new("disk");
        findings.mended(28672);
        assert_eq!(findings.problem(), None);
        findings.note(BadBlock::Stale, (7, 28672), true);
        assert_eq!((findings.problem(), findings.has_bad()), (None, false));
    }

    #[test]
    fn a_report_that_is_being_made_delays_no_sidecore() {
        let findings = Findings::new("disk");
        let report = findings.lock();
        findings.note(BadBlock::Stale, (7, 28672), true);
        findings.note(BadBlock::Stale, (8, 32768), true);
        findings.mended(32768);
        drop(report);
        assert!(findings.problem().unwrap().starts_with("bad blocks: 1,"));
    }
}
