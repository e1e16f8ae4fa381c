//! A guest of libvirt's on a real daemon.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use sidecore_guest::DemoOptions;
use sidecore_guest::libvirt::{Inside, libvirt, run_inside};

use crate::workspace::Workspace;

/// How this program calls itself, in namespaces of its own.
const INSIDE: &str = "--inside";

/// What to run with.
#[derive(Args)]
pub struct Options {
    /// The guest's kernel, its image, and where the daemon is: this is the process in the namespaces.
    #[arg(long, hide = true, num_args = 3, value_names = ["KERNEL", "IMAGE", "BINARIES"])]
    pub inside: Option<Vec<PathBuf>>,
}

/// Builds what ships and has libvirt's guest use it.
pub fn run(workspace: &Workspace) -> Result<()> {
    let options = DemoOptions { target: workspace.target.clone(), ..DemoOptions::new(&workspace.root) };
    libvirt(&options, &["libvirt", INSIDE])
}

/// What this program does once more in namespaces of its own.
pub fn run_in_namespaces(paths: &[PathBuf]) -> Result<()> {
    let [kernel, initramfs, binaries] = paths else { bail!("{INSIDE} takes three paths") };
    let (kernel, initramfs, binaries) = (kernel.clone(), initramfs.clone(), binaries.clone());
    run_inside(&Inside { kernel, initramfs, binaries })
}
