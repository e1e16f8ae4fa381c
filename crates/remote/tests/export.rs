//! Clients use the devices of an IOhost, each its own.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{
    DISK_BYTES, IOHOST, Rig, TestClient, TestStore, client_id, device_name, exported, pattern,
    request,
};
use sidecore_block::{BlockError, Geometry, Limit, Limits, NullStore, Operation};
use sidecore_link::{EthernetAddress, Faults, LinkAddress};
use sidecore_reactor::{Arm, Pollable, Polled, Unit};
use sidecore_remote::export::{ClientLimits, ClientShare, ClientSpec, Export, ExportError};
use sidecore_units::Nanos;
use sidecore_vrio::port::{Payload, Port};
use sidecore_vrio::wire::{
    DATA_HEADER_BYTES, FrameHeader, Kind, RequestBody, VERSION, device_flag,
};
use sidecore_vrio::{ClientOptions, Plain, Reason, Request, ServerOptions};

/// The station of an IOhost's second unit.
const ELSEWHERE: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 200]);

fn with_one_device() -> (Rig, TestStore, u16) {
    let mut rig = Rig::simple();
    let client = rig.add_client(ClientOptions::default());
    let store = TestStore::new();
    rig.add_device(client, "disk", Arc::new(store.clone()));
    let disk = rig.open(client, "disk");
    (rig, store, disk)
}

#[test]
fn every_operation_reaches_the_store_and_its_result_the_client() {
    let (mut rig, store, disk) = with_one_device();
    for (offset, len) in [(0, 512), (512, 4096), (8192, 7680), (65_536, 65_536)] {
        let bytes = pattern(len as u8, len);
        rig.write(0, disk, offset as u64, &bytes);
        assert!(store.get(|disk| disk.bytes[offset..offset + len] == bytes), "{len} bytes");
        assert!(rig.read(0, disk, offset as u64, len) == bytes, "{len} bytes");
    }
    assert_eq!(rig.run(0, disk, 5, Request::FLUSH), Ok(()));
    assert!(store.get(|disk| disk.durable == disk.bytes));
    store.set(|disk| disk.log.clear());
    rig.clients[0].fill(0, &pattern(9, 512));
    let durable = Request { fua: true, ..request(Operation::Write, 1024, 512) };
    assert_eq!(rig.run(0, disk, 0, durable), Ok(()));
    assert!(store.get(|disk| disk.durable[1024..1536] == pattern(9, 512)));
    let zeroes = Operation::WriteZeroes { may_unmap: true };
    for operation in [Operation::Discard, zeroes] {
        assert_eq!(rig.run(0, disk, 0, request(operation, 65_536, 1 << 20)), Ok(()));
    }
    assert_eq!(rig.read(0, disk, 65_536, 65_536), vec![0; 65_536]);
    let expected =
        [Operation::Write, Operation::Flush, Operation::Discard, zeroes, Operation::Read];
    assert_eq!(store.operations(), expected);
    for error in [BlockError::EIO, BlockError::NoSpace] {
        store.set(|disk| disk.fails = Some(error));
        assert_eq!(rig.run(0, disk, 0, request(Operation::Read, 0, 512)), Err(error));
    }
    let status = rig.export.status();
    assert_eq!(status.devices[0].counts.errors, 2);
    assert_eq!((status.devices[0].counts.writes, status.devices[0].in_flight), (5, 0));
    assert_eq!(status.sessions[0].peer, Some(LinkAddress::Ethernet(common::station(0))));
    assert_eq!((status.sessions[0].credit, status.sessions[0].in_flight), (128, 0));
    assert_eq!(status.sessions[0].counts.sessions, 1);
}

