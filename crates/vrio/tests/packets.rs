//! Packets of a NIC: cut, lost, put together, delivered in order, or dropped and counted.

mod common;

use common::{HOP, Rig, request};
use proptest::prelude::*;
use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::wire::{
    DEVICE_NAME_BYTES, FrameHeader, Kind, MAX_PACKET_BYTES, MIN_FRAME_BYTES, NicEntry, PacketBody,
    device_flag, feature,
};
use sidecore_vrio::{
    ClientOptions, Nic, PACKET_PATIENCE, Packet, Peer, Reason, ServerOptions, packet_segment_bytes,
};

/// The name of the first buffer.
const NAME: u64 = 1 << 63;
/// The NIC's number at the IOhost.
const DEVICE: u16 = 7;
/// Buffers for each direction: those to the peer come first.
const BUFFERS: u16 = 8;

fn name() -> [u8; DEVICE_NAME_BYTES] {
    let mut name = [0; DEVICE_NAME_BYTES];
    name[..4].copy_from_slice(b"nic1");
    name
}

fn entry() -> NicEntry {
    NicEntry {
        device: DEVICE,
        flags: device_flag::LINK_UP,
        epoch: 5,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        name: name(),
        ..NicEntry::default()
    }
}

fn nic() -> Nic {
    let mut nic = Nic::new(NAME, BUFFERS);
    (BUFFERS..2 * BUFFERS).for_each(|buffer| nic.lend(buffer));
    nic
}

/// A client with a NIC at an IOhost.
struct Net {
    rig: Rig,
    /// The NIC's number at the client.
    number: u16,
    free: [Vec<u16>; 2],
}

/// To the IOhost, and to the client.
const UP: usize = 0;
const DOWN: usize = 1;

impl Net {
    fn new(frame_bytes: u32) -> Self {
        let options = ClientOptions { frame_bytes, ..ClientOptions::default() };
        let mut net = Self::unattached(options, ServerOptions::default());
        net.rig.run_until(Nanos::from_millis(50), |rig| rig.client.nic_entry(1).is_some());
        assert_eq!(net.rig.client.nic_entry(net.number).unwrap().mac, entry().mac);
        // The list is read, and nothing else is to be sent.
        net.rig.run_for(Nanos::from_millis(5));
        net
    }

    fn unattached(options: ClientOptions, server: ServerOptions) -> Self {
        let mut rig = Rig::connected(options, server);
        rig.devices.push(entry().to_device());
        rig.host.add_nic(DEVICE, nic());
        rig.set_devices();
        let number = rig.client.open_nic(&name(), nic()).unwrap();
        let free = [(0..BUFFERS).collect(), (0..BUFFERS).collect()];
        Self { rig, number, free }
    }

    /// Sends a packet, which takes a free buffer.
    fn send(&mut self, way: usize, bytes: &[u8]) {
        let buffer = self.free[way].pop().expect("a buffer is free");
        let packet = Packet { buffer, len_bytes: bytes.len() as u32 };
        let data = NAME + u64::from(buffer);
        let Rig { client, host, guest, buffers, client_stats, host_stats, .. } = &mut self.rig;
        if way == UP {
            guest.bytes(data)[..bytes.len()].copy_from_slice(bytes);
            client.nic_mut(self.number).unwrap().send(packet, client_stats);
        } else {
            buffers.bytes(data)[..bytes.len()].copy_from_slice(bytes);
            host.nic_mut(DEVICE).unwrap().0.send(packet, host_stats);
        }
    }

    /// The frames that both ends send now.
    fn frames(&mut self) -> [Vec<Vec<u8>>; 2] {
        self.rig.poll_client();
        self.rig.poll_host();
        for way in [UP, DOWN] {
            let Rig { client, host, .. } = &mut self.rig;
            let at_host = host.nic_mut(DEVICE).map(|(nic, _)| nic);
            let nic = if way == UP { client.nic_mut(self.number) } else { at_host };
            let nic = nic.unwrap();
            while let Some(buffer) = nic.next_sent() {
                self.free[way].push(buffer);
            }
        }
        [&mut self.rig.to_host, &mut self.rig.to_client]
            .map(|wire| std::mem::take(&mut wire.frames).into())
    }

