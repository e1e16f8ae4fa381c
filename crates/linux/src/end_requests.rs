//! Signals that ask a process to end, some of them twice.

use std::time::{Duration, Instant};

/// The meaning of a signal to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndRequest {
    /// The process ends in order.
    First,
    /// The same request as the first.
    Repeated,
    /// The process ends at once.
    AtOnce,
}

/// Distinguishes a second request to end from one signal that was sent twice.
///
/// `timeout` of GNU, some shells and some service managers send a signal to the
/// process and to its group, which is one request. So all signals within
/// [`SAME`](Self::SAME) after the first mean the same as the first.
#[derive(Debug, Default)]
pub struct EndRequests {
    first: Option<Instant>,
}

impl EndRequests {
    /// The time after the first signal during which further signals mean the same.
    pub const SAME: Duration = Duration::from_secs(2);

    /// Returns the meaning of a signal that came at this time.
    pub fn receive(&mut self, at: Instant) -> EndRequest {
        match self.first {
            None => {
                self.first = Some(at);
                EndRequest::First
            }
            Some(first) if at.saturating_duration_since(first) < Self::SAME => EndRequest::Repeated,
            Some(_) => EndRequest::AtOnce,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_signal_two_seconds_after_the_first_ends_at_once() {
        let start = Instant::now();
        let mut requests = EndRequests::default();
        let mut at = |ms| requests.receive(start + Duration::from_millis(ms));
        assert_eq!(at(0), EndRequest::First);
        // The first signal counts: a sender that repeats itself for ever still causes an end at
        // once.
        assert_eq!([0, 1, 1500, 1999].map(&mut at), [EndRequest::Repeated; 4]);
        assert_eq!([2000, 60_000].map(&mut at), [EndRequest::AtOnce; 2]);
    }
}
