//! A NIC at one end of a session: packets are cut into frames, and put together again.
//!
//! Nothing is acknowledged and nothing is sent twice: docs/decisions/0071. Packets are delivered in
//! the order of their numbers, and memory is bounded by the buffers that the caller lends.

use std::collections::VecDeque;

use sidecore_units::Nanos;

use crate::channel::Channel;
use crate::port::{Payload, Port, Seal};
use crate::segmentation::Segmentation;
use crate::wire::{DATA_HEADER_BYTES, Kind, MAX_PACKET_BYTES, PacketBody};
use crate::{Reason, VrioStats};

/// An incomplete packet is given up when its first segment has been there for this time.
pub const PACKET_PATIENCE: Nanos = Nanos::from_millis(1);

/// Packets of a NIC that may be incomplete at a time. Frames of a link that keeps the order need
/// one.
const INCOMPLETE_MAX: usize = 4;

/// Segments begin at cache lines of their buffers.
const SEGMENT_ALIGNMENT: u32 = 64;

/// The size of segments of packets, in frames of `frame_bytes` with a tag of `tag_bytes`.
#[must_use]
pub fn packet_segment_bytes(frame_bytes: u32, tag_bytes: usize) -> u32 {
    let header_bytes = DATA_HEADER_BYTES.saturating_add(tag_bytes);
    let room = frame_bytes.saturating_sub(u32::try_from(header_bytes).unwrap_or(u32::MAX));
    room & !SEGMENT_ALIGNMENT.wrapping_sub(1)
}

/// A packet in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The buffer, by the caller's number.
    pub buffer: u16,
    /// Size of the packet with its virtio header.
    pub len_bytes: u32,
}

/// The part of a NIC's frames that the link had room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    All,
    Part,
    None,
}

/// The turns of NICs at a link that is short of room.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    first: usize,
}

impl Turns {
    /// Sends packets with `transmit`, of the NIC whose turn it is first. A NIC that has sent a part
    /// is behind the others the next time. Returns whether the link had room for all.
    #[inline]
    pub(crate) fn send<T>(
        &mut self,
        all: &mut [T],
        mut transmit: impl FnMut(&mut T) -> Sent,
    ) -> bool {
        let count = all.len();
        let start = self.first.min(count);
        let mut next = None;
        let (last, first) = all.split_at_mut(start);
        for (at, nic) in (start..).zip(first).chain((0..).zip(last)) {
            let sent = transmit(nic);
            if next.is_none() {
                next = match sent {
                    Sent::All => None,
                    Sent::Part => Some(at.wrapping_add(1)),
                    Sent::None => Some(at),
                };
            }
        }
        self.first = next.filter(|next| *next < count).unwrap_or(0);
        next.is_none()
    }
}

/// A packet that has not arrived whole.
#[derive(Clone, Copy, Debug)]
struct Incomplete {
    sequence: u64,
    buffer: u16,
    cut: Segmentation,
    /// A bit for each segment that has not arrived.
    missing: u64,
    /// When the first one did.
    since: Nanos,
}

/// A NIC at one end of a session.
///
/// Buffers are the caller's, by numbers below 65536. Those that it [lends](Self::lend) come back
/// with [packets](Self::next_arrived) in them; those that it [sends](Self::send) come back
/// [empty](Self::next_sent). To a [`Port`], a buffer is the data of the request of its
/// [name](Self::new).
#[derive(Debug)]
pub struct Nic {
    name: u64,
    /// The number and the epoch that the NIC has in this session; `None` outside of one.
    attached: Option<(u16, u64)>,
    /// Packets to the peer.
    queued: VecDeque<Packet>,
    /// The next segment of the first one.
    segment: u32,
    /// Packets of this session that were sent whole.
    sent_packets: u64,
    sent: VecDeque<u16>,
    /// Buffers for packets of the peer.
    free: Vec<u16>,
    incomplete: [Option<Incomplete>; INCOMPLETE_MAX],
    /// The newest packet that was delivered or given up: older ones are never delivered.
    passed: u64,
    arrived: VecDeque<Packet>,
}

impl Nic {
    /// A NIC without buffers, which will have up to `buffers` in each direction. The data of a
    /// buffer are those of the request `name` plus its number.
    #[must_use]
    pub fn new(name: u64, buffers: u16) -> Self {
        let buffers = usize::from(buffers);
        Self {
            name,
            attached: None,
            queued: VecDeque::with_capacity(buffers),
            segment: 0,
            sent_packets: 0,
            sent: VecDeque::with_capacity(buffers),
            free: Vec::with_capacity(buffers),
            incomplete: [None; INCOMPLETE_MAX],
            passed: 0,
            arrived: VecDeque::with_capacity(buffers),
        }
    }