    fn receive(&mut self, way: usize, frame: &[u8]) {
        if way == UP {
            self.rig.host_receives(Peer(9), frame);
        } else {
            self.rig.client_receives(frame);
        }
    }

    /// Packets that have arrived. Their buffers are lent again.
    fn arrived(&mut self, way: usize) -> Vec<Vec<u8>> {
        let Rig { client, host, guest, buffers, .. } = &mut self.rig;
        let (nic, data) = if way == UP {
            (host.nic_mut(DEVICE).map(|(nic, _)| nic), buffers)
        } else {
            (client.nic_mut(self.number), guest)
        };
        let nic = nic.unwrap();
        let mut all = Vec::new();
        while let Some(Packet { buffer, len_bytes }) = nic.next_arrived() {
            let bytes = data.bytes(NAME + u64::from(buffer));
            all.push(bytes[..len_bytes as usize].to_vec());
            // Bytes that a later packet does not cover would show.
            bytes.fill(0xdd);
            nic.lend(buffer);
        }
        all
    }

    /// One hop, without losses.
    fn step(&mut self) {
        let frames = self.frames();
        self.rig.now = self.rig.now.after(HOP);
        for (way, frames) in frames.into_iter().enumerate() {
            frames.iter().for_each(|frame| self.receive(way, frame));
        }
    }

    /// The frames of packets that are to be sent in one direction; others arrive.
    fn packets(&mut self, way: usize) -> Vec<Vec<u8>> {
        let mut frames = self.frames();
        let (packets, others) =
            std::mem::take(&mut frames[way]).into_iter().partition(|frame| is_packet(frame));
        frames[way] = others;
        for (way, frames) in frames.into_iter().enumerate() {
            frames.iter().for_each(|frame| self.receive(way, frame));
        }
        packets
    }

    /// The reason for which the IOhost drops this frame.
    fn drops(&mut self, frame: &[u8]) -> Option<Reason> {
        let before = self.rig.host_counts();
        self.receive(UP, frame);
        let after = self.rig.host_counts();
        Reason::ALL.iter().copied().find(|reason| after.dropped(*reason) > before.dropped(*reason))
    }
}

fn is_packet(frame: &[u8]) -> bool {
    frame[1] == Kind::Packet.code()
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + seed * 31) as u8).collect()
}

/// The frame with another counter and another body.
fn with_body(frame: &[u8], counter: u64, change: impl FnOnce(&mut PacketBody)) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[10..18].copy_from_slice(&counter.to_le_bytes());
    let at = FrameHeader::BYTES;
    let mut body = PacketBody::decode(frame[at..].first_chunk().unwrap());
    change(&mut body);
    frame[at..at + PacketBody::BYTES].copy_from_slice(&body.encode());
    frame
}

#[test]
fn packets_of_all_sizes_come_in_their_order_both_ways() {
    for frame_bytes in [MIN_FRAME_BYTES, 8_100] {
        let mut net = Net::new(frame_bytes);
        let segment = packet_segment_bytes(net.rig.client.frame_bytes(), 0) as usize;
        let sizes = [1, 26, 1512, segment - 1, segment, segment + 1, 3 * segment, 65_536];
        for way in [UP, DOWN] {
            let sent: Vec<_> = sizes.iter().map(|len| bytes(*len, *len)).collect();
            sent.iter().for_each(|packet| net.send(way, packet));
            net.step();
            assert!(net.arrived(way) == sent, "{frame_bytes} {way}");
            assert_eq!(net.free[way].len(), usize::from(BUFFERS));
        }
        let (client, host) = (net.rig.client_counts(), net.rig.host_counts());
        assert_eq!((client.packets_sent, client.packets_received), (8, 8));
        assert_eq!((host.packets_sent, host.packets_received), (8, 8));
        assert_eq!((client.packets_incomplete, host.packets_incomplete), (0, 0));
    }
}

