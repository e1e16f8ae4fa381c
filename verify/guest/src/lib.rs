//! Real guests against a real daemon.
//!
//! [`demo`] boots a Debian kernel in QEMU twice, with two disks of one `sidecored` each time: once the way a hypervisor
//! commonly serves disks, by notifications and interrupts, and once polled on both sides. The guest checks what it
//! stored, and both sides count what the paper is about: kicks and interrupts per request.
#![forbid(unsafe_code)]

mod console;
mod cores;
mod cpio;
mod daemon;
mod dialogue;
mod download;
mod initramfs;
mod install;
mod interrupt;
mod measure;
mod modules;
mod process;
mod progress;
mod qemu;
mod report;

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use report::{Mode, Row};

/// What the demo works with.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// The root of the cargo workspace.
    pub workspace: PathBuf,
    /// Where builds, the cached kernel and guest image, and `demo.json` go.
    pub target: PathBuf,
    /// Where `sidecored` and `sidecore` are; `None` builds both in release mode first.
    pub binaries: Option<PathBuf>,
    /// How long each disk is measured, for each mode.
    pub window: Duration,
}

impl DemoOptions {
    /// The usual demo of this workspace: build, then measure five seconds on each disk.
    pub fn new(workspace: impl Into<PathBuf>) -> DemoOptions {
        let workspace = workspace.into();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(target) => workspace.join(target),
            None => workspace.join("target"),
        };
        DemoOptions { workspace, target, binaries: None, window: Duration::from_secs(5) }
    }
}

/// Runs the demo, prints its table, and writes `demo.json` into the target directory.
///
/// It fails when a disk gave back anything but what was stored, or when the polled run shows a single kick or interrupt.
pub fn demo(options: &DemoOptions) -> Result<()> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "the demo boots an x86-64 guest on an x86-64 Linux machine; this is another kind"
    );
    let interrupt = interrupt::Interrupt::watch()?;
    let progress = progress::Progress::start();
    let cache = options.target.join("guest");
    std::fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;

    install::missing_packages(&progress)?;
    interrupt.check()?;
    let kernel = download::kernel(&cache, &progress)?;
    let busybox = download::busybox(&cache, &progress)?;
    interrupt.check()?;
    let initramfs = initramfs::build(&cache, &kernel, &busybox, &progress)?;
    interrupt.check()?;
    let binaries = match &options.binaries {
        Some(binaries) => binaries.clone(),
        None => build_daemon(options, &progress)?,
    };
    interrupt.check()?;

    let accelerator = qemu::Accelerator::choose();
    progress.say(accelerator.explanation());
    let mut rows = Vec::new();
    for mode in [Mode::Interrupt, Mode::Polled] {
        let boot = dialogue::Boot {
            mode,
            accelerator,
            kernel: &kernel.image,
            initramfs: &initramfs,
            binaries: &binaries,
            window: options.window,
        };
        rows.extend(dialogue::run(&boot, &interrupt, &progress)?);
    }

    print!("\n{}", report::table(&rows, accelerator));
    let path = options.target.join("demo.json");
    std::fs::write(&path, report::json(&rows)?).with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nWritten to {}", path.display());
    report::judge(&rows)
}

/// Builds the daemon and its command line tool the way a user would.
fn build_daemon(options: &DemoOptions, progress: &progress::Progress) -> Result<PathBuf> {
    progress.say("building sidecored and sidecore (cargo build --release)");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args(["build", "--release", "--package", "sidecored", "--package", "sidecore", "--target-dir"])
        .arg(&options.target)
        .current_dir(&options.workspace)
        .status()
        .context("cannot run cargo; is Rust installed?")?;
    ensure!(status.success(), "the daemon does not build ({status}); cargo's messages above say why");
    Ok(options.target.join("release"))
}

/// The path as text, for configuration files and command lines.
fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8; use another directory", path.display()))
}
