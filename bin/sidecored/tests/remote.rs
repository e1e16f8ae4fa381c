//! Two daemons on one host, an IOhost and a VMhost, with a memory link between them.

mod common;

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use sidecore_control::report::{DeviceState, IohostReport, RemoteReport};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_kit::guest::{complete, complete_all};
use sidecore_kit::wait;
use sidecore_units::Sector;
use tempfile::TempDir;

use common::Daemon;

const SOON: Duration = Duration::from_secs(60);
const WRITE_BYTES: u32 = 4096;
const SECTORS: u64 = WRITE_BYTES as u64 / 512;
const DISK_BYTES: u64 = 16 << 20;

/// An IOhost with a device on a file, for the client `vmhost`.
fn iohost(shared: &Path, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n{keys}\
         [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{0}/disk.img\"\ndirect = false\n\
         [[device]]\nname = \"disk1\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\nstore = \
         \"disk\"\n",
        shared.display()
    )
}

/// A VMhost with a guest's disk that is the IOhost's device.
fn vmhost(shared: &Path, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n[[sidecore]]\nname = \
         \"vm1\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{keys}\
         [[store]]\nname = \"r1\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \"disk1\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"r1\"\nsocket = \"vd0.sock\"\nqueues = 2\n\
         sidecores = [\"vm0\", \"vm1\"]\n",
        shared.display()
    )
}

