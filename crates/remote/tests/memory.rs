//! A client and an IOhost that share memory, whose frames are few.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{
    STEP, TestClient, TestStore, client_id, device_name, exported, iohost_on, pattern, request,
};
use sidecore_block::Operation;
use sidecore_link::{
    LinkAddress, LinkDescription, LinkOptions, LinkState, Medium, MemoryEnd, MemoryLink,
    dropped_frames, open,
};
use sidecore_reactor::{Arm, EventFd, Pollable};
use sidecore_remote::export::{ClientId, ClientShare, ClientSpec, Export};
use sidecore_units::Nanos;
use sidecore_vrio::port::{Payload, Port};
use sidecore_vrio::wire::{DATA_HEADER_BYTES, FrameHeader, Kind, RequestBody, VERSION};
use sidecore_vrio::{ClientOptions, Plain, Reason, ServerOptions};

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

/// A client that floods, and others, at one IOhost: each has a channel of its own.
struct Flooded {
    export: Box<Export<Plain>>,
    /// The one that floods, the victim, and others that have one request in flight each.
    clients: Vec<TestClient>,
    disks: Vec<u16>,
    stores: Vec<TestStore>,
    now: Nanos,
    _directory: tempfile::TempDir,
}

/// In a poll: a share of the flood, and its last frame.
const SENT_BYTES: u64 = 8192 + 8100;

impl Flooded {
    fn new(count: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wire.sock");
        let options = LinkOptions::new(DATA_HEADER_BYTES);
        let end = |end| {
            let medium = Medium::Memory { path: path.clone(), end };
            open(&LinkDescription { medium, queues: 1, options }).unwrap().remove(0)
        };
        let host = end(MemoryEnd::Listen { users: Vec::new(), clients: count.into() });
        let (mut export, _) = iohost_on(host, 1, 0, ServerOptions::default());
        let stores: Vec<_> = (0..count).map(|_| TestStore::new()).collect();
        let client = |(number, store): (u8, &TestStore)| {
            let share = ClientShare::default();
            let name = format!("client{number}").into();
            let spec = ClientSpec { name, id: client_id(number), queues: 1, share };
            let id = export.add_client(&spec).unwrap();
            let store = Arc::new(store.clone());
            export.add_device(id, &exported("disk", store)).unwrap();
            let mut link = end(MemoryEnd::Connect);
            let start = Instant::now();
            while link.state() != LinkState::Up {
                assert!(start.elapsed() < Duration::from_secs(20), "the link does not come up");
                link.receive(Nanos::ZERO, 0, &mut Vec::new());
                std::thread::yield_now();
            }
            TestClient::on(link, LinkAddress::Peer(0), number, ClientOptions::default())
        };
        let mut clients: Vec<_> = (0..).zip(&stores).map(client).collect();
        let open = |client: &mut TestClient| client.client.open(&device_name("disk")).unwrap();
        let disks = clients.iter_mut().map(open).collect();
        let now = Nanos::from_millis(1);
        let mut rig = Self { export, clients, disks, stores, now, _directory: directory };
        let start = Instant::now();
        let is_ready = |(client, disk): (&TestClient, &u16)| client.client.is_ready(*disk);
        while !rig.clients.iter().zip(&rig.disks).all(is_ready) {
            assert!(start.elapsed() < Duration::from_secs(20), "no session begins");
            rig.clients.iter_mut().for_each(|client| client.poll(rig.now));
            rig.poll_iohost();
            std::thread::yield_now();
        }
        rig
    }

    fn poll_iohost(&mut self) {
        for client in 2..self.clients.len() {
            self.clients[client].poll(self.now);
            if let Some((tag, _)) = self.clients[client].completed.pop() {
                self.read(client, tag, 4096);
                self.clients[client].poll(self.now);
            }
        }
        self.export.poll(self.now, 32);
        self.now = self.now.after(STEP);
    }

    fn read(&mut self, client: usize, tag: u64, len_bytes: u64) {
        let read = request(Operation::Read, tag % 32 * len_bytes, len_bytes);
        self.clients[client].client.submit(tag, self.disks[client], read).unwrap();
    }

    /// Frames of the flood that were taken so far, and bytes that were sent to all.
    fn served(&mut self) -> [u64; 2] {
        let status = self.export.status();
        let others = status.sessions[1..].iter().map(|session| session.counts.frames_received);
        let taken = status.link_counts.received - others.sum::<u64>();
        [taken, status.link_counts.sent_bytes]
    }

