//! Progress of a command: a sequence of named steps with the time of each.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::test_report::Report;

/// The number of slowest steps and test programs that the summary names.
const SLOWEST: usize = 10;

/// The steps of one command. The first that fails ends the command.
pub struct Steps {
    started: Instant,
    done: Vec<(String, Duration)>,
    skipped: Vec<String>,
}

impl Steps {
    pub fn new() -> Self {
        Self { started: Instant::now(), done: Vec::new(), skipped: Vec::new() }
    }

    /// Runs a step. `advice` is the remedy that is printed if the step fails.
    pub fn step<T>(
        &mut self,
        name: &'static str,
        advice: &str,
        action: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
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
            Err(error) => {
                bail!("{name} failed after {}:\n  {error:#}\n\nWhat to do: {advice}", seconds(took))
            }
        }
    }

    /// Adds the report of a test run: the time of each program, and the skipped tests.
    pub fn add(&mut self, report: Report) {
        self.skipped.extend(report.skipped);
        self.done.extend(report.programs);
    }

    /// Prints the slowest steps, and the skipped tests with their reasons.
    pub fn summarise(&mut self) {
        println!(
            "\nAll steps passed in {}. The slowest steps and test programs:",
            seconds(self.started.elapsed())
        );
        self.done.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        for (name, took) in self.done.iter().take(SLOWEST) {
            println!("  {name:<60} {:>9}", seconds(*took));
        }
        if !self.skipped.is_empty() {
            println!(
                "\nTests that this machine cannot run, or that run elsewhere ({}):",
                self.skipped.len()
            );
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
        let error = Steps::new()
            .step("tea", "boil water", || -> Result<()> { anyhow::bail!("cold") })
            .unwrap_err();
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
