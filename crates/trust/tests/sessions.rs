//! Sealed sessions of the engines: over a wire that loses, doubles, reorders and damages frames,
//! with keys that change all the time.

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_block::{BlockError, Operation};
use sidecore_telemetry::CounterSet as _;
use sidecore_trust::{Admission, ClientName, ClientTrust, HostTrust, Invitation, PrivateKey};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, Buffers, SlicePort, Transmit};
use sidecore_vrio::wire::{
    DEVICE_NAME_BYTES, DeviceEntry, FrameHeader, Kind, MIN_FRAME_BYTES, device_flag,
};
use sidecore_vrio::{
    Client, ClientOptions, Event, Host, HostOptions, Member, Peer, Reason, Request, VrioCounts,
    VrioStats,
};

const HOST: Peer = Peer(1);
const CLIENT: Peer = Peer(2);
const HOP: Nanos = Nanos::from_micros(20);
const BLOCKS: u64 = 64;
const BLOCK: usize = 4096;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 11
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count)
    }
}

#[derive(Default)]
struct Wire {
    frames: VecDeque<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Transmit for Wire {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        self.buffer = vec![0xee; len_bytes];
        Some(&mut self.buffer)
    }

    fn commit(&mut self, _to: Peer) {
        self.frames.push_back(std::mem::take(&mut self.buffer));
    }
}

struct Rig {
    now: Nanos,
    random: Random,
    client: Client<ClientTrust>,
    host: Host<HostTrust>,
    to_host: Wire,
    to_client: Wire,
    guest: Buffers,
    buffers: Buffers,
    disk: Vec<u8>,
    stats: [Arc<VrioStats>; 2],
    completed: Vec<(u64, Result<(), BlockError>)>,
    is_bad: bool,
    hop: Nanos,
    /// The mean delay of a frame beyond the hop.
    delay: Nanos,
    /// Delayed frames to the IOhost, and to the client, with the times of their arrival.
    delayed: [VecDeque<(Nanos, Vec<u8>)>; 2],
}

fn name() -> [u8; DEVICE_NAME_BYTES] {
    let mut name = [0; DEVICE_NAME_BYTES];
    name[..4].copy_from_slice(b"disk");
    name
}

impl Rig {
    fn new(seed: u64) -> Self {
        let iohost = PrivateKey::generate().unwrap();
        let key = PrivateKey::generate().unwrap();
        let client: ClientName = "vmhost1".parse().unwrap();
        let admission = Admission::Key(key.public());
        let invitation = Invitation { client, iohost: iohost.public(), key };
        let stats = [Arc::new(VrioStats::default()), Arc::new(VrioStats::default())];
        let trust = HostTrust::new(Some(iohost), vec![(client, admission)]).frames_per_key(70);
        let options = HostOptions { incarnation: 7, secret: [3, 4], ..HostOptions::default() };
        let mut host = Host::new(options, trust, Arc::clone(&stats[1]));
        let member = Member { client: client.to_wire(), queue: 0 };
        assert_eq!(host.add(member, Arc::clone(&stats[1])), Some(0));
        let entry = DeviceEntry {
            flags: device_flag::PRESENT,
            epoch: 1,
            capacity_bytes: BLOCKS * BLOCK as u64,
            block_bytes: 512,
            physical_block_bytes: 512,
            name: name(),
            ..DeviceEntry::default()
        };
        host.set_devices(Nanos(1), 0, &[entry]);
        let options = ClientOptions { client: client.to_wire(), ..ClientOptions::default() };
        let trust = ClientTrust::invited(&invitation).frames_per_key(50);
        let mut client = Client::new(options, HOST, trust, Arc::clone(&stats[0]));
        assert_eq!(client.open(&name()), Some(0));
        Self {
            now: Nanos::from_millis(1),
            random: Random(seed),
            client,
            host,
            to_host: Wire::default(),
            to_client: Wire::default(),
            guest: Buffers::default(),
            buffers: Buffers::default(),
            disk: vec![0; BLOCKS as usize * BLOCK],
            stats,
            completed: Vec::new(),
            is_bad: false,
            hop: HOP,
            delay: Nanos::ZERO,
            delayed: [VecDeque::new(), VecDeque::new()],
        }
    }

    /// Delays frames in one direction, in order. Returns those that arrive now.
    fn delay(&mut self, direction: usize, frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let delayed = &mut self.delayed[direction];
        for frame in frames {
            // From half of the mean to one and a half.
            let half = self.delay.0 / 2;
            let due = self.now.after(Nanos(half + self.random.next() % (2 * half + 1)));
            let due = delayed.back().map_or(due, |(last, _)| due.max(*last));
            delayed.push_back((due, frame));
        }
        let count = delayed.iter().take_while(|(due, _)| *due <= self.now).count();
        delayed.drain(..count).map(|(_, frame)| frame).collect()
    }