#[test]
fn a_device_without_a_write_cache_answers_when_the_write_is_durable() {
    let mut rig = Rig::simple();
    let client = rig.add_client(ClientOptions::default());
    let store = TestStore::new();
    let device = exported("disk", Arc::new(store.clone()));
    let device = sidecore_remote::export::ExportedDevice { write_cache: false, ..device };
    rig.export.add_device(rig.ids[client], &device).unwrap();
    let disk = rig.open(client, "disk");
    assert!(!rig.clients[0].client.device(disk).unwrap().has(device_flag::VOLATILE_CACHE));
    rig.write(client, disk, 0, &pattern(1, 4096));
    assert_eq!(store.operations(), [Operation::Write, Operation::Flush]);
}

#[test]
fn a_read_only_device_is_not_written() {
    let mut rig = Rig::simple();
    let client = rig.add_client(ClientOptions::default());
    let store = TestStore::new();
    let device = exported("disk", Arc::new(store.clone()));
    let device = sidecore_remote::export::ExportedDevice { read_only: true, ..device };
    rig.export.add_device(rig.ids[client], &device).unwrap();
    let disk = rig.open(client, "disk");
    let entry = *rig.clients[0].client.device(disk).unwrap();
    assert!(entry.has(device_flag::READ_ONLY) && !entry.has(device_flag::DISCARD));
    assert_eq!(&entry.serial, b"serial of disk\0\0\0\0\0\0");
    assert_eq!(
        rig.run(client, disk, 0, request(Operation::Write, 0, 512)),
        Err(BlockError::ReadOnly)
    );
    assert_eq!(rig.run(client, disk, 0, request(Operation::Read, 0, 512)), Ok(()));
    assert_eq!(store.operations(), [Operation::Read]);
}

#[test]
fn a_client_reaches_its_own_devices_only() {
    let (mut rig, store, _) = with_one_device();
    let other = rig.add_client(ClientOptions::default());
    let theirs = TestStore::new();
    rig.add_device(other, "theirs", Arc::new(theirs.clone()));
    let own = rig.open(other, "theirs");
    let foreign = rig.clients[other].client.open(&device_name("disk")).unwrap();
    let unknown = rig.clients[other].client.open(&device_name("nothing")).unwrap();
    rig.run_for(Nanos::from_millis(100));
    assert!(!rig.clients[other].client.is_ready(foreign));
    assert!(!rig.clients[other].client.is_ready(unknown));
    assert_eq!(rig.clients[other].client.listed().len(), 1);
    // A client that names the number of another one's device all the same.
    let status = rig.export.status();
    let session = status.sessions.iter().find(|session| &*session.client == "client1").unwrap();
    for number in [status.devices[0].number, 7] {
        let header = FrameHeader {
            version: VERSION,
            kind: Kind::Request.code(),
            session: session.session,
            counter: 100_000 + u64::from(number),
            incarnation: status.incarnation,
            ..FrameHeader::default()
        };
        let body = RequestBody {
            device: number,
            epoch: 1,
            sequence: 1,
            slot: 9,
            len_bytes: 512,
            ..RequestBody::default()
        };
        let head = [header.encode().as_slice(), &body.encode()].concat();
        let client = &mut rig.clients[other];
        let host = client.port.peers().name(LinkAddress::Ethernet(IOHOST));
        assert!(client.port.send(host, &head, Payload::NONE, (1, &mut Plain)));
    }
    rig.run_for(Nanos::from_millis(1));
    let counts = |rig: &mut Rig| rig.export.status().sessions[1].counts.dropped(Reason::Device);
    assert_eq!(counts(&mut rig), 2);
    assert!(store.operations().is_empty() && theirs.operations().is_empty());
    let _ = own;
}

