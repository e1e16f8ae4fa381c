//! A guest that is two hosts with one NVMe disk: a namespace of its kernel's own target, which both
//! reach by a controller of their own. `sidecore own` fences one by the other's reservation, and a
//! foreign program reads what it has done.

use crate::checks::Checks;
use crate::download::find_kernel;
use crate::guest::{Guest, RESERVATION};
use crate::initramfs::{self, Extra};
use crate::progress::Progress;
use crate::root::{KernelOf, ROOTS, Root};
use crate::session::Session;
use crate::ublk::without_debug;
use crate::{DemoOptions, Prepared, install, listen, qemu, remote};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;

/// The kernel's NVMe target, with a transport that it has itself.
const MODULES: [&str; 3] = ["configfs", "nvmet", "nvme_loop"];

/// `EBADE`, as the C library words it, and as one word.
const CONFLICT: &str = "Invalid exchange";
const CONFLICT_WORD: &str = "Invalid-exchange";
/// NVMe's number of write exclusive, registrants only.
const TYPE: &str = "3";
/// The beginning of Sidecore's keys.
const MARK: &str = "0x51de";

const FIRST: &str = "io1";
const SECOND: &str = "io2";

/// Runs the guest, and prints the results.
///
/// # Errors
/// A program or file is not available; a check failed.
pub fn run(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    install::packages(&remote::NEEDED, &progress)?;
    let prepared = Prepared::new(options, &["sidecored", "sidecore"], &progress)?;
    let (image, initramfs) = equip(options, &prepared, &progress)?;
    let mut stage = prepared.stage(qemu::Accelerator::choose(), &progress);
    (stage.kernel, stage.initramfs) = (&image, &initramfs);
    let mut checks = Checks::default();
    Session::hold(&stage, RESERVATION, |session| fail_over(session, &mut checks))?;
    print!("\n{}", checks.text("A fence by the reservations of a guest's NVMe target"));
    let faults = checks.faults();
    if !faults.is_empty() {
        bail!("the run failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

fn equip(
    options: &DemoOptions,
    prepared: &Prepared,
    progress: &Progress,
) -> Result<(PathBuf, PathBuf)> {
    // Linux 6.13 is the first one whose target has reservations.
    let of = KernelOf::Backports;
    let root = Root::kernel(&options.target.join(ROOTS), of, |what| progress.say(what))?;
    let kernel = find_kernel(&root.path("")).context("the packages brought no kernel")?;
    // An image removes the older ones in its directory.
    let cache = prepared.cache.join("reservation");
    std::fs::create_dir_all(&cache)
        .with_context(|| format!("cannot create {}", cache.display()))?;
    let sidecore = without_debug(&prepared.binaries.join("sidecore"), &cache.join("sidecore"))?;
    let extra = Extra {
        programs: vec![("/bin/sidecore", sidecore), ("/bin/etcd", install::require("etcd")?)],
        modules: &MODULES,
        ..Extra::default()
    };
    let initramfs = initramfs::build(&cache, &kernel, &prepared.busybox, &extra, progress)?;
    Ok((kernel.image, initramfs))
}

/// The guest, with the run's checks.
struct Run<'a, 'b> {
    guest: Guest,
    session: &'a mut Session<'b>,
    checks: &'a mut Checks,
}

impl Run<'_, '_> {
    /// Gives an order that has no answer.
    fn order(&mut self, order: &str) -> Result<()> {
        self.guest.order(self.session, order).map(drop)
    }

    /// Gives an order whose answer has a text under this key.
    fn ask(&mut self, order: &str, key: &str) -> Result<String> {
        Ok(self.guest.order(self.session, order)?.text(key)?.to_owned())
    }

    /// Notes whether the text of an answer has a word in it.
    fn says(&mut self, what: &str, (order, key): (&str, &str), word: &str) -> Result<()> {
        let found = self.ask(order, key)?;
        self.checks.note(self.session, what, found.contains(word), found);
        Ok(())
    }

    /// The epoch of a host's next write that is done.
    fn epoch(&mut self, host: &str) -> Result<u64> {
        self.guest.order(self.session, &format!("wrote {host} done"))?.number("epoch")
    }

    /// Notes whether the disk has one registration, which holds the reservation. Returns its key.
    fn reserved(&mut self, what: &str) -> Result<String> {
        let keys = self.guest.order(self.session, "keys")?;
        let [count, key, holds, kind] = ["keys", "key", "holds", "type"]
            .map(|key| keys.text(key).unwrap_or_default().to_owned());
        let is_one = count == "1" && holds == "1" && key.starts_with(MARK);
        let found = format!("{count} key, {key}, type {kind}");
        self.checks.note(self.session, what, is_one && kind == TYPE, found);
        Ok(key)
    }
}

fn fail_over(session: &mut Session<'_>, checks: &mut Checks) -> Result<()> {
    let mut guest = Guest::boot_reservation(session)?;
    guest.booted(session)?;
    let mut run = Run { guest, session, checks };
    run.order("begin")?;
    let plain = ("refused plain io3 /dev/nvme2n1 reserv", "words");
    run.says("a disk without reservations is refused at the start", plain, "refuses the reserv")?;

    run.order(&format!("own {FIRST}"))?;
    let epoch = run.epoch(FIRST)?;
    let first = run.reserved("the owner has the reservation, as another program reads it")?;
    run.says("other hosts cannot write", ("foreign /dev/nvme1n1", "words"), CONFLICT)?;
    let other = ("refused other io2 /dev/nvme1n1 neither", "words");
    run.says("a reservation of an unknown owner is refused", other, "sidecore reservation clear")?;
    let kept = run.ask("keys", "key")?;
    run.checks.note(run.session, "... and left alone", kept == first, kept);

    take_over(&mut run, epoch, &first)?;
    hand_over(&mut run)?;
    end(&mut run)?;
    run.guest.off(run.session)
}

/// The owner and its command are stopped, and continue when the successor serves.
fn take_over(run: &mut Run<'_, '_>, epoch: u64, first: &str) -> Result<()> {
    run.order(&format!("own {SECOND}"))?;
    run.order(&format!("says {SECOND} waiting"))?;
    run.order(&format!("signal {FIRST} STOP"))?;
    run.order(&format!("command {FIRST} STOP"))?;
    let next = run.epoch(SECOND)?;
    let found = format!("epoch {next} after {epoch}");
    run.checks.note(run.session, "a successor serves", next > epoch, found);
    let second = run.reserved("the successor alone is registered")?;
    run.checks.note(run.session, "... with a key of its own", second != first, second);
    run.order(&format!("command {FIRST} CONT"))?;
    let refused = format!("wrote {FIRST} {CONFLICT_WORD}");
    let late: u64 = run.guest.order(run.session, &refused)?.number("epoch")?;
    let what = "the next write of the former owner's command is refused";
    run.checks.note(run.session, what, late == epoch, format!("{CONFLICT}, in epoch {late}"));
    let again = run.epoch(SECOND)?;
    run.checks.note(run.session, "... and the successor's is done", again == next, "done");
    run.order(&format!("signal {FIRST} CONT"))?;
    let killed = (format!("says {FIRST} killed"), "words");
    run.says("the former owner ends its command", (&killed.0, killed.1), "was killed")
}

/// The owner hands the store over, and loses its reservation to another program after that.
fn hand_over(run: &mut Run<'_, '_>) -> Result<()> {
    let before = run.epoch(SECOND)?;
    run.order(&format!("says {FIRST} waiting"))?;
    run.order(&format!("signal {SECOND} USR1"))?;
    let after = run.epoch(FIRST)?;
    let found = format!("epoch {after} after {before}");
    run.checks.note(run.session, "a planned hand-over moves the store", after > before, found);
    run.reserved("... and the reservation")?;
    run.order("intrude")?;
    let fenced = (format!("says {FIRST} fenced"), "words");
    let what = "an owner without reservation ends its command, and says why";
    run.says(what, (&fenced.0, fenced.1), "another host has fenced this owner: the command was")?;
    run.epoch(SECOND)?;
    run.reserved("... and another one reserves the disk again").map(drop)
}

fn clear(run: &mut Run<'_, '_>, what: &str, disk: &str) -> Result<()> {
    let order = format!("tool clear {disk} --record /run/shared.owner --yes --unlisted");
    let code = run.ask(&order, "code")?;
    run.checks.note(run.session, what, code == "0", code);
    let show = ("tool show /dev/nvme0n1", "words");
    run.says("... and `show` says so", show, "not reserved")
}

/// Both candidates end in order.
fn end(run: &mut Run<'_, '_>) -> Result<()> {
    for host in [FIRST, SECOND] {
        run.order(&format!("signal {host} TERM"))?;
        run.order(&format!("ended {host}"))?;
    }
    run.reserved("an orderly end keeps the reservation")?;
    let cleared = "`sidecore reservation clear` by the holder's host ends it";
    clear(run, cleared, "/dev/nvme1n1")?;
    run.order(&format!("own {FIRST}"))?;
    run.epoch(FIRST)?;
    run.reserved("... so that the next owner reserves the disk")?;
    run.order(&format!("signal {FIRST} TERM"))?;
    run.order(&format!("ended {FIRST}"))?;
    clear(run, "another host's `clear` ends it, too", "/dev/nvme1n1")?;
    let code = run.ask("foreign /dev/nvme1n1", "code")?;
    run.checks.note(run.session, "... so that all hosts write", code == "0", code);
    Ok(())
}
