//! The experiments: the bench is a program of its own, because it must be built in release mode.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::shell;

/// Every experiment there is.
const EXPERIMENTS: [&str; 8] =
    ["local-block", "translation", "nested", "vf-cost", "nvme-vf", "guest-cost", "fresh-writes", "shares"];

/// Where the experiments leave how their bounds fared.
const VERDICTS: &str = "target/verdicts.jsonl";

/// Runs the bench with these arguments. Without the name of an experiment among them, all experiments one after the other;
/// with `--enforce`, how all bounds fared is written into docs/bench.md then, and an experiment that fails does not keep the
/// next one from being run.
pub fn run(arguments: &[String]) -> Result<()> {
    build_what_ships()?;
    if arguments.first().is_some_and(|first| !first.starts_with('-')) {
        return shell::run(bench().args(arguments));
    }
    if !arguments.iter().any(|argument| argument == "--enforce") {
        return EXPERIMENTS.iter().try_for_each(|experiment| shell::run(bench().arg(experiment).args(arguments)));
    }
    if Path::new(VERDICTS).exists() {
        std::fs::remove_file(VERDICTS)?;
    }
    let mut failed = Vec::new();
    for experiment in EXPERIMENTS {
        let ran = shell::run(bench().arg(experiment).args(arguments).args(["--verdicts", VERDICTS]));
        failed.extend(ran.err().map(|error| format!("{experiment}: {error:#}")));
    }
    let hold = shell::run(bench().args(["verdicts", VERDICTS]));
    hold?;
    // One that came to nothing has left no verdicts.
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// Runs each experiment for a moment, so that none rots.
pub fn run_tiny() -> Result<()> {
    build_what_ships()?;
    EXPERIMENTS.iter().try_for_each(|experiment| shell::run(bench().args([experiment, "--tiny"])))
}

fn bench() -> Command {
    let mut command = shell::cargo();
    command.args(["run", "--release", "--quiet", "--package", "sidecore-bench", "--"]);
    command
}

/// Builds the daemon and the command line tool in release mode: what is measured and shown is what ships.
pub fn build_what_ships() -> Result<()> {
    shell::run(shell::cargo().args(["build", "--release", "--package", "sidecored", "--package", "sidecore"]))
}
