//! Formatting, the house rules and clippy; the quick ones first.

use anyhow::Result;

use crate::steps::Steps;
use crate::workspace::Workspace;
use crate::{arrows, fuzz, law, links, ratchet, shell, tidy, tools};

/// The name of the step that runs [`clippy`], and the remedy if it fails.
pub const CLIPPY: (&str, &str) =
    ("clippy", "fix what clippy names; allow a lint only with a reason beside it");

/// The same of [`documentation`].
pub const DOCUMENTATION: (&str, &str) =
    ("documentation", "fix the link or the comment that rustdoc names");

/// Checks all that can be checked without running the project.
pub fn run(workspace: &Workspace) -> Result<()> {
    let mut steps = Steps::new();
    quick(workspace, &mut steps)?;
    let (name, advice) = CLIPPY;
    steps.step(name, advice, || clippy(workspace))?;
    let (name, advice) = DOCUMENTATION;
    steps.step(name, advice, documentation)?;
    steps.summarise();
    Ok(())
}

/// Runs the checks that compile nothing of this project.
pub fn quick(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    steps.step("format", "run `cargo fmt --all`, and the same in verify/fuzz", || {
        shell::run(shell::cargo().args(["fmt", "--all", "--check"]))?;
        shell::run(shell::cargo().args(["fmt", "--check", "--manifest-path", fuzz::MANIFEST]))
    })?;
    steps
        .step("arrows", "see docs/decisions/0001-workspace-law.md", || arrows::check(workspace))?;
    steps.step("law of the crates", "see docs/decisions/0001-workspace-law.md", || {
        law::check(workspace)
    })?;
    steps.step("tidiness", "see each line", || tidy::check(workspace))?;
    steps.step("links between pages", "see each line", || links::check(workspace))?;
    let advice = "wrap, split or rephrase what is named; `cargo xtask ratchet` after a violation \
                  is gone or has moved";
    steps.step("ratchets of style", advice, || ratchet::check(workspace))?;
    steps.step(
        "dependencies",
        "see deny.toml and docs/decisions/0030-dependencies-by-cargo-deny.md",
        || {
            tools::ensure_cargo_deny()?;
            // On a fresh machine nothing is there yet that cargo-deny could read without a network.
            shell::run(shell::cargo().args(["fetch", "--locked"]))?;
            let check =
                "deny --offline check -D unmatched-skip -D unnecessary-skip bans licenses sources";
            shell::run(shell::cargo().args(check.split(' ')))
        },
    )
}

pub fn clippy(workspace: &Workspace) -> Result<()> {
    let command = "clippy --workspace --all-targets -- -D warnings";
    shell::run(shell::cargo().args(command.split(' ')))?;
    // The runtime of the fuzzer is C++.
    tools::ensure(&[tools::CPP_COMPILER])?;
    fuzz::clippy(workspace)
}

pub fn documentation() -> Result<()> {
    let mut command = shell::cargo();
    shell::run(command.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}