#[test]
fn a_packet_without_a_segment_is_given_up_after_a_millisecond() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    // More often than there are buffers.
    for round in 1..=3 * u64::from(BUFFERS) {
        net.send(UP, &bytes(1, 3000));
        let frames = net.packets(UP);
        assert_eq!(frames.len(), 3);
        net.receive(UP, &frames[0]);
        net.receive(UP, &frames[2]);
        let due = net.rig.now.after(PACKET_PATIENCE);
        assert!(net.rig.host.deadline().is_some_and(|at| at <= due), "the IOhost is polled then");
        net.rig.now = Nanos(due.0 - 1);
        net.rig.poll_host();
        assert_eq!(net.rig.host_counts().packets_incomplete, round - 1);
        net.rig.now = due;
        assert!(!net.rig.host.is_idle(due));
        net.rig.poll_host();
        assert_eq!(net.rig.host_counts().packets_incomplete, round);
        assert_eq!(net.drops(&frames[1]), Some(Reason::Late));
        assert!(net.arrived(UP).is_empty());
    }
    net.send(UP, &bytes(2, 3000));
    net.step();
    assert!(net.arrived(UP) == [bytes(2, 3000)]);
}

#[test]
fn a_client_gives_packets_up_too() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    net.send(DOWN, &bytes(1, 3000));
    let frames = net.packets(DOWN);
    net.receive(DOWN, &frames[1]);
    let due = net.rig.now.after(PACKET_PATIENCE);
    assert!(net.rig.client.deadline() <= due);
    net.rig.now = due;
    assert!(net.rig.client.is_due(due));
    net.rig.poll_client();
    assert_eq!(net.rig.client_counts().packets_incomplete, 1);
    assert!(net.arrived(DOWN).is_empty());
}

#[test]
fn a_whole_packet_passes_those_in_front_of_it() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    for seed in 1..=3 {
        net.send(UP, &bytes(seed, 2000));
    }
    let frames = net.packets(UP);
    assert_eq!(frames.len(), 6);
    // 1 and 2 are begun; 2 is whole first.
    for at in [0, 2, 3] {
        net.receive(UP, &frames[at]);
    }
    assert!(net.arrived(UP) == [bytes(2, 2000)]);
    assert_eq!(net.rig.host_counts().packets_incomplete, 1);
    assert_eq!(net.drops(&frames[1]), Some(Reason::Late));
    // 3 comes with its end first.
    net.receive(UP, &frames[5]);
    net.receive(UP, &frames[4]);
    assert!(net.arrived(UP) == [bytes(3, 2000)]);
}

#[test]
fn a_fifth_incomplete_packet_passes_the_oldest() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    for seed in 1..=5 {
        net.send(UP, &bytes(seed, 2000));
    }
    let frames = net.packets(UP);
    for at in [2, 4, 6, 8] {
        net.receive(UP, &frames[at]);
    }
    assert_eq!(net.drops(&frames[0]), Some(Reason::Late), "older than those that are begun");
    assert_eq!(net.rig.host_counts().packets_incomplete, 0);
    net.send(UP, &bytes(6, 2000));
    let more = net.packets(UP);
    net.receive(UP, &more[0]);
    assert_eq!(net.rig.host_counts().packets_incomplete, 1);
    assert_eq!(net.drops(&frames[3]), Some(Reason::Late));
    net.receive(UP, &frames[5]);
    assert!(net.arrived(UP) == [bytes(3, 2000)]);
}

