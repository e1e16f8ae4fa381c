//! The progress of long work: a bar on a terminal, a line every few seconds elsewhere.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::units::bytes;

/// The time between two lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

const BAR: &str = "{msg} [{bar:30.#-}] {percent:>3}%  {binary_bytes} of {binary_total_bytes}  \
                   {binary_bytes_per_sec}  {eta} left";

/// The progress of one piece of work, on the standard error, because the standard output is for
/// scripts.
pub(crate) struct Progress {
    /// Counts the bytes in either case, and is drawn only on a terminal.
    bar: ProgressBar,
    /// The time of the next line; `None` on a terminal.
    next_line: Option<Instant>,
}

impl Progress {
    /// Starts with no byte of `total` done.
    pub(crate) fn new(what: impl Into<String>, total: u64) -> Self {
        let on_terminal = io::stderr().is_terminal();
        let target =
            if on_terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style =
            ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), target)
            .with_style(style)
            .with_message(what.into());
        Self { bar, next_line: (!on_terminal).then(|| Instant::now() + LINE_INTERVAL) }
    }

    /// Counts more bytes as done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.set(self.bar.position().saturating_add(bytes));
    }

    /// Sets the number of bytes that are done.
    pub(crate) fn set(&mut self, done: u64) {
        self.bar.set_position(done);
        if self.next_line.is_some_and(|next| Instant::now() >= next) {
            self.next_line = Some(Instant::now() + LINE_INTERVAL);
            eprintln!("{}", line(&self.bar));
        }
    }

    /// Shows the work as complete.
    pub(crate) fn finish(self) {
        self.bar.set_position(self.bar.position().max(self.bar.length().unwrap_or(0)));
        if self.next_line.is_some() {
            eprintln!("{}", line(&self.bar));
        }
        self.bar.finish();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // After a failure, the bar stays above the error message.
        self.bar.abandon();
    }
}

fn line(bar: &ProgressBar) -> String {
    let (done, total) = (bar.position(), bar.length().unwrap_or(0));
    let percent = done.min(total).saturating_mul(100).checked_div(total).unwrap_or(100);
    let mut line = format!("{} {percent:3}%  {} of {}", bar.message(), bytes(done), bytes(total));
    if bar.per_sec() >= 1.0 {
        line.push_str(&format!("  {}/s", bytes(bar.per_sec() as u64)));
        if done < total {
            line.push_str(&format!("  {} left", HumanDuration(bar.eta())));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_share_and_the_sizes() {
        let progress = |done, total| {
            let bar = ProgressBar::hidden().with_message("importing").with_position(done);
            bar.set_length(total);
            line(&bar)
        };
        assert!(progress(1 << 30, 2 << 30).starts_with("importing  50%  1GiB of 2GiB"));
        assert!(progress(0, 0).contains("100%  0B of 0B"));
        assert!(progress(3, 2).contains("100%"));
    }

    #[test]
    fn the_template_of_the_bar_is_valid() {
        ProgressStyle::with_template(BAR).unwrap();
    }
}
