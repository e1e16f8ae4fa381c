//! Warnings about clients, which any user of the machine can cause without end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LinkStats;

/// The time between two warnings.
const INTERVAL: Duration = Duration::from_secs(5);

/// Counts refused clients, and limits the warnings of them.
#[derive(Debug)]
pub(super) struct Complaints {
    stats: Arc<LinkStats>,
    /// No warning before.
    next_at: Option<Instant>,
    withheld: u64,
}

impl Complaints {
    /// Counts in the counters of a link, of which no other thread writes this one.
    pub const fn new(stats: Arc<LinkStats>) -> Self {
        Self { stats, next_at: None, withheld: 0 }
    }

    /// Counts a refused client. Returns the number of warnings withheld since the last one if
    /// another one is due.
    pub fn count(&mut self, now: Instant) -> Option<u64> {
        self.stats.refused_clients.add(1);
        if self.next_at.is_some_and(|at| now < at) {
            self.withheld = self.withheld.saturating_add(1);
            return None;
        }
        self.next_at = now.checked_add(INTERVAL);
        Some(std::mem::take(&mut self.withheld))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_clients_is_counted_and_warned_of_now_and_then() {
        let stats = Arc::new(LinkStats::default());
        let mut complaints = Complaints::new(Arc::clone(&stats));
        let begin = Instant::now();
        assert_eq!(complaints.count(begin), Some(0));
        for _ in 0..1_000 {
            assert_eq!(complaints.count(begin + INTERVAL / 2), None);
        }
        assert_eq!(complaints.count(begin + INTERVAL), Some(1_000));
        assert_eq!(complaints.count(begin + INTERVAL), None);
        assert_eq!(stats.refused_clients.get(), 1_003);
    }
}
