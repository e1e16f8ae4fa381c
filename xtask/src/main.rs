//! The project's own commands: `cargo xtask demo|demo-net|demo-remote|dm-crypt|foreign|libvirt|
//! reservation|ublk|test|bench|lint|ratchet|fuzz|arrows|metrics|keys|openapi`.
//!
//! Everything that `make`, CI and a developer run is here, in the project's own language, so that
//! there is one way to do each thing. A command prints its steps and their times, stops at the
//! first failure, and prints the remedy.
#![forbid(unsafe_code)]

mod arrows;
mod bench;
mod demo;
mod foreign;
mod fuzz;
mod install;
mod jobs;
mod law;
mod libvirt;
mod links;
mod lint;
mod programs;
mod ratchet;
mod shell;
mod steps;
mod test;
mod test_report;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The project's own commands",
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Serve a disk to a real guest, end to end.
    Demo(demo::Options),
    /// Serve disks of one host to guests of two others, over a bad network.
    DemoRemote(demo::RemoteOptions),
    /// Connect two guests by a switch.
    DemoNet,
    /// Compare the stage `encrypt` with dm-crypt of a guest's kernel, in both directions.
    DmCrypt,
    /// Test the remote channel on machines of other kinds, in QEMU's user mode.
    Foreign,
    /// Have libvirt give a guest its disk, over restarts of the daemon.
    Libvirt(libvirt::Options),
    /// Have two hosts in a guest fence each other by the reservations of an NVMe disk.
    Reservation,
    /// Have a guest serve a block device of its own kernel, and kill its daemon under load.
    Ublk(demo::UblkOptions),
    /// Run everything that must pass before a commit.
    Test,
    /// Run one step of `test`.
    #[command(hide = true)]
    Step { step: test::Step },
    /// Run the experiments, in release mode.
    #[command(disable_help_flag = true)]
    Bench {
        /// Passed on to the bench.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Check formatting, the house rules and clippy.
    Lint,
    /// Write xtask/ratchets.txt anew: fewer violations of style, never more.
    Ratchet,
    /// Fuzz every target, or one.
    Fuzz(fuzz::Options),
    /// Print the table of which room may depend on which, as ARCHITECTURE.md shows it.
    Arrows,
    /// Rewrite the tables of docs/metrics.md.
    Metrics,
    /// Rewrite the tables of keys in docs/config.md.
    Keys,
    /// Rewrite docs/openapi.json.
    Openapi,
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    if let Task::Libvirt(libvirt::Options { inside: Some(paths) }) = &task {
        // This process may run as root, whose environment need not have cargo.
        return libvirt::run_in_namespaces(paths);
    }
    let workspace = Workspace::load()?;
    // The paths that the commands print, and the tools that they start, are relative to the root.
    std::env::set_current_dir(&workspace.root)?;
    match task {
        Task::Demo(options) => demo::run(&workspace, &options),
        Task::DemoRemote(options) => demo::run_remote(&workspace, &options),
        Task::DemoNet => demo::run_net(&workspace),
        Task::DmCrypt => demo::run_encrypted(&workspace),
        Task::Foreign => foreign::run(&workspace).map(drop),
        Task::Libvirt(_) => libvirt::run(&workspace),
        Task::Reservation => demo::run_reservation(&workspace),
        Task::Ublk(options) => demo::run_ublk(&workspace, &options),
        Task::Test => test::run(&workspace),
        Task::Step { step } => step.run(&workspace),
        Task::Bench { arguments } => bench::run(&workspace, &arguments),
        Task::Lint => lint::run(&workspace),
        Task::Ratchet => ratchet::tighten(&workspace),
        Task::Fuzz(options) => fuzz::run(&workspace, &options),
        Task::Arrows => {
            print!("{}", arrows::as_markdown());
            Ok(())
        }
        Task::Metrics => rewrite(&["--lib", "metrics::tests::manual"]),
        Task::Openapi => rewrite(&["--lib", "api::document::tests"]),
        Task::Keys => rewrite(&["--test", "config", "manual::the_tables"]),
    }
}

/// Runs tests that compare a document with its source, in the mode that rewrites the document.
fn rewrite(tests: &[&str]) -> Result<()> {
    let cargo = ["test", "--quiet", "--package", "sidecore-control"];
    shell::run(shell::cargo().args(cargo).args(tests).env("SIDECORE_WRITE_DOCS", "1"))
}