    /// The frames that arrive of those that were sent, if the wire is bad.
    fn pass(random: &mut Random, is_bad: bool, wire: &mut Wire) -> Vec<Vec<u8>> {
        let mut arrived = Vec::new();
        for frame in std::mem::take(&mut wire.frames) {
            if is_bad && random.one_in(12) {
                continue;
            }
            if is_bad && random.one_in(12) {
                arrived.push(frame.clone());
            }
            if is_bad && random.one_in(6) {
                // Not in the header: a wrong session is answered by an ENDING, which is a hint.
                let mut damaged = frame.clone();
                let at = FrameHeader::BYTES
                    + random.next() as usize % (damaged.len() - FrameHeader::BYTES);
                damaged[at] ^= 1 << (random.next() % 8);
                arrived.push(damaged);
            }
            arrived.push(frame);
        }
        if is_bad && arrived.len() > 1 && random.one_in(3) {
            let at = random.next() as usize % arrived.len();
            arrived.swap(0, at);
        }
        arrived
    }

    fn step(&mut self) {
        let mut port = SlicePort { wire: &mut self.to_host, data: &mut self.guest };
        self.client.poll(self.now, &mut port);
        let mut port = SlicePort { wire: &mut self.to_client, data: &mut self.buffers };
        self.host.poll(self.now, &mut port);
        self.now = self.now.after(self.hop);
        let frames = Self::pass(&mut self.random, self.is_bad, &mut self.to_host);
        for frame in self.delay(0, frames) {
            let mut port = SlicePort { wire: &mut self.to_client, data: &mut self.buffers };
            port.to_host(&mut self.host, (self.now, CLIENT), &mut Arrived::new(frame));
        }
        let frames = Self::pass(&mut self.random, self.is_bad, &mut self.to_client);
        for frame in self.delay(1, frames) {
            let mut port = SlicePort { wire: &mut self.to_host, data: &mut self.guest };
            port.to_client(&mut self.client, (self.now, HOST), &mut Arrived::new(frame));
        }
        while let Some(execute) = self.host.next_execute() {
            let Request { operation, offset_bytes, len_bytes, .. } = execute.request;
            let range = offset_bytes as usize..(offset_bytes + len_bytes) as usize;
            let data = &mut self.buffers.bytes(execute.place)[..range.len()];
            match operation {
                Operation::Read => data.copy_from_slice(&self.disk[range]),
                Operation::Write => self.disk[range].copy_from_slice(data),
                _ => {}
            }
            self.host.complete(execute.ticket, Ok(()));
        }
        while let Some(event) = self.client.next_event() {
            if let Event::Completed { tag, result } = event {
                self.completed.push((tag, result));
            }
        }
    }

    /// Steps until the IOhost sends a WELCOME, which does not arrive.
    fn caught_welcome(&mut self) -> Vec<u8> {
        loop {
            self.step();
            let mut port = SlicePort { wire: &mut self.to_client, data: &mut self.buffers };
            self.host.poll(self.now, &mut port);
            let is_welcome = |frame: &Vec<u8>| frame[1] == Kind::Welcome.code();
            if let Some(at) = self.to_client.frames.iter().position(is_welcome) {
                return self.to_client.frames.remove(at).unwrap();
            }
        }
    }

    fn client_receives(&mut self, frame: &[u8]) {
        let mut port = SlicePort { wire: &mut self.to_host, data: &mut self.guest };
        let mut arrived = Arrived::new(frame.to_vec());
        port.to_client(&mut self.client, (self.now, HOST), &mut arrived);
    }

    fn run_until(&mut self, until: impl Fn(&Self) -> bool) {
        for _ in 0..2_000_000 {
            if until(self) {
                return;
            }
            self.step();
        }
        panic!("it never happens: {:?}", [self.counts(0), self.counts(1)]);
    }

    fn counts(&self, end: usize) -> VrioCounts {
        self.stats[end].counts()
    }

    fn request(&mut self, tag: u64, operation: Operation, block: u64) {
        let (offset_bytes, len_bytes) = (block * BLOCK as u64, BLOCK as u64);
        let request = Request { operation, offset_bytes, len_bytes, fua: false };
        self.client.submit(tag, 0, request).unwrap();
    }
}

