//! Two daemons on one host, an IOhost and a VMhost, with a memory link between them.

mod common;

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use sidecore_control::report::{DeviceState, IohostReport, RemoteDeviceReport, RemoteReport};
use sidecore_control::{ClientError, NewDevice, RemoteKind};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, NvmeClient, NvmeOptions, Slot, Status};
use sidecore_kit::guest::complete;
use sidecore_kit::wait;
use sidecore_units::Sector;
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, iohost, survives_kills, vmhost};

const SOON: Duration = Duration::from_secs(60);
const SECTORS: u64 = BLOCK as u64 / 512;
const DISK_BYTES: u64 = 16 << 20;

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
    common::remote::data(index, round, BLOCK)
}

fn write(queue: &mut BlkQueue, slot: Slot, index: u64, round: u64) {
    common::remote::write(queue, slot, index, data(index, round));
}

fn read(queue: &mut BlkQueue, slot: Slot, index: u64) -> Vec<u8> {
    common::remote::read(queue, slot, index, BLOCK)
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
    assert!(file[..BLOCK as usize] == data(0, 0));
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

/// The socket of a device is there before its IOhost. A VMM that connects waits for its first
/// answer, whatever the front end. The other devices and the API go on meanwhile.
#[test]
fn vmms_connect_before_the_iohost_is_up_and_wait() {
    let shared = shared();
    let mut config = vmhost(shared.path(), "");
    config += "[[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
               [[device]]\nname = \"local\"\nstore = \"mem\"\nsocket = \"local.sock\"\n\
               [[device]]\nname = \"pci\"\nfront_end = \"nvme\"\nstore = \"r1\"\n\
               read_only = true\nsocket = \"pci.sock\"\nqueues = 2\n";
    for index in 0..128 {
        config += &format!(
            "[[device]]\nname = \"wait{index}\"\nstore = \"r1\"\nread_only = true\nsocket = \
             \"wait{index}.sock\"\n"
        );
    }
    let vmhost = start(&config);
    let socket = |name: &str| vmhost.directory.path().join(name);
    let options = ClientOptions { queues: 2, timeout: SOON, ..ClientOptions::default() };
    let nvme = NvmeOptions { timeout: SOON, ..NvmeOptions::default() };
    let waiting: Vec<_> = (0..128)
        .map(|index| UnixStream::connect(socket(&format!("wait{index}.sock"))).unwrap())
        .collect();
    std::thread::scope(|scope| {
        let blk = scope.spawn(|| BlkClient::connect(socket("vd0.sock"), &options).unwrap());
        let pci = scope.spawn(|| NvmeClient::connect(socket("pci.sock"), &nvme).unwrap());
        let mut local =
            BlkClient::connect(socket("local.sock"), &ClientOptions::default()).unwrap();
        let queue = local.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        write(queue, slot, 1, 0);
        assert!(read(queue, slot, 1) == data(1, 0));
        let states: Vec<_> = vmhost.client().devices().unwrap();
        let opening = states.iter().filter(|device| device.state == DeviceState::Opening);
        assert_eq!(opening.count(), 130);
        assert!(!blk.is_finished() && !pci.is_finished());
        let iohost = start(&iohost(shared.path(), ""));
        let (mut blk, _pci) = (blk.join().unwrap(), pci.join().unwrap());
        let queue = blk.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        write(queue, slot, 2, 0);
        assert!(read(queue, slot, 2) == data(2, 0));
        drop(iohost);
    });
    drop(waiting);
}

#[test]
fn a_daemon_whose_vmms_wait_for_an_iohost_ends_at_once() {
    let shared = shared();
    let mut vmhost = start(&vmhost(shared.path(), ""));
    let socket = vmhost.directory.path().join("vd0.sock");
    let mut vmm = UnixStream::connect(&socket).unwrap();
    vmhost.signal(Signal::TERM);
    let (status, complaint) = vmhost.wait();
    assert!(status.success(), "{complaint}");
    assert!(!socket.exists());
    // The VMM does not wait for ever.
    vmm.set_read_timeout(Some(SOON)).unwrap();
    assert!(matches!(vmm.read(&mut [0; 1]), Ok(0) | Err(_)));
}

/// A signal to a VMhost whose IOhost was killed, with writes and requests as named.
fn ends_without_its_iohost(flushes: bool, asks: bool) -> (Option<i32>, String) {
    let shared = shared();
    let mut iohost = start(&iohost(shared.path(), ""));
    let mut vmhost = start(&vmhost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    if flushes {
        queue.submit_flush(slot).unwrap();
        assert_eq!(complete(queue).status, Status::Ok);
    }
    iohost.child.signal(Signal::KILL).unwrap();
    iohost.child.wait_for_end(SOON).unwrap();
    if asks {
        queue.submit_read(slot, Sector(0), BLOCK).unwrap();
        queue.publish().unwrap();
    }
    remote(&vmhost, |report| {
        let devices = report.iohosts.iter().flat_map(|iohost| &iohost.devices);
        // Not the empty report from before the first look.
        report.iohosts.iter().any(|iohost| iohost.state == "away")
            && devices.map(|device| device.in_flight).sum::<u64>() == u64::from(asks)
    });
    vmhost.signal(Signal::TERM);
    let (status, complaint) = vmhost.wait();
    (status.code(), complaint)
}

#[test]
fn a_vmhost_without_its_iohost_ends_by_one_signal_and_says_what_is_lost() {
    let (code, log) = ends_without_its_iohost(true, false);
    assert_eq!(code, Some(0), "nothing was to be lost: {log}");
    let (code, log) = ends_without_its_iohost(false, false);
    let lost = "0 requests have no answer, and 1 answered writes are covered by no flush";
    assert!(code == Some(4) && log.contains(lost), "{code:?} {log}");
    let (code, log) = ends_without_its_iohost(true, true);
    let lost = "1 requests have no answer, and 0 answered writes are covered by no flush";
    assert!(code == Some(4) && log.contains(lost), "{code:?} {log}");
    assert!(log.contains("after 5 s the daemon ends without them"), "{log}");
}

#[test]
fn a_vmhost_that_is_told_to_end_waits_for_an_iohost_that_comes_back() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let mut iohost = start(&config);
    let mut vmhost = start(&vmhost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    iohost.child.signal(Signal::KILL).unwrap();
    iohost.child.wait_for_end(SOON).unwrap();
    remote(&vmhost, |report| report.iohosts.iter().any(|iohost| iohost.state == "away"));
    vmhost.signal(Signal::TERM);
    let iohost = start(&config);
    let (status, log) = vmhost.wait();
    assert!(status.success() && log.contains("flushed"), "{status} {log}");
    remote(&iohost, |report| report.clients.iter().any(|it| it.counts.requests >= 2));
    end(iohost);
}

/// Two daemons that know nothing of each other become an IOhost and its client, and forget it
/// again.
#[test]
fn links_clients_iohosts_and_their_disks_come_and_go_while_the_daemons_run() {
    let shared = shared();
    let wire =
        json!({ "name": "wire", "type": "memory", "socket": shared.path().join("wire.sock") });
    let io = start(&format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n[[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{0}/disk.img\"\ndirect = \
         false\n",
        shared.path().display()
    ));
    let vm = start("control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n");
    let (iohost, vmhost) = (io.client(), vm.client());
    let client = json!({ "name": "vmhost", "links": ["wire"] });
    let upstream = json!({ "name": "io1", "link": "wire", "client": "vmhost" });
    let export = NewDevice::default().with("name", "disk1").with("front_end", "vrio");
    let export = export.with("client", "vmhost").with("store", "disk");
    let socket = vm.directory.path().join("vd0.sock");
    let disk = NewDevice::new("vd0", &socket).of_iohost("io1", "disk1");
    for round in 0..2 {
        assert!(iohost.add_part(RemoteKind::Client, &client).is_err(), "its link is missing");
        iohost.add_part(RemoteKind::Link, &wire).unwrap();
        iohost.add_part(RemoteKind::Client, &client).unwrap();
        vmhost.add_part(RemoteKind::Link, &wire).unwrap();
        vmhost.add_part(RemoteKind::Iohost, &upstream).unwrap();
        // The VMM connects before the IOhost has the disk.
        assert_eq!(vmhost.add_device(&disk).unwrap().state, DeviceState::Opening);
        let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
        let mut guest = std::thread::scope(|scope| {
            let guest = scope.spawn(|| BlkClient::connect(&socket, &options).unwrap());
            iohost.add_device(&export).unwrap();
            guest.join().unwrap()
        });
        let queue = guest.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        write(queue, slot, 3, round);
        assert!(read(queue, slot, 3) == data(3, round));
        let refused = |result: Result<(), ClientError>, by: &str| {
            let why = result.unwrap_err().to_string();
            assert!(why.contains("is in use: remove ") && why.contains(by), "{why}");
        };
        refused(iohost.remove_part(RemoteKind::Link, "wire"), "client \"vmhost\"");
        refused(iohost.remove_part(RemoteKind::Client, "vmhost"), "device \"disk1\"");
        refused(vmhost.remove_part(RemoteKind::Link, "wire"), "iohost \"io1\"");
        refused(vmhost.remove_part(RemoteKind::Iohost, "io1"), "store \"io1/disk1@vd0\"");
        drop(guest);
        vmhost.remove_device("vd0").unwrap();
        vmhost.remove_part(RemoteKind::Iohost, "io1").unwrap();
        vmhost.remove_part(RemoteKind::Link, "wire").unwrap();
        iohost.remove_device("disk1").unwrap();
        iohost.remove_part(RemoteKind::Client, "vmhost").unwrap();
        iohost.remove_part(RemoteKind::Link, "wire").unwrap();
        for daemon in [&io, &vm] {
            remote(daemon, |report| *report == RemoteReport::default());
        }
    }
    let file = std::fs::read(shared.path().join("disk.img")).unwrap();
    let at = (3 * BLOCK) as usize;
    assert!(file[at..at + BLOCK as usize] == data(3, 1));
    end(vm);
    end(io);
}

#[test]
fn a_drained_client_waits_with_its_writes_flushed() {
    let shared = shared();
    let iohost = start(&iohost(shared.path(), ""));
    let vmhost = start(&vmhost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    let control = iohost.client();
    assert!(control.drain("vmhost", true).unwrap_err().to_string().contains("is not drained"));
    control.drain("vmhost", false).unwrap();
    remote(&iohost, |report| report.clients.iter().any(|client| client.state == "drained"));
    let metrics = control.metrics(false).unwrap();
    assert!(metrics.contains("sidecore_client_drained{client=\"vmhost\"} 1\n"), "{metrics}");
    queue.write_data(slot, 0, &data(1, 1));
    queue.submit_write(slot, Sector(SECTORS), BLOCK).unwrap();
    queue.publish().unwrap();
    remote(&vmhost, |report| {
        let mut devices = report.iohosts.iter().flat_map(|iohost| &iohost.devices);
        let waits = |what: &str| what.contains("sidecore remote drain");
        devices.any(|it| it.waits_for.as_deref().is_some_and(waits) && it.in_flight == 1)
    });
    let at = BLOCK as usize;
    let stored = || std::fs::read(shared.path().join("disk.img")).unwrap()[at..2 * at].to_vec();
    assert!(stored() == data(1, 0), "the write before the drain, and not the one after");
    control.drain("vmhost", true).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    assert!(read(queue, slot, 1) == data(1, 1));
    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    assert!(stored() == data(1, 1));
    remote(&iohost, |report| report.clients.iter().any(|client| client.state == "connected"));
    drop(guest);
    end(vmhost);
    end(iohost);
}

/// The state of the VMhost's IOhost, and the reason for which its device waits.
fn is_at(vmhost: &Daemon, state: &str, reason: Option<&str>) {
    remote(vmhost, |report| {
        let waits = |device: &RemoteDeviceReport| device.wait_reason.as_deref() == reason;
        let mut iohosts = report.iohosts.iter();
        iohosts.any(|iohost| iohost.state == state && iohost.devices.iter().all(waits))
    });
}

#[test]
fn an_iohost_is_drained_at_its_vmhost_before_it_is_taken_away() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let (mut iohost, vmhost) = (start(&config), start(&vmhost(shared.path(), "")));
    let control = vmhost.client();
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    let undo = || control.drain_iohost("io1", true);
    assert!(undo().unwrap_err().to_string().contains("is not drained"));
    let unknown = control.drain_iohost("io9", false).unwrap_err().to_string();
    assert!(unknown.contains("there are \"io1\""), "{unknown}");
    control.drain_iohost("io1", false).unwrap();
    is_at(&vmhost, "drained", Some("drained_here"));
    remote(&vmhost, |report| report.iohosts[0].devices[0].kept_writes == 0);
    let metrics = control.metrics(false).unwrap();
    for row in [
        "sidecore_iohost_drained{iohost=\"io1\"} 1\n",
        "sidecore_iohost_connected{iohost=\"io1\"} 1\n",
        "sidecore_remote_device_waiting{iohost=\"io1\",store=\"r1\",device=\"disk1\",reason=\
         \"drained_here\"} 1\n",
    ] {
        assert!(metrics.contains(row), "{row} {metrics}");
    }
    queue.write_data(slot, 0, &data(1, 1));
    queue.submit_write(slot, Sector(SECTORS), BLOCK).unwrap();
    queue.publish().unwrap();
    remote(&vmhost, |report| report.iohosts[0].devices[0].in_flight == 1);
    let at = BLOCK as usize;
    let stored = std::fs::read(shared.path().join("disk.img")).unwrap();
    assert!(stored[at..2 * at] == data(1, 0), "the write before the drain");
    iohost.child.signal(Signal::KILL).unwrap();
    iohost.child.wait_for_end(SOON).unwrap();
    is_at(&vmhost, "drained", Some("link"));
    let iohost = start(&config);
    is_at(&vmhost, "drained", Some("drained_here"));
    undo().unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    assert!(read(queue, slot, 1) == data(1, 1));
    is_at(&vmhost, "connected", None);
    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn a_drain_of_an_iohost_that_is_away_says_what_is_left_and_can_be_undone() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let (mut iohost, vmhost) = (start(&config), start(&vmhost(shared.path(), "")));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    iohost.child.signal(Signal::KILL).unwrap();
    iohost.child.wait_for_end(SOON).unwrap();
    is_at(&vmhost, "away", Some("link"));
    let control = vmhost.client();
    let error = control.drain_iohost("io1", false).unwrap_err().to_string();
    let left = "it does not answer; 0 requests have no answer, and 1 answered writes are covered";
    assert!(error.contains(left), "{error}");
    is_at(&vmhost, "draining", Some("link"));
    // It goes on when the IOhost is back.
    let iohost = start(&config);
    is_at(&vmhost, "drained", Some("drained_here"));
    control.drain_iohost("io1", true).unwrap();
    assert!(read(queue, slot, 1) == data(1, 0));
    drop(guest);
    end(vmhost);
    end(iohost);
}

#[test]
fn an_iohost_that_is_killed_and_comes_back_loses_no_answered_write() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let iohost = start(&config);
    let vmhost = start(&vmhost(shared.path(), ""));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    let file = || std::fs::read(shared.path().join("disk.img")).unwrap();
    let iohost = survives_kills(queue, &slots, iohost, 3, (|| start(&config), file));
    remote(&vmhost, |report| report.iohosts.iter().any(|it| it.counts.sessions >= 4));
    drop(guest);
    end(vmhost);
    end(iohost);
}

/// Writes a block in each slot, over and over, as long as `goes_on`. Returns the last round of each
/// slot, when all are answered.
fn write_while(
    queue: &mut BlkQueue,
    slots: &[Slot],
    first_round: u64,
    mut goes_on: impl FnMut() -> bool,
) -> Vec<u64> {
    let mut is_again = true;
    let mut rounds = vec![first_round; slots.len()];
    let submit = |queue: &mut BlkQueue, index: usize, round| {
        common::remote::submit(queue, slots[index], index as u64, data(index as u64, round));
    };
    (0..slots.len()).for_each(|index| submit(queue, index, first_round));
    queue.publish().unwrap();
    let (mut in_flight, mut done) = (slots.len(), Vec::new());
    let deadline = Instant::now() + SOON;
    while in_flight > 0 {
        assert!(Instant::now() < deadline, "{in_flight} writes are not answered");
        is_again = is_again && goes_on();
        queue.poll_completions(&mut done).unwrap();
        for completion in done.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            let index = slots.iter().position(|slot| *slot == completion.slot).unwrap();
            if is_again {
                rounds[index] += 1;
                submit(queue, index, rounds[index]);
            } else {
                in_flight -= 1;
            }
        }
        queue.publish().unwrap();
        let _ = queue.notify();
        std::thread::yield_now();
    }
    rounds
}

#[test]
fn an_iohost_that_ends_under_load_and_comes_back_fails_no_request() {
    let shared = shared();
    let config = iohost(shared.path(), "");
    let (iohost, vmhost) = (start(&config), start(&vmhost(shared.path(), "")));
    let mut guest = guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..16).map(|_| queue.take_slot().unwrap()).collect();
    let mut iohost = Some(iohost);
    for round in 1..=3 {
        iohost.as_ref().unwrap().signal(Signal::TERM);
        let rounds = write_while(queue, &slots, round * 1_000_000, || {
            let it = iohost.as_mut().unwrap();
            let ended = it.child.wait_for_end(Duration::ZERO).unwrap();
            if let Some(status) = ended {
                assert!(status.success(), "{status}");
                iohost = Some(start(&config));
            }
            ended.is_none()
        });
        for (index, round) in (0..).zip(rounds) {
            assert!(read(queue, slots[0], index) == data(index, round), "block {index}");
        }
    }
    drop(guest);
    end(vmhost);
    end(iohost.unwrap());
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
    // Otherwise the end of the VMhost would give the write up.
    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
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
