//! Which calls of a stage are measured: two readings of the clock cost more than many a stage.

use sidecore_units::Nanos;

use super::LONG;

/// Calls that are all measured, after the first one and after each pause.
const EXACT_CALLS: u32 = 1024;

/// Of other calls, one in so many is measured.
const ONE_IN: u32 = 16;

/// Chooses the calls that are measured.
///
/// A stage that takes long makes a pause between two calls, and so does a device with little to do,
/// for which the clock is cheap enough: all calls are measured after it. So of the calls that take
/// over a millisecond and are less than a thousand calls apart, all but the first are seen.
pub(crate) struct Sampler {
    last: Nanos,
    exact: u32,
    skipped: u32,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { last: Nanos::ZERO, exact: EXACT_CALLS, skipped: 0 }
    }
}

impl Sampler {
    /// The number of calls that a call at `now` stands for; 0 if it is not measured.
    #[inline]
    pub(crate) fn weight(&mut self, now: Nanos) -> u64 {
        if now.since(self.last) >= LONG {
            self.exact = EXACT_CALLS;
        }
        self.last = now;
        if self.exact > 0 {
            self.exact = self.exact.wrapping_sub(1);
            return 1;
        }
        self.skipped = self.skipped.wrapping_add(1);
        if self.skipped < ONE_IN {
            return 0;
        }
        self.skipped = 0;
        ONE_IN.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_add_up_to_the_calls_and_all_are_measured_after_a_pause() {
        let mut sampler = Sampler::default();
        let mut now = Nanos::from_millis(5);
        let mut calls = |count: u64, apart: Nanos| {
            let weights = (0..count).map(|_| {
                now = now.after(apart);
                sampler.weight(now)
            });
            weights.collect::<Vec<u64>>()
        };
        let micros = Nanos::from_micros(1);
        assert!(calls(1024, micros).iter().all(|weight| *weight == 1));
        let sampled = calls(1600, micros);
        assert_eq!(sampled.iter().sum::<u64>(), 1600);
        assert_eq!(sampled.iter().filter(|weight| **weight > 0).count(), 100);
        assert_eq!(calls(1, LONG), [1]);
        assert!(calls(1023, micros).iter().all(|weight| *weight == 1));
        assert_eq!(calls(1, micros), [0]);
    }
}
