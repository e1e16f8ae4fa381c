//! How far something is that takes a while: a bar on a terminal, now and then a line elsewhere.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use crate::units::bytes;

/// Between two drawings of the bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// Between two lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Of the bar itself, in characters.
const WIDTH: usize = 30;

/// On the standard error, so that the standard output is for what a script wants.
pub(crate) struct Progress {
    what: String,
    total: u64,
    done: u64,
    started: Instant,
    shown: Option<Instant>,
    on_terminal: bool,
}

impl Progress {
    /// Something that will be done when `total` bytes are.
    pub(crate) fn new(what: impl Into<String>, total: u64) -> Self {
        let on_terminal = io::stderr().is_terminal();
        Self { what: what.into(), total, done: 0, started: Instant::now(), shown: None, on_terminal }
    }

    /// More is done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.set(self.done.saturating_add(bytes));
    }

    /// So much is done.
    pub(crate) fn set(&mut self, done: u64) {
        self.done = done;
        let interval = if self.on_terminal { BAR_INTERVAL } else { LINE_INTERVAL };
        let due = self.shown.unwrap_or(self.started).elapsed() >= interval;
        if due || (self.on_terminal && self.shown.is_none()) {
            self.shown = Some(Instant::now());
            self.show("");
        }
    }

    /// All is done.
    pub(crate) fn finish(mut self) {
        self.done = self.done.max(self.total);
        self.show("\n");
        self.shown = None;
    }

    fn show(&self, end: &str) {
        let line = line(&self.what, self.done, self.total, self.started.elapsed());
        let mut err = io::stderr().lock();
        // Nobody may be looking.
        let _ = if self.on_terminal { write!(err, "\r{line}\x1b[K{end}") } else { writeln!(err, "{line}") };
        let _ = err.flush();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.on_terminal && self.shown.is_some() {
            // It failed: its message goes below the bar.
            let _ = writeln!(io::stderr());
        }
    }
}

fn line(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let share = if total == 0 { 1.0 } else { (done as f64 / total as f64).min(1.0) };
    let filled = (share * WIDTH as f64) as usize;
    let bar = format!("{}{}", "#".repeat(filled), "-".repeat(WIDTH.saturating_sub(filled)));
    let seconds = elapsed.as_secs_f64();
    let speed = if seconds > 0.0 { done as f64 / seconds } else { 0.0 };
    let mut line = format!("{what} [{bar}] {:3.0}%  {} of {}", (share * 100.0).floor(), bytes(done), bytes(total));
    if speed >= 1.0 {
        line.push_str(&format!("  {}/s", bytes(speed as u64)));
        let left = total.saturating_sub(done) as f64 / speed;
        if left >= 1.0 {
            line.push_str(&format!("  {left:.0}s left"));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let half = line("importing", 1 << 30, 2 << 30, Duration::from_secs(8));
        let bar = format!("{}{}", "#".repeat(15), "-".repeat(15));
        assert_eq!(half, format!("importing [{bar}]  50%  1GiB of 2GiB  128MiB/s  8s left"));
        assert!(line("x", 0, 0, Duration::ZERO).contains("100%  0B of 0B"));
        assert!(line("x", 3, 2, Duration::ZERO).contains("100%"));
    }
}
