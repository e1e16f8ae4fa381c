//! A guest: a driver, the data that it expects on its disk, and its requests in flight.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_reactor::EventFd;
use sidecore_ring::driver::{Buffer, DriverRing, RingAreas};
use sidecore_ring::{RingFormat, RingLayout};
use sidecore_spec_virtio::blk::request_type::{FLUSH, IN, OUT};
use sidecore_spec_virtio::blk::{RequestHeader, status};
use sidecore_virtio::QueueResources;
use sidecore_virtio::blk::{BlkDevice, BlkOptions};

use crate::Random;

const RING_SIZE: u16 = 16;
const SLOTS: u16 = 5;
const MEMORY_BYTES: u64 = 256 << 10;
/// The header and status of each slot have a cache line.
const LINES: u64 = 0x1_0000;
const STATUS: u64 = 16;
const DATA: u64 = 0x2_0000;
/// The unit of this guest's requests. Each write fills a block with one byte.
const BLOCK_BYTES: u64 = 1024;
pub(crate) const BLOCKS: u64 = 32;
const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES / 512;

const UNKNOWN: u32 = 77;

#[derive(Clone, Copy, Debug)]
struct Flight {
    kind: u32,
    block: u64,
    byte: u8,
}

pub(crate) struct Guest {
    pub(crate) device: Arc<BlkDevice>,
    pub(crate) store: Arc<dyn BlockDevice>,
    memory: GuestMemory,
    layout: RingLayout,
    ring: DriverRing,
    pub(crate) kick: EventFd,
    call: EventFd,
    /// Whether the guest looks at its ring only after an interrupt.
    sleeps: bool,
    /// Whether the store may fail requests.
    faults: bool,
    flights: [Option<Flight>; SLOTS as usize],
    /// The byte in each block.
    disk: [u8; BLOCKS as usize],
    /// Requests still to be sent.
    pub(crate) wanted: u64,
    pub(crate) completed: u64,
    pub(crate) kicks: u64,
}

/// Guest memory at address 0.
pub(crate) fn memory(len_bytes: u64) -> GuestMemory {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, len_bytes).expect("its size");
    GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes,
        file,
        file_offset_bytes: 0,
    }])
    .expect("a mapping")
}

impl Guest {
    pub(crate) fn new(
        random: &mut Random,
        store: Arc<dyn BlockDevice>,
        faults: bool,
        wanted: u64,
    ) -> Self {
        let memory = memory(MEMORY_BYTES);
        let format = if random.once_in(2) { RingFormat::Split } else { RingFormat::Packed };
        let areas = RingAreas::of(format, RING_SIZE);
        let layout = RingLayout {
            format,
            size: RING_SIZE,
            descriptor_area: UserAddress(0),
            driver_area: UserAddress(areas.driver_offset_bytes as u64),
            device_area: UserAddress(areas.device_offset_bytes as u64),
            event_idx: random.once_in(2),
            indirect: false,
        };
        let mut ring = DriverRing::new(&memory, &layout, SLOTS, 3, None).expect("a ring");
        let sleeps = random.once_in(2);
        if sleeps {
            assert!(!ring.arm_calls(), "nothing was sent yet");
        } else {
            ring.suppress_calls();
        }
        let options = BlkOptions { packed: true, ..BlkOptions::default() };
        Self {
            device: Arc::new(BlkDevice::new("simulated", options, store.geometry())),
            store,
            memory,
            layout,
            ring,
            kick: EventFd::new().expect("an eventfd"),
            call: EventFd::new().expect("an eventfd"),
            sleeps,
            faults,
            flights: [None; SLOTS as usize],
            disk: [0; BLOCKS as usize],
            wanted,
            completed: 0,
            kicks: 0,
        }
    }

