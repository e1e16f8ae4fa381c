//! The run with faults: two guests write over bad cables while the IOhost's daemon is killed and
//! started again.

use super::config::{self, DISK_MIB, Device, Limits, READ_ONLY, READ_ONLY_MIB};
use super::enforced;
use super::host::Host;
use super::net::{Faults, LossyNet, STATIONS, Station};
use super::store::{self, Digest};
use crate::checks::Checks;
use crate::config::socket;
use crate::emulator::Emulator;
use crate::guest::{Answer, FIRST_SLOT, Guest, VIRTIO};
use crate::nvme::log;
use crate::qemu::{self, Backend, Disk, Equipment, Port};
use crate::session::{Session, Stage};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The chances of the wires, in percent.
const FAULTS: Faults = Faults { loss: 10, doubling: 10, reordering: 10 };
/// The part of each disk for the file system, in MiB.
pub(super) const FILESYSTEM: u64 = 160;
/// The part that the load writes, behind the file system.
pub(super) const LOAD: u64 = 200;
pub(super) const LOAD_SIZE: u64 = 4;
/// How often the IOhost's daemon is killed.
const KILLS: u32 = 3;
/// The longest time from the start of the IOhost's daemon to the first request of each client.
const SERVICE: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);
/// The slot of the disk that a guest may only read.
pub(super) const READ_ONLY_SLOT: u8 = FIRST_SLOT + 1;

/// The hosts, and the guests on them.
pub(super) struct Place {
    pub(super) cables: LossyNet,
    /// The directory of the IOhost's stores.
    pub(super) stores: PathBuf,
    pub(super) iohost: Host,
    pub(super) vmhosts: Vec<Host>,
}

/// Does the run.
pub(super) fn run(stage: &Stage<'_>, vfio_user: &Emulator) -> Result<Checks> {
    Session::hold(stage, "remote", |session| {
        session.share_cores();
        // In memory, so that other work of the host's disk has no part in the time to service.
        let stores = session.directory.join("stores");
        std::fs::create_dir(&stores)?;
        let mut checks = Checks::default();
        let mut place = start(session, stores.clone(), &mut checks)?;
        let mut guests = boot(session, vfio_user)?;
        files(session, &mut guests)?;
        kill_under_load(session, &mut place, &mut guests, &mut checks)?;
        let digests = end_load(session, &mut guests, &mut checks)?;
        faults_happened(session, &mut place, &mut checks)?;
        place.cables.repair()?;
        let digests = enforced::run(session, place, guests, &digests, &mut checks)?;
        for (station, digest) in STATIONS.iter().zip(&digests) {
            store::compare(session, &stores, station.disk, digest, &mut checks)?;
        }
        Ok(checks)
    })
}

/// Starts the IOhost, invites its clients, and starts them.
fn start(session: &mut Session<'_>, stores: PathBuf, checks: &mut Checks) -> Result<Place> {
    for (disk, mib) in
        [(STATIONS[0].disk, DISK_MIB), (STATIONS[1].disk, DISK_MIB), (READ_ONLY, READ_ONLY_MIB)]
    {
        std::fs::File::create(config::store(&stores, disk))?.set_len(mib << 20)?;
    }
    let binaries = session.stage.binaries;
    let cables = LossyNet::new(&mut session.inbox, binaries, FAULTS)?;
    let directory = session.directory;
    let configuration = config::iohost(directory, &stores, Limits::None)?;
    let iohost = Host::start(session, &cables.net.iohost, "iohost", &configuration)?;
    let mut vmhosts = Vec::new();
    let of_nvme = [Device { disk: STATIONS[1].disk, keys: "front_end = \"nvme\"\n" }];
    let of_virtio = [STATIONS[0].disk, READ_ONLY].map(|disk| Device { disk, keys: "queues = 2\n" });
    for ((station, namespace), devices) in
        STATIONS.iter().zip(&cables.net.vmhosts).zip([of_virtio.as_slice(), of_nvme.as_slice()])
    {
        let file = config::invitation(directory, station.client);
        iohost.sidecore.run(&["remote", "invite", station.client, crate::text(&file)?])?;
        let configuration = config::vmhost(directory, station, devices)?;
        vmhosts.push(Host::start(session, namespace, station.client, &configuration)?);
    }
    for host in &vmhosts {
        wait_for("all remote disks of a VMhost", || is_attached(host))?;
    }
    let sealed = iohost.sidecore.remote()?;
    let all_sealed = sealed["clients"]
        .as_array()
        .is_some_and(|clients| clients.iter().all(|client| client["encryption"] == "on"));
    checks.note(
        session,
        "both VMhosts were invited, and every frame is sealed",
        all_sealed,
        format!("encryption is {}", sealed["clients"][0]["encryption"]),
    );
    checks.show(&iohost.sidecore, &["remote", "list"])?;
    Ok(Place { cables, stores, iohost, vmhosts })
}

