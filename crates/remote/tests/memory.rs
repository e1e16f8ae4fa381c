//! A client and an IOhost that share memory, whose frames are few.

mod common;

use std::sync::Arc;

use common::request;
use common::{STEP, TestClient, TestStore, client_id, device_name, exported, iohost_on, pattern};
use sidecore_block::Operation;
use sidecore_link::{LinkAddress, LinkOptions, MemoryLink, dropped_frames};
use sidecore_reactor::{Arm, EventFd, Pollable};
use sidecore_remote::export::{ClientId, ClientShare, ClientSpec, Export};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, Plain, ServerOptions};

#[test]
fn requests_pass_through_shared_memory_whole_and_both_sides_can_sleep() {
    let options = LinkOptions {
        receive_frames: 32,
        transmit_frames: 32,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    };
    let (host, client) = MemoryLink::pair(&options, EventFd::peer_signal).unwrap();
    let (mut export, _) = iohost_on(Box::new(host), 1, 0, ServerOptions::default());
    let spec = ClientSpec {
        name: "client".into(),
        id: client_id(3),
        queues: 1,
        share: ClientShare::default(),
    };
    let id = export.add_client(&spec).unwrap();
    let store = TestStore::new();
    export.add_device(id, &exported("disk", Arc::new(store.clone()))).unwrap();
    let options = ClientOptions { receive_frames: 32, ..ClientOptions::default() };
    let mut client = TestClient::on(Box::new(client), LinkAddress::Peer(0), 3, options);
    let disk = client.client.open(&device_name("disk")).unwrap();
    let mut now = Nanos::from_millis(1);
    let mut slept = 0;
    let mut run = |client: &mut TestClient, until: &dyn Fn(&TestClient) -> bool| {
        let end = now.after(Nanos::from_millis(5_000));
        while !until(client) {
            assert!(now < end, "it does not happen");
            client.poll(now);
            if export.arm() == Arm::Armed {
                slept += 1;
                export.disarm();
            }
            export.poll(now, 32);
            now = now.after(STEP);
        }
    };
    run(&mut client, &|client| client.client.is_ready(disk));
    for round in 0..50_u8 {
        let len = 512 * (1 + usize::from(round) * 5 % 128);
        let bytes = pattern(round, len);
        for tag in 0..8 {
            client.fill(tag, &bytes);
            let write = request(Operation::Write, tag * 65_536, len as u64);
            client.client.submit(tag, disk, write).unwrap();
        }
        run(&mut client, &|client| client.completed.len() == 8);
        assert!(client.completed.drain(..).all(|(_, result)| result.is_ok()));
        for tag in 0..8 {
            client.fill(tag, &vec![0xcc; len]);
            let read = request(Operation::Read, tag * 65_536, len as u64);
            client.client.submit(tag, disk, read).unwrap();
        }
        run(&mut client, &|client| client.completed.len() == 8);
        for (tag, result) in client.completed.drain(..).collect::<Vec<_>>() {
            assert_eq!(result, Ok(()));
            assert!(client.bytes(tag, len) == bytes, "{len} bytes");
        }
    }
    assert!(slept > 0);
    drop((export, client));
    assert_eq!(dropped_frames(), 0);
}

/// The store holds requests whose data are in the client's frames.
struct Held {
    export: Box<Export<Plain>>,
    id: ClientId,
    disk_number: u16,
    store: TestStore,
    client: TestClient,
    disk: u16,
    now: Nanos,
}

/// Twice as many as frames that a store may use at a time.
const HELD: u64 = 64;
const HELD_BYTES: usize = 4096;