    /// The name of its first buffer.
    #[must_use]
    pub const fn name(&self) -> u64 {
        self.name
    }

    /// Lends an empty buffer of [`MAX_PACKET_BYTES`] for a packet of the peer.
    #[inline]
    pub fn lend(&mut self, buffer: u16) {
        self.free.push(buffer);
    }

    /// The next packet of the peer, in their order. Its buffer is the caller's again.
    #[inline]
    pub fn next_arrived(&mut self) -> Option<Packet> {
        self.arrived.pop_front()
    }

    /// Takes a packet to the peer. Packets without a session that has the NIC, and packets that are
    /// too long, are dropped and counted.
    #[inline]
    pub fn send(&mut self, packet: Packet, stats: &VrioStats) {
        if self.attached.is_some() && (1..=MAX_PACKET_BYTES).contains(&packet.len_bytes) {
            self.queued.push_back(packet);
        } else {
            stats.packets_unsent.add(1);
            self.sent.push_back(packet.buffer);
        }
    }

    /// The next buffer whose packet was sent, or dropped.
    #[inline]
    pub fn next_sent(&mut self) -> Option<u16> {
        self.sent.pop_front()
    }

    /// Whether the peer has the NIC in this session.
    #[must_use]
    #[inline]
    pub const fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Whether packets are to be sent.
    #[must_use]
    #[inline]
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Whether a packet has arrived, or a buffer is empty again.
    #[must_use]
    #[inline]
    pub fn has_events(&self) -> bool {
        !(self.arrived.is_empty() && self.sent.is_empty())
    }

    /// When an incomplete packet is given up; `None` without one.
    #[must_use]
    #[inline]
    pub fn deadline(&self) -> Option<Nanos> {
        let since = self.incomplete.iter().flatten().map(|packet| packet.since).min()?;
        Some(since.after(PACKET_PATIENCE))
    }

    /// A session has the NIC from now on, by this number and in this epoch: both ends count packets
    /// from 1.
    pub(crate) fn attach(&mut self, device: u16, epoch: u64, stats: &VrioStats) {
        if self.attached != Some((device, epoch)) {
            self.detach(stats);
            self.attached = Some((device, epoch));
        }
    }

    /// The session is over, or does not have the NIC any more: packets of it are dropped.
    pub(crate) fn detach(&mut self, stats: &VrioStats) {
        self.attached = None;
        stats.packets_unsent.add(self.queued.len() as u64);
        self.sent.extend(self.queued.drain(..).map(|packet| packet.buffer));
        self.pass(u64::MAX, stats);
        (self.segment, self.sent_packets, self.passed) = (0, 0, 0);
    }

    /// Takes a frame of a packet.
    ///
    /// # Errors
    /// The frame was dropped; the reason is to be counted.
    #[inline]
    pub(crate) fn receive<P: Port>(
        &mut self,
        now: Nanos,
        (body, payload_bytes, segment_bytes): (&PacketBody, usize, u32),
        (received, port): (&mut P::Received, &mut P),
        stats: &VrioStats,
    ) -> Result<(), Reason> {
        let Some((device, epoch)) = self.attached else { return Err(Reason::Device) };
        if body.device != device {
            return Err(Reason::Device);
        }
        if body.epoch != epoch {
            return Err(Reason::Epoch);
        }
        if body.sequence <= self.passed {
            return Err(Reason::Late);
        }
        let cut = Segmentation::new(body.len_bytes, segment_bytes, 1)
            .filter(|_| body.len_bytes <= MAX_PACKET_BYTES)
            .ok_or(Reason::Segment)?;
        let index = cut.index_of(body.offset_bytes, payload_bytes).ok_or(Reason::Segment)?;
        let (place, packet) = if cut.count() == 1 {
            let buffer = self.free.pop().ok_or(Reason::Buffers)?;
            (None, Incomplete { sequence: body.sequence, buffer, cut, missing: 0, since: now })
        } else {
            let place = self.place(now, body.sequence, cut, stats)?;
            let packet = self.incomplete.get_mut(place).and_then(Option::as_mut);
            let packet = packet.ok_or(Reason::Buffers)?;
            let bit = 1_u64.wrapping_shl(index);
            if packet.missing & bit == 0 {
                return Err(Reason::Duplicate);
            }
            packet.missing &= !bit;
            (Some(place), *packet)
        };
        port.store(received, self.buffer_name(packet.buffer), body.offset_bytes);
        if packet.missing == 0 {
            if let Some(place) = place.and_then(|place| self.incomplete.get_mut(place)) {
                *place = None;
            }
            self.pass(packet.sequence, stats);
            self.arrived.push_back(Packet { buffer: packet.buffer, len_bytes: body.len_bytes });
            stats.packets_received.add(1);
        }
        Ok(())
    }

