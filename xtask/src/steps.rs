//! Progress of a command: a sequence of named steps with the time of each.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::jobs::{self, Job, Queue};
use crate::test_report::Report;

/// The number of slowest steps and test programs that the summary names.
const SLOWEST: usize = 10;

/// The number of a failed step's last lines which its error repeats: the steps beside it print
/// theirs after it, and logs are often kept by their ends.
const LAST_LINES: usize = 12;

/// The steps of one command. The first that fails ends the command.
pub struct Steps {
    started: Instant,
    done: Vec<(String, Duration)>,
    skipped: Vec<String>,
}

/// A step that is a command, and so can run beside others.
pub struct Part {
    pub name: &'static str,
    /// The remedy if the step fails.
    pub advice: String,
    pub command: Command,
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

    /// Runs lanes of steps side by side; the steps of a lane run one after another. What a step
    /// prints appears whole when it has ended.
    pub fn beside(&mut self, lanes: Vec<Vec<Part>>) -> Result<()> {
        let mut advices = Vec::new();
        let mut lane = |parts: Vec<Part>| {
            advices.extend(parts.iter().map(|part| (part.name, part.advice.clone())));
            Queue::new(parts.into_iter().map(|part| Job::new(part.name, part.command)))
        };
        let queues: Vec<Queue> = lanes.into_iter().map(&mut lane).collect();
        jobs::run(&queues.iter().collect::<Vec<_>>(), |ended| {
            let (name, took) = (&ended.name, seconds(ended.took));
            let now = seconds(self.started.elapsed());
            print!(
                "\n==> {name}  (to {now}, beside other steps)\n$ {}\n{}",
                ended.line, ended.output
            );
            let advice = advices.iter().find(|(of, _)| of == name).map_or("", |(_, advice)| advice);
            ensure!(
                ended.status.success(),
                "{name} failed after {took} ({}). Its output is above, and ends with:\n{}\n\n\
                 What to do: {advice}",
                ended.status,
                last_lines(&ended.output)
            );
            println!("    {name}: ok, {took}");
            self.done.push((name.clone(), ended.took));
            self.add(Report::of_output(name, &ended.output));
            Ok(())
        })
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

fn last_lines(output: &str) -> String {
    let mut lines: Vec<&str> = output.lines().rev().take(LAST_LINES).collect();
    lines.reverse();
    lines.join("\n")
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

    #[test]
    fn steps_run_beside_each_other_and_a_failing_one_names_itself_and_the_remedy() {
        let part = |name, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Part { name, advice: format!("ask for {name}"), command }
        };
        let mut steps = Steps::new();
        steps
            .beside(vec![
                vec![part("tea", "echo 'skipped: a cup'"), part("milk", "")],
                vec![part("cake", "echo 'test pie ... ignored, later'")],
            ])
            .unwrap();
        let mut names: Vec<_> = steps.done.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["cake", "milk", "tea"]);
        steps.skipped.sort();
        assert_eq!(steps.skipped, ["cake: pie: later", "tea: a cup"]);
        let lanes =
            vec![vec![part("bun", "echo burnt; exit 2"), part("late", "")], vec![part("jam", "")]];
        let error = steps.beside(lanes).unwrap_err().to_string();
        for text in ["bun failed after", "exit status: 2", "burnt", "What to do: ask for bun"] {
            assert!(error.contains(text), "{error}");
        }
        assert!(!steps.done.iter().any(|(name, _)| name == "late"));
    }
}
