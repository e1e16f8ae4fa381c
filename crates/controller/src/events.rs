//! Events for the operator: kept for `controller show`, and logged.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// An event at a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time of its last occurrence, in seconds since 1970.
    pub at_unix_s: u64,
    /// The message.
    pub what: String,
    /// The number of occurrences in a row.
    pub times: u64,
}

/// The number of events kept: the oldest are dropped.
const KEPT: usize = 256;

/// The latest events, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<VecDeque<Event>>);

impl Events {
    /// Adds an event. A repetition of the last one only counts: a guest that goes on to write to a
    /// full volume makes one event, and a line in the log each time the count has doubled.
    pub(crate) fn note(&self, controller: &str, what: String) {
        let mut events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at_unix_s = now_unix_s();
        let times = match events.back_mut() {
            Some(last) if last.what == what => {
                last.times = last.times.saturating_add(1);
                last.at_unix_s = at_unix_s;
                last.times
            }
            _ => {
                if events.len() >= KEPT {
                    events.pop_front();
                }
                events.push_back(Event { at_unix_s, what: what.clone(), times: 1 });
                1
            }
        };
        if times.is_power_of_two() {
            tracing::warn!(controller, times, "{what}");
        }
    }

    pub(crate) fn list(&self) -> Vec<Event> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// The time of day, in seconds since 1970.
pub(crate) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