#[test]
fn no_client_sees_the_bytes_of_another_one() {
    let slots = ServerOptions { slots: 4, ..ServerOptions::default() };
    let mut rig = Rig::new(Faults::default(), 0, slots);
    let options = ClientOptions { slots: 4, ..ClientOptions::default() };
    let geometry = Geometry::new(DISK_BYTES, 512);
    let store = TestStore::new();
    for client in 0..2 {
        rig.add_client(options);
        rig.add_device(client, "null", Arc::new(NullStore::new(geometry)));
        rig.add_device(client, "disk", Arc::new(store.clone()));
    }
    let disks: Vec<_> = (0..2).map(|c| (rig.open(c, "null"), rig.open(c, "disk"))).collect();
    for round in 0..20_u8 {
        let (writer, reader) = (usize::from(round % 2), usize::from(1 - round % 2));
        rig.write(writer, disks[writer].0, 0, &[0x5e; 65_536]);
        for client in [writer, reader] {
            assert_eq!(rig.read(client, disks[client].0, 0, 65_536), [0; 65_536]);
        }
        // A read that fails leaves no bytes, and nothing for the next one either.
        store.set(|disk| disk.fails = Some(BlockError::EIO));
        let read = request(Operation::Read, 0, 65_536);
        rig.clients[reader].fill(2, &[0xcc; 65_536]);
        assert_eq!(rig.run(reader, disks[reader].1, 2, read), Err(BlockError::EIO));
        let left = rig.clients[reader].bytes(2, 65_536);
        assert!(left.iter().all(|byte| [0, 0xcc].contains(byte)));
        store.set(|disk| disk.fails = None);
        assert_eq!(rig.read(reader, disks[reader].0, 0, 4096), [0; 4096]);
    }
}

#[test]
fn answered_writes_survive_an_iohost_that_restarts() {
    for helpers in [0, 2] {
        let faults =
            Faults { lost: 20_000, doubled: 20_000, overtaken: 20_000, ..Faults::default() };
        let mut rig = Rig::new(faults, helpers, ServerOptions::default());
        let client = rig.add_client(ClientOptions::default());
        let store = TestStore::new();
        rig.add_device(client, "disk", Arc::new(store.clone()));
        let disk = rig.open(client, "disk");
        for round in 0..5_u8 {
            for block in 0..20_u64 {
                rig.write(client, disk, block * 4096, &pattern(round + block as u8, 4096));
            }
            // Requests in flight end, too.
            store.set(|disk| disk.holds = true);
            rig.clients[0].fill(7, &pattern(77, 4096));
            let write = request(Operation::Write, 1 << 20, 4096);
            rig.clients[0].client.submit(7, disk, write).unwrap();
            rig.run_until(|_| store.get(|disk| disk.held > 0));
            rig.restart(&[]);
            assert_eq!(store.get(|disk| disk.channels), 0);
            store.set(|disk| (disk.holds, disk.held) = (false, 0));
            store.power_cut();
            rig.run_for(Nanos::from_millis(5));
            rig.add_device(client, "disk", Arc::new(store.clone()));
            rig.run_until(|rig| rig.clients[0].completed.len() == 1);
            assert_eq!(rig.clients[0].take(7), Some(Ok(())));
            for block in 0..20_u64 {
                let bytes = rig.read(client, disk, block * 4096, 4096);
                assert!(bytes == pattern(round + block as u8, 4096), "block {block}");
            }
            assert!(rig.read(client, disk, 1 << 20, 4096) == pattern(77, 4096));
        }
        assert!(rig.clients[0].stats.replayed.get() >= 100);
    }
}

