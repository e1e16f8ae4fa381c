//! The experiments: the bench is a program of its own, because it must be built in release mode.

use std::process::Command;

use anyhow::Result;

use crate::shell;

/// Every experiment there is.
const EXPERIMENTS: [&str; 5] = ["local-block", "translation", "nested", "nvme-vf", "guest-cost"];

/// Runs the bench with these arguments; without any, all experiments one after the other.
pub fn run(arguments: &[String]) -> Result<()> {
    build_what_ships()?;
    if arguments.is_empty() {
        return EXPERIMENTS.iter().try_for_each(|experiment| shell::run(bench().arg(experiment)));
    }
    shell::run(bench().args(arguments))
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
