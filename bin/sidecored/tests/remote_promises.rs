//! A VMhost whose daemon is started again while its IOhost is away: the next daemon serves what the
//! last one has promised to its guests.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use sidecore_control::report::{DeviceReport, DeviceState};
use sidecore_driver::{BlkClient, ClientOptions, NvmeClient, NvmeOptions, Slot, Status};
use sidecore_kit::guest::complete;
use sidecore_kit::wait;
use sidecore_luks::{Kdf, NewHeader, SectorSize};
use sidecore_units::Sector;
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, data, flush, read, write};

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 16 << 20;
/// A device of the configuration, and one of a pattern.
const DEVICES: [&str; 2] = ["vd0", "db-1"];

/// Another one of the configuration: at the VMhost, an NVMe controller on an encrypted store.
const SEALED: &str = "sealed";

/// An IOhost with these devices for the client `vmhost`.
fn iohost(shared: &Path) -> String {
    let mut text = format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n[[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n",
        shared.display()
    );
    for name in DEVICES.into_iter().chain([SEALED]) {
        text += &format!(
            "[[store]]\nname = \"{name}-file\"\ntype = \"file\"\npath = \"{}/{name}.img\"\n\
             direct = false\n[[device]]\nname = \"{name}\"\nfront_end = \"vrio\"\n\
             client = \"vmhost\"\nstore = \"{name}-file\"\n",
            shared.display()
        );
    }
    text
}

/// Its client.
fn vmhost(shared: &Path) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n\
         [[store]]\nname = \"r1\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \"vd0\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"r1\"\nsocket = \"vd0.sock\"\n\
         [[serve]]\nname = \"databases\"\niohost = \"io1\"\npattern = \"db-*\"\n\
         socket = \"{{device}}.sock\"\n",
        shared.display()
    )
}

fn resize(shared: &Path, name: &str, bytes: u64) {
    let path = shared.join(format!("{name}.img"));
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path);
    file.unwrap().set_len(bytes).unwrap();
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

fn kill(daemon: Daemon) -> TempDir {
    let Daemon { mut child, directory } = daemon;
    child.signal(Signal::KILL).unwrap();
    child.wait_for_end(SOON).unwrap();
    directory
}

/// Waits until a device is as expected.
fn device(vmhost: &Daemon, name: &str, is_it: impl Fn(&DeviceReport) -> bool) {
    let control = vmhost.client();
    wait::succeed(SOON, || {
        let devices = control.devices().unwrap();
        let found = devices.iter().find(|device| device.name == name);
        if found.is_some_and(&is_it) { Ok(()) } else { Err(format!("{name}: {found:?}")) }
    });
}

fn connect(vmhost: &Daemon, name: &str) -> BlkClient {
    let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
    BlkClient::connect(vmhost.directory.path().join(format!("{name}.sock")), &options).unwrap()
}

fn make_disks(shared: &Path) {
    for name in DEVICES.into_iter().chain([SEALED]) {
        resize(shared, name, DISK_BYTES);
    }
}

/// Daemons of both hosts that were killed, the IOhost's first, after guests have used their disks.
/// Returns the directory of the VMhost's daemon.
fn killed(shared: &Path) -> TempDir {
    make_disks(shared);
    let (iohost, vmhost) = (start(&iohost(shared)), start(&vmhost(shared)));
    for (name, round) in DEVICES.into_iter().zip(0..) {
        device(&vmhost, name, |device| device.state == DeviceState::Waiting);
        let mut guest = connect(&vmhost, name);
        let queue = guest.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        write(queue, slot, 1, data(1, round, BLOCK));
        flush(queue, slot);
    }
    kill(iohost);
    kill(vmhost)
}

/// Begins a read of the block that the guest before has written.
fn submit(guest: &mut BlkClient) -> Slot {
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(u64::from(BLOCK / 512)), BLOCK).unwrap();
    queue.publish().unwrap();
    slot
}

/// Waits for the answer.
fn finish(guest: &mut BlkClient, slot: Slot, round: u64) {
    let queue = guest.queue(0).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    let mut back = vec![0; BLOCK as usize];
    queue.read_data(slot, 0, &mut back);
    assert!(back == data(1, round, BLOCK));
}

fn waits(report: &DeviceReport, reason: &str) -> bool {
    let warnings = report.warnings.join(" ");
    report.state == DeviceState::Running
        && report.capacity_bytes == DISK_BYTES
        && warnings.contains("has waited")
        && warnings.contains(reason)
}

#[test]
fn guests_come_back_while_the_iohost_is_away_and_their_requests_wait() {
    let shared = tempfile::tempdir().unwrap();
    let directory = killed(shared.path());
    let vmhost = Daemon::start(directory, &vmhost(shared.path()));
    // The VMMs are answered without the IOhost.
    let mut guests = DEVICES.map(|name| connect(&vmhost, name));
    let slots = guests.each_mut().map(submit);
    for name in DEVICES {
        device(&vmhost, name, |device| waits(device, "iohost \"io1\""));
    }
    let iohost = start(&iohost(shared.path()));
    for ((guest, slot), round) in guests.iter_mut().zip(slots).zip(0..) {
        finish(guest, slot, round);
        let queue = guest.queue(0).unwrap();
        write(queue, slot, 2, data(2, round, BLOCK));
        assert!(read(queue, slot, 2, BLOCK) == data(2, round, BLOCK));
        flush(queue, slot);
    }
    for name in DEVICES {
        device(&vmhost, name, |device| device.warnings.is_empty());
    }
    drop((guests, iohost));
}

