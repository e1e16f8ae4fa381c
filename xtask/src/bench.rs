//! Runs the experiments. The bench is a separate program, because it must be built in release mode.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::workspace::Workspace;
use crate::{shell, tools};

/// In the order of docs/bench.md.
const EXPERIMENTS: &str = "local-block translation nested vf-cost nvme-vf guest-cost \
    fresh-writes shares stages remote-block remote-figures net-switch";

/// The packages that ship. Who else builds in release mode names them, too: another choice of
/// packages has other features of third parties, and so another build of every crate.
pub const SHIPPED: [&str; 4] = ["--package", "sidecored", "--package", "sidecore"];

/// The file to which the experiments write the verdict on each of their bounds.
const VERDICTS: &str = "target/verdicts.jsonl";

/// Runs the bench with these arguments. If they do not begin with the name of an experiment, all
/// experiments run in turn. With `--enforce`, all verdicts are then written into docs/bench.md, and
/// a failed experiment does not keep the next one from running.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    build()?;
    install_peers(arguments);
    let bench = || bench(workspace);
    if arguments.first().is_some_and(|first| !first.starts_with('-')) {
        return shell::run(bench().args(arguments));
    }
    if !arguments.iter().any(|argument| argument == "--enforce") {
        return EXPERIMENTS
            .split(' ')
            .try_for_each(|experiment| shell::run(bench().arg(experiment).args(arguments)));
    }
    if Path::new(VERDICTS).exists() {
        std::fs::remove_file(VERDICTS)?;
    }
    let mut failed = Vec::new();
    for experiment in EXPERIMENTS.split(' ') {
        let ran =
            shell::run(bench().arg(experiment).args(arguments).args(["--verdicts", VERDICTS]));
        failed.extend(ran.err().map(|error| format!("{experiment}: {error:#}")));
    }
    let hold = shell::run(bench().args(["verdicts", VERDICTS]));
    hold?;
    // An experiment that ended early has written no verdicts.
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

/// Installs the peers of the experiments that these arguments select. An experiment says which
/// peers it lacks.
fn install_peers(arguments: &[String]) {
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    let selected = |experiment| {
        arguments.first().is_none_or(|first| first.starts_with('-') || first == experiment)
    };
    let without = ["--tiny", "--no-peer", "--against", "--help"].into_iter().any(has);
    let peers = tools::OF_BENCHES.iter().filter(|(experiment, _)| selected(experiment));
    let peers: Vec<_> = peers.map(|(_, peer)| *peer).collect();
    if !without && let Err(error) = tools::ensure(&peers) {
        eprintln!("    a peer is missing: {error:#}");
    }
}

/// Runs each experiment for a moment, to show that all of them still work.
pub fn run_tiny(workspace: &Workspace) -> Result<()> {
    EXPERIMENTS
        .split(' ')
        .try_for_each(|experiment| shell::run(bench(workspace).args([experiment, "--tiny"])))
}

/// The bench that [`build`] has built.
fn bench(workspace: &Workspace) -> Command {
    Command::new(workspace.target.join("release/sidecore-bench"))
}

/// Builds all programs in release mode, as they ship: the bench and the demo run these binaries.
pub fn build_what_ships() -> Result<()> {
    shell::run(shell::cargo().args(["build", "--release"]).args(SHIPPED))?;
    shell::run(shell::cargo().args(sidecore_guest::GUEST_TUNE))
}

/// Builds the bench, and what it measures.
pub fn build() -> Result<()> {
    let bench = ["--package", "sidecore-bench"];
    shell::run(shell::cargo().args(["build", "--release"]).args(SHIPPED).args(bench))
}