impl Held {
    fn new() -> Self {
        let (host, client) =
            MemoryLink::pair(&LinkOptions::new(DATA_HEADER_BYTES), EventFd::peer_signal).unwrap();
        let (mut export, _) = iohost_on(Box::new(host), 1, 0, ServerOptions::default());
        let share = ClientShare::default();
        let spec = ClientSpec { name: "client".into(), id: client_id(3), queues: 1, share };
        let id = export.add_client(&spec).unwrap();
        let store = TestStore::new();
        let disk_number =
            export.add_device(id, &exported("disk", Arc::new(store.clone()))).unwrap();
        let options = ClientOptions::default();
        let mut client = TestClient::on(Box::new(client), LinkAddress::Peer(0), 3, options);
        let disk = client.client.open(&device_name("disk")).unwrap();
        let now = Nanos::from_millis(1);
        let mut held = Self { export, id, disk_number, store, client, disk, now };
        held.run(|held| held.client.client.is_ready(held.disk));
        held.store.set(|disk| disk.holds = true);
        for tag in 0..HELD {
            held.client.fill(tag, &pattern(tag as u8, HELD_BYTES));
            let write = request(Operation::Write, tag * 65_536, HELD_BYTES as u64);
            held.client.client.submit(tag, held.disk, write).unwrap();
        }
        held.run(|held| held.store.get(|disk| disk.held) == HELD as usize);
        held
    }

    fn step(&mut self) {
        self.client.poll(self.now);
        self.export.poll(self.now, 32);
        self.now = self.now.after(STEP);
    }

    fn run(&mut self, until: impl Fn(&Self) -> bool) {
        let end = self.now.after(Nanos::from_millis(5_000));
        while !until(self) {
            assert!(self.now < end, "it does not happen");
            self.step();
        }
    }

    fn written(&self, tag: u64) -> bool {
        let at = tag as usize * 65_536;
        let bytes = self.store.get(|disk| disk.bytes[at..at + HELD_BYTES].to_vec());
        bytes == pattern(tag as u8, HELD_BYTES)
    }
}

#[test]
fn frames_that_a_slow_store_uses_keep_their_data_and_others_pass() {
    let mut held = Held::new();
    // Longer than a session lives whose frames do not pass, and more rounds than the link has
    // frames.
    let (until, sent) =
        (held.now.after(Nanos::from_millis(3_000)), held.client.stats.frames_sent.get());
    while held.now < until {
        held.client.poll(held.now);
        held.export.poll(held.now, 32);
        held.now = held.now.after(Nanos::from_micros(500));
    }
    assert!(held.client.stats.frames_sent.get() > sent);
    assert_eq!((held.client.stats.sessions.get(), held.client.completed.len()), (1, 0));
    held.store.set(|disk| disk.holds = false);
    held.run(|held| held.client.completed.len() as u64 == HELD);
    assert!((0..HELD).all(|tag| held.written(tag)));
    // The slots' own buffers have the data of reads.
    held.client.completed.clear();
    for tag in 0..HELD {
        held.client.fill(tag, &[0xcc; HELD_BYTES]);
        let read = request(Operation::Read, tag * 65_536, HELD_BYTES as u64);
        held.client.client.submit(tag, held.disk, read).unwrap();
    }
    held.run(|held| held.client.completed.len() as u64 == HELD);
    assert!(
        (0..HELD).all(|tag| held.client.bytes(tag, HELD_BYTES) == pattern(tag as u8, HELD_BYTES))
    );
    drop(held);
    assert_eq!(dropped_frames(), 0);
}

#[test]
fn frames_outlive_their_client_until_the_store_has_ended() {
    let mut held = Held::new();
    held.export.remove_client(held.id).unwrap();
    let (removed, is_removed) = std::sync::mpsc::channel();
    held.export
        .remove_device(held.disk_number, Box::new(move || removed.send(()).unwrap()))
        .unwrap();
    for _ in 0..1000 {
        held.step();
    }
    assert!(is_removed.try_recv().is_err(), "the store has its requests");
    held.store.set(|disk| disk.holds = false);
    held.run(|_| is_removed.try_recv().is_ok());
    assert!((0..HELD).all(|tag| held.written(tag)));
    held.step();
    drop(held);
    assert_eq!(dropped_frames(), 0);
}

#[test]
fn frames_that_a_store_uses_go_back_when_the_unit_ends() {
    let held = Held::new();
    drop(held);
    assert_eq!(dropped_frames(), 0);
}
