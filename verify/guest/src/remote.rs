//! Remote devices, end to end: an IOhost and two VMhosts in network namespaces, with real guests.
//!
//! The cables between them lose, double and reorder frames. Each VMhost gives a guest its disk, one
//! by virtio and one by NVMe. The IOhost's daemon is killed while both write. Then root on a VMhost
//! tries to get past what the IOhost enforces (vRIO, section 4.6). Two IOhosts with etcd hand a
//! disk over and fail over while its guest writes, the guest migrates between the VMhosts, and the
//! events per request of the models of the paper's Table 3 are counted.

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
use crate::{DemoOptions, Prepared, install, json, listen, qemu, write};
use anyhow::{Result, bail};
use serde::Serialize;
use std::time::Duration;

pub use models::Model;

/// The programs that are built.
const BUILT: [&str; 3] = ["sidecored", "sidecore", "sidecore-wire"];

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
    install::packages(&[("etcd", "etcd-server")], &progress)?;
    let prepared = Prepared::new(options, &BUILT, &progress)?;
    let accelerator = qemu::Accelerator::choose();
    progress.say(accelerator.explanation());
    let stage = prepared.stage(accelerator, &progress);
    let mut checks = run::run(&stage, &prepared.vfio_user)?;
    let migration = migration::run(&stage)?;
    checks.checks.extend(migration.checks);
    checks.shown.extend(migration.shown);
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

/// Counts need no long window.
fn window(options: &DemoOptions) -> Duration {
    options.window.clamp(Duration::from_secs(1), Duration::from_secs(10))
}