#[test]
fn a_frame_that_lies_about_its_packet_is_dropped_by_its_reason() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    net.send(UP, &bytes(1, 2000));
    let frames = net.packets(UP);
    let mut counter = 1_000;
    let mut drops = |net: &mut Net, change: &dyn Fn(&mut PacketBody)| {
        counter += 1;
        net.drops(&with_body(&frames[0], counter, change))
    };
    assert_eq!(drops(&mut net, &|body| body.device = 0), Some(Reason::Device), "a disk");
    assert_eq!(drops(&mut net, &|body| body.device = 99), Some(Reason::Device));
    assert_eq!(drops(&mut net, &|body| body.epoch = 4), Some(Reason::Epoch));
    assert_eq!(drops(&mut net, &|body| body.sequence = 0), Some(Reason::Late));
    for len_bytes in [0, 1, 1343, MAX_PACKET_BYTES + 1, 64 * 1344, u32::MAX] {
        let dropped = drops(&mut net, &|body| body.len_bytes = len_bytes);
        assert_eq!(dropped, Some(Reason::Segment), "{len_bytes}");
    }
    for offset_bytes in [1, 1344, 2000, u32::MAX] {
        let dropped = drops(&mut net, &|body| body.offset_bytes = offset_bytes);
        assert_eq!(dropped, Some(Reason::Segment), "{offset_bytes}");
    }
    assert_eq!(drops(&mut net, &|_| ()), None);
    assert_eq!(drops(&mut net, &|_| ()), Some(Reason::Duplicate));
    assert_eq!(drops(&mut net, &|body| body.len_bytes = 2001), Some(Reason::Segment));
    net.receive(UP, &with_body(&frames[1], 1_500, |_| ()));
    assert!(net.arrived(UP) == [bytes(1, 2000)]);
    // A number far ahead harms only its sender.
    assert_eq!(drops(&mut net, &|body| (body.sequence, body.len_bytes) = (u64::MAX, 1344)), None);
    assert_eq!(net.arrived(UP).len(), 1);
    net.send(UP, &bytes(2, 10));
    let frames = net.packets(UP);
    assert_eq!(net.drops(&with_body(&frames[0], 2_000, |_| ())), Some(Reason::Late));
}

#[test]
fn packets_without_buffers_are_dropped_and_counted() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    for round in 0..2 {
        for seed in 0..usize::from(BUFFERS) {
            net.send(UP, &bytes(seed, 100));
        }
        net.step();
        assert_eq!(net.rig.host_counts().dropped(Reason::Buffers), round * u64::from(BUFFERS));
    }
    let arrived = net.arrived(UP);
    assert_eq!(arrived.len(), usize::from(BUFFERS), "the first ones");
    net.send(UP, &bytes(9, 100));
    net.step();
    assert!(net.arrived(UP) == [bytes(9, 100)]);
}

#[test]
fn sessions_without_the_feature_have_no_nics() {
    let with = ClientOptions::default();
    let without = ClientOptions { features: feature::BUNDLES, ..with };
    let old = ServerOptions { features: feature::BUNDLES, ..ServerOptions::default() };
    for (options, server) in [(without, ServerOptions::default()), (with, old)] {
        let mut net = Net::unattached(options, server);
        net.rig.run_for(Nanos::from_millis(300));
        assert!(net.rig.client.nic_entry(net.number).is_none());
        assert_eq!(net.rig.client.listed().len(), 1, "the disk alone");
        net.send(UP, &bytes(1, 100));
        net.send(DOWN, &bytes(1, 100));
        assert!(net.frames().iter().flatten().all(|frame| !is_packet(frame)));
        assert_eq!(net.rig.client_counts().packets_unsent, 1);
        assert_eq!(net.rig.host_counts().packets_unsent, 1);
        assert_eq!(net.free[UP].len(), usize::from(BUFFERS));
        assert!(net.rig.client.is_ready(0), "the disk is served");
    }
}

