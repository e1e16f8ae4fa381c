//! A fuzz target: its program, its corpus, and the ways to run it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::report::{Report, Show};
use crate::shell;

/// The inputs in git, one directory per target.
const CORPUS: &str = "verify/fuzz/corpus";

/// More than any target needs, and far less than the machine has.
const MEMORY_LIMIT_MB: u32 = 2048;

/// An input that takes longer is a failure.
const INPUT_TIMEOUT_S: u32 = 10;

pub struct Target<'a> {
    name: &'a str,
    program: PathBuf,
    /// The corpus in git, to which only a merge writes.
    committed: PathBuf,
    /// The inputs that runs on this machine have found.
    found: PathBuf,
    /// The inputs that crashed, hung or took too much memory.
    artifacts: PathBuf,
}

impl<'a> Target<'a> {
    /// A target with the program `program`, and its directories in git and in cargo's target
    /// directory.
    pub fn new(name: &'a str, program: PathBuf, cargo_target: &Path) -> Self {
        Self {
            name,
            program,
            committed: Path::new(CORPUS).join(name),
            found: cargo_target.join("fuzz-corpus").join(name),
            artifacts: cargo_target.join("fuzz-artifacts").join(name),
        }
    }

    /// Fuzzes for so long. New inputs go to cargo's target directory, not into the tree.
    pub fn fuzz(&self, seconds: u32, show: Show) -> Result<()> {
        println!("\n--- fuzzing {} for {seconds} s", self.name);
        let mut command = self.command()?;
        command.arg(format!("-max_total_time={seconds}")).arg(&self.found).arg(&self.committed);
        let report = Report::of(&mut command, show)?;
        if !report.passed {
            if show == Show::Outcome {
                report.print_tail();
            }
            bail!("{}", self.advice(report.reproducer.as_deref()));
        }
        // A compiler that ignores the coverage flags would make every run a blind one that passes.
        let summary =
            report.summary.context("libFuzzer printed no summary: has its output changed?")?;
        if !summary.contains("cov: ") {
            bail!(
                "no coverage was measured: see COVERAGE_FLAGS in xtask/src/fuzz/build.rs, the \
                 compiler may have changed"
            );
        }
        println!("    {}: {summary}", self.name);
        Ok(())
    }

    /// Adds to the corpus in git those found inputs that cover more code.
    pub fn merge(&self) -> Result<()> {
        println!("\n--- merging what was found for {}", self.name);
        shell::run(self.command()?.arg("-merge=1").arg(&self.committed).arg(&self.found))?;
        println!(
            "{} now holds {} inputs: look them over, then commit them",
            self.committed.display(),
            { std::fs::read_dir(&self.committed)?.count() }
        );
        Ok(())
    }

    pub fn reproduce(&self, input: &Path) -> Result<()> {
        shell::run(self.command()?.arg(input))
    }

    /// A command with the target's program and the limits that every run has.
    fn command(&self) -> Result<Command> {
        for directory in [&self.committed, &self.found, &self.artifacts] {
            std::fs::create_dir_all(directory)
                .with_context(|| format!("cannot create {}", directory.display()))?;
        }
        let mut command = Command::new(&self.program);
        command
            .arg(format!("-rss_limit_mb={MEMORY_LIMIT_MB}"))
            .arg(format!("-timeout={INPUT_TIMEOUT_S}"));
        // libFuzzer joins the prefix and the file name: the slash makes the prefix a directory.
        command.arg(format!("-artifact_prefix={}/", self.artifacts.display()));
        Ok(command)
    }

    /// The remedy for a failure.
    fn advice(&self, reproducer: Option<&str>) -> String {
        match reproducer {
            Some(input) => format!(
                "{name} fails on {input}\n  To see it again: cargo xtask fuzz {name} --reproduce \
                 {input}\n  When it is fixed, copy the input to {corpus} under a name that says \
                 what it was",
                name = self.name,
                corpus = self.committed.display(),
            ),
            None => format!(
                "{} failed without leaving an input behind: read its output above",
                self.name
            ),
        }
    }
}
