//! A guest whose disk comes from libvirt: defined in XML, run by QEMU as another user, over
//! restarts of the daemon.
//!
//! libvirt keeps its state in fixed directories and needs root to run QEMU as another user. So the
//! whole run is in a mount namespace and a PID namespace in which those directories are empty: this
//! program starts itself again there ([`run_inside`]). When the first process there ends, for any
//! reason, the namespaces end with all their processes and mounts.

mod domain;
mod place;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use sidecore_kit::interrupt;

use crate::initramfs::{self, Extra};
use crate::progress::Progress;
use crate::qemu::Accelerator;
use crate::{DemoOptions, build, download, install, listen, text};
use domain::Domain;
use place::Place;

/// libvirt's programs, and their packages. Its QEMU driver is a library.
pub(crate) const NEEDED: [(&str, &str); 5] = [
    ("libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    (DRIVER, "libvirt-daemon-driver-qemu"),
    ("unshare", "util-linux"),
    ("mount", "mount"),
];
/// Blocks of 4 KiB that the guest writes behind its file system before the daemon ends.
const FRESH_BLOCKS: u32 = 200;
const DRIVER: &str = "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";

/// The command of the first process in the PID namespace: a shell, because it reaps orphaned
/// processes, for whose end libvirt waits. The redirections give the background command the
/// standard input, which a shell would take away.
const FIRST: &str = "exec 3<&0; \"$0\" \"$@\" <&3 & exec 3<&-; wait $!";

/// Paths from outside for the run in the namespaces.
#[derive(Debug, Clone)]
pub struct Inside {
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The initial filesystem.
    pub initramfs: PathBuf,
    /// The directory of `sidecored`.
    pub binaries: PathBuf,
}

/// Builds and fetches all files that the run needs, and starts the run in new namespaces, by this
/// program with `arguments` and the paths of [`Inside`].
///
/// # Errors
/// A program or file is not available, or the guest read other data than it wrote.
pub fn libvirt(options: &DemoOptions, arguments: &[&str]) -> Result<()> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "this boots an x86-64 guest on x86-64 Linux"
    );
    listen()?;
    let progress = Progress::start();
    let cache = options.cache()?;
    install::missing_packages(&progress)?;
    install::packages(&NEEDED, &progress)?;
    let kernel = download::kernel(&cache, &progress)?;
    let busybox = download::busybox(&cache, &progress)?;
    let initramfs = initramfs::build(&cache, &kernel, &busybox, &Extra::default(), &progress)?;
    let binaries = match &options.binaries {
        Some(binaries) => binaries.clone(),
        None => build(options, &["sidecored", "sidecore"], &progress)?,
    };
    interrupt::check()?;

    let mut command = if rustix::process::geteuid().is_root() {
        Command::new("unshare")
    } else {
        let mut command = Command::new("sudo");
        command.arg("unshare");
        command
    };
    command.args([
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    command.args(["sh", "-c", FIRST]).arg(std::env::current_exe()?).args(arguments).args([
        &kernel.image,
        &initramfs,
        &binaries,
    ]);
    // The run inside sees the end of this pipe, and so the end of this process, for any reason.
    let mut child = command.stdin(Stdio::piped()).spawn().context("cannot run unshare")?;
    loop {
        if let Some(status) = child.try_wait()? {
            ensure!(
                status.success(),
                "the run with libvirt failed ({status}); its messages above say why"
            );
            return Ok(());
        }
        if let Err(interrupted) = interrupt::check() {
            drop(child.stdin.take());
            child.wait()?;
            return Err(interrupted.into());
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Runs in the new namespaces. The end of standard input ends the run.
///
/// # Errors
/// A program or file is not available, or the guest read other data than it wrote.
pub fn run_inside(inside: &Inside) -> Result<()> {
    ensure!(
        std::os::unix::process::parent_id() == 1,
        "this is for the process that `cargo xtask libvirt` starts"
    );
    end_with_the_parent();
    let progress = Progress::start();
    let mut place = Place::make(&inside.binaries)?;
    let accelerator = Accelerator::choose();
    progress.say(accelerator.explanation());
    place.start_libvirt(accelerator)?;
    // Without a configured owner, a socket belongs to the daemon's user, and libvirt's QEMU cannot
    // connect to it.
    place.start_daemon(&progress)?;
    let (owner, mode) = place.socket_access(place::OTHER)?;
    ensure!(
        (owner, mode) == (0, 0o600),
        "a socket without a configured owner belongs to {owner}, with mode {mode:o}"
    );

    progress.say("defining the domain");
    let mut domain = Domain::start(&place, inside, accelerator)?;
    let boot = domain.answer("boot")?;
    ensure!(boot.number::<u64>("mib")? == place::DISK_MIB, "the guest sees another disk: {boot:?}");
    let user = domain.user()?;
    ensure!(user == place.user(), "QEMU runs as user {user}, not {}", place.user());
    progress
        .say(format!("libvirt runs QEMU as user {user}; the guest has its disk and writes to it"));
    domain.order("mkfs 48")?;
    let mut digest = domain.order("keep")?.text("digest")?.to_owned();
    for (kill, how) in [(false, "restarted"), (true, "killed and started again")] {
        // Blocks that the volume does not have yet. Only the daemon's own end makes their mappings
        // durable.
        let fresh = format!("{} {FRESH_BLOCKS}", if kill { 56 } else { 50 });
        domain.order(&format!("fresh {fresh}"))?;
        progress.say(format!("the daemon is {how}"));
        place.stop_daemon(kill)?;
        place.start_daemon(&progress)?;
        let answered = domain.order(&format!("answered {fresh}"))?;
        ensure!(
            answered.text("same")? == "true",
            "data of answered writes is not there: {answered:?}"
        );
        domain.order("unmount")?;
        domain.order("mount")?;
        let check = domain.order(&format!("check {digest}"))?;
        ensure!(
            check.text("verdict")? == "true",
            "the guest reads other data than it wrote: {check:?}"
        );
        progress.say(format!(
            "the guest reads back its {} files, and changes them",
            check.text("files")?
        ));
        digest = domain.order("change")?.text("digest")?.to_owned();
    }
    domain.order("unmount")?;
    domain.off(&place)?;
    place.stop_daemon(false)?;
    println!(
        "\nlibvirt's guest kept its disk over two restarts of the daemon, with QEMU as user {user}"
    );
    Ok(())
}

/// Ends this process when its parent ends; the shell and all processes in the PID namespace follow.
fn end_with_the_parent() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        std::process::exit(1);
    });
}

/// Copies a file so that other users can read it.
fn copy_for_all(from: &Path, to: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o644))?)
}

/// A path for XML and configuration files, without characters that need quoting.
fn plain(path: &Path) -> Result<&str> {
    let text = text(path)?;
    ensure!(
        !text.contains(['"', '\'', '<', '>', '&', '\\']),
        "{text} cannot be written into XML; use another directory"
    );
    Ok(text)
}