fn shared() -> TempDir {
    let shared = tempfile::tempdir().unwrap();
    std::fs::File::create(shared.path().join("disk.img")).unwrap().set_len(DISK_BYTES).unwrap();
    shared
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

/// Waits until the VMhost serves its disk, and connects to it.
fn guest(vmhost: &Daemon) -> BlkClient {
    let control = vmhost.client();
    wait::until("the remote device is attached", SOON, || {
        control.devices().unwrap()[0].state == DeviceState::Waiting
    });
    let options = ClientOptions { queues: 2, ..ClientOptions::default() };
    BlkClient::connect(vmhost.directory.path().join("vd0.sock"), &options).unwrap()
}

fn data(index: u64, round: u64) -> Vec<u8> {
    (0..u64::from(WRITE_BYTES)).map(|at| (at / 512 + index * 7 + round * 31 + 1) as u8).collect()
}

fn write(queue: &mut BlkQueue, slot: Slot, index: u64, round: u64) {
    queue.write_data(slot, 0, &data(index, round));
    queue.submit_write(slot, Sector(index * SECTORS), WRITE_BYTES).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
}

fn read(queue: &mut BlkQueue, slot: Slot, index: u64) -> Vec<u8> {
    queue.write_data(slot, 0, &[0xee; WRITE_BYTES as usize]);
    queue.submit_read(slot, Sector(index * SECTORS), WRITE_BYTES).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    let mut back = vec![0; WRITE_BYTES as usize];
    queue.read_data(slot, 0, &mut back);
    back
}

fn remote(daemon: &Daemon, is_it: impl Fn(&RemoteReport) -> bool) {
    let control = daemon.client();
    wait::until("the report of the remote channel", SOON, || is_it(&control.remote().unwrap()));
}

fn end(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
}

#[test]
fn a_guest_of_a_vmhost_uses_a_disk_of_an_iohost_and_start_order_does_not_matter() {
    let shared = shared();
    let vmhost = start(&vmhost(shared.path(), ""));
    remote(&vmhost, |report| report.iohosts.iter().any(|iohost| iohost.state == "connecting"));
    let control = vmhost.client();
    let device = control.devices().unwrap().remove(0);
    assert_eq!(device.state, DeviceState::Opening);
    wait::until("the list says for whom the disk waits", SOON, || {
        let reason = control.devices().unwrap().remove(0).reason.unwrap_or_default();
        reason.contains("store \"r1\" has waited") && reason.contains("iohost \"io1\"")
    });
    let iohost = start(&iohost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    // The queues lie on two sidecores, and the session on one of them.
    for queue in 0..2 {
        let queue = guest.queue(queue).unwrap();
        let slot = queue.take_slot().unwrap();
        for index in 0..64 {
            write(queue, slot, index, 0);
        }
        for index in 0..64 {
            assert!(read(queue, slot, index) == data(index, 0));
        }
        queue.submit_flush(slot).unwrap();
        assert_eq!(complete(queue).status, Status::Ok);
    }
    let file = std::fs::read(shared.path().join("disk.img")).unwrap();
    assert!(file[..WRITE_BYTES as usize] == data(0, 0));
    assert_eq!(control.devices().unwrap()[0].capacity_bytes, DISK_BYTES);
    remote(&vmhost, |report| {
        let is_ready = |iohost: &IohostReport| {
            iohost.devices.iter().any(|device| device.store == "r1" && device.ready)
        };
        let mut iohosts = report.iohosts.iter();
        iohosts.any(|it| it.state == "connected" && is_ready(it) && it.counts.requests >= 128)
    });
    remote(&iohost, |report| {
        let is_up = report.links.iter().any(|link| link.state == "up");
        let mut clients = report.clients.iter();
        is_up && clients.any(|client| client.state == "connected" && client.counts.requests >= 128)
    });
    let metrics = iohost.client().metrics(false).unwrap();
    assert!(metrics.contains("sidecore_client_connected{client=\"vmhost\"} 1\n"), "{metrics}");
    drop(guest);
    end(vmhost);
    remote(&iohost, |report| report.clients.iter().any(|it| it.state == "away"));
    end(iohost);
}

#[test]
fn an_iohost_that_is_killed_and_comes_back_loses_no_answered_write() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let mut iohost = start(&config);
    let vmhost = start(&vmhost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    let count = slots.len() as u64;
    for round in 1..=3 {
        // The first writes are answered when the IOhost dies; the others are given to it then.
        let half = slots.len() / 2;
        for (index, slot) in (0..count).zip(&slots) {
            queue.write_data(*slot, 0, &data(index, round));
            queue.submit_write(*slot, Sector(index * SECTORS), WRITE_BYTES).unwrap();
            if index + 1 == half as u64 {
                let done = complete_all(queue, half);
                assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
                iohost.child.signal(Signal::KILL).unwrap();
            }
        }
        queue.publish().unwrap();
        drop(iohost);
        iohost = start(&config);
        let done = complete_all(queue, slots.len() - half);
        assert!(done.iter().all(|done| done.status == Status::Ok), "round {round}: {done:?}");
        for index in 0..count {
            assert!(read(queue, slots[0], index) == data(index, round), "round {round}, {index}");
        }
        queue.submit_flush(slots[0]).unwrap();
        assert_eq!(complete(queue).status, Status::Ok);
        let file = std::fs::read(shared.path().join("disk.img")).unwrap();
        for index in 0..count {
            let at = (index * u64::from(WRITE_BYTES)) as usize;
            assert!(file[at..at + WRITE_BYTES as usize] == data(index, round), "round {round}");
        }
    }
    remote(&vmhost, |report| report.iohosts.iter().any(|it| it.counts.sessions >= 4));
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn an_invited_client_is_sealed_and_a_revoked_one_is_out_within_a_second() {
    let shared = shared();
    let iohost = start(&iohost(shared.path(), "encryption = \"on\"\n"));
    let control = iohost.client();
    remote(&iohost, |report| report.clients.iter().any(|client| client.state == "not invited"));
    let invitation = control.invite("vmhost").unwrap().invitation;
    let path = shared.path().join("vmhost.invitation");
    std::fs::write(&path, &invitation).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let keys = format!("encryption = \"on\"\ninvitation = \"{}\"\n", path.display());
    let vmhost = start(&vmhost(shared.path(), &keys));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 3, 0);
    assert!(read(queue, slot, 3) == data(3, 0));
    remote(&vmhost, |report| report.iohosts.iter().any(|it| it.encryption == "on"));
    assert!(control.invite("vmhost").unwrap_err().to_string().contains("already invited"));
    assert!(control.invite("stranger").unwrap_err().to_string().contains("there are \"vmhost\""));
    control.revoke("vmhost").unwrap();
    remote(&iohost, |report| report.clients.iter().any(|it| it.state == "not invited"));
    remote(&vmhost, |report| report.iohosts.iter().any(|it| it.state == "away"));
    // Its requests wait, as for an IOhost that is away.
    let warning = || vmhost.client().devices().unwrap()[0].warnings.join("");
    wait::until("the disk says that it waits", SOON, || warning().contains("has waited"));
    assert!(control.revoke("vmhost").unwrap_err().to_string().contains("not invited"));
    drop(guest);
    end(vmhost);
    end(iohost);
}
