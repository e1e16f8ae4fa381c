//! A conversation of this version's engines, as another version can hear it.

use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::wire::{DeviceEntry, device_flag};
use sidecore_vrio::{Client, ClientOptions, Event as Change, OnDisconnect, Peer, Request};

use super::format::{Conversation, Event, Line, data, outcome};
use super::frame::{ANSWER, REQUEST, kind};
use crate::common::{DISK_BYTES, HOP, Rig, device, name, request};

/// The devices of each conversation: one to write to, and one that takes no writes.
pub fn devices() -> Vec<DeviceEntry> {
    let first = device(0);
    let flags = first.flags | device_flag::READ_ONLY;
    vec![first, DeviceEntry { device: 1, flags, name: name(1), ..first }]
}

/// A rig with [`devices`], whose client has opened both.
pub fn rig(options: ClientOptions) -> Rig {
    let options =
        ClientOptions { on_disconnect: OnDisconnect::Stall, replay_bytes: 256 << 10, ..options };
    let mut rig = Rig::new(options, sidecore_vrio::ServerOptions::default());
    assert_eq!(Client::open(&mut rig.client, &name(1)), Some(1));
    rig.devices = devices();
    rig.set_devices();
    rig
}

pub struct Recorder {
    rig: Rig,
    conversation: Conversation,
    /// Frames of the client, or of the IOhost, that are lost next: how many are not, and the kind.
    loses: Vec<(bool, usize, u8)>,
    tag: u64,
}

impl Recorder {
    fn event(&mut self, event: Event) {
        self.conversation.push((self.rig.now, Line::Event(event)));
    }

    /// Whether the link loses this frame.
    fn is_lost(&mut self, of_client: bool, frame: &[u8]) -> bool {
        let is_next = |(of, _, lost): &(bool, usize, u8)| *of == of_client && *lost == kind(frame);
        let Some(at) = self.loses.iter().position(is_next) else { return false };
        if self.loses[at].1 > 0 {
            self.loses[at].1 -= 1;
            return false;
        }
        self.loses.remove(at);
        true
    }

    fn carry(&mut self, of_client: bool) {
        let wire = if of_client { &mut self.rig.to_host } else { &mut self.rig.to_client };
        for frame in std::mem::take(&mut wire.frames) {
            let is_lost = self.is_lost(of_client, &frame);
            if !is_lost && of_client {
                self.rig.host_receives(Peer(9), &frame);
            } else if !is_lost {
                self.rig.client_receives(&frame);
            }
            self.conversation.push((self.rig.now, Line::Frame { of_client, is_lost, frame }));
        }
    }

    /// One hop: both sides send, and what they sent arrives.
    fn step(&mut self) {
        self.rig.poll_client();
        self.rig.poll_host();
        self.rig.now = self.rig.now.after(HOP);
        self.carry(true);
        self.carry(false);
        self.rig.execute();
        for stored in std::mem::take(&mut self.rig.disk.log) {
            self.event(Event::Store(stored));
        }
        while let Some(change) = self.rig.client.next_event() {
            let Change::Completed { tag, result } = change else { continue };
            let submitted = self.conversation.iter().find_map(|(_, line)| match line {
                Line::Event(Event::Submit { tag: it, request, .. }) if *it == tag => Some(*request),
                _ => None,
            });
            let request = submitted.expect("a request was submitted");
            let is_read = request.operation == Operation::Read && result.is_ok();
            let len = if is_read { request.len_bytes as usize } else { 0 };
            let data = self.rig.guest.bytes(tag)[..len].to_vec();
            self.event(Event::Done { tag, outcome: outcome(result).to_owned(), data });
        }
    }

    fn run_for(&mut self, time: Nanos) {
        let end = self.rig.now.after(time);
        while self.rig.now < end {
            self.step();
        }
    }

    /// Runs until all requests have ended, and the frames of that have arrived.
    fn settle(&mut self) {
        let end = self.rig.now.after(Nanos::from_millis(5_000));
        while self.rig.client.unanswered() > 0 || !self.rig.client.is_ready(0) {
            assert!(self.rig.now < end, "requests do not end");
            self.step();
        }
        self.run_for(Nanos::from_millis(1));
    }

    fn submit(&mut self, device: u16, request: Request) {
        self.tag += 1;
        submit(&mut self.rig, self.tag, device, request);
        self.event(Event::Submit { tag: self.tag, device, request });
    }

    fn lose(&mut self, of_client: bool, after: usize, kind: u8) {
        self.loses.push((of_client, after, kind));
    }

    fn limit(&mut self, slots: u16) {
        self.event(Event::Limit(slots));
        self.rig.host.set_slot_limit(self.rig.now, 0, slots);
    }
}

