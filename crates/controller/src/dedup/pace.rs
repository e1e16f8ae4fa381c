//! The rate of a run: slower while guests make requests.

use std::time::Duration;

/// Requests a second of all guests from which on they count as busy.
const BUSY_PER_S: u64 = 100;
/// The part of the rate that remains while guests are busy.
const BUSY_SHARE: u32 = 8;
/// The shortest time over which requests are counted.
pub(super) const WINDOW: Duration = Duration::from_millis(100);

/// The rate of a run.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_s: u64,
    requests: u64,
    is_busy: bool,
}

impl Pace {
    /// `requests`: those of all guests until now.
    pub(super) fn new(bytes_per_s: u64, requests: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1), requests, is_busy: false }
    }

    /// Whether guests were busy in the last window.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Notes the guests' requests until now, so long after the last call.
    pub(super) fn note(&mut self, requests: u64, since: Duration) {
        let more = u128::from(requests.saturating_sub(self.requests));
        let busy_at = u128::from(BUSY_PER_S).saturating_mul(since.as_millis());
        self.is_busy = more.saturating_mul(1000) > busy_at;
        self.requests = requests;
    }

    /// The pause after a step that has read so many bytes. A step that has read none, of metadata
    /// alone, is followed by one as long as itself: it holds the hypervisor's lock, for which the
    /// misses of guests wait, and a thread that locks again at once overtakes those that wait.
    pub(super) fn pause(&self, bytes: u64, took: Duration) -> Duration {
        if bytes == 0 { took } else { self.time_for(bytes).saturating_sub(took) }
    }

    /// The time that so many bytes have to take.
    fn time_for(&self, bytes: u64) -> Duration {
        let ns = u128::from(bytes)
            .saturating_mul(1_000_000_000)
            .checked_div(u128::from(self.bytes_per_s))
            .unwrap_or(0);
        let time = Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
        if self.is_busy { time.saturating_mul(BUSY_SHARE) } else { time }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_requests_slow_it_down_and_it_recovers() {
        let mut pace = Pace::new(1 << 20, 500);
        assert_eq!(pace.time_for(1 << 19), Duration::from_millis(500));
        pace.note(510, WINDOW);
        assert!(!pace.is_busy(), "100 a second are few");
        pace.note(521, WINDOW);
        assert!(pace.is_busy());
        assert_eq!(pace.time_for(1 << 19), Duration::from_secs(4));
        pace.note(521, WINDOW);
        assert_eq!(pace.time_for(1 << 19), Duration::from_millis(500));
        let second = Duration::from_secs(1);
        assert_eq!(pace.pause(2 << 20, Duration::from_millis(500)), second * 3 / 2);
        assert_eq!(pace.pause(1 << 10, second), Duration::ZERO);
        assert_eq!(pace.pause(0, second), second, "metadata alone");
        assert!(Pace::new(0, 0).time_for(u64::MAX) > Duration::from_secs(1 << 30));
    }
}
