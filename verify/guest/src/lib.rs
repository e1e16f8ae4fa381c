//! Real guests against a real daemon.
//!
//! [`demo`] boots a Debian kernel in QEMU on disks of one `sidecored`, which are thin volumes
//! behind virtual functions. It does so twice to measure: once with notifications and interrupts,
//! as a hypervisor commonly serves disks, and once polled on both sides. The guest checks the data
//! that it stored, and both sides count the events that the FAST'12 paper is about: kicks and
//! interrupts per request. Then the demo takes a snapshot of a guest's volume under load, boots a
//! second guest from a clone of it, and shows that neither guest sees the other one's writes. In
//! the end it gives a guest NVMe functions over vfio-user, by QEMU's `vfio-user-pci`.
//!
//! [`remote`] gives guests of two hosts their disks from a third one, over a bad network.
//!
//! [`encrypted`] compares the stage `encrypt` with dm-crypt of a guest's kernel.
//!
//! [`ublk`] has a guest serve a block device of its own kernel, whose daemon is killed under load.
//!
//! [`reservation`] has two hosts in a guest, which fence each other by a disk's reservation.
//!
//! [`network`] connects two guests by a switch.
//!
//! [`libvirt`] gives a guest its disk by a libvirt domain, as most operators do.
#![forbid(unsafe_code)]

mod checks;
mod config;
mod console;
mod cores;
mod cpio;
mod daemon;
mod download;
mod emulator;
pub mod encrypted;
mod guest;
mod initramfs;
mod install;
pub mod libvirt;
mod measure;
mod measured;
mod modules;
pub mod network;
mod nvme;
mod overhead;
mod process;
mod progress;
mod publish;
mod qemu;
mod qmp;
mod recording;
pub mod remote;
mod report;
pub mod reservation;
pub mod root;
mod secret;
mod session;
mod sidecore;
pub mod ublk;
mod volumes;

use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use checks::{Check, Checks, Shown};
use initramfs::Extra;
pub use install::PATIENT_APT;
pub use nvme::{Nvme, Way};
pub use overhead::Overhead;
pub use report::{Mode, Row};
use serde::Serialize;
use sidecore_kit::interrupt;
pub use volumes::Volumes;

/// The options of the demo.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// The root of the cargo workspace.
    pub workspace: PathBuf,
    /// The directory of builds, the cached kernel and guest image, and the results.
    pub target: PathBuf,
    /// The directory of `sidecored` and `sidecore`; `None` builds both in release mode first.
    pub binaries: Option<PathBuf>,
    /// The time for which each disk is measured in each mode.
    pub window: Duration,
    /// Whether to write the results and the recording into the documentation.
    pub publish: bool,
}

impl DemoOptions {
    /// The default demo of this workspace: builds, then measures five seconds on each disk.
    pub fn new(workspace: impl Into<PathBuf>) -> DemoOptions {
        let workspace = workspace.into();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(target) => workspace.join(target),
            None => workspace.join("target"),
        };
        DemoOptions {
            workspace,
            target,
            binaries: None,
            window: Duration::from_secs(5),
            publish: false,
        }
    }

    /// The directory of the kernel, the guest's image and other large files, which exists then.
    fn cache(&self) -> Result<PathBuf> {
        let cache = self.target.join("guest");
        std::fs::create_dir_all(&cache)
            .with_context(|| format!("cannot create {}", cache.display()))?;
        Ok(cache)
    }
}

/// Runs the demo, prints its results, and writes `demo.json` (the measured disks), `demo-nvme.json`
/// (NVMe), `demo-volumes.json` (the rest) and `demo.svg` (a recording) into the target directory.
///
/// Fails if a disk returned other data than was stored, if the polled run had a kick or an
/// interrupt, or if a check of volumes, snapshots, clones or NVMe failed.
pub fn demo(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = &progress::Progress::start();
    let prepared = Prepared::new(options, &["sidecored", "sidecore"], progress)?;
    let vfio_user = &prepared.vfio_user;
    let accelerator = qemu::Accelerator::choose();
    progress.say(accelerator.explanation());
    let stage = prepared.stage(accelerator, progress);
    let (mut rows, mut overheads) = measured::run(&stage, Mode::Interrupt, options.window)?;
    let polled = measured::run(&stage, Mode::Polled, options.window)?;
    rows.extend(polled.0);
    overheads.extend(polled.1);
    let volumes = volumes::run(&stage)?;
    let nvme = nvme::run(&stage, vfio_user, options.window)?;

    print!("\n{}\n{}", report::table(&rows, accelerator), overhead::table(&overheads));
    print!("\n{}\n{}", volumes.text(), nvme.text());
    let mut faults = [report::faults(&rows), overhead::faults(&overheads)].concat();
    faults.extend([volumes.checks.faults(), nvme.faults()].concat());
    let rest = Rest { filesystem_overheads: overheads, volumes };
    let rows_json = report::json(&rows)?;
    for (name, json) in [
        ("demo.json", rows_json),
        ("demo-volumes.json", json(&rest)?),
        ("demo-nvme.json", json(&nvme)?),
    ] {
        write(options, name, &json)?;
        println!("\nWritten to {}", options.target.join(name).display());
    }
    if !faults.is_empty() {
        bail!("the demo failed:\n  {}", faults.join("\n  "));
    }
    let recording = record(progress, &report::table(&rows, accelerator));
    write(options, "demo.svg", &recording)?;
    if options.publish {
        publish::publish(&options.workspace, &rows, &rest.filesystem_overheads, &nvme, &recording)?;
    }
    Ok(())
}