#[test]
fn a_new_session_counts_anew_and_an_old_epoch_is_over() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    net.send(UP, &bytes(1, 2000));
    let old = net.packets(UP);
    net.receive(UP, &old[0]);
    net.rig.devices[1] = NicEntry { epoch: 6, ..entry() }.to_device();
    net.rig.set_devices();
    net.rig.run_until(Nanos::from_millis(50), |rig| {
        rig.client.nic_entry(1).is_some_and(|entry| entry.epoch == 6)
    });
    assert_eq!(net.rig.host_counts().packets_incomplete, 1, "its session is over");
    assert_eq!(net.drops(&old[1]), Some(Reason::Session));
    net.send(UP, &bytes(2, 2000));
    let new = net.packets(UP);
    let stale = with_body(&new[0], 900, |body| body.epoch = 5);
    assert_eq!(net.drops(&stale), Some(Reason::Epoch));
    new.iter().for_each(|frame| net.receive(UP, frame));
    assert!(net.arrived(UP) == [bytes(2, 2000)]);
}

#[test]
fn the_iohost_changes_and_removes_a_nic() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    let changed = NicEntry { mac: [2, 0, 0, 0, 0, 2], mtu: 9000, flags: 0, ..entry() };
    net.rig.devices[1] = changed.to_device();
    net.rig.set_devices();
    net.rig.run_for(Nanos::from_millis(20));
    let now = net.rig.client.nic_entry(net.number).unwrap();
    assert_eq!((now.mac, now.mtu, now.is_up()), (changed.mac, 9000, false));
    assert_eq!(net.rig.client_counts().sessions, 1, "in the same session");
    net.send(UP, &bytes(1, 100));
    net.step();
    assert_eq!(net.arrived(UP).len(), 1);
    net.send(UP, &bytes(1, 100));
    let frames = net.packets(UP);
    net.rig.devices.truncate(1);
    net.rig.set_devices();
    assert!(net.rig.host.nic_mut(DEVICE).is_some_and(|(nic, _)| !nic.is_attached()));
    assert_eq!(net.drops(&frames[0]), Some(Reason::Device), "it was on its way");
    net.rig.run_for(Nanos::from_millis(20));
    assert!(net.rig.client.nic_entry(net.number).is_none());
    net.send(UP, &bytes(1, 100));
    assert_eq!(net.rig.client_counts().packets_unsent, 1);
    // It comes back.
    net.rig.devices.push(entry().to_device());
    net.rig.set_devices();
    net.rig.run_for(Nanos::from_millis(300));
    net.send(DOWN, &bytes(3, 100));
    net.step();
    assert!(net.arrived(DOWN) == [bytes(3, 100)]);
    net.rig.client.close(net.number);
    net.rig.host.remove_nic(DEVICE);
    assert!(net.rig.host.nic_mut(DEVICE).is_none());
}

#[test]
fn a_link_without_room_keeps_packets_until_it_has_some() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    for way in [UP, DOWN] {
        net.send(way, &bytes(1, 5000));
        let wire = if way == UP { &mut net.rig.to_host } else { &mut net.rig.to_client };
        wire.refuses = 1;
        assert_eq!(net.packets(way).len(), 0);
        assert_eq!(net.free[way].len(), usize::from(BUFFERS) - 1, "its buffer is in use");
        let frames = net.packets(way);
        assert_eq!(frames.len(), 4);
        frames.iter().for_each(|frame| net.receive(way, frame));
        assert!(net.arrived(way) == [bytes(1, 5000)]);
    }
}

/// The devices that frames of packets name; 0 for other frames.
fn devices_of(frames: &[Vec<u8>]) -> Vec<u16> {
    let body = |frame: &[u8]| *frame[FrameHeader::BYTES..].first_chunk().unwrap();
    let device = |frame: &Vec<u8>| PacketBody::decode(&body(frame)).device;
    frames.iter().map(|frame| if is_packet(frame) { device(frame) } else { 0 }).collect()
}

