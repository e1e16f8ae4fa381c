//! Progress: a sequence of named steps with the time that each took.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The steps of one command. The first that fails ends the command.
pub struct Steps {
    started: Instant,
    done: Vec<(&'static str, Duration)>,
}

impl Steps {
    /// No step taken yet.
    pub fn new() -> Self {
        Self { started: Instant::now(), done: Vec::new() }
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
                self.done.push((name, took));
                Ok(value)
            }
            Err(error) => bail!("{name} failed after {}:\n  {error:#}\n\nWhat to do: {advice}", seconds(took)),
        }
    }

    /// Prints what was done and how long it took.
    pub fn summarise(&self) {
        println!("\nAll {} steps passed:", self.done.len());
        for (name, took) in &self.done {
            println!("  {name:<24} {:>9}", seconds(*took));
        }
        println!("  {:<24} {:>9}", "together", seconds(self.started.elapsed()));
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
