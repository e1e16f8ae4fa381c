//! A libvirt guest on a real daemon.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use sidecore_guest::DemoOptions;
use sidecore_guest::libvirt::{Inside, libvirt, run_inside};

use crate::workspace::Workspace;

/// The option with which this program starts itself in new namespaces.
const INSIDE: &str = "--inside";

/// The options of `cargo xtask libvirt`.
#[derive(Args)]
pub struct Options {
    /// The paths of the guest's kernel, its image, and the daemon's directory. Only given to the
    /// process in the new namespaces.
    #[arg(long, hide = true, num_args = 3, value_names = ["KERNEL", "IMAGE", "BINARIES"])]
    pub inside: Option<Vec<PathBuf>>,
}

/// Builds the daemon as it ships and has a libvirt guest use it.
pub fn run(workspace: &Workspace) -> Result<()> {
    let options =
        DemoOptions { target: workspace.target.clone(), ..DemoOptions::new(&workspace.root) };
    libvirt(&options, &["libvirt", INSIDE])
}

/// The part of the command that runs in the new namespaces.
pub fn run_in_namespaces(paths: &[PathBuf]) -> Result<()> {
    let [kernel, initramfs, binaries] = paths else { bail!("{INSIDE} takes three paths") };
    let (kernel, initramfs, binaries) = (kernel.clone(), initramfs.clone(), binaries.clone());
    run_inside(&Inside { kernel, initramfs, binaries })
}
