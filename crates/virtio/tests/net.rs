//! Pairs of queues on a switch: merged buffers all or nothing, positions, and drivers that lie.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_net::contract::{QueueDriver, QueueRig, check_queue};
use sidecore_net::{
    PortConfig, PortCounts, PortId, PortStats, QueueId, Switch, SwitchOptions, SwitchUnit,
};
use sidecore_reactor::{EventFd, IdleMode, Pollable};
use sidecore_ring::driver::{Buffer, DriverRing};
use sidecore_ring::{RingFormat, RingLayout, RingState};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_telemetry::CounterSet;
use sidecore_units::Nanos;
use sidecore_virtio::QueueResources;
use sidecore_virtio::net::{NetDevice, NetOptions, NetPair};

const MEMORY_BYTES: u64 = 1 << 20;
/// The ring of the queue that sends; that of the other one is at 0.
const SENDING: u64 = 0x1_0000;
const DATA: u64 = 0x4_0000;
const BUFFER_BYTES: u32 = 1024;
const FORMATS: [RingFormat; 2] = [RingFormat::Split, RingFormat::Packed];

/// A guest with one NIC: queue 0 receives, queue 1 sends.
struct Guest {
    memory: GuestMemory,
    device: Arc<NetDevice>,
    layouts: [RingLayout; 2],
    rings: [DriverRing; 2],
    events: Vec<EventFd>,
    port: PortId,
    queue: QueueId,
    stats: Arc<PortStats>,
}

fn duplicate(event: &EventFd) -> Option<OwnedFd> {
    Some(event.as_fd().try_clone_to_owned().unwrap())
}

impl Guest {
    fn new(unit: &mut SwitchUnit, format: RingFormat, station: u8) -> Self {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: MEMORY_BYTES,
            file,
            file_offset_bytes: 0,
        }])
        .unwrap();
        let layouts = [0, SENDING].map(|at| RingLayout {
            event_idx: true,
            ..RingLayout::compact(UserAddress(at), format, 8)
        });
        let rings = layouts.map(|layout| DriverRing::new(&memory, &layout, 4, 2, None).unwrap());
        let options =
            NetOptions { packed: true, mac: [2, 0, 0, 0, 0, station], ..NetOptions::default() };
        let device = Arc::new(NetDevice::new("nic", options));
        let stats = Arc::<PortStats>::default();
        let port = unit
            .switch_mut()
            .add_port(Nanos(0), &format!("nic{station}"), PortConfig::station(), Arc::clone(&stats))
            .unwrap();
        let events = (0..4).map(|_| EventFd::new().unwrap()).collect::<Vec<_>>();
        let mut pair = NetPair::new(&device, 0);
        for (index, layout) in (0..).zip(layouts) {
            let resources = QueueResources {
                memory: memory.clone(),
                layout,
                features: device.options().features(),
                kick: duplicate(&events[usize::from(index) * 2]),
                call: duplicate(&events[usize::from(index) * 2 + 1]),
                err: None,
                log: None,
                is_enabled: true,
            };
            let fresh = RingState::fresh(format);
            pair.start(index, resources, fresh, EventFd::peer_signal).unwrap();
        }
        let queue = unit.attach(port, Box::new(pair)).unwrap();
        Self { memory, device, layouts, rings, events, port, queue, stats }
    }

    fn offer(&mut self, slot: u16, len_bytes: u32) {
        let at = DATA + u64::from(slot) * 0x1000;
        self.rings[0].describe(slot, &[Buffer::from_device(at, len_bytes)]).unwrap();
        self.rings[0].push(slot).unwrap();
        self.rings[0].publish();
    }

    fn send(&mut self, slot: u16, header: &PacketHeader, frame: &[u8]) {
        let at = DATA + 0x2_0000 + u64::from(slot) * 0x1000;
        let bytes = [&header.encode(), frame].concat();
        self.memory.write_slice(GuestAddress(at), &bytes, &mut RegionHint::default()).unwrap();
        let buffer = Buffer::to_device(at, bytes.len() as u32);
        self.rings[1].describe(slot, &[buffer]).unwrap();
        self.rings[1].push(slot).unwrap();
        self.rings[1].publish();
    }

    /// The next used buffer of the receive queue.
    fn used(&mut self) -> Option<(u16, Vec<u8>)> {
        let used = self.rings[0].pop().unwrap()?;
        let mut bytes = vec![0; used.written_bytes as usize];
        let at = GuestAddress(DATA + u64::from(used.slot) * 0x1000);
        self.memory.read_slice(at, &mut bytes, &mut RegionHint::default()).unwrap();
        Some((used.slot, bytes))
    }

    fn counts(&self) -> PortCounts {
        self.stats.counts()
    }
}

fn unit() -> SwitchUnit {
    SwitchUnit::new("lan", Switch::new(SwitchOptions::new(7)), IdleMode::Poll).unwrap()
}

fn turn(unit: &mut SwitchUnit, now: &mut u64) {
    *now += 1000;
    unit.poll(Nanos(*now), 64);
}