#[test]
fn devices_come_grow_and_go_while_clients_use_them() {
    for helpers in [0, 2] {
        let mut rig = Rig::new(Faults::default(), helpers, ServerOptions::default());
        let client = rig.add_client(ClientOptions::default());
        // It is wanted before it is there.
        let disk = rig.clients[client].client.open(&device_name("disk")).unwrap();
        rig.run_for(Nanos::from_millis(10));
        assert!(!rig.clients[client].client.is_ready(disk));
        let store = TestStore::new();
        let number = rig.add_device(client, "disk", Arc::new(store.clone()));
        rig.run_until(|rig| rig.clients[client].client.is_ready(disk));
        let past = request(Operation::Read, DISK_BYTES - 4096, 8192);
        assert_eq!(rig.run(client, disk, 0, past), Err(BlockError::OutOfBounds));
        rig.export.resize_device(number, DISK_BYTES + 4099).unwrap();
        let entry =
            move |rig: &Rig| rig.clients[client].client.device(disk).map(|e| e.capacity_bytes);
        rig.run_until(|rig| entry(rig) == Some(DISK_BYTES + 4096));
        // The store has a request when the device is taken away.
        store.set(|disk| disk.holds = true);
        rig.clients[client].client.submit(3, disk, request(Operation::Write, 0, 4096)).unwrap();
        rig.run_until(|_| store.get(|disk| disk.held == 1));
        let gone = Arc::new(AtomicU32::new(0));
        let (told, late) = (Arc::clone(&gone), Arc::clone(&gone));
        let removed = Box::new(move || {
            told.fetch_add(1, Ordering::Relaxed);
        });
        rig.export.remove_device(number, removed).unwrap();
        let again = rig.export.remove_device(
            number,
            Box::new(move || {
                late.fetch_add(9, Ordering::Relaxed);
            }),
        );
        assert!(matches!(again, Err(ExportError::NoDevice)));
        rig.run_for(Nanos::from_millis(2));
        assert_eq!(
            (gone.load(Ordering::Relaxed), store.get(|disk| disk.channels)),
            (0, helpers + 1)
        );
        store.set(|disk| disk.holds = false);
        rig.run_until(|_| gone.load(Ordering::Relaxed) == 1);
        assert_eq!(store.get(|disk| disk.channels), 0, "its channels were closed before");
        assert!(rig.export.status().devices.is_empty());
        // Another device of this name has another number.
        let next = rig.add_device(client, "disk", Arc::new(TestStore::new()));
        assert_eq!(next, number + 1);
        // It is smaller than the user of the first one knows.
        rig.run_until(|rig| rig.clients[client].client.change(disk) == Some("it has shrunk"));
        assert!(!rig.clients[client].client.is_ready(disk));
        rig.export.resize_device(next, DISK_BYTES + 4096).unwrap();
        rig.run_until(|rig| rig.clients[client].client.is_ready(disk));
        rig.run_for(Nanos::from_millis(200));
        rig.clients[client].completed.clear();
        rig.write(client, disk, 0, &pattern(3, 512));
        assert!(rig.read(client, disk, 0, 512) == pattern(3, 512));
    }
}

#[test]
fn a_client_that_is_removed_has_no_session_any_more_and_others_have_theirs() {
    let (mut rig, store, disk) = with_one_device();
    let other = rig.add_client(ClientOptions::default());
    rig.add_device(other, "disk", Arc::new(TestStore::new()));
    let theirs = rig.open(other, "disk");
    store.set(|disk| disk.holds = true);
    rig.clients[0].client.submit(3, disk, request(Operation::Write, 0, 4096)).unwrap();
    rig.run_until(|_| store.get(|disk| disk.held == 1));
    rig.export.remove_client(rig.ids[0]).unwrap();
    assert!(matches!(rig.export.remove_client(rig.ids[0]), Err(ExportError::NoClient)));
    rig.run_until(|rig| !rig.clients[0].client.is_connected());
    rig.run_for(Nanos::from_millis(100));
    assert!(!rig.clients[0].client.is_connected());
    rig.write(other, theirs, 0, &pattern(1, 512));
    store.set(|disk| disk.holds = false);
    rig.run_for(Nanos::from_millis(10));
    assert!(rig.clients[0].completed.is_empty(), "it is told nothing any more");
    assert_eq!(store.get(|disk| disk.held), 0);
    // Its place is free for the next one.
    let spec = ClientSpec {
        name: "client0".into(),
        id: client_id(0),
        queues: 1,
        share: ClientShare::default(),
    };
    let again = rig.export.add_client(&spec).unwrap();
    assert!(matches!(rig.export.add_client(&spec), Err(ExportError::Client { .. })));
    rig.export.add_device(again, &exported("disk", Arc::new(store.clone()))).unwrap();
    rig.run_until(|rig| rig.clients[0].completed.len() == 1);
    assert_eq!(rig.clients[0].take(3), Some(Ok(())));
}

