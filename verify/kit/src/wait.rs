//! Waits for a condition that has no event: the state of a process, a device or a socket.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// The time between two attempts.
const INTERVAL: Duration = Duration::from_micros(200);

/// Waits until the condition holds.
///
/// # Panics
/// With `what`, if the condition does not hold within `patience`.
#[track_caller]
pub fn until(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    succeed(patience, || {
        if condition() { Ok(()) } else { Err(format!("not within {patience:?}: {what}")) }
    });
}

/// Repeats an attempt until it succeeds, and returns its result.
///
/// # Panics
/// With the error of the last attempt, if none succeeds within `patience`.
#[track_caller]
pub fn succeed<T, E: Display>(patience: Duration, attempt: impl FnMut() -> Result<T, E>) -> T {
    attempts(patience, attempt).unwrap_or_else(|error| panic!("{error}"))
}

/// Repeats an attempt until it succeeds.
///
/// # Errors
/// The error of the last attempt, if none succeeds within `patience`.
pub fn attempts<T, E>(
    patience: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let deadline = Instant::now() + patience;
    loop {
        // The time is read first, so that the last attempt is made at the deadline or later.
        let is_over = Instant::now() >= deadline;
        let result = attempt();
        if result.is_ok() || is_over {
            return result;
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_end_with_the_first_success() {
        let mut count = 0;
        let attempt = || {
            count += 1;
            if count == 3 { Ok(count) } else { Err("too early") }
        };
        assert_eq!(succeed(Duration::from_secs(60), attempt), 3);
    }

    #[test]
    #[should_panic(expected = "not within 0ns: the moon is full")]
    fn a_condition_that_does_not_hold_is_named() {
        until("the moon is full", Duration::ZERO, || false);
    }
}