fn frame(to: u8, from: u8, len: usize) -> Vec<u8> {
    let head = [2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    head.into_iter().chain((head.len()..len).map(|at| at as u8)).collect()
}

/// 1526 bytes with the header need two buffers of 1024.
#[test]
fn a_frame_gets_all_of_its_buffers_or_none() {
    for format in FORMATS {
        let (mut unit, mut now) = (unit(), 0);
        let mut one = Guest::new(&mut unit, format, 1);
        let mut two = Guest::new(&mut unit, format, 2);
        let large = frame(2, 1, 1514);
        two.offer(0, BUFFER_BYTES);
        one.send(0, &PacketHeader::default(), &large);
        turn(&mut unit, &mut now);
        assert_eq!(two.used(), None, "{format:?}: one buffer is too few");
        two.offer(1, BUFFER_BYTES);
        turn(&mut unit, &mut now);
        let (first, second) = (two.used().unwrap(), two.used().unwrap());
        assert_eq!((first.0, second.0), (0, 1), "{format:?}");
        let whole = [&first.1[..], &second.1[..]].concat();
        let (header, rest) = whole.split_at(PacketHeader::BYTES);
        assert_eq!(PacketHeader::decode(header.try_into().unwrap()).num_buffers, 2);
        assert_eq!(rest, large);

        // No second buffer comes: the frame is dropped, and the first buffer serves the next one.
        two.offer(2, BUFFER_BYTES);
        one.send(1, &PacketHeader::default(), &large);
        for _ in 0..20 {
            turn(&mut unit, &mut now);
        }
        assert_eq!((two.used(), two.counts().dropped_no_buffers), (None, 1), "{format:?}");
        one.send(2, &PacketHeader::default(), &frame(2, 1, 64));
        turn(&mut unit, &mut now);
        let (slot, bytes) = two.used().unwrap();
        assert_eq!((slot, &bytes[PacketHeader::BYTES..]), (2, &frame(2, 1, 64)[..]));
        for _ in 0..3 {
            assert!(one.rings[1].pop().unwrap().is_some(), "its sender has every frame back");
        }
    }
}

#[test]
fn a_queue_that_stops_leaves_the_frames_that_it_did_not_take() {
    for format in FORMATS {
        let (mut unit, mut now) = (unit(), 0);
        let mut one = Guest::new(&mut unit, format, 1);
        let mut two = Guest::new(&mut unit, format, 2);
        two.offer(0, BUFFER_BYTES);
        one.send(0, &PacketHeader::default(), &frame(2, 1, 100));
        turn(&mut unit, &mut now);
        assert!(two.used().is_some());
        two.offer(1, BUFFER_BYTES);
        let queue: Box<dyn std::any::Any> = unit.detach(two.queue).unwrap();
        let mut pair = queue.downcast::<NetPair>().unwrap();
        let states = [pair.stop(0).unwrap(), pair.stop(1).unwrap()];
        assert!(pair.is_empty());
        assert_eq!(states[0].to_vring_base(format) & 0x7fff, 1, "one buffer was taken");
        assert_eq!(states[1], RingState::fresh(format));
        for (index, layout) in (0..).zip(two.layouts) {
            let resources = QueueResources {
                memory: two.memory.clone(),
                layout,
                features: two.device.options().features(),
                kick: duplicate(&two.events[0]),
                call: None,
                err: None,
                log: None,
                is_enabled: true,
            };
            let state = states[usize::from(index)];
            pair.start(index, resources, state, EventFd::peer_signal).unwrap();
        }
        two.queue = unit.attach(two.port, pair).unwrap();
        one.send(1, &PacketHeader::default(), &frame(2, 1, 200));
        turn(&mut unit, &mut now);
        assert_eq!(two.used().unwrap().1[PacketHeader::BYTES..], frame(2, 1, 200));
    }
}

#[test]
fn a_driver_that_mixes_up_its_buffers_breaks_its_own_nic() {
    let (mut unit, mut now) = (unit(), 0);
    let mut one = Guest::new(&mut unit, RingFormat::Split, 1);
    let mut two = Guest::new(&mut unit, RingFormat::Split, 2);
    let mut three = Guest::new(&mut unit, RingFormat::Split, 3);
    two.rings[0].describe(0, &[Buffer::to_device(DATA, 1024)]).unwrap();
    two.rings[0].push(0).unwrap();
    two.rings[0].publish();
    one.send(0, &PacketHeader::default(), &frame(2, 1, 64));
    turn(&mut unit, &mut now);
    assert!(two.device.health().reason().unwrap().contains("parts for the device to read"));
    three.offer(0, BUFFER_BYTES);
    one.send(1, &PacketHeader::default(), &frame(3, 1, 64));
    turn(&mut unit, &mut now);
    assert!(three.used().is_some(), "its neighbours live on");
    assert!(one.device.health().reason().is_none());
}

/// The driver of a NIC in the tests of the contract.
struct Driver {
    guest: Guest,
    sent: u16,
    offered: u16,
}

impl Driver {
    /// The slot of number `count`: rings have four.
    fn slot(count: &mut u16) -> u16 {
        *count += 1;
        *count % 4
    }
}

impl QueueDriver for Driver {
    fn send(&mut self, frame: &[u8]) {
        while self.guest.rings[1].pop().unwrap().is_some() {}
        let slot = Self::slot(&mut self.sent);
        self.guest.send(slot, &PacketHeader::default(), frame);
        if self.guest.rings[1].kick_wanted() {
            self.guest.events[2].signal();
        }
    }

    fn offer(&mut self, frames: usize) {
        for _ in 0..frames {
            let slot = Self::slot(&mut self.offered);
            self.guest.offer(slot, 2 * BUFFER_BYTES);
        }
    }

    fn received(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while let Some((_, bytes)) = self.guest.used() {
            frames.push(bytes[PacketHeader::BYTES..].to_vec());
        }
        frames
    }
}

#[test]
fn a_pair_keeps_the_contract_of_queues() {
    for format in FORMATS {
        check_queue(&|| {
            let mut unit = unit();
            let guest = Guest::new(&mut unit, format, 1);
            let queue = unit.detach(guest.queue).unwrap();
            QueueRig { queue, driver: Box::new(Driver { guest, sent: 0, offered: 0 }) }
        });
    }
}
