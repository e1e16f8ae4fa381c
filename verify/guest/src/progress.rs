//! What the user sees while waiting: one line for each step, with the seconds since the start.

use std::time::Instant;

pub(crate) struct Progress {
    start: Instant,
}

impl Progress {
    pub(crate) fn start() -> Progress {
        Progress { start: Instant::now() }
    }

    /// Progress goes to stderr, so that stdout holds the result alone.
    pub(crate) fn say(&self, what: impl AsRef<str>) {
        eprintln!("[{:4.0} s] {}", self.start.elapsed().as_secs_f64(), what.as_ref());
    }
}