/// A client without a session is removed, and the next one has its place before the unit is polled,
/// as when a client is revoked.
#[test]
fn a_client_keeps_the_place_that_another_one_has_just_left() {
    let mut rig = Rig::simple();
    let share = ClientShare::default();
    let spec = ClientSpec { name: "gone".into(), id: client_id(40), queues: 2, share };
    let gone = rig.export.add_client(&spec).unwrap();
    rig.export.remove_client(gone).unwrap();
    let client = rig.add_client(ClientOptions::default());
    rig.add_device(client, "disk", Arc::new(TestStore::new()));
    let disk = rig.open(client, "disk");
    rig.write(client, disk, 0, &pattern(1, 4096));
    assert!(rig.read(client, disk, 0, 4096) == pattern(1, 4096));
}

#[test]
fn names_that_do_not_fit_and_doubles_are_refused() {
    let (mut rig, ..) = with_one_device();
    let store = Arc::new(TestStore::new());
    let mut add = |name: &str| {
        rig.export.add_device(rig.ids[0], &exported(name, store.clone())).map_err(|e| e.to_string())
    };
    assert_eq!(add("disk").unwrap_err(), "the client has a device disk already: use another name");
    for name in ["", &*"x".repeat(65)] {
        assert!(add(name).unwrap_err().ends_with("use a name of 1 to 64 bytes"));
    }
    assert!(add(&"x".repeat(64)).is_ok());
}

#[test]
fn a_unit_that_stops_answers_what_the_store_has_and_gives_its_parts_back() {
    let (mut rig, store, disk) = with_one_device();
    store.set(|disk| disk.holds = true);
    rig.clients[0].client.submit(3, disk, request(Operation::Write, 0, 4096)).unwrap();
    rig.run_until(|_| store.get(|disk| disk.held == 1));
    let told = Arc::new(AtomicU32::new(0));
    let stopped = Arc::clone(&told);
    rig.export.stop(Box::new(move |()| {
        stopped.fetch_add(1, Ordering::Relaxed);
    }));
    rig.run_for(Nanos::from_millis(1));
    store.set(|disk| disk.holds = false);
    assert_eq!(rig.export.poll(rig.now, 32), Polled::Finished);
    let Rig { export, mut clients, now, .. } = rig;
    export.finish();
    assert_eq!((told.load(Ordering::Relaxed), store.get(|disk| disk.channels)), (1, 0));
    clients[0].poll(now.after(Nanos::from_millis(1)));
    assert_eq!(clients[0].take(3), Some(Ok(())));
}

#[test]
fn an_idle_unit_sleeps_and_is_woken_by_a_frame() {
    let (mut rig, store, disk) = with_one_device();
    // No frame is under way.
    rig.run_for(Nanos::from_micros(50));
    let is_readable = |rig: &Rig| {
        let mut readable = false;
        rig.export.wake_fds(&mut |fd| {
            let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            readable |= rustix::event::poll(&mut poll, Some(&now)).unwrap() > 0;
        });
        readable
    };
    rig.export.on_wake();
    assert_eq!(rig.export.arm(), Arm::Armed);
    assert!(!is_readable(&rig));
    assert!(rig.export.deadline().is_none(), "an idle client costs nothing");
    rig.clients[0].client.submit(3, disk, request(Operation::Write, 0, 4096)).unwrap();
    rig.clients[0].poll(rig.now);
    // The simulated wire has no interrupt: it says when the frame is there.
    assert!(is_readable(&rig) || rig.export.deadline().is_some());
    rig.export.disarm();
    store.set(|disk| disk.holds = true);
    rig.run_until(|_| store.get(|disk| disk.held == 1));
    assert_eq!(rig.export.arm(), Arm::CannotSleep, "the store has to be polled");
}

