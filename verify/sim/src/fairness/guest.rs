//! A guest that keeps its queue full.

use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, UserAddress};
use sidecore_ring::driver::{Buffer, DriverRing, RingAreas};
use sidecore_ring::{RingFormat, RingLayout};
use sidecore_spec_virtio::blk::{RequestHeader, request_type};
use sidecore_virtio::QueueResources;
use sidecore_virtio::blk::{BlkDevice, BlkOptions};

use crate::guest::memory;

const MEMORY_BYTES: u64 = 512 << 10;
/// The header and status of each slot have a cache line.
const LINES: u64 = 0x1_0000;
const STATUS: u64 = 16;
const DATA: u64 = 0x2_0000;
const REQUEST_BYTES: u64 = 512;
const BUFFERS: u16 = 3;

/// The size of a volume, which all requests read.
pub(super) const VOLUME_BYTES: u64 = 64 << 10;

/// A driver that sends each read again as soon as it is completed.
pub(super) struct SaturatingGuest {
    pub(super) device: Arc<BlkDevice>,
    memory: GuestMemory,
    layout: RingLayout,
    ring: DriverRing,
    idle: Vec<u16>,
    pub(super) served: u64,
}

impl SaturatingGuest {
    pub(super) fn new(store: &dyn BlockDevice, depth: u16) -> Self {
        let memory = memory(MEMORY_BYTES);
        let size = (depth * BUFFERS).next_power_of_two();
        let areas = RingAreas::of(RingFormat::Split, size);
        let layout = RingLayout {
            format: RingFormat::Split,
            size,
            descriptor_area: UserAddress(0),
            driver_area: UserAddress(areas.driver_offset_bytes as u64),
            device_area: UserAddress(areas.device_offset_bytes as u64),
            event_idx: true,
            indirect: false,
        };
        let mut ring = DriverRing::new(&memory, &layout, depth, BUFFERS, None).expect("a ring");
        ring.suppress_calls();
        let guest = Self {
            device: Arc::new(BlkDevice::new("greedy", BlkOptions::default(), store.geometry())),
            memory,
            layout,
            ring,
            idle: (0..depth).collect(),
            served: 0,
        };
        guest.described()
    }

    fn described(mut self) -> Self {
        for &slot in &self.idle {
            let (line, data) =
                (LINES + u64::from(slot) * 64, DATA + u64::from(slot) * REQUEST_BYTES);
            let sector = u64::from(slot) % (VOLUME_BYTES / REQUEST_BYTES);
            let header = RequestHeader { kind: request_type::IN, sector }.encode();
            self.memory
                .write_slice(GuestAddress(line), &header, &mut RegionHint::default())
                .expect("in range");
            let chain = [
                Buffer::to_device(line, header.len() as u32),
                Buffer::from_device(data, REQUEST_BYTES as u32),
                Buffer::from_device(line + STATUS, 1),
            ];
            self.ring.describe(slot, &chain).expect("a free slot");
        }
        self
    }

    /// The resources for a queue that serves this guest.
    pub(super) fn resources(&self) -> QueueResources {
        QueueResources {
            memory: self.memory.clone(),
            layout: self.layout,
            features: self.device.features(),
            kick: None,
            call: None,
            err: None,
            log: None,
            is_enabled: true,
        }
    }

    /// Takes the completed requests and sends all of them again; returns their number.
    pub(super) fn step(&mut self) -> u64 {
        while let Some(used) = self.ring.pop().expect("the device gives back what it was given") {
            assert_eq!(
                u64::from(used.written_bytes),
                REQUEST_BYTES + 1,
                "{:?}",
                self.device.broken()
            );
            self.idle.push(used.slot);
            self.served += 1;
        }
        let count = self.idle.len() as u64;
        for slot in self.idle.drain(..) {
            self.ring.push(slot).expect("a free slot");
        }
        self.ring.publish();
        count
    }
}