    /// The place of an incomplete packet, which is made for its first segment.
    fn place(
        &mut self,
        now: Nanos,
        sequence: u64,
        cut: Segmentation,
        stats: &VrioStats,
    ) -> Result<usize, Reason> {
        let is_it = |place: &Option<Incomplete>| {
            place.as_ref().is_some_and(|packet| packet.sequence == sequence)
        };
        if let Some(at) = self.incomplete.iter().position(is_it) {
            // Each frame says the size of the packet.
            let found = self.incomplete.get(at).and_then(Option::as_ref);
            return if found.is_some_and(|packet| packet.cut == cut) {
                Ok(at)
            } else {
                Err(Reason::Segment)
            };
        }
        if self.incomplete.iter().all(Option::is_some) {
            let sequences = self.incomplete.iter().flatten().map(|packet| packet.sequence);
            let oldest = sequences.min().filter(|oldest| *oldest < sequence);
            self.pass(oldest.ok_or(Reason::Late)?, stats);
        }
        let at = self.incomplete.iter().position(Option::is_none).ok_or(Reason::Buffers)?;
        let buffer = self.free.pop().ok_or(Reason::Buffers)?;
        if let Some(place) = self.incomplete.get_mut(at) {
            *place = Some(Incomplete { sequence, buffer, cut, missing: cut.all(), since: now });
        }
        Ok(at)
    }

    /// No packet up to this one is delivered any more.
    #[inline]
    fn pass(&mut self, sequence: u64, stats: &VrioStats) {
        self.passed = self.passed.max(sequence);
        for place in &mut self.incomplete {
            if let Some(packet) = place.take_if(|packet| packet.sequence <= sequence) {
                self.free.push(packet.buffer);
                stats.packets_incomplete.add(1);
            }
        }
    }

    /// Gives up packets whose first segment came a millisecond ago, and those in front of them.
    #[inline]
    pub(crate) fn expire(&mut self, now: Nanos, stats: &VrioStats) {
        let is_over = |packet: &&Incomplete| now.since(packet.since) >= PACKET_PATIENCE;
        let over = self.incomplete.iter().flatten().filter(is_over);
        if let Some(newest) = over.map(|packet| packet.sequence).max() {
            self.pass(newest, stats);
        }
    }

    /// Sends queued packets in frames of a session, as far as the link has room.
    #[inline]
    pub(crate) fn transmit<S: Seal>(
        &mut self,
        frame_bytes: u32,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) -> Sent {
        let Some((device, epoch)) = self.attached else { return Sent::All };
        let mut sent = Sent::None;
        let segment_bytes = packet_segment_bytes(frame_bytes, channel.tag_bytes());
        while let Some(Packet { buffer, len_bytes }) = self.queued.front().copied() {
            let cut = Segmentation::new(len_bytes, segment_bytes, 1).unwrap_or_default();
            let request = self.buffer_name(buffer);
            let sequence = self.sent_packets.wrapping_add(1);
            while let Some((offset_bytes, segment_bytes)) = cut.range(self.segment) {
                let body = PacketBody { device, epoch, sequence, offset_bytes, len_bytes }.encode();
                let payload = Payload::Data { request, offset_bytes, len_bytes: segment_bytes };
                if !channel.send(port, Kind::Packet, Some(&body), payload) {
                    return sent;
                }
                sent = Sent::Part;
                self.segment = self.segment.wrapping_add(1);
            }
            self.queued.pop_front();
            (self.segment, self.sent_packets) = (0, sequence);
            self.sent.push_back(buffer);
            channel.stats.packets_sent.add(1);
        }
        Sent::All
    }

    #[inline]
    fn buffer_name(&self, buffer: u16) -> u64 {
        self.name.wrapping_add(buffer.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MIN_FRAME_BYTES;

    #[test]
    fn the_longest_packet_fits_into_the_smallest_frames() {
        for (frame, tag, segment) in [
            (MIN_FRAME_BYTES, 16, 1344),
            (8_100, 16, 8_000),
            (8_100, 0, 8_000),
            (65_000, 16, 64_896),
        ] {
            assert_eq!(packet_segment_bytes(frame, tag), segment, "{frame} {tag}");
            let cut = Segmentation::new(MAX_PACKET_BYTES, segment, 1).unwrap();
            assert!(cut.count() <= 49, "{frame}");
        }
        assert_eq!(packet_segment_bytes(0, 16), 0);
    }
}
