//! The counters of functions, and of the hypervisor side.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_extent::{TranslationCounts, TranslationStats};
use sidecore_telemetry::{CounterSet, counters};

counters! {
    /// A queue's counters: written by its sidecore, read anywhere.
    pub(crate) struct ChannelStats;

    /// A function's counters, over all its queues, past and present.
    #[derive(Copy, Eq)]
    pub struct FunctionStats;

    /// Requests that stayed in their queue's last extent, and needed no translation.
    pub(crate) last_hits: Counter = "last_extent_hits_total",
    /// Requests that were translated, by buffer or by walk, once or several times.
    pub(crate) translations: Counter = "translations_total",
    /// Requests that were split: at the borders of extents, or because a part of them missed.
    pub(crate) splits: Counter = "splits_total",
    /// Writes that found no block of their own.
    pub(crate) misses: Counter = "misses_total",
    /// Requests that met a pruned part of the tree.
    pub(crate) prune_misses: Counter = "prune_misses_total",
    /// Walks after a miss was served.
    pub(crate) rewalks: Counter = "rewalks_total",
    /// Requests that the function's limits delayed, once for each delay.
    pub(crate) throttled: Counter = "throttled_total",
    /// Times that requests were queued for the store: its slots were taken, or other functions came
    /// first.
    pub(crate) store_waits: Counter = "store_waits_total",
    /// Requests that wait for the hypervisor side at this moment.
    pub(crate) stalled: Gauge = "stalled",
}

counters! {
    /// The counters of a controller's hypervisor side, whose threads write them.
    pub(crate) struct HypervisorStats;

    /// The counters of a controller's hypervisor side at one moment.
    #[derive(Copy, Eq)]
    pub struct HypervisorCounts;

    /// Commits that have made metadata durable.
    pub(crate) commits: SharedCounter = "commits_total",
    /// Nodes of extent trees that were dropped from memory.
    pub(crate) pruned_nodes: SharedCounter = "pruned_nodes_total",
    /// Bytes that deduplications have read.
    pub(crate) dedup_read_bytes: SharedCounter = "dedup_read_bytes_total",
    /// Runs of equal blocks that deduplications have remapped.
    pub(crate) dedup_remaps: SharedCounter = "dedup_remaps_total",
    /// Bytes of blocks that deduplications have freed.
    pub(crate) dedup_freed_bytes: SharedCounter = "dedup_freed_bytes_total",
}

/// The counters of all queues of a function.
#[derive(Debug, Default)]
pub(crate) struct StatsBook {
    inner: Mutex<Book>,
    /// MissAddress and MissSize of the last miss (thesis 6.1), in blocks.
    pub(crate) miss_address: AtomicU64,
    pub(crate) miss_size: AtomicU64,
}

#[derive(Debug, Default)]
struct Book {
    gone: FunctionStats,
    channels: Vec<Arc<ChannelStats>>,
}

impl StatsBook {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the counters of a new queue.
    pub(crate) fn open(&self) -> Arc<ChannelStats> {
        let stats = Arc::new(ChannelStats::default());
        self.book().channels.push(Arc::clone(&stats));
        stats
    }

    /// Removes a queue's counters; their values stay in the sum.
    pub(crate) fn close(&self, stats: &Arc<ChannelStats>) {
        let mut book = self.book();
        book.channels.retain(|open| !Arc::ptr_eq(open, stats));
        stats.add_to(&mut book.gone);
        book.gone.stalled = 0;
    }

    /// The sum over all queues, and the number of open queues.
    pub(crate) fn total(&self) -> (FunctionStats, u64) {
        let book = self.book();
        let mut total = book.gone;
        for channel in &book.channels {
            channel.add_to(&mut total);
        }
        (total, book.channels.len() as u64)
    }
}

/// The counters of a controller's translation units, one on each sidecore.
#[derive(Debug, Default)]
pub(crate) struct UnitStats(Mutex<Vec<Arc<TranslationStats>>>);

impl UnitStats {
    /// Adds a unit's counters, which are kept after the unit is gone.
    pub(crate) fn add(&self, stats: Arc<TranslationStats>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(stats);
    }

    /// The sum over all units.
    pub(crate) fn total(&self) -> TranslationCounts {
        let mut total = TranslationCounts::default();
        for unit in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            unit.add_to(&mut total);
        }
        total
    }
}
