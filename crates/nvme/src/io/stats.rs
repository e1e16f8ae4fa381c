//! The counters of a completion queue, and the SMART activity that follows from them.

use std::ops::Deref;
use std::sync::Arc;

use sidecore_block::QueueCounts;
use sidecore_telemetry::{Counter, CounterSet};

use super::QueueSet;
use crate::{Activity, Statistics};

/// The counters of a completion queue, with those of the submission queues that complete into it:
/// those of every block queue, and NVMe's own. Its sidecore alone writes them, any thread may read
/// them.
///
/// They live as long as the function, over any number of drivers. Bytes read include those that
/// the host did not get (Compare, Verify).
#[derive(Debug, Default)]
pub struct QueueStats {
    pub(super) block: Arc<sidecore_block::QueueStats>,
    /// Compares completed.
    pub compares: Counter,
    /// Verifies completed.
    pub verifies: Counter,
    /// Doorbell values that the queue cannot have.
    pub invalid_doorbells: Counter,
}

impl Deref for QueueStats {
    type Target = sidecore_block::QueueStats;

    fn deref(&self) -> &Self::Target {
        &self.block
    }
}

impl Statistics for QueueSet {
    fn activity(&self) -> Activity {
        let mut sum = QueueCounts::default();
        let mut compares = 0_u64;
        for stats in (1..=self.queue_pairs()).filter_map(|queue| self.stats(queue)) {
            stats.add_to(&mut sum);
            compares = compares.saturating_add(stats.compares.get());
        }
        Activity {
            read_bytes: sum.bytes_read,
            written_bytes: sum.bytes_written,
            read_commands: sum.reads.saturating_add(compares),
            write_commands: sum.writes,
            media_errors: sum.errors,
            ..Activity::default()
        }
    }
}
