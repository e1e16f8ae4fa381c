//! The counters of a translation unit.

use sidecore_telemetry::counters;

counters! {
    /// Counters that one sidecore writes and any thread may read.
    pub struct TranslationStats;

    /// The counters of a unit at one moment, or the sum over several units.
    #[derive(Copy, Eq)]
    pub struct TranslationCounts;

    /// Requests inside the queue's last extent.
    pub(crate) last_hits: Counter,
    /// Translations found in a sidecore's buffer (BTLB).
    pub(crate) btlb_hits: Counter = "btlb_hits_total",
    /// Translations that walked a tree.
    pub(crate) walks: Counter = "walks_total",
    /// Nodes visited by those walks.
    pub(crate) nodes_visited: Counter = "walk_nodes_total",
    /// Pieces of requests that were holes.
    pub(crate) holes: Counter,
    /// Pieces of requests that were pruned.
    pub(crate) pruned: Counter,
}
