//! The limit of frames that go to all ports: a token bucket.

use sidecore_units::Nanos;

use crate::FloodLimit;

const SECOND_NS: u64 = 1_000_000_000;

/// Frames that may still be flooded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Floods {
    limit: Option<FloodLimit>,
    /// In billionths of a frame.
    tokens: u64,
    filled_at: Nanos,
}

impl Floods {
    pub fn new(limit: Option<FloodLimit>, now: Nanos) -> Self {
        let full = limit.map_or(0, |limit| u64::from(limit.burst).saturating_mul(SECOND_NS));
        Self { limit, tokens: full, filled_at: now }
    }

    /// Whether one more frame may be flooded now.
    pub fn take(&mut self, now: Nanos) -> bool {
        let Some(limit) = self.limit else {
            return true;
        };
        let full = u64::from(limit.burst).saturating_mul(SECOND_NS);
        let gained = now.since(self.filled_at).0.saturating_mul(limit.per_second.into());
        self.tokens = self.tokens.saturating_add(gained).min(full);
        self.filled_at = now;
        match self.tokens.checked_sub(SECOND_NS) {
            Some(tokens) => {
                self.tokens = tokens;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate() {
        let mut floods = Floods::new(Some(FloodLimit { per_second: 10, burst: 3 }), Nanos::ZERO);
        let mut passed = |now| (0..100).filter(|_| floods.take(now)).count();
        assert_eq!(passed(Nanos::ZERO), 3);
        assert_eq!(passed(Nanos::from_millis(99)), 0);
        assert_eq!(passed(Nanos::from_millis(100)), 1);
        assert_eq!(passed(Nanos::from_millis(350)), 2);
        assert_eq!(passed(Nanos::from_millis(400)), 1, "the half of a frame was not lost");
        assert_eq!(passed(Nanos::from_millis(99_000)), 3);
        assert_eq!(
            (0..100).filter(|_| Floods::new(None, Nanos::ZERO).take(Nanos::ZERO)).count(),
            100
        );
    }
}
