//! Progress: a sequence of named steps with the time that each took.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::test_report::Report;

/// As many of the slowest steps and test programs are named at the end.
const SLOWEST: usize = 10;

/// The steps of one command. The first that fails ends the command.
pub struct Steps {
    started: Instant,
    done: Vec<(String, Duration)>,
    skipped: Vec<String>,
}

impl Steps {
    /// No step taken yet.
    pub fn new() -> Self {
        Self { started: Instant::now(), done: Vec::new(), skipped: Vec::new() }
    }

    /// Takes a step. `advice` says what to do if it fails.
    pub fn step<T>(&mut self, name: &'static str, advice: &str, action: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n==> {name}  (at {})", seconds(self.started.elapsed()));
        let started = Instant::now();
        let outcome = action();
        let took = started.elapsed();
        match outcome {
            Ok(value) => {
                println!("    {name}: ok, {}", seconds(took));
                self.done.push((name.to_owned(), took));
                Ok(value)
            }
            Err(error) => bail!("{name} failed after {}:\n  {error:#}\n\nWhat to do: {advice}", seconds(took)),
        }
    }

    /// Adds what a run of tests reported: the time of each program, and the tests that it left out.
    pub fn add(&mut self, report: Report) {
        self.skipped.extend(report.skipped);
        self.done.extend(report.programs);
    }

    /// Prints the slowest steps, and the tests that were left out with their reasons.
    pub fn summarise(&mut self) {
        println!("\nAll steps passed in {}. The slowest steps and test programs:", seconds(self.started.elapsed()));
        self.done.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        for (name, took) in self.done.iter().take(SLOWEST) {
            println!("  {name:<60} {:>9}", seconds(*took));
        }
        if !self.skipped.is_empty() {
            println!("\nTests that this machine cannot run, or that run elsewhere ({}):", self.skipped.len());
            self.skipped.iter().for_each(|test| println!("  {test}"));
        }
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_step_names_itself_the_cause_and_the_remedy() {
        let error = Steps::new().step("tea", "boil water", || -> Result<()> { anyhow::bail!("cold") }).unwrap_err();
        let text = format!("{error:#}");
        for part in ["tea failed", "boil water", "cold"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_passing_step_returns_its_value() {
        assert_eq!(Steps::new().step("sum", "count again", || Ok(1 + 1)).unwrap(), 2);
    }
}