#[test]
fn a_link_that_is_short_of_room_is_each_nics_and_the_answers_in_turn() {
    let mut net = Net::new(MIN_FRAME_BYTES);
    let mut second = NicEntry { device: DEVICE + 1, mac: [2, 0, 0, 0, 0, 2], ..entry() };
    second.name[3] = b'2';
    net.rig.devices.push(second.to_device());
    net.rig.host.add_nic(DEVICE + 1, nic());
    net.rig.set_devices();
    let number = net.rig.client.open_nic(&second.name, nic()).unwrap();
    net.rig.run_until(Nanos::from_millis(50), |rig| rig.client.nic_entry(number).is_some());
    net.rig.run_for(Nanos::from_millis(5));
    let frames = |net: &mut Net, way: usize| {
        let wire = if way == UP { &mut net.rig.to_host } else { &mut net.rig.to_client };
        wire.room = Some(2);
        devices_of(&net.frames()[way])
    };
    for buffer in 0..BUFFERS {
        for device in [net.number, number] {
            let Rig { client, client_stats, .. } = &mut net.rig;
            client.nic_mut(device).unwrap().send(Packet { buffer, len_bytes: 100 }, client_stats);
        }
    }
    for turn in 0..3 {
        assert_eq!(frames(&mut net, UP), [DEVICE, DEVICE], "{turn}");
        assert_eq!(frames(&mut net, UP), [DEVICE + 1, DEVICE + 1], "{turn}");
    }
    net.rig.to_host.room = None;
    net.frames();
    // Answers of a frame each, and packets.
    (1..=6).for_each(|tag| net.rig.submit(tag, request(Operation::Read, tag << 12, 1024)));
    net.rig.step();
    for buffer in 0..BUFFERS {
        for device in [DEVICE, DEVICE + 1] {
            let Rig { host, host_stats, .. } = &mut net.rig;
            host.nic_mut(device).unwrap().0.send(Packet { buffer, len_bytes: 100 }, host_stats);
        }
    }
    for (turn, device) in [DEVICE, DEVICE + 1, DEVICE].into_iter().enumerate() {
        assert_eq!(frames(&mut net, DOWN), [0, 0], "{turn}");
        assert_eq!(frames(&mut net, DOWN), [device, device], "{turn}");
    }
}

proptest! {
    /// On a wire that loses, doubles and reorders frames, packets come whole or not at all, in
    /// their order, and no buffer is lost.
    #[test]
    fn packets_come_whole_and_in_order_or_not_at_all(
        steps in prop::collection::vec(
            (prop::collection::vec(1_usize..6000, 0..4), any::<u64>()), 1..40),
        down in any::<bool>(),
    ) {
        let way = if down { DOWN } else { UP };
        let mut net = Net::new(MIN_FRAME_BYTES);
        let (mut sent, mut next) = (Vec::new(), 0);
        let mut late: Vec<Vec<u8>> = Vec::new();
        for (sizes, mut fate) in steps {
            for len in sizes {
                let packet = bytes(sent.len(), len);
                net.send(way, &packet);
                sent.push(packet);
            }
            let mut frames = std::mem::take(&mut late);
            frames.extend(net.packets(way));
            for frame in frames {
                match fate & 7 {
                    0 => {}
                    1 => late.push(frame),
                    2 => {
                        net.receive(way, &frame);
                        net.receive(way, &frame);
                    }
                    _ => net.receive(way, &frame),
                }
                fate = fate.rotate_right(3);
            }
            net.rig.now = net.rig.now.after(Nanos(fate % 700_000));
            for packet in net.arrived(way) {
                let at = sent[next..].iter().position(|one| *one == packet);
                prop_assert!(at.is_some(), "in order, once, and whole");
                next += at.unwrap_or(0) + 1;
            }
        }
        net.rig.now = net.rig.now.after(PACKET_PATIENCE);
        net.step();
        net.step();
        net.arrived(way);
        for seed in 0..usize::from(BUFFERS) {
            net.send(way, &bytes(seed, 4000));
        }
        net.step();
        prop_assert_eq!(net.arrived(way).len(), usize::from(BUFFERS), "all buffers are there");
    }
}
