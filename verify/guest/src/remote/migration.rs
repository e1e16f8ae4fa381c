//! A guest whose disk changes between two IOhosts while it writes, and that moves between two
//! VMhosts, by QEMU's live migration.

use super::config::{self, DISK_MIB};
use super::failover::IoHosts;
use super::host::Host;
use super::net::{RackNet, STATIONS};
use super::run::{FILESYSTEM, LOAD, LOAD_SIZE, is_attached, wait_for};
use super::store::{self, Digest};
use crate::checks::Checks;
use crate::config::socket;
use crate::guest::{CANCELLED, FIRST_SLOT, Guest, MOVED, MOVING};
use crate::nvme::log;
use crate::qemu::{Backend, Disk, Equipment, Port};
use crate::qmp::Qmp;
use crate::session::{Session, Stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest time for a migration.
const PATIENCE: Duration = Duration::from_secs(120);
/// A port without a device, because of which QEMU has a control socket.
const PORT: Port = Port { slot: FIRST_SLOT + 4, device: None };
/// Bytes a second of a migration that is to be cancelled before its end.
const SLOW: u64 = 1 << 20;
/// The pause that QEMU aims at, in milliseconds. It stops the guest when it expects to need no more
/// for the rest.
const PAUSE_LIMIT_MS: u64 = 150;
/// The same, once the migration has not ended by itself within [`CONVERGES_WITHIN`].
const LONG_PAUSE_LIMIT_MS: u64 = 5000;
const CONVERGES_WITHIN: Duration = Duration::from_secs(30);

/// Does the run.
pub(super) fn run(stage: &Stage<'_>) -> Result<Checks> {
    Session::hold(stage, "migration", |session| {
        session.share_cores();
        let stores = session.directory.join("stores");
        std::fs::create_dir(&stores)?;
        let disk = STATIONS[0].disk;
        std::fs::File::create(config::store(&stores, disk))?.set_len(DISK_MIB << 20)?;
        let net = RackNet::new()?;
        let mut iohosts = IoHosts::start(session, &net, &stores, disk)?;
        let mut vmhosts = Vec::new();
        for (station, namespace) in STATIONS.iter().zip(&net.vmhosts) {
            let file = config::invitation(session.directory, station.client);
            let owner = iohosts.owner()?;
            owner.sidecore.run(&["remote", "invite", station.client, crate::text(&file)?])?;
            let text = config::vmhost_of(session.directory, station, disk)?;
            vmhosts.push(Host::start(session, namespace, station.client, &text)?);
        }
        for host in &vmhosts {
            wait_for("the disk at both VMhosts", || is_attached(host))?;
        }
        let mut checks = Checks::default();
        let place = (&net, stores.as_path(), disk);
        let digest = migrate(session, (&mut iohosts, &vmhosts, place), &mut checks)?;
        for host in &mut vmhosts {
            host.stop(session)?;
        }
        iohosts.stop(session)?;
        store::compare(session, &stores, disk, &digest, &mut checks)?;
        Ok(checks)
    })
}

/// The disk's socket at a VMhost.
fn disk_socket(directory: &Path, vmhost: usize) -> PathBuf {
    socket(directory, &config::moving_disk(&STATIONS[vmhost]))
}

/// Starts a guest at a VMhost: a new one, or one that waits for a migration.
fn start(
    session: &mut Session<'_>,
    name: &'static str,
    vmhost: usize,
    incoming: Option<&Path>,
) -> Result<Guest> {
    let socket = disk_socket(session.directory, vmhost);
    // QEMU finds a device of the source by its place, whatever its name.
    let disks =
        [Disk { name: "disk", backend: Backend::Daemon(&socket), slot: FIRST_SLOT, packed: false }];
    let equipment = Equipment { polled: false, disks: &disks, ports: &[PORT], nics: &[] };
    match incoming {
        None => Guest::boot_with(session, name, &equipment),
        Some(path) => Guest::incoming(session, name, &equipment, path),
    }
}

/// Lets the guest write while its disk changes between the IOhosts, cancels one migration,
/// completes another one, and ends the load at the other VMhost. Returns the checksums of the disk.
fn migrate(
    session: &mut Session<'_>,
    (iohosts, vmhosts, place): (&mut IoHosts, &[Host], (&RackNet, &Path, &str)),
    checks: &mut Checks,
) -> Result<Digest> {
    let mut guest = start(session, MOVING, 0, None)?;
    guest.booted(session)?;
    guest.order(session, "log")?;
    guest.order(session, &format!("mkfs {FILESYSTEM}"))?;
    guest.order(session, "keep")?;
    guest.order(session, &format!("load {LOAD} {LOAD_SIZE}"))?;
    iohosts.take_over(session, &mut guest, &vmhosts[0], checks)?;
    iohosts.serve_near(session, place, (&mut guest, &vmhosts[0]), checks)?;
    let mut source = session.qmp(MOVING)?;
    cancel(session, &mut guest, &mut source, checks)?;
    let mut moved = complete(session, guest, source, checks)?;
    let before = vmhosts[1].sidecore.requests(&config::moving_disk(&STATIONS[1]))?;
    let done = moved.rounds_done(session, 0)?;
    moved.rounds_done(session, done + 2)?;
    let now = vmhosts[1].sidecore.requests(&config::moving_disk(&STATIONS[1]))?;
    let what = "the guest's requests go through the other VMhost";
    checks.note(session, what, now > before, format!("{} requests", now - before));
    let ended = moved.order(session, "endload")?;
    let found = format!("{} rounds of {LOAD_SIZE} MiB", ended.text("rounds")?);
    let what = "no request of the guest failed, and fio has read back what it wrote";
    checks.note(session, what, true, found);
    moved.order(session, "unmount")?;
    let fsck = moved.order(session, "fsck")?;
    let what = "e2fsck has nothing to say about ext4 on the disk";
    checks.note(session, what, fsck.text("code")? == "0", fsck.text("words")?);
    moved.order(session, "mount")?;
    let digest = Digest::of(&moved.order(session, &format!("digest {LOAD} {LOAD_SIZE}"))?)?;
    let log = moved.order(session, "log")?;
    let faults = log::faults(log.text("lines")?);
    let found = if faults.is_empty() { "none".to_owned() } else { faults.join("; ") };
    checks.note(session, "the guest's kernel has logged no error", faults.is_empty(), found);
    moved.order(session, "unmount")?;
    moved.off(session)?;
    Ok(digest)
}

/// Begins a migration and cancels it while the guest writes.
fn cancel(
    session: &mut Session<'_>,
    guest: &mut Guest,
    source: &mut Qmp,
    checks: &mut Checks,
) -> Result<()> {
    let path = session.directory.join("cancelled.migrate");
    let destination = start(session, CANCELLED, 1, Some(&path))?;
    session.qmp(CANCELLED)?;
    source.execute("migrate-set-parameters", json!({ "max-bandwidth": SLOW }))?;
    source.execute("migrate", json!({ "uri": format!("unix:{}", crate::text(&path)?) }))?;
    until(source, |state| state["status"] == "active" && state["ram"]["transferred"] != 0)?;
    // The guest writes while its pages are logged.
    let done = guest.rounds_done(session, 0)?;
    guest.rounds_done(session, done + 1)?;
    source.execute("migrate_cancel", json!({}))?;
    until(source, |state| state["status"] == "cancelled")?;
    destination.kill(session)?;
    let done = guest.rounds_done(session, 0)?;
    guest.rounds_done(session, done + 2)?;
    let what = "after a migration that was cancelled, the guest writes on";
    checks.note(session, what, true, "two rounds more");
    Ok(())
}

/// Completes a migration while the guest writes. Returns the guest at its new place.
fn complete(
    session: &mut Session<'_>,
    guest: Guest,
    mut source: Qmp,
    checks: &mut Checks,
) -> Result<Guest> {
    let path = session.directory.join("moved.migrate");
    let moved = start(session, MOVED, 1, Some(&path))?;
    session.qmp(MOVED)?;
    let limits = json!({ "max-bandwidth": 1_u64 << 32, "downtime-limit": PAUSE_LIMIT_MS });
    source.execute("migrate-set-parameters", limits)?;
    let begun = Instant::now();
    source.execute("migrate", json!({ "uri": format!("unix:{}", crate::text(&path)?) }))?;
    let state = until(&mut source, |state| {
        state["status"] == "completed" || begun.elapsed() > CONVERGES_WITHIN
    })?;
    let state = if state["status"] == "completed" {
        state
    } else {
        // A busy host copies pages more slowly than the guest changes them.
        let longer = json!({ "downtime-limit": LONG_PAUSE_LIMIT_MS });
        source.execute("migrate-set-parameters", longer)?;
        until(&mut source, |state| state["status"] == "completed")?
    };
    let took = begun.elapsed();
    let pause = state["downtime"].as_u64().context("QEMU gives no downtime")?;
    let rounds = state["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
    let found = format!("a pause of {pause} ms; {rounds} passes in {:.1} s", took.as_secs_f64());
    checks.note(session, "the guest has moved to the other VMhost while it wrote", true, found);
    guest.leave(session, &mut source)?;
    Ok(moved)
}

/// Asks for the state of a migration until it is as wanted.
fn until(qmp: &mut Qmp, is_wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = qmp.execute("query-migrate", json!({}))?;
        if is_wanted(&state) {
            return Ok(state);
        }
        ensure!(state["status"] != "failed", "the migration failed: {state}");
        ensure!(Instant::now() < deadline, "the migration is late: {state}");
        sidecore_kit::interrupt::check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
}
