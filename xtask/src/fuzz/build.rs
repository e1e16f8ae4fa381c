//! Builds the targets with coverage, on stable Rust.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::MANIFEST;
use super::target::Target;
use crate::shell;
use crate::workspace::Workspace;

/// Coverage that steers libFuzzer: edge counters, the table that names them, and the operands of
/// comparisons.
const COVERAGE_FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
    "-Coverflow-checks",
];

/// A build of the fuzz targets.
pub struct Build {
    /// This machine's target triple. If it is named, cargo keeps the flags away from build scripts
    /// and macros.
    triple: String,
    /// Cargo's target directory for the workspace.
    target: PathBuf,
}

impl Build {
    /// A build of this workspace's targets.
    pub fn new(workspace: &Workspace) -> Result<Self> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let version = shell::read(Command::new(rustc).args(["--version", "--verbose"]))?;
        let triple = version
            .lines()
            .find_map(|line| line.strip_prefix("host: "))
            .context("rustc named no host")?;
        Ok(Self { triple: triple.to_owned(), target: workspace.target.clone() })
    }

    /// Builds every target.
    pub fn run(&self) -> Result<()> {
        shell::run(&mut self.cargo("build"))
    }

    /// A cargo command on the targets, with the coverage flags.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = shell::cargo();
        command.args([
            subcommand,
            "--release",
            "--manifest-path",
            MANIFEST,
            "--target",
            &self.triple,
        ]);
        command.arg("--target-dir").arg(self.directory());
        command.env("CARGO_ENCODED_RUSTFLAGS", COVERAGE_FLAGS.join("\u{1f}"));
        command
    }

    /// Separate from the workspace's target directory, so that the two builds never wait for each
    /// other's lock.
    fn directory(&self) -> PathBuf {
        self.target.join("fuzz")
    }

    /// The target of this name; its program exists after [`run`](Self::run).
    pub fn target<'a>(&self, name: &'a str) -> Target<'a> {
        Target::new(
            name,
            self.directory().join(&self.triple).join("release").join(name),
            &self.target,
        )
    }
}
