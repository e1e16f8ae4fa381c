//! A guest that is a host: its `sidecored` serves a volume to its own kernel as `/dev/ublkb0`, with
//! a file system on it. The daemon is killed while it makes the device, under load, and while it
//! recovers the device.

use crate::checks::Checks;
use crate::download::find_kernel;
use crate::guest::{Guest, UBLK};
use crate::initramfs::{self, Extra};
use crate::progress::Progress;
use crate::root::{KernelOf, ROOTS, Root};
use crate::session::Session;
use crate::{DemoOptions, Prepared, install, listen, qemu};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The seconds after which a daemon that makes the device is killed.
const KILLS_AT_FIRST: &str = "0.2 0.5 0.8";

/// The seconds after which a daemon that recovers is killed: before it has opened its store, while
/// it takes over the device, and afterwards.
const KILLS: &str = "0.05 0.2 0.4 0.6 0.8 1.1";

/// The size to which the volume is grown while it is used.
const GROWN_MIB: u32 = 320;

/// Runs the guest with a kernel, and prints the results.
///
/// # Errors
/// A program or file is not available; a check failed.
pub fn run(options: &DemoOptions, kernel: KernelOf) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    let prepared = Prepared::new(options, &["sidecored", "sidecore"], &progress)?;
    let (image, initramfs) = equip(options, &prepared, kernel, &progress)?;
    let mut stage = prepared.stage(qemu::Accelerator::choose(), &progress);
    (stage.kernel, stage.initramfs) = (&image, &initramfs);
    let mut checks = Checks::default();
    Session::hold(&stage, UBLK, |session| serve_itself(session, kernel, &mut checks))?;
    print!("\n{}", checks.text("A block device of a guest's own kernel (ublk)"));
    let faults = checks.faults();
    if !faults.is_empty() {
        bail!("the run failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// The image of a kernel with ublk, and the guest's image with its module and our programs.
pub(crate) fn equip(
    options: &DemoOptions,
    prepared: &Prepared,
    of: KernelOf,
    progress: &Progress,
) -> Result<(PathBuf, PathBuf)> {
    let root = Root::kernel(&options.target.join(ROOTS), of, |what| progress.say(what))?;
    let kernel = find_kernel(&root.path("")).context("the packages brought no kernel")?;
    // An image removes the older ones in its directory.
    let cache = prepared.cache.join(match of {
        KernelOf::Release => "ublk",
        KernelOf::Backports => "ublk-backports",
    });
    std::fs::create_dir_all(&cache)
        .with_context(|| format!("cannot create {}", cache.display()))?;
    let program = |name: &str| without_debug(&prepared.binaries.join(name), &cache.join(name));
    let extra = Extra {
        programs: vec![
            ("/bin/sidecored", program("sidecored")?),
            ("/bin/sidecore", program("sidecore")?),
        ],
        module: Some("ublk_drv"),
        ..Extra::default()
    };
    let initramfs = initramfs::build(&cache, &kernel, &prepared.busybox, &extra, progress)?;
    Ok((kernel.image, initramfs))
}

/// Copies a program without its debug information, which the memory of a guest may have no room
/// for. The copy has the time of the original.
pub(crate) fn without_debug(program: &Path, copy: &Path) -> Result<PathBuf> {
    let mut command = Command::new(install::require("objcopy")?);
    let status = command.args(["--preserve-dates", "--strip-debug"]).args([program, copy]).status();
    ensure!(
        status.context("cannot run objcopy")?.success(),
        "objcopy could not copy {}",
        program.display()
    );
    Ok(copy.to_owned())
}

fn serve_itself(session: &mut Session<'_>, of: KernelOf, checks: &mut Checks) -> Result<()> {
    let mut guest = Guest::boot_ublk(session)?;
    guest.booted(session)?;
    let missing = guest.order(session, "missing")?;
    let words = missing.text("words")?.to_owned();
    let is_named = words.contains("modprobe ublk_drv") && missing.text("code")? != "0";
    checks.note(session, "without the module the daemon names the remedy", is_named, words);

    let served = guest.order(session, &format!("serve {KILLS_AT_FIRST}"))?;
    let shown = ["mib", "cache", "fua", "queues"].map(|key| served.text(key).unwrap_or_default());
    // The release's kernel cannot recover two queues, see `UblkControl::queues_max`.
    let (queues, warns) = if of == KernelOf::Release { ("1", true) } else { ("2", false) };
    let is_shown = shown == ["256", "write back", "1", queues];
    let found = shown.join(", ");
    checks.note(session, "the kernel has the volume's size, cache and queues", is_shown, found);
    let words = served.text("words")?.to_owned();
    let is_warned = words.contains("it has 1 of 2 queues") == warns;
    checks.note(session, "the list says if the kernel allows fewer queues", is_warned, words);
    guest.order(session, "format")?;

    guest.order(session, "load")?;
    guest.order(session, &format!("kill {KILLS}"))?;
    let load = guest.order(session, "wait")?.text("load")?.to_owned();
    let what = "a load reads what it wrote, though the daemon was killed seven times";
    checks.note(session, what, load == "true", load);
    let total = guest.order(session, "total")?;
    let count = |key| total.number::<u64>(key);
    let (requests, enters) = (count("requests")?, count("enters")?);
    let found = format!("{enters} for {requests} requests");
    // One to take a request and one to complete it, if nothing else is in flight. A queue has some
    // at its start.
    let what = "the queues make at most two system calls for a request";
    checks.note(session, what, requests > 0 && enters <= 2 * requests + 100, found);
    let refused = count("errors")? + count("rejected")?;
    checks.note(session, "no request fails", refused == 0, refused.to_string());

    let restarted = guest.order(session, "restart")?;
    let (code, synced) = (restarted.text("code")?, restarted.text("synced")?);
    let what = "writes wait for the next daemon while one ends in order";
    checks.note(session, what, [code, synced] == ["0", "0"], format!("{code}, {synced}"));
    let known = guest.order(session, "known")?.text("known")?.to_owned();
    checks.note(session, "files have their contents", known == "true", known);
    let discards: u64 = guest.order(session, "total")?.number("discards")?;
    checks.note(session, "discards reach the volume", discards > 0, discards.to_string());

    let mib = guest.order(session, &format!("grow {GROWN_MIB}"))?.text("mib")?.to_owned();
    let (expected, what) = match of {
        KernelOf::Release => ("256".to_owned(), "a kernel that cannot resize is warned of"),
        KernelOf::Backports => (GROWN_MIB.to_string(), "the device grows with its volume"),
    };
    checks.note(session, what, mib == expected, mib);

    let end = guest.order(session, "check")?;
    for (key, what, expected) in [
        ("fsck", "the file system has no fault", "true"),
        ("gone", "a removed device is gone from the kernel", "true"),
    ] {
        let found = end.text(key)?.to_owned();
        checks.note(session, what, found == expected, found);
    }
    serve_others(&mut guest, session, checks)?;
    let kernel = guest.order(session, "kernel")?.text("kernel")?.to_owned();
    checks.note(session, "the kernel logs no errors", kernel == "none", kernel);
    guest.off(session)
}

/// Serves devices beside the first one: one whose store is remote, and one whose store is slow.
fn serve_others(guest: &mut Guest, session: &mut Session<'_>, checks: &mut Checks) -> Result<()> {
    let far = guest.order(session, "remote")?;
    let (code, words) = (far.text("code")?, far.text("words")?.to_owned());
    let what = "a remote device has what was written, though both of its daemons were killed";
    checks.note(session, what, code == "0", words);
    let state = guest.order(session, "slow")?.text("state")?.to_owned();
    let what = "a killed daemon ends though its store has not answered a first read";
    checks.note(session, what, state == "ended", state);
    Ok(())
}