#[test]
fn a_bad_wire_shows_neither_data_nor_damage() {
    let mut rig = Rig::new(1);
    rig.run_until(|rig| rig.client.is_ready(0));
    rig.is_bad = true;
    let mut versions = vec![0_u8; BLOCKS as usize];
    for round in 0..60_u8 {
        let mut asked = Vec::new();
        for block in 0..BLOCKS {
            let tag = u64::from(round) << 32 | block;
            if rig.random.one_in(3) {
                versions[block as usize] = round + 1;
                let data = [round + 1; BLOCK];
                rig.guest.bytes(tag)[..BLOCK].copy_from_slice(&data);
                rig.request(tag, Operation::Write, block);
            } else {
                rig.request(tag, Operation::Read, block);
                asked.push((tag, block));
            }
        }
        rig.run_until(|rig| rig.completed.len() == BLOCKS as usize);
        assert!(rig.completed.drain(..).all(|(_, result)| result.is_ok()));
        for (tag, block) in asked {
            let read = &rig.guest.bytes(tag)[..BLOCK];
            assert!(read.iter().all(|byte| *byte == versions[block as usize]), "block {block}");
        }
    }
    for end in [0, 1] {
        let counts = rig.counts(end);
        assert!(counts.frames_sent > 1_000, "the keys of end {end} have changed many times");
        assert!(counts.dropped_seal > 50, "damage was found: {counts:?}");
    }
    assert_eq!(rig.counts(0).sessions, 1, "and no session was lost");
}

#[test]
fn data_are_not_on_the_wire() {
    let mut rig = Rig::new(2);
    rig.run_until(|rig| rig.client.is_ready(0));
    rig.guest.bytes(1)[..BLOCK].fill(0x5a);
    rig.request(1, Operation::Write, 3);
    let mut shown = false;
    while rig.completed.is_empty() {
        rig.step();
        for wire in [&rig.to_host, &rig.to_client] {
            shown |= wire.frames.iter().any(|frame| frame.windows(8).any(|part| part == [0x5a; 8]));
        }
        let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
        rig.client.poll(rig.now, &mut port);
        let sent = &rig.to_host.frames;
        shown |= sent.iter().any(|frame| frame.windows(8).any(|part| part == [0x5a; 8]));
    }
    assert!(!shown);
    assert_eq!(rig.disk[3 * BLOCK..][..BLOCK], [0x5a; BLOCK]);
}

#[test]
fn a_client_that_was_revoked_gets_no_further_session() {
    let mut rig = Rig::new(3);
    rig.run_until(|rig| rig.client.is_ready(0));
    rig.host.remove(0);
    rig.run_until(|rig| !rig.client.is_connected());
    let end = rig.now.after(Nanos::from_millis(500));
    rig.run_until(|rig| rig.now >= end);
    assert!(!rig.client.is_connected());
    assert!(rig.counts(1).sessions == 1);
}

#[test]
fn a_welcome_in_a_damaged_frame_uses_no_handshake_up() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(Damage, Reason); 3] = [
        // The incarnation, which is in clear.
        (|frame| frame[18] ^= 1, Reason::Incarnation),
        // A frame that shows less than what the message promises.
        (
            |frame| {
                frame.truncate(MIN_FRAME_BYTES as usize);
                let payload_bytes = MIN_FRAME_BYTES as u16 - FrameHeader::BYTES as u16;
                frame[28..30].copy_from_slice(&payload_bytes.to_le_bytes());
            },
            Reason::Malformed,
        ),
        // The message.
        (|frame| frame[FrameHeader::BYTES + 40 + 60] ^= 1, Reason::Seal),
    ];
    for (damage, reason) in damages {
        let mut rig = Rig::new(1);
        let welcome = rig.caught_welcome();
        let mut forged = welcome.clone();
        damage(&mut forged);
        for _ in 0..3 {
            let before = rig.counts(0).dropped(reason);
            rig.client_receives(&forged);
            assert!(!rig.client.is_connected());
            assert_eq!(rig.counts(0).dropped(reason), before + 1);
        }
        rig.client_receives(&welcome);
        assert!(rig.client.is_connected(), "{reason:?}");
        rig.run_until(|rig| rig.client.is_ready(0));
        assert_eq!(rig.counts(0).sessions, 1, "the keys are those of the IOhost");
    }
}

/// On hosts whose sidecores wait for a core, answers come later than the first HELLOs are repeated.
#[test]
fn a_session_begins_however_late_the_answers_come() {
    let mut failed = Vec::new();
    for delay_ms in [1, 4, 8, 15, 25, 40, 60, 100, 150, 250, 400] {
        for seed in 0..3 {
            let mut rig = Rig::new(seed);
            (rig.hop, rig.delay) = (Nanos::from_millis(1), Nanos::from_millis(delay_ms));
            let (begun, patience) = (rig.now, Nanos::from_millis(10_000));
            while !rig.client.is_connected() && rig.now.since(begun) < patience {
                rig.step();
            }
            let took_ms = rig.now.since(begun).0 / 1_000_000;
            // The attempts from which the client learns of the delay, and the last one.
            if took_ms > 20 * delay_ms + 200 {
                failed.push((delay_ms, seed, took_ms));
            }
        }
    }
    assert!(failed.is_empty(), "delay in ms, seed, time to a session in ms: {failed:?}");
}
