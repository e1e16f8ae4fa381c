//! The monotonic clock, read from the CPU's time-stamp counter where that is sound.

use std::sync::OnceLock;

use sidecore_units::Nanos;

/// The origin of all clocks of this process: sidecores compare each other's times, so all clocks
/// count from the same point.
static ORIGIN: OnceLock<(quanta::Clock, u64)> = OnceLock::new();

/// Nanoseconds since the first clock of this process was made.
///
/// Reading it costs about ten nanoseconds where the CPU's counter is invariant,
/// and a `clock_gettime` elsewhere.
#[derive(Clone, Debug)]
pub struct Clock {
    counter: quanta::Clock,
    origin: u64,
}

impl Clock {
    /// Makes a clock. The first clock of a process takes up to 200 ms, to measure the counter's
    /// frequency; make it before guests are served.
    #[must_use]
    pub fn new() -> Self {
        let (counter, origin) = ORIGIN.get_or_init(|| {
            let counter = quanta::Clock::new();
            let origin = counter.raw();
            (counter, origin)
        });
        Self { counter: counter.clone(), origin: *origin }
    }

    /// Returns the current time.
    #[must_use]
    #[inline]
    pub fn now(&self) -> Nanos {
        Nanos(self.counter.delta_as_nanos(self.origin, self.counter.raw()))
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_clock_runs_as_fast_as_the_kernels() {
        let clock = Clock::new();
        let (ours, theirs) = (clock.now(), Instant::now());
        std::thread::sleep(Duration::from_millis(200));
        let (ours, theirs) = (clock.now().since(ours), theirs.elapsed());
        let difference = Duration::from(ours).abs_diff(theirs);
        assert!(difference < Duration::from_millis(5), "{ours:?} against {theirs:?}");
    }

    #[test]
    fn clocks_of_two_threads_agree() {
        let here = Clock::new().now();
        let there = std::thread::spawn(|| Clock::new().now()).join().unwrap();
        assert!(there >= here);
    }
}