    /// The resources for a queue that serves this guest.
    pub(crate) fn resources(&self) -> QueueResources {
        let duplicate =
            |event: &EventFd| -> Option<OwnedFd> { event.as_fd().try_clone_to_owned().ok() };
        QueueResources {
            memory: self.memory.clone(),
            layout: self.layout,
            features: self.device.features(),
            kick: duplicate(&self.kick),
            call: duplicate(&self.call),
            err: None,
            log: None,
            is_enabled: true,
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.iter().flatten().count()
    }

    /// The guest's state, for the message about a hang.
    pub(crate) fn describe(&self) -> String {
        let stats = self.device.queue_stats(0);
        format!(
            "{:?} ring, event index {}, {}; {} requests in flight, of which the device has \
             completed {}; {} to come",
            self.layout.format,
            self.layout.event_idx,
            if self.sleeps { "called" } else { "polling" },
            self.in_flight(),
            if self.ring.has_used() { "some" } else { "none" },
            self.wanted,
        ) + &stats.map_or(String::new(), |stats| {
            format!(
                "; {} kicks sent, {} received, {} calls",
                self.kicks,
                stats.kicks.get(),
                stats.interrupts.get()
            )
        })
    }

    /// Takes a random step.
    pub(crate) fn step(&mut self, random: &mut Random) {
        if random.once_in(3) {
            self.look();
        } else {
            self.submit(random);
        }
    }

    fn submit(&mut self, random: &mut Random) {
        let mut sent = false;
        for _ in 0..=random.below(SLOTS.into()) {
            let Some(slot) = self.flights.iter().position(Option::is_none) else { break };
            // Overlapping requests in flight have no defined outcome, so the guest sends none.
            let block = random.below(BLOCKS);
            if self.wanted == 0 || self.flights.iter().flatten().any(|flight| flight.block == block)
            {
                break;
            }
            self.wanted -= 1;
            sent = true;
            let kind = match random.below(10) {
                0 => FLUSH,
                1 => UNKNOWN,
                2..6 => OUT,
                _ => IN,
            };
            let flight = Flight { kind, block, byte: random.below(256) as u8 };
            self.send(slot, flight);
            self.flights[slot] = Some(flight);
        }
        if !sent {
            return;
        }
        self.ring.publish();
        if self.ring.kick_wanted() {
            self.kicks += 1;
            self.kick.signal();
        }
    }

    fn send(&mut self, slot: usize, flight: Flight) {
        let (line, data) = (LINES + slot as u64 * 64, DATA + slot as u64 * BLOCK_BYTES);
        let header = RequestHeader { kind: flight.kind, sector: flight.block * SECTORS_PER_BLOCK };
        self.write(line, &header.encode());
        self.write(line + STATUS, &[0xff]);
        let fill = if flight.kind == OUT { flight.byte } else { !self.disk[flight.block as usize] };
        self.write(data, &[fill; BLOCK_BYTES as usize]);
        let header = Buffer::to_device(line, RequestHeader::BYTES as u32);
        let status = Buffer::from_device(line + STATUS, 1);
        let chain = match flight.kind {
            OUT => vec![header, Buffer::to_device(data, BLOCK_BYTES as u32), status],
            IN => vec![header, Buffer::from_device(data, BLOCK_BYTES as u32), status],
            _ => vec![header, status],
        };
        let slot = slot as u16;
        self.ring.describe(slot, &chain).expect("a free slot");
        self.ring.push(slot).expect("a free slot");
    }

    /// Takes completions, as a driver does: a driver that sleeps looks only after an interrupt, and
    /// then until the ring is empty *after* it has enabled interrupts again.
    pub(crate) fn look(&mut self) {
        if self.sleeps && self.call.drain() == 0 {
            return;
        }
        loop {
            while let Some(used) = self.ring.pop().expect("the device gives back what it was given")
            {
                self.complete(used.slot, used.written_bytes);
            }
            if !self.sleeps || !self.ring.arm_calls() {
                return;
            }
        }
    }

    fn complete(&mut self, slot: u16, written_bytes: u32) {
        let flight = self.flights[usize::from(slot)].take().expect("in flight");
        self.completed += 1;
        let mut status = [0];
        self.read(LINES + u64::from(slot) * 64 + STATUS, &mut status);
        let expected = if flight.kind == UNKNOWN { status::UNSUPP } else { status::OK };
        if status[0] != expected {
            assert!(
                self.faults && status[0] == status::IOERR,
                "status {} of {flight:?}",
                status[0]
            );
            return;
        }
        match flight.kind {
            OUT => self.disk[flight.block as usize] = flight.byte,
            IN => {
                let mut data = [0; BLOCK_BYTES as usize];
                self.read(DATA + u64::from(slot) * BLOCK_BYTES, &mut data);
                assert_eq!(
                    data, [self.disk[flight.block as usize]; BLOCK_BYTES as usize],
                    "{flight:?}"
                );
                assert_eq!(u64::from(written_bytes), BLOCK_BYTES + 1);
            }
            _ => assert_eq!(written_bytes, 1),
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(GuestAddress(address), bytes, &mut RegionHint::default())
            .expect("in range");
    }

    fn read(&self, address: u64, bytes: &mut [u8]) {
        self.memory
            .read_slice(GuestAddress(address), bytes, &mut RegionHint::default())
            .expect("in range");
    }
}
