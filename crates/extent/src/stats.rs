//! What a translation unit counts.

use sidecore_telemetry::Counter;

/// Counters that one sidecore writes and anybody may read.
#[derive(Debug, Default)]
pub struct TranslationStats {
    pub(crate) last_hits: Counter,
    pub(crate) btlb_hits: Counter,
    pub(crate) walks: Counter,
    pub(crate) nodes_visited: Counter,
    pub(crate) holes: Counter,
    pub(crate) pruned: Counter,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TranslationCounts {
    /// Requests inside the queue's last extent.
    pub last_hits: u64,
    /// Requests inside an extent of the BTLB.
    pub btlb_hits: u64,
    /// Block walks.
    pub walks: u64,
    /// Nodes visited by walks.
    pub nodes_visited: u64,
    /// Pieces that were holes.
    pub holes: u64,
    /// Pieces that were pruned.
    pub pruned: u64,
}

impl TranslationStats {
    /// Reads all counters. They are not of the same instant.
    #[must_use]
    pub fn counts(&self) -> TranslationCounts {
        TranslationCounts {
            last_hits: self.last_hits.get(),
            btlb_hits: self.btlb_hits.get(),
            walks: self.walks.get(),
            nodes_visited: self.nodes_visited.get(),
            holes: self.holes.get(),
            pruned: self.pruned.get(),
        }
    }
}
