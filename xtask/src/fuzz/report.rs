//! Reads libFuzzer's output.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// How much of libFuzzer's output to show.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Show {
    Everything,
    /// One line, or the last lines of the output if the run fails.
    Outcome,
}

/// The result of a run of libFuzzer.
pub struct Report {
    pub passed: bool,
    /// Coverage and speed, in libFuzzer's words.
    pub summary: Option<String>,
    /// The file that holds the failing input.
    pub reproducer: Option<String>,
    tail: VecDeque<String>,
}

impl Report {
    /// Enough for a panic with its backtrace.
    const TAIL_LINES: usize = 80;

    /// Runs this command to its end.
    pub fn of(command: &mut Command, show: Show) -> Result<Self> {
        let mut child =
            command.stderr(Stdio::piped()).spawn().context("cannot start the fuzz target")?;
        let mut report =
            Self { passed: false, summary: None, reproducer: None, tail: VecDeque::new() };
        // libFuzzer and a panic both write to the standard error output, and not always UTF-8.
        let mut lines =
            BufReader::new(child.stderr.take().context("the fuzz target has no output")?);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            report.take(String::from_utf8_lossy(&line).trim_end(), show);
            line.clear();
        }
        report.passed = child.wait()?.success();
        Ok(report)
    }

    fn take(&mut self, line: &str, show: Show) {
        if show == Show::Everything {
            eprintln!("{line}");
        }
        // For instance: #21582618 DONE   cov: 69 ft: 250 corp: 171/6225b lim: 4096 exec/s: 1027743
        // rss: 28Mb
        if let Some((runs, figures)) = line.split_once("DONE ") {
            self.summary =
                Some(format!("{} inputs, {}", runs.trim().trim_start_matches('#'), figures.trim()));
        }
        if let Some((_, file)) = line.split_once("Test unit written to ") {
            self.reproducer = Some(file.to_owned());
        }
        if self.tail.len() == Self::TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_owned());
    }

    /// Prints the last lines of the output.
    pub fn print_tail(&self) {
        for line in &self.tail {
            eprintln!("{line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_run_names_the_input_that_it_failed_on() {
        let script = "echo \"artifact_prefix='/x/'; Test unit written to /x/crash-1\" >&2; exit 77";
        let report = Report::of(Command::new("sh").args(["-c", script]), Show::Outcome).unwrap();
        assert_eq!(report.reproducer.as_deref(), Some("/x/crash-1"));
    }

    #[test]
    fn a_run_is_reported_by_its_last_figures_and_its_last_lines() {
        let script = "for i in $(seq 200); do echo \"line $i\" >&2; done; echo '#7	DONE   cov: 3 \
                      ft: 4' >&2; exit 1";
        let report = Report::of(Command::new("sh").args(["-c", script]), Show::Outcome).unwrap();
        assert!(!report.passed);
        assert_eq!(report.summary.as_deref(), Some("7 inputs, cov: 3 ft: 4"));
        assert_eq!(report.tail.len(), Report::TAIL_LINES);
        assert_eq!(report.tail[Report::TAIL_LINES - 2], "line 200");
    }
}