/// Whether all remote disks of a VMhost are attached.
pub(super) fn is_attached(host: &Host) -> Result<bool> {
    let report = host.sidecore.remote()?;
    // The list is as of the last half second: at first it has no devices.
    let devices = report["iohosts"][0]["devices"].as_array().map_or(&[][..], Vec::as_slice);
    Ok(!devices.is_empty() && devices.iter().all(|device| device["ready"] == true))
}

pub(super) fn wait_for(what: &str, mut is_done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_done()? {
        sidecore_kit::interrupt::check()?;
        ensure!(Instant::now() < deadline, "not within {} s: {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Boots a guest on each VMhost: one with virtio disks, one with an NVMe function.
fn boot(session: &mut Session<'_>, vfio_user: &Emulator) -> Result<[Guest; 2]> {
    let directory = session.directory;
    let sockets = [STATIONS[0].disk, READ_ONLY].map(|disk| socket(directory, disk));
    let slots = [FIRST_SLOT, READ_ONLY_SLOT];
    let disks = [0, 1].map(|index| Disk {
        name: if index == 0 { STATIONS[0].disk } else { READ_ONLY },
        backend: Backend::Daemon(&sockets[index]),
        slot: slots[index],
        packed: false,
    });
    let equipment = Equipment { polled: false, disks: &disks, ports: &[], nics: &[] };
    let mut virtio = Guest::boot_with(session, VIRTIO, &equipment)?;
    let disk = STATIONS[1].disk;
    let function = qemu::function(disk, &socket(directory, disk), FIRST_SLOT)?;
    let ports = [Port { slot: FIRST_SLOT, device: Some(function) }];
    let mut nvme = Guest::boot_nvme(session, vfio_user, &ports, false)?;
    virtio.booted(session)?;
    nvme.booted(session)?;
    let found = nvme.order(session, &format!("find {FIRST_SLOT:02x}"))?;
    ensure!(found.number::<u64>("mib")? == DISK_MIB, "the NVMe guest sees another disk: {found:?}");
    // The kernel's messages of the boot.
    let mut guests = [virtio, nvme];
    both(session, &mut guests, "log")?;
    Ok(guests)
}

/// Lets both guests execute an order at the same time.
fn both(session: &mut Session<'_>, guests: &mut [Guest; 2], order: &str) -> Result<[Answer; 2]> {
    guests.iter_mut().try_for_each(|guest| guest.send(order))?;
    let [virtio, nvme] = guests;
    Ok([virtio.answer(session, order)?, nvme.answer(session, order)?])
}

/// Makes a file system on each disk, with known files.
fn files(session: &mut Session<'_>, guests: &mut [Guest; 2]) -> Result<()> {
    both(session, guests, &format!("mkfs {FILESYSTEM}"))?;
    session.say("ext4 on both disks; copying known files");
    let kept = both(session, guests, "keep")?;
    session.say(format!(
        "{} files of {} KiB on each disk",
        kept[0].text("files")?,
        kept[0].text("kib")?
    ));
    Ok(())
}

/// Kills the IOhost's daemon while both guests write, and starts it again.
fn kill_under_load(
    session: &mut Session<'_>,
    place: &mut Place,
    guests: &mut [Guest; 2],
    checks: &mut Checks,
) -> Result<()> {
    let configuration = config::iohost(session.directory, &place.stores, Limits::None)?;
    both(session, guests, &format!("load {LOAD} {LOAD_SIZE}"))?;
    let Place { iohost, vmhosts, .. } = place;
    let mut longest = Duration::ZERO;
    let mut done = [0; 2];
    for _ in 0..KILLS {
        // The kill comes while both guests write.
        let before = answered(vmhosts)?;
        wait_for_answers(vmhosts, &before, 50)?;
        iohost.kill(session)?;
        let before = answered(vmhosts)?;
        session.say("the IOhost's daemon is killed, and started again");
        let start = Instant::now();
        iohost.start_again(session, &configuration)?;
        let ready = start.elapsed();
        wait_for_answers(vmhosts, &before, 1)?;
        session.say(format!(
            "it is ready after {} ms, and both guests have answers after {} ms",
            ready.as_millis(),
            start.elapsed().as_millis()
        ));
        longest = longest.max(start.elapsed());
        // One round was in progress at the kill; only the round after it began later.
        for (guest, done) in guests.iter_mut().zip(&mut done) {
            *done = guest.rounds_done(session, *done)?;
            *done = guest.rounds_done(session, *done + 2)?;
        }
    }
    let what = "kill -9 of the IOhost's daemon under load: both guests get answers within a second \
                of its start";
    let found = format!("{KILLS} times, {:.2} s at most", longest.as_secs_f64());
    checks.note(session, what, longest <= SERVICE, found);
    Ok(())
}

/// The requests that each VMhost's guest has got answers to.
fn answered(vmhosts: &[Host]) -> Result<Vec<u64>> {
    let answered = |(station, host): (&Station, &Host)| host.sidecore.requests(station.disk);
    STATIONS.iter().zip(vmhosts).map(answered).collect()
}

/// Waits until each guest has got so many more answers.
fn wait_for_answers(vmhosts: &[Host], before: &[u64], more: u64) -> Result<()> {
    wait_for("answers to both guests", || {
        Ok(answered(vmhosts)?.iter().zip(before).all(|(now, before)| *now >= before + more))
    })
}

/// A counter of a client at the IOhost.
pub(super) fn count(report: &Value, client: &str, counter: &str) -> Result<u64> {
    let mut clients = report["clients"].as_array().into_iter().flatten();
    let found = clients.find(|found| found["name"] == client);
    let count = found.and_then(|found| found[counter].as_u64());
    count.with_context(|| format!("sidecore remote list shows no {counter} of {client}"))
}

/// Ends the load, which verifies all its writes, and checks the files, the file systems and the
/// kernels' logs. Returns the checksums of each disk.
fn end_load(
    session: &mut Session<'_>,
    guests: &mut [Guest; 2],
    checks: &mut Checks,
) -> Result<Vec<Digest>> {
    // The guest fails at the first block with other data than was written, and at the first error.
    let ended = both(session, guests, "endload")?;
    let rounds: Vec<&str> = ended.iter().map(|end| end.text("rounds")).collect::<Result<_>>()?;
    let found =
        format!("{} rounds of {LOAD_SIZE} MiB, each read back by fio", rounds.join(" and "));
    checks.note(session, "no request of either guest failed, and all data is right", true, found);
    both(session, guests, "unmount")?;
    let fsck = both(session, guests, "fsck")?;
    both(session, guests, "mount")?;
    let digests = both(session, guests, &format!("digest {LOAD} {LOAD_SIZE}"))?;
    let logs = both(session, guests, "log")?;
    for (index, station) in STATIONS.iter().enumerate() {
        let kind = ["virtio", "NVMe"][index];
        let what = format!("{kind}: e2fsck has nothing to say about ext4 on {}", station.disk);
        let words = fsck[index].text("words")?;
        checks.note(session, &what, fsck[index].text("code")? == "0", words);
        let faults = log::faults(logs[index].text("lines")?);
        let what = format!("{kind}: the guest's kernel has logged no error");
        let found = if faults.is_empty() { "none".to_owned() } else { faults.join("; ") };
        checks.note(session, &what, faults.is_empty(), found);
    }
    digests.iter().map(Digest::of).collect()
}

/// Checks that the wires did what they were told.
fn faults_happened(
    session: &mut Session<'_>,
    place: &mut Place,
    checks: &mut Checks,
) -> Result<()> {
    for (station, fates) in STATIONS.iter().zip(place.cables.fates(&mut session.inbox)?) {
        let share = |count: u64| count as f64 / fates.carried.max(1) as f64;
        let is_bad = [fates.lost, fates.doubled, fates.overtaken]
            .iter()
            .all(|count| (0.08..0.12).contains(&share(*count)));
        let found = format!(
            "{} frames: {:.1} % lost, {:.1} % doubled, {:.1} % late",
            fates.carried,
            share(fates.lost) * 100.0,
            share(fates.doubled) * 100.0,
            share(fates.overtaken) * 100.0
        );
        let what = format!("all this was over a bad wire to {}", station.client);
        checks.note(session, &what, is_bad, found);
    }
    Ok(())
}