/// Submits a request to the rig's client, with the data that follow from its tag.
pub fn submit(rig: &mut Rig, tag: u64, device: u16, request: Request) {
    if request.operation == Operation::Write {
        let data = data(tag, request.len_bytes);
        rig.guest.bytes(tag)[..data.len()].copy_from_slice(&data);
    }
    rig.client.submit(tag, device, request).unwrap();
}

/// Every kind of frame, of request and of repair, and an IOhost that is killed.
pub fn record() -> Conversation {
    let rig = rig(ClientOptions { life: 0x1111_2222_3333_4444, ..ClientOptions::default() });
    let mut it = Recorder { rig, conversation: Vec::new(), loses: Vec::new(), tag: 0 };
    while !(it.rig.client.is_ready(0) && it.rig.client.is_ready(1)) {
        it.step();
    }
    it.run_for(Nanos::from_millis(5));
    requests(&mut it);
    repairs(&mut it);
    changes(&mut it);
    it.event(Event::End);
    let mut port =
        sidecore_vrio::slices::SlicePort { wire: &mut it.rig.to_host, data: &mut it.rig.guest };
    it.rig.client.end(it.rig.now, &mut port);
    it.rig.now = it.rig.now.after(HOP);
    it.carry(true);
    it.conversation
}

/// Each kind of request, with each status that the IOhost itself gives, and several at a time.
fn requests(it: &mut Recorder) {
    it.submit(0, request(Operation::Write, 0, 4096));
    it.submit(0, request(Operation::Write, 8192, 20_480));
    it.settle();
    it.submit(0, request(Operation::Read, 0, 4096));
    it.submit(0, request(Operation::Read, 8192, 20_480));
    it.submit(0, Request { fua: true, ..request(Operation::Write, 1024, 512) });
    it.settle();
    it.submit(0, request(Operation::Discard, 8192, 4096));
    it.submit(0, request(Operation::WriteZeroes { may_unmap: true }, 12_288, 512));
    it.submit(0, request(Operation::WriteZeroes { may_unmap: false }, 13_312, 512));
    it.settle();
    it.submit(0, Request::FLUSH);
    it.submit(0, request(Operation::Read, DISK_BYTES as u64, 512));
    it.submit(1, request(Operation::Write, 0, 512));
    it.submit(1, request(Operation::Read, 8192, 6144));
    it.settle();
    for index in 0..8 {
        it.submit(0, request(Operation::Write, 65_536 + index * 512, 512));
    }
    it.settle();
    for index in 0..8 {
        it.submit(0, request(Operation::Read, 65_536 + index * 512, 512));
    }
    it.settle();
}

/// Frames that are lost, and a store that takes its time.
fn repairs(it: &mut Recorder) {
    it.lose(true, 0, REQUEST);
    it.submit(0, request(Operation::Write, 131_072, 512));
    it.settle();
    it.lose(false, 0, ANSWER);
    it.submit(0, request(Operation::Write, 131_584, 512));
    it.settle();
    // The second of three segments.
    it.lose(true, 1, REQUEST);
    it.submit(0, request(Operation::Write, 163_840, 20_480));
    it.settle();
    it.lose(false, 1, ANSWER);
    it.submit(0, request(Operation::Read, 163_840, 20_480));
    it.settle();
    it.event(Event::Holds(true));
    it.rig.holds = true;
    it.submit(0, request(Operation::Write, 196_608, 4096));
    // Longer than the client waits before it asks.
    it.run_for(Nanos::from_millis(250));
    it.event(Event::Holds(false));
    it.rig.holds = false;
    it.settle();
}

/// Limits and devices that change, keepalives, and an IOhost that is killed.
fn changes(it: &mut Recorder) {
    it.limit(0);
    it.run_for(Nanos::from_millis(2));
    it.submit(0, request(Operation::Read, 0, 512));
    it.run_for(Nanos::from_millis(2));
    it.limit(16);
    it.settle();
    let bytes = 2 * DISK_BYTES as u64;
    it.event(Event::Grow(bytes));
    it.rig.devices[0].capacity_bytes = bytes;
    it.rig.set_devices();
    it.run_for(Nanos::from_millis(20));
    // Over a keepalive.
    it.run_for(Nanos::from_millis(800));
    // Two writes without a flush, which the client repeats to the next IOhost.
    it.submit(0, Request::FLUSH);
    it.settle();
    it.submit(0, request(Operation::Write, 262_144, 4096));
    it.submit(0, request(Operation::Write, 294_912, 20_480));
    it.settle();
    it.event(Event::Restart);
    it.rig.restart(true);
    it.submit(0, request(Operation::Read, 262_144, 4096));
    it.settle();
    it.submit(0, Request::FLUSH);
    it.submit(0, request(Operation::Read, 294_912, 20_480));
    it.settle();
}
