//! The progress of the demo: a line for each step, with the seconds since the start.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) struct Progress {
    start: Instant,
    said: Mutex<Vec<(Duration, String)>>,
}

impl Progress {
    pub(crate) fn start() -> Progress {
        Progress { start: Instant::now(), said: Mutex::default() }
    }

    /// Prints a line to stderr, so that stdout has only the results.
    pub(crate) fn say(&self, what: impl AsRef<str>) {
        let at = self.start.elapsed();
        let line = format!("[{:4.0} s] {}", at.as_secs_f64(), what.as_ref());
        eprintln!("{line}");
        self.said.lock().unwrap_or_else(PoisonError::into_inner).push((at, line));
    }

    /// The lines so far, each with its time since the start.
    pub(crate) fn said(&self) -> Vec<(Duration, String)> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
