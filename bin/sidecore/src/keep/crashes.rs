//! The limit on failures of the command.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The most new starts within [`WINDOW`].
const MAX: usize = 5;

const WINDOW: Duration = Duration::from_secs(60);

/// The times of the command's last failures.
#[derive(Debug, Default)]
pub(super) struct Crashes(VecDeque<Instant>);

impl Crashes {
    /// Counts a failure. Returns whether there were too many.
    pub(super) fn too_many(&mut self, now: Instant) -> bool {
        self.0.retain(|then| now.saturating_duration_since(*then) < WINDOW);
        self.0.push_back(now);
        self.0.len() > MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sixth_within_a_minute_is_too_many() {
        let (mut crashes, start) = (Crashes::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!((0..5).all(|second| !crashes.too_many(at(second))));
        assert!(crashes.too_many(at(59)));
    }

    #[test]
    fn five_a_minute_are_never_too_many() {
        let (mut crashes, start) = (Crashes::default(), Instant::now());
        assert!((0..100).all(|index| !crashes.too_many(start + Duration::from_secs(12 * index))));
    }
}
