//! What the operator has to know: kept for `controller show`, and logged.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Something that happened to a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, in seconds since 1970.
    pub at_unix_s: u64,
    /// What.
    pub what: String,
    /// How often in a row.
    pub times: u64,
}

/// How many are kept.
const KEPT: usize = 256;

/// The last events.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<VecDeque<Event>>);

impl Events {
    /// Takes note of `what`. A guest that writes on to a full volume makes one event
    /// with a count, and a line in the log each time the count has doubled.
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