    /// Has the victim read while `flood` is repeated, and checks how much of it the IOhost serves
    /// from the moment at which a request has just missed a poll until its answer.
    fn check(&mut self, name: &str, flood: &mut dyn FnMut(&mut Self)) {
        let others = self.clients.len() as u64 - 2;
        (2..self.clients.len()).for_each(|client| self.read(client, 0, 4096));
        // Its queue is full, and the victim has sent something.
        for _ in 0..20 {
            flood(self);
        }
        let mut late = 0;
        for round in 0..200 {
            let before = self.served();
            flood(self);
            self.poll_iohost();
            self.read(1, round, 4096);
            let mut polls = 1;
            while self.clients[1].completed.is_empty() {
                self.clients[1].poll(self.now);
                flood(self);
                self.poll_iohost();
                self.clients[1].poll(self.now);
                polls += 1;
            }
            assert_eq!(self.clients[1].take(round), Some(Ok(())), "{name}, round {round}");
            late += u64::from(polls > 2);
            let after = self.served();
            let [taken, sent] = [0, 1].map(|at: usize| after[at] - before[at]);
            assert!(polls <= 3, "{name}, round {round}: {polls} polls");
            if round == 0 {
                // The IOhost did not know of this client's requests.
                continue;
            }
            // As many as the others have in all.
            let most = polls * others.max(1);
            assert!(taken <= most, "{name}, round {round}: {taken} frames taken");
            let most = polls * (SENT_BYTES + 4200 * others) + 4200;
            assert!(sent <= most, "{name}, round {round}: {sent} bytes sent");
        }
        assert!(late <= 4, "{name}: {late} requests behind a PING");
    }

    /// Sends frames with this head as long as there is room.
    fn send_heads(&mut self, mut head: impl FnMut() -> Vec<u8>) {
        let port = &mut self.clients[0].port;
        let host = port.peers().name(LinkAddress::Peer(0));
        for _ in 0..32 {
            if !port.send(host, &head(), Payload::NONE, (1, &mut Plain)) {
                break;
            }
        }
        port.flush(self.now);
    }
}

#[test]
fn a_flood_of_requests_delays_a_victim_by_as_many_as_the_others_have() {
    for (len_bytes, clients) in [(512, 2), (4096, 2), (65_536, 2), (4096, 9), (65_536, 9)] {
        let mut rig = Flooded::new(clients);
        let mut free: Vec<u64> = (0..200).collect();
        let mut answered = 0;
        rig.check(&format!("reads of {len_bytes} bytes"), &mut |rig| {
            for tag in free.drain(..) {
                rig.read(0, tag, len_bytes);
            }
            rig.clients[0].poll(rig.now);
            answered += rig.clients[0].completed.len();
            free.extend(rig.clients[0].completed.drain(..).map(|(tag, _)| tag));
        });
        assert!(answered > 40, "the flood has its share: {answered}");
        if clients > 2 {
            continue;
        }
        // The victim sends nothing for a while: whole batches.
        rig.now = rig.now.after(Nanos::from_millis(20));
        let before = rig.served();
        rig.poll_iohost();
        let sent = rig.served()[1] - before[1];
        assert!(sent >= 30 * len_bytes.min(4096), "{len_bytes} bytes: {sent} bytes sent");
    }
}

#[test]
fn a_flood_beyond_the_credit_is_dropped_and_delays_a_victim_by_a_frame() {
    let mut rig = Flooded::new(2);
    rig.stores[0].set(|disk| disk.holds = true);
    (0..128).for_each(|tag| rig.read(0, tag, 4096));
    for _ in 0..300 {
        rig.clients[0].poll(rig.now);
        rig.poll_iohost();
    }
    assert_eq!(rig.stores[0].get(|disk| disk.held), 128);
    let status = rig.export.status();
    let (session, incarnation) = (status.sessions[0].session, status.incarnation);
    let (device, mut counter) = (status.devices[0].number, 100_000_u64);
    rig.check("requests beyond the credit", &mut |rig| {
        rig.send_heads(|| {
            counter += 1;
            let kind = Kind::Request.code();
            let header = FrameHeader {
                version: VERSION,
                kind,
                session,
                counter,
                incarnation,
                ..FrameHeader::default()
            };
            let (slot, sequence) = ((counter % 128) as u16, counter as u32);
            let body = RequestBody {
                device,
                slot,
                sequence,
                epoch: 1,
                len_bytes: 512,
                ..RequestBody::default()
            };
            [header.encode().as_slice(), &body.encode()].concat()
        });
    });
    let counts = rig.export.status().sessions[0].counts.clone();
    assert!(counts.dropped(Reason::Slot) >= 400, "{counts:?}");
    assert_eq!(rig.stores[0].get(|disk| disk.held), 128);
}

#[test]
fn a_flood_of_garbage_delays_a_victim_by_a_frame() {
    let mut rig = Flooded::new(2);
    let mut number = 0_u64;
    rig.check("garbage", &mut |rig| {
        rig.send_heads(|| {
            number += 1;
            let bytes = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
            bytes.iter().copied().cycle().take(1 + number as usize % 80).collect()
        });
    });
    let status = rig.export.status();
    let dropped: u64 = Reason::ALL.iter().map(|reason| status.strangers.dropped(*reason)).sum();
    assert!(dropped >= 400, "{dropped}");
    assert_eq!(status.sessions[1].counts.sessions, 1);
}
