//! Fuzzing on stable Rust: libFuzzer through libfuzzer-sys, without cargo-fuzz and without a
//! nightly compiler.
//!
//! For a stable subset of its job, cargo-fuzz needs only a few compiler flags, listed here. See
//! docs/decisions/0002-fuzzing-on-stable.md.

mod build;
mod report;
mod target;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use self::build::Build;
use self::report::Show;
use crate::workspace::Workspace;
use crate::{shell, tools};

/// The workspace of the fuzz targets. Each of its binaries is a target.
pub const MANIFEST: &str = "verify/fuzz/Cargo.toml";

/// The options of `cargo xtask fuzz`.
#[derive(Args)]
pub struct Options {
    /// The target; without it, every target in turn.
    target: Option<String>,
    /// How long to fuzz each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Instead of fuzzing, add what earlier runs found and the committed corpus lacks to the
    /// committed corpus.
    #[arg(long, conflicts_with = "reproduce")]
    merge: bool,
    /// Instead of fuzzing, run the target on this one input.
    #[arg(long, value_name = "FILE", requires = "target")]
    reproduce: Option<PathBuf>,
}

/// Fuzzes, merges or reproduces, as the options say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    tools::ensure(&[tools::CPP_COMPILER])?;
    let all = targets(workspace)?;
    let chosen: Vec<&String> = match &options.target {
        None => all.iter().collect(),
        Some(name) => match all.iter().find(|target| *target == name) {
            Some(target) => vec![target],
            None => bail!("there is no fuzz target {name}: {MANIFEST} has {}", all.join(", ")),
        },
    };
    let build = Build::new(workspace)?;
    build.run()?;
    for target in chosen {
        let target = build.target(target);
        match (&options.reproduce, options.merge) {
            (Some(input), _) => target.reproduce(input)?,
            (None, true) => target.merge()?,
            (None, false) => target.fuzz(options.seconds, Show::Everything)?,
        }
    }
    Ok(())
}

/// Fuzzes every target for so long, and prints its outcome alone.
pub fn run_briefly(workspace: &Workspace, seconds: u32) -> Result<()> {
    tools::ensure(&[tools::CPP_COMPILER])?;
    let targets = targets(workspace)?;
    let build = Build::new(workspace)?;
    build.run()?;
    targets.iter().try_for_each(|target| build.target(target).fuzz(seconds, Show::Outcome))
}

/// Runs clippy on the targets, which are outside of the workspace that clippy checks otherwise.
pub fn clippy(workspace: &Workspace) -> Result<()> {
    let mut command = Build::new(workspace)?.cargo("clippy");
    shell::run(command.args(["--", "-D", "warnings"]))
}

/// The names of the targets: the binaries of the fuzz workspace.
fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let fuzz = Workspace::load_manifest(&workspace.root.join(MANIFEST))?;
    let targets = fuzz.packages.iter().flat_map(|package| &package.targets);
    Ok(targets.filter(|target| target.kind == ["bin"]).map(|target| target.name.clone()).collect())
}
