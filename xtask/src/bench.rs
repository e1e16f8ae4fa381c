//! The experiments: the bench is a program of its own, because it must be built in release mode.

use anyhow::Result;

use crate::shell;

/// Runs the bench with these arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    build_what_ships()?;
    shell::run(
        shell::cargo().args(["run", "--release", "--quiet", "--package", "sidecore-bench", "--"]).args(arguments),
    )
}

/// Builds the daemon and the command line tool in release mode: what is measured and shown is what ships.
pub fn build_what_ships() -> Result<()> {
    shell::run(shell::cargo().args(["build", "--release", "--package", "sidecored", "--package", "sidecore"]))
}
