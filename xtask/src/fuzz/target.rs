//! One fuzz target: its program, its corpus, and what to do with them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::report::{Report, Show};
use crate::shell;

/// Inputs worth keeping, one directory per target, in git.
const CORPUS: &str = "verify/fuzz/corpus";

/// Enough for any target, and far below what would trouble the machine.
const MEMORY_LIMIT_MB: u32 = 2048;

/// No input may take longer.
const INPUT_TIMEOUT_S: u32 = 10;

/// One target, built, and its directories.
pub struct Target<'a> {
    name: &'a str,
    program: PathBuf,
    /// The corpus in git. Only a merge writes to it.
    committed: PathBuf,
    /// What runs on this machine found.
    found: PathBuf,
    /// The inputs that crashed, hung or took too much memory.
    artifacts: PathBuf,
}

impl<'a> Target<'a> {
    /// The target that was built as `program`, with its directories in git and in cargo's target directory.
    pub fn new(name: &'a str, program: PathBuf, cargo_target: &Path) -> Self {
        Self {
            name,
            program,
            committed: Path::new(CORPUS).join(name),
            found: cargo_target.join("fuzz-corpus").join(name),
            artifacts: cargo_target.join("fuzz-artifacts").join(name),
        }
    }

    /// Fuzzes for so long. What is new goes to cargo's target directory, not into the tree.
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
        // A compiler that drops the flags silently would leave us throwing dice, and passing.
        let summary = report.summary.context("libFuzzer printed no summary: has its output changed?")?;
        if !summary.contains("cov: ") {
            bail!(
                "no coverage was measured: see COVERAGE_FLAGS in xtask/src/fuzz/build.rs, the compiler may have changed"
            );
        }
        println!("    {}: {summary}", self.name);
        Ok(())
    }

    /// Adds to the corpus in git what was found since and covers something new.
    pub fn merge(&self) -> Result<()> {
        println!("\n--- merging what was found for {}", self.name);
        shell::run(self.command()?.arg("-merge=1").arg(&self.committed).arg(&self.found))?;
        println!("{} now holds {} inputs: look them over, then commit them", self.committed.display(), {
            std::fs::read_dir(&self.committed)?.count()
        });
        Ok(())
    }

    /// Runs one input.
    pub fn reproduce(&self, input: &Path) -> Result<()> {
        shell::run(self.command()?.arg(input))
    }

    /// The target with the limits that hold for every way of running it.
    fn command(&self) -> Result<Command> {
        for directory in [&self.committed, &self.found, &self.artifacts] {
            std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        }
        let mut command = Command::new(&self.program);
        command.arg(format!("-rss_limit_mb={MEMORY_LIMIT_MB}")).arg(format!("-timeout={INPUT_TIMEOUT_S}"));
        // libFuzzer glues the prefix and the name together: the slash makes it a directory.
        command.arg(format!("-artifact_prefix={}/", self.artifacts.display()));
        Ok(command)
    }

    /// What to do about a failure.
    fn advice(&self, reproducer: Option<&str>) -> String {
        match reproducer {
            Some(input) => format!(
                "{name} fails on {input}\n  To see it again: cargo xtask fuzz {name} --reproduce {input}\n  When it is \
                 fixed, copy the input to {corpus} under a name that says what it was",
                name = self.name,
                corpus = self.committed.display(),
            ),
            None => format!("{} failed without leaving an input behind: read its output above", self.name),
        }
    }
}