/// Fetches and installs what all runs with guests need, so that these can do without the network.
///
/// # Errors
/// A package cannot be fetched or installed.
pub fn fetch(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = &progress::Progress::start();
    install::missing_packages(progress)?;
    install::packages(&libvirt::NEEDED, progress)?;
    install::packages(&remote::NEEDED, progress)?;
    let cache = options.cache()?;
    download::kernel(&cache, progress)?;
    download::busybox(&cache, progress)?;
    let roots = options.target.join(root::ROOTS);
    emulator::Emulator::with_vfio_user(&roots, progress)?;
    for of in [root::KernelOf::Release, root::KernelOf::Backports] {
        interrupt::check()?;
        root::Root::kernel(&roots, of, |what| progress.say(what))?;
    }
    Ok(())
}

/// The programs and files of a run with guests.
struct Prepared {
    installed: emulator::Emulator,
    vfio_user: emulator::Emulator,
    kernel: PathBuf,
    initramfs: PathBuf,
    busybox: PathBuf,
    binaries: PathBuf,
    /// The directory for large files.
    cache: PathBuf,
}

impl Prepared {
    /// Installs, fetches and builds what is missing. The `packages` of this workspace are built.
    fn new(
        options: &DemoOptions,
        packages: &[&str],
        progress: &progress::Progress,
    ) -> Result<Prepared> {
        ensure!(
            cfg!(all(target_os = "linux", target_arch = "x86_64")),
            "the demo boots an x86-64 guest on an x86-64 Linux machine; this is another kind"
        );
        let cache = options.cache()?;
        install::missing_packages(progress)?;
        interrupt::check()?;
        let kernel = download::kernel(&cache, progress)?;
        let busybox = download::busybox(&cache, progress)?;
        interrupt::check()?;
        let installed = emulator::Emulator::installed()?;
        let vfio_user =
            emulator::Emulator::with_vfio_user(&options.target.join(root::ROOTS), progress)?;
        interrupt::check()?;
        let initramfs = initramfs::build(&cache, &kernel, &busybox, &Extra::default(), progress)?;
        interrupt::check()?;
        let binaries = match &options.binaries {
            Some(binaries) => binaries.clone(),
            None => build(options, packages, progress)?,
        };
        interrupt::check()?;
        let kernel = kernel.image;
        Ok(Prepared { installed, vfio_user, kernel, initramfs, busybox, binaries, cache })
    }

    fn stage<'a>(
        &'a self,
        accelerator: qemu::Accelerator,
        progress: &'a progress::Progress,
    ) -> session::Stage<'a> {
        session::Stage {
            accelerator,
            qemu: &self.installed,
            kernel: &self.kernel,
            initramfs: &self.initramfs,
            binaries: &self.binaries,
            scratch: &self.cache,
            progress,
        }
    }
}

fn write(options: &DemoOptions, name: &str, content: &str) -> Result<()> {
    let path = options.target.join(name);
    std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// The recording of a successful run, with the rows of its report at the end.
fn record(progress: &progress::Progress, report: &str) -> String {
    let rows = report.split("\n\n").next().unwrap_or_default();
    let said = progress.said();
    let seconds = said.last().map_or(0, |(at, _)| at.as_secs());
    recording::svg("make demo", &said, &format!("{rows}\n\nEvery check passed, in {seconds} s."))
}

/// The results besides the rows, for programs.
#[derive(Serialize)]
struct Rest {
    filesystem_overheads: Vec<Overhead>,
    volumes: Volumes,
}

fn json(findings: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(findings)? + "\n")
}

/// Builds programs of this workspace as a user would.
fn build(
    options: &DemoOptions,
    packages: &[&str],
    progress: &progress::Progress,
) -> Result<PathBuf> {
    progress.say(format!("building {} (cargo build --release)", packages.join(", ")));
    let mut arguments = vec!["build", "--release"];
    arguments.extend(packages.iter().flat_map(|package| ["--package", package]));
    cargo(options, &arguments)
}

/// Builds the guests' program, and returns its path.
fn build_guest_tune(options: &DemoOptions, progress: &progress::Progress) -> Result<PathBuf> {
    const NAME: &str = "sidecore-guest-tune";
    if let Some(binaries) = &options.binaries {
        return Ok(binaries.join(NAME));
    }
    progress.say(format!("building {NAME} (cargo rustc --release)"));
    Ok(cargo(options, &GUEST_TUNE)?.join(NAME))
}

/// Runs cargo, and returns the directory of its release builds.
fn cargo(options: &DemoOptions, arguments: &[&str]) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let (verb, arguments) = arguments.split_first().context("no verb")?;
    let status = std::process::Command::new(cargo)
        .arg(verb)
        .arg("--target-dir")
        .arg(&options.target)
        .args(arguments)
        .current_dir(&options.workspace)
        .status()
        .context("cannot run cargo; is Rust installed?")?;
    ensure!(status.success(), "they do not build ({status}); cargo's messages above say why");
    Ok(options.target.join("release"))
}

/// The arguments of cargo that build the guests' program, with no need of the guest's libraries.
pub const GUEST_TUNE: [&str; 9] = [
    "rustc",
    "--release",
    "--package",
    "sidecore-guest-tune",
    "--",
    "-C",
    "target-feature=+crt-static",
    "-C",
    "strip=debuginfo",
];

/// Notes the signals of a terminal or a service manager.
fn listen() -> Result<()> {
    interrupt::listen()
        .and_then(|()| interrupt::listen_to_hang_up())
        .context("cannot handle signals")
}

/// The path as text, for configuration files and command lines.
fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8; use another directory", path.display()))
}