#[test]
fn frames_without_sense_are_dropped_and_counted_and_neighbours_are_served() {
    let (mut rig, _, disk) = with_one_device();
    let mut hostile = TestClient::new(&rig.network, 66, ClientOptions::default());
    let host = hostile.port.peers().name(LinkAddress::Ethernet(IOHOST));
    let session = rig.export.status().sessions[0].session;
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 33
    };
    for round in 0..2000_u64 {
        let len = next() as usize % DATA_HEADER_BYTES;
        let mut head: Vec<u8> = (0..=len).map(|_| next() as u8).collect();
        if next() % 4 > 0 {
            head[0] = VERSION;
        }
        if head.len() >= 26 && next() % 2 > 0 {
            head[1] = (next() % 14) as u8;
            head[2..10].copy_from_slice(&session.to_le_bytes());
            head[18..26].copy_from_slice(&(next() % 2).to_le_bytes());
        }
        let len_bytes = next() as usize % 4000;
        let payload = Payload::Message { message: &[], len_bytes };
        assert!(hostile.port.send(host, &head, payload, (1, &mut Plain)));
        hostile.port.flush(rig.now);
        if round % 50 == 0 {
            rig.write(0, disk, 4096, &pattern(round as u8, 4096));
            assert!(rig.read(0, disk, 4096, 4096) == pattern(round as u8, 4096));
        }
        rig.step();
    }
    let status = rig.export.status();
    let own = &status.sessions[0].counts;
    let dropped: u64 = Reason::ALL
        .iter()
        .map(|reason| status.strangers.dropped(*reason) + own.dropped(*reason))
        .sum();
    assert!(dropped > 1500, "{dropped}");
}

/// An IOhost with two units, at two stations, that serve one device of one client.
fn two_units(store: &TestStore) -> (Rig, Box<Export<Plain>>) {
    let mut rig = Rig::simple();
    rig.add_client(ClientOptions::default());
    let device = exported("disk", Arc::new(store.clone()));
    rig.export.add_device(rig.ids[0], &device).unwrap();
    assert_eq!(rig.open(0, "disk"), 0);
    let link = rig.network.link(ELSEWHERE, &common::link_options()).unwrap();
    let (mut other, _) = common::iohost_on(Box::new(link), 1, 0, ServerOptions::default());
    let share = ClientShare::default();
    let spec = ClientSpec { name: "client0".into(), id: client_id(0), queues: 1, share };
    let id = other.add_client(&spec).unwrap();
    other.add_device(id, &device).unwrap();
    (rig, other)
}

/// The client is killed and starts again, at the other unit.
fn elsewhere(rig: &mut Rig) -> TestClient {
    let link = Box::new(rig.network.link(common::station(9), &common::link_options()).unwrap());
    let options = ClientOptions { life: 99, ..ClientOptions::default() };
    rig.clients.clear();
    TestClient::on(link, LinkAddress::Ethernet(ELSEWHERE), 0, options)
}

/// A client that is killed with requests that a limit holds back for minutes, and starts again.
#[test]
fn a_new_session_does_not_wait_for_the_limits_of_the_old_one() {
    let (mut rig, store, disk) = with_one_device();
    let limit = Limit { per_s: 1, burst: 1 };
    let limits = Limits { write_iops: Some(limit), ..Limits::default() };
    let limits = Some(Arc::new(ClientLimits::new(&limits)));
    rig.export.set_share(rig.ids[0], &ClientShare { limits, ..ClientShare::default() }).unwrap();
    for tag in 0..100 {
        let write = request(Operation::Write, tag * 4096, 4096);
        rig.clients[0].client.submit(tag, disk, write).unwrap();
    }
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(store.operations(), [Operation::Write], "the others have to wait");
    let link = Box::new(rig.network.link(common::station(9), &common::link_options()).unwrap());
    let options = ClientOptions { life: 99, ..ClientOptions::default() };
    let client = TestClient::on(link, LinkAddress::Ethernet(IOHOST), 0, options);
    rig.clients[0] = client;
    let begin = rig.now;
    let disk = rig.open(0, "disk");
    assert!(rig.now.since(begin) < Nanos::from_millis(500));
    assert_eq!(rig.read(0, disk, 0, 512).len(), 512);
    assert_eq!(store.operations(), [Operation::Write, Operation::Read]);
}