#[test]
fn a_promised_disk_that_has_shrunk_waits_until_it_is_as_it_was() {
    let shared = tempfile::tempdir().unwrap();
    let directory = killed(shared.path());
    let vmhost = Daemon::start(directory, &vmhost(shared.path()));
    let mut guest = connect(&vmhost, "db-1");
    let slot = submit(&mut guest);
    resize(shared.path(), "db-1", DISK_BYTES / 2);
    let smaller = start(&iohost(shared.path()));
    device(&vmhost, "db-1", |device| waits(device, "it has shrunk"));
    kill(smaller);
    resize(shared.path(), "db-1", DISK_BYTES);
    let iohost = start(&iohost(shared.path()));
    finish(&mut guest, slot, 1);
    drop((guest, iohost));
}

#[test]
fn a_damaged_file_of_promises_is_named_and_its_disks_wait_for_the_iohost() {
    let shared = tempfile::tempdir().unwrap();
    let directory = killed(shared.path());
    let path = directory.path().join("control.sock.remote");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut vmhost = Daemon::start(directory, &vmhost(shared.path()));
    device(&vmhost, "vd0", |device| {
        let reason = device.reason.as_deref().unwrap_or_default();
        device.state == DeviceState::Opening && reason.contains("has waited")
    });
    assert!(vmhost.directory.path().join("vd0.sock").exists());
    let iohost = start(&iohost(shared.path()));
    for (name, round) in DEVICES.into_iter().zip(0..) {
        device(&vmhost, name, |device| device.state == DeviceState::Waiting);
        let mut guest = connect(&vmhost, name);
        let slot = submit(&mut guest);
        finish(&mut guest, slot, round);
    }
    vmhost.signal(Signal::TERM);
    let (status, log) = vmhost.wait();
    assert!(status.success(), "{log}");
    assert!(log.contains("control.sock.remote") && log.contains("checksum is wrong"), "{log}");
    drop(iohost);
}

/// The keys of the VMhost's encrypted disk, whose header and key are files of that host.
fn sealed(shared: &Path) -> String {
    let [header, key] = ["disk.luks", "disk.key"].map(|name| shared.join(name));
    if !header.exists() {
        let kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };
        let new = NewHeader { sector: SectorSize::SMALLEST, kdf };
        std::fs::write(&header, new.make(b"right").unwrap()).unwrap();
        std::fs::write(&key, b"right").unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let stage = format!(
        "[[store.stage]]\ntype = \"encrypt\"\nheader = \"{}\"\nkey_file = \"{}\"\n",
        header.display(),
        key.display()
    );
    format!(
        "[[store]]\nname = \"r2\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \
         \"{SEALED}\"\n{stage}[[device]]\nname = \"{SEALED}\"\nfront_end = \"nvme\"\nstore = \
         \"r2\"\nsocket = \"{SEALED}.sock\"\nqueues = 1\n"
    )
}

/// An NVMe driver of the encrypted disk.
fn nvme(vmhost: &Daemon) -> NvmeClient {
    let options = NvmeOptions { timeout: SOON, ..NvmeOptions::default() };
    let socket = vmhost.directory.path().join(format!("{SEALED}.sock"));
    NvmeClient::connect(socket, &options).unwrap()
}

/// Submits a write of block 1, or a read of it if there are no data.
fn begin(guest: &mut NvmeClient, data: Option<&[u8]>) {
    let queue = guest.queue(0).unwrap();
    let (slot, sector) = (queue.take_slot().unwrap(), Sector(u64::from(BLOCK / 512)));
    match data {
        Some(data) => {
            queue.write_data(slot, 0, data);
            queue.submit_write(slot, sector, BLOCK).unwrap();
        }
        None => queue.submit_read(slot, sector, BLOCK).unwrap(),
    }
    queue.publish().unwrap();
}

/// Waits for its end, and returns the data of its slot.
fn end(guest: &mut NvmeClient) -> Vec<u8> {
    let queue = guest.queue(0).unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(SOON).unwrap(), "no completion");
    }
    assert!(completions[0].status.is_ok());
    let mut data = vec![0; BLOCK as usize];
    queue.read_data(completions[0].slot, 0, &mut data);
    queue.release_slot(completions.remove(0).slot);
    data
}

#[test]
fn an_encrypted_disk_and_an_nvme_controller_come_back_without_the_iohost() {
    let shared = tempfile::tempdir().unwrap();
    make_disks(shared.path());
    let config = vmhost(shared.path()) + &sealed(shared.path());
    let (first, daemon) = (start(&iohost(shared.path())), start(&config));
    device(&daemon, SEALED, |device| device.state == DeviceState::Waiting);
    let mut guest = nvme(&daemon);
    let written = data(1, 7, BLOCK);
    begin(&mut guest, Some(&written));
    end(&mut guest);
    kill(first);
    let directory = kill(daemon);
    drop(guest);
    let stored = std::fs::read(shared.path().join(format!("{SEALED}.img"))).unwrap();
    let place = BLOCK as usize;
    assert!(stored[place..][..place] != written, "the IOhost has the data in clear");

    let daemon = Daemon::start(directory, &config);
    // The controller is enabled, and its namespace identified, without the IOhost.
    let mut guest = nvme(&daemon);
    assert_eq!(guest.namespace().len_bytes(), DISK_BYTES);
    begin(&mut guest, None);
    device(&daemon, SEALED, |device| waits(device, "iohost \"io1\""));
    let again = start(&iohost(shared.path()));
    assert!(end(&mut guest) == written);
    device(&daemon, SEALED, |device| device.warnings.is_empty());
    drop((guest, again));
}
