//! A wire that loses, doubles, delays and damages frames, in simulated time.

mod network;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use sidecore_memory::{GuestMemory, SharedPages};
use sidecore_reactor::{Arm, EventFd};
use sidecore_units::Nanos;

use crate::frame::{Piece, Pieces};
use crate::options::{SEND_BATCH, SlotShape};
use crate::{
    Buffer, EthernetAddress, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkState,
    LinkStats, Properties,
};
pub use network::{Network, NetworkCounts};
pub use sidecore_wire_faults::Faults;

/// A link to a simulated [`Network`]. All that happens to a frame follows from the network's seed
/// and from the times at which its links are polled.
#[derive(Debug)]
pub struct SimulatedLink {
    network: Network,
    address: EthernetAddress,
    properties: Properties,
    stats: Arc<LinkStats>,
    pages: SharedPages,
    shape: SlotShape,
    /// Receive slots come first.
    receive_free: Vec<u32>,
    transmit_free: Vec<u32>,
    event: Arc<EventFd>,
    /// The latest time of a poll.
    now: Nanos,
    starved: bool,
    /// A frame on its way into memory, or out of it.
    scratch: Vec<u8>,
}

impl SimulatedLink {
    pub(super) fn new(
        network: Network,
        address: EthernetAddress,
        options: &LinkOptions,
    ) -> Result<Self, LinkError> {
        options.check()?;
        let shape = SlotShape::new(options, 0);
        let slots = options.receive_frames.saturating_add(options.transmit_frames);
        let len_bytes = slots.saturating_mul(shape.slot_bytes);
        if u32::try_from(len_bytes).is_err() {
            return Err(LinkError::TooMuchMemory { bytes: len_bytes });
        }
        let pages = SharedPages::new("simulated", len_bytes.next_multiple_of(4096))
            .map_err(LinkError::kernel("make memory for frames"))?;
        let event = Arc::new(EventFd::new().map_err(LinkError::kernel("make an eventfd"))?);
        network.plug(address, Arc::clone(&event));
        let (receive, all) = (as_u32(options.receive_frames), as_u32(slots));
        Ok(Self {
            network,
            address,
            properties: Properties {
                address: LinkAddress::Ethernet(address),
                frame_bytes: options.frame_bytes,
                header_bytes: options.header_bytes,
                payload_align_bytes: shape.payload_align_bytes,
                receive_frames: options.receive_frames,
                transmit_frames: options.transmit_frames,
                fills_in_order: false,
                batch_frames: SEND_BATCH,
                mode: "simulated",
            },
            stats: Arc::default(),
            pages,
            shape,
            receive_free: (0..receive).rev().collect(),
            transmit_free: (receive..all).rev().collect(),
            event,
            now: Nanos::ZERO,
            starved: false,
            scratch: vec![0; options.frame_bytes],
        })
    }

    fn piece(&self, slot: u32, len_bytes: usize) -> Piece {
        let start = as_u32(self.shape.slot_bytes)
            .saturating_mul(slot)
            .saturating_add(as_u32(self.shape.frame_at));
        Piece::new(start, as_u32(len_bytes))
    }

    /// Stores a frame that has arrived in a free slot.
    fn store(&mut self, from: EthernetAddress, bytes: &[u8]) -> Option<Frame> {
        let stats = &self.stats;
        if bytes.len() > self.properties.frame_bytes {
            stats.dropped_truncated.add(1);
            return None;
        }
        let Some(slot) = self.receive_free.pop() else {
            stats.dropped_full.add(1);
            return None;
        };
        stats.received.add(1);
        stats.received_bytes.add(bytes.len() as u64);
        let pieces = Pieces::one(self.piece(slot, bytes.len()));
        pieces.write(self.pages.memory(), 0, bytes);
        Some(Frame::new(LinkAddress::Ethernet(from), pieces, slot))
    }
}

/// Numbers that the options bound.
fn as_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Link for SimulatedLink {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> &GuestMemory {
        self.pages.memory()
    }

    fn stats(&self) -> &Arc<LinkStats> {
        &self.stats
    }

    fn state(&self) -> LinkState {
        LinkState::Up
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        self.now = self.now.max(now);
        let network = self.network.clone();
        let mut count = 0_usize;
        while count < limit
            && let Some((from, bytes)) = network.deliver(self.address, self.now)
        {
            if let Some(frame) = self.store(from, &bytes) {
                frames.push(frame);
                count = count.saturating_add(1);
            }
            network.recycle(bytes);
        }
        if count > 0 {
            self.stats.received_batches.add(1);
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        self.receive_free.extend(frames.drain(..).map(Frame::into_slot));
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        self.starved = self.transmit_free.len() < count;
        for _ in 0..count {
            let Some(slot) = self.transmit_free.pop() else {
                break;
            };
            buffers.push(Buffer::new(
                Pieces::one(self.piece(slot, self.properties.frame_bytes)),
                slot,
            ));
        }
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        self.now = self.now.max(now);
        let mut count = 0;
        for buffer in buffers.drain(..) {
            if let Some((LinkAddress::Ethernet(to), len_bytes)) = buffer.frame()
                && let Some(bytes) = self.scratch.get_mut(..len_bytes)
            {
                buffer.pieces().read(self.pages.memory(), 0, bytes);
                self.network.carry(self.now, self.address, to, bytes);
                self.stats.sent.add(1);
                self.stats.sent_bytes.add(len_bytes as u64);
                count = 1;
            } else {
                self.stats.dropped_unsendable.add(1);
            }
            self.transmit_free.push(buffer.into_slot());
        }
        self.stats.sent_batches.add(count);
    }

    fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
        self.transmit_free.extend(buffers.drain(..).map(Buffer::into_slot));
    }

    fn arm(&mut self) -> Arm {
        let room = self.starved && !self.transmit_free.is_empty();
        let due = self.network.arm(self.address).is_some_and(|at| at <= self.now);
        if room || due {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        self.network.disarm(self.address);
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn on_wake(&mut self) {
        self.event.drain();
    }

    fn deadline(&self) -> Option<Nanos> {
        self.network.next_delivery(self.address)
    }
}

impl Drop for SimulatedLink {
    fn drop(&mut self) {
        self.network.unplug(self.address, &self.event);
    }
}

#[cfg(test)]
mod tests;