/// A write that a limit holds back at one unit, while the client comes back at another one and
/// writes there.
#[test]
fn a_queued_write_of_a_former_session_at_another_unit_is_never_executed() {
    let store = TestStore::new();
    let (mut rig, mut other) = two_units(&store);
    let limit = Limit { per_s: 100, burst: 1 };
    let limits = Limits { write_iops: Some(limit), ..Limits::default() };
    let limits = Some(Arc::new(ClientLimits::new(&limits)));
    rig.export.set_share(rig.ids[0], &ClientShare { limits, ..ClientShare::default() }).unwrap();
    let old = pattern(1, 4096);
    for tag in 0..3 {
        rig.clients[0].fill(tag, &old);
        let write = request(Operation::Write, tag * 4096, 4096);
        rig.clients[0].client.submit(tag, 0, write).unwrap();
    }
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(store.operations(), [Operation::Write], "the others have to wait");
    let mut client = elsewhere(&mut rig);
    let disk = client.client.open(&device_name("disk")).unwrap();
    let new = pattern(2, 4096);
    let mut is_written = false;
    let end = rig.now.after(Nanos::from_millis(100));
    while rig.now < end {
        client.poll(rig.now);
        other.poll(rig.now, 32);
        if client.client.is_ready(disk) && !std::mem::replace(&mut is_written, true) {
            for tag in 0..3 {
                client.fill(tag, &new);
                let write = request(Operation::Write, tag * 4096, 4096);
                client.client.submit(tag, disk, write).unwrap();
            }
        }
        rig.step();
    }
    assert_eq!(client.completed.iter().filter(|(_, result)| result.is_ok()).count(), 3);
    assert_eq!(store.operations(), [Operation::Write; 4]);
    assert!(store.get(|disk| disk.bytes[..3 * 4096] == [&new[..]; 3].concat()));
}

/// A client that comes back by another link queue, while the store has a write of its former
/// session there.
#[test]
fn a_late_write_of_a_former_session_at_another_unit_overwrites_nothing() {
    let store = TestStore::new();
    let (mut rig, mut other) = two_units(&store);
    store.set(|disk| disk.takes = Nanos::from_millis(3));
    let old = pattern(1, 4096);
    rig.clients[0].fill(3, &old);
    rig.clients[0].client.submit(3, 0, request(Operation::Write, 0, 4096)).unwrap();
    rig.run_until(|_| store.get(|disk| disk.held == 1));
    let mut client = elsewhere(&mut rig);
    let disk = client.client.open(&device_name("disk")).unwrap();
    let new = pattern(2, 4096);
    let mut is_written = false;
    let mut steps = 0;
    while client.completed.len() < 2 {
        client.poll(rig.now);
        other.poll(rig.now, 32);
        if client.client.is_ready(disk) && !is_written {
            is_written = true;
            assert_eq!(store.get(|disk| disk.held), 1, "the old write is late");
            store.set(|disk| disk.takes = Nanos::ZERO);
            client.fill(4, &new);
            client.client.submit(4, disk, request(Operation::Write, 0, 4096)).unwrap();
            client.client.submit(5, disk, request(Operation::Read, 8192, 4096)).unwrap();
        }
        if is_written && steps < 100 {
            // The other unit gives nothing to the store meanwhile.
            steps += 1;
            assert_eq!(store.operations(), [Operation::Write]);
            assert_ne!(other.poll(rig.now, 32), Polled::Finished);
        }
        rig.step();
    }
    assert!(steps == 100 && store.get(|disk| disk.bytes[..4096] == new));
    assert_eq!(store.operations(), [Operation::Write, Operation::Write, Operation::Read]);
}
