//! Remote devices, end to end: an IOhost and two VMhosts in network namespaces, with real guests.
//!
//! The cables between them lose, double and reorder frames. Each VMhost gives a guest its disk, one
//! by virtio and one by NVMe. The IOhost's daemon is killed while both write. Then root on a VMhost
//! tries to get past what the IOhost enforces (vRIO, section 4.6). Two IOhosts with etcd hand a
//! disk over and fail over while its guest writes, and the guest migrates between the VMhosts. A
//! guest with ublk is a client itself. The events per request of the models of the paper's Table 3
//! are counted.

mod client;
mod config;
mod enforced;
mod failover;
mod host;
mod intruder;
mod migration;
mod models;
mod net;
mod run;
mod store;

use crate::checks::Checks;
use crate::progress::Progress;
use crate::root::KernelOf;
use crate::session::Stage;
use crate::{DemoOptions, Prepared, install, json, listen, qemu, ublk, write};
use anyhow::{Result, bail};
use serde::Serialize;
use std::time::Duration;

pub use models::Model;

/// The program that decides over owners, and its package.
pub(crate) const NEEDED: [(&str, &str); 1] = [("etcd", "etcd-server")];

/// The programs that are built.
const BUILT: [&str; 3] = ["sidecored", "sidecore", "sidecore-wire"];

/// The kernel of the guest that is a client itself.
const CLIENTS_KERNEL: KernelOf = KernelOf::Backports;

/// The results of the demo.
#[derive(Debug, Clone, Serialize)]
struct Remote {
    /// The events per request of each model.
    models: Vec<Model>,
    /// The checks, and commands with their output.
    #[serde(flatten)]
    checks: Checks,
}

/// Runs the demo, prints its results, and writes `demo-remote.json` into the target directory.
///
/// # Errors
/// A program or file is not available, or a check failed.
pub fn demo(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    install::packages(&NEEDED, &progress)?;
    let prepared = Prepared::new(options, &BUILT, &progress)?;
    let accelerator = qemu::Accelerator::choose();
    progress.say(accelerator.explanation());
    let stage = prepared.stage(accelerator, &progress);
    let mut checks = run::run(&stage, &prepared.vfio_user)?;
    for more in [migration::run(&stage)?, run_client(options, &prepared, &stage)?] {
        checks.checks.extend(more.checks);
        checks.shown.extend(more.shown);
    }
    let models = models::count(&stage, window(options), &mut checks)?;
    print!("\n{}\n{}", checks.text("Remote devices, over a bad wire"), models::table(&models));
    let faults = checks.faults();
    write(options, "demo-remote.json", &json(&Remote { models, checks })?)?;
    println!("\nWritten to {}", options.target.join("demo-remote.json").display());
    if !faults.is_empty() {
        bail!("the demo failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// Runs only the guest that is a client itself, and prints the results.
///
/// # Errors
/// As [`demo`].
pub fn client(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    let prepared = Prepared::new(options, &BUILT, &progress)?;
    let stage = prepared.stage(qemu::Accelerator::choose(), &progress);
    let checks = run_client(options, &prepared, &stage)?;
    print!("\n{}", checks.text("A guest that is a client of an IOhost"));
    let faults = checks.faults();
    if !faults.is_empty() {
        bail!("the run failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// Runs the guest that is a client itself, with a kernel that has ublk.
fn run_client(options: &DemoOptions, prepared: &Prepared, stage: &Stage<'_>) -> Result<Checks> {
    let (kernel, initramfs) = ublk::equip(options, prepared, CLIENTS_KERNEL, stage.progress)?;
    client::run(&Stage { kernel: &kernel, initramfs: &initramfs, ..*stage })
}

/// Counts need no long window.
fn window(options: &DemoOptions) -> Duration {
    options.window.clamp(Duration::from_secs(1), Duration::from_secs(10))
}
