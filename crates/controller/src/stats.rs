//! What became of a function's requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_extent::{TranslationCounts, TranslationStats};
use sidecore_telemetry::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A queue's counters: written by its sidecore, read anywhere.
        #[derive(Debug, Default)]
        pub(crate) struct ChannelStats {
            $($(#[$doc])* pub(crate) $name: Counter,)*
            /// Requests that wait for the hypervisor right now.
            pub(crate) stalled: AtomicU64,
        }

        /// A function's counters, over all its queues, past and present.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct FunctionStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Requests that wait for the hypervisor right now.
            pub stalled: u64,
            /// Queues open right now.
            pub channels: u64,
        }

        impl FunctionStats {
            fn add(&mut self, channel: &ChannelStats) {
                $(self.$name = self.$name.saturating_add(channel.$name.get());)*
                self.stalled = self.stalled.saturating_add(channel.stalled.load(Ordering::Relaxed));
            }
        }
    };
}

counters! {
    /// Requests whose mapping was in the queue's last extent.
    last_hits,
    /// Requests that went through the translation unit, once or several times.
    translations,
    /// Requests that were cut up: at extent borders, or because part of them missed.
    splits,
    /// Misses of writes: no block of its own there.
    misses,
    /// Misses because a part of the tree was pruned.
    prune_misses,
    /// Walks after the hypervisor served a miss.
    rewalks,
    /// Times that a request was held back by the function's limits.
    throttled,
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

    /// Counters for a new queue.
    pub(crate) fn open(&self) -> Arc<ChannelStats> {
        let stats = Arc::new(ChannelStats::default());
        self.book().channels.push(Arc::clone(&stats));
        stats
    }

    /// A queue is gone; what it counted stays.
    pub(crate) fn close(&self, stats: &Arc<ChannelStats>) {
        let mut book = self.book();
        book.channels.retain(|open| !Arc::ptr_eq(open, stats));
        book.gone.add(stats);
        book.gone.stalled = 0;
    }

    /// All together.
    pub(crate) fn total(&self) -> FunctionStats {
        let book = self.book();
        let mut total = book.gone;
        for channel in &book.channels {
            total.add(channel);
        }
        total.channels = book.channels.len() as u64;
        total
    }
}

/// The counters of a controller's translation units, one on each sidecore.
#[derive(Debug, Default)]
pub(crate) struct UnitStats(Mutex<Vec<Arc<TranslationStats>>>);

impl UnitStats {
    /// Another unit. Its counters are kept when it is gone.
    pub(crate) fn add(&self, stats: Arc<TranslationStats>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(stats);
    }

    /// All together.
    pub(crate) fn total(&self) -> TranslationCounts {
        let mut total = TranslationCounts::default();
        for unit in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let counts = unit.counts();
            total.last_hits = total.last_hits.saturating_add(counts.last_hits);
            total.btlb_hits = total.btlb_hits.saturating_add(counts.btlb_hits);
            total.walks = total.walks.saturating_add(counts.walks);
            total.nodes_visited = total.nodes_visited.saturating_add(counts.nodes_visited);
            total.holes = total.holes.saturating_add(counts.holes);
            total.pruned = total.pruned.saturating_add(counts.pruned);
        }
        total
    }
}
