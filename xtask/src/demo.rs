//! The demonstration: real guests on a real daemon.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use sidecore_guest::DemoOptions;
use sidecore_guest::root::KernelOf;

use crate::workspace::Workspace;

/// The options of `cargo xtask demo`.
#[derive(Args)]
pub struct Options {
    /// How long to measure each disk, in each mode.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
    /// Write the results into README.md and docs/demo.md, and the recording to docs/demo.svg.
    #[arg(long)]
    pub update_readme: bool,
}

/// The options of `cargo xtask demo-remote`.
#[derive(Args)]
pub struct RemoteOptions {
    /// How long to count the events of each model.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=10))]
    pub seconds: u64,
    /// Run only the guest that is a client of an IOhost itself.
    #[arg(long)]
    pub only_client: bool,
}

/// Fetches and installs what the runs with guests need.
pub fn fetch(workspace: &Workspace) -> Result<()> {
    sidecore_guest::fetch(&DemoOptions {
        target: workspace.target.clone(),
        ..DemoOptions::new(&workspace.root)
    })
}

/// Builds the daemon and tools as they ship and serves disks to real guests with them.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    sidecore_guest::demo(&DemoOptions {
        target: workspace.target.clone(),
        window: Duration::from_secs(options.seconds),
        publish: options.update_readme,
        ..DemoOptions::new(&workspace.root)
    })
}

/// Builds the daemon as it ships, and compares its encryption with that of a guest's kernel.
pub fn run_encrypted(workspace: &Workspace) -> Result<()> {
    sidecore_guest::encrypted::run(&DemoOptions {
        target: workspace.target.clone(),
        ..DemoOptions::new(&workspace.root)
    })
}

/// The options of `cargo xtask ublk`.
#[derive(Args, Default)]
pub struct UblkOptions {
    /// Take the kernel of Debian's backports, with two queues.
    #[arg(long)]
    pub backports: bool,
}

/// Builds the daemon and tools as they ship, and runs them in a guest that serves its own kernel.
pub fn run_ublk(workspace: &Workspace, options: &UblkOptions) -> Result<()> {
    let kernel = if options.backports { KernelOf::Backports } else { KernelOf::Release };
    let demo =
        DemoOptions { target: workspace.target.clone(), ..DemoOptions::new(&workspace.root) };
    sidecore_guest::ublk::run(&demo, kernel)
}

/// Builds the tools as they ship, and runs two hosts in a guest, which fence each other.
pub fn run_reservation(workspace: &Workspace) -> Result<()> {
    sidecore_guest::reservation::run(&DemoOptions {
        target: workspace.target.clone(),
        ..DemoOptions::new(&workspace.root)
    })
}

/// Builds the daemon and tools as they ship, and connects two guests by a switch.
pub fn run_net(workspace: &Workspace) -> Result<()> {
    sidecore_guest::network::demo(&DemoOptions {
        target: workspace.target.clone(),
        ..DemoOptions::new(&workspace.root)
    })
}

/// Builds the daemon and tools as they ship, and serves disks of one host to guests of others.
pub fn run_remote(workspace: &Workspace, options: &RemoteOptions) -> Result<()> {
    let demo = DemoOptions {
        target: workspace.target.clone(),
        window: Duration::from_secs(options.seconds),
        ..DemoOptions::new(&workspace.root)
    };
    if options.only_client {
        sidecore_guest::remote::client(&demo)
    } else {
        sidecore_guest::remote::demo(&demo)
    }
}
