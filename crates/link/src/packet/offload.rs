//! Several frames as one packet, which is cut into frames as late on its way as possible, or never.

use std::io;

use sidecore_linux::{
    FrameShare, Interface, OFFLOAD_PLACES_MAX, OffloadFilter, OffloadSocket, PacketRing,
    PacketSlots, Place, packet_slot,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_units::Nanos;

use super::fake_header::{
    Contents, DESTINATION, FAKE_HEADER_BYTES, FakeHeader, OFFLOAD_BYTES_MAX, SEGMENT_BYTES_MIN,
    SOURCE,
};
use super::receiving::Arrival;
use super::stations::{MESSAGE_BYTES, Message, MessageKind, Stations};
use super::{ETHERNET_BYTES, PacketOptions};
use crate::frame::Piece;
use crate::{Buffer, EthernetAddress, LinkError, LinkQueue, LinkStats, QUEUE_AT};

const HEADERS_BYTES: usize = ETHERNET_BYTES as usize + FAKE_HEADER_BYTES;
const IPV4: [u8; 2] = [0x08, 0x00];
/// Room for a packet, and for what the kernel puts in front of it.
const SLOT_BYTES: u32 = 1 << 16;
/// Frames of a packet, where there are few of them: 64 KiB are nine frames in two packets.
const FRAMES_PER_PACKET: usize = 4;
const SLOTS_MIN: usize = 32;
/// Answers to questions that one call of receive sends.
const ANSWERS_MAX: u32 = 4;
/// An interface that refuses so many packets in a row cannot cut them.
const REFUSALS_MAX: u32 = 8;

/// Frames for one station that travel together: all but the last one have one size.
#[derive(Debug)]
pub(super) struct Run {
    pub frames: Vec<Buffer>,
    pub to: EthernetAddress,
    queue: u8,
    segment_bytes: usize,
    total_bytes: usize,
    last_bytes: usize,
}

impl Run {
    fn new() -> Self {
        let frames = Vec::with_capacity(OFFLOAD_PLACES_MAX);
        let to = EthernetAddress([0; 6]);
        Self { frames, to, queue: 0, segment_bytes: 0, total_bytes: 0, last_bytes: 0 }
    }

    /// Whether a frame can join the others, or be the first one.
    fn has_room(&self, to: EthernetAddress, queue: u8, len_bytes: usize, max_bytes: usize) -> bool {
        if self.frames.is_empty() {
            return (SEGMENT_BYTES_MIN..=max_bytes).contains(&len_bytes);
        }
        self.to == to
            && self.queue == queue
            && self.last_bytes == self.segment_bytes
            && len_bytes <= self.segment_bytes
            && self.frames.len() < OFFLOAD_PLACES_MAX
            && self.total_bytes.saturating_add(len_bytes) <= OFFLOAD_BYTES_MAX
    }

    fn push(&mut self, buffer: Buffer, to: EthernetAddress, queue: u8, len_bytes: usize) {
        if self.frames.is_empty() {
            (self.to, self.queue) = (to, queue);
            (self.segment_bytes, self.total_bytes) = (len_bytes, 0);
        }
        self.total_bytes = self.total_bytes.saturating_add(len_bytes);
        self.last_bytes = len_bytes;
        self.frames.push(buffer);
    }
}

/// The part of a packet link that sends and receives packets of several frames.
#[derive(Debug)]
pub(super) struct Offload {
    socket: OffloadSocket,
    ring: PacketSlots,
    next: usize,
    /// Frames of the slot of this number that are lent, or still to be lent.
    frames: Box<[u16]>,
    cut: Option<Cut>,
    /// Where the ring lies in the link's memory, and the number of its first slot.
    base: u32,
    first_slot: u32,
    own: EthernetAddress,
    port: u16,
    frame_bytes: usize,
    /// The longest frame that fits behind the headers.
    segment_bytes_max: usize,
    pub run: Run,
    /// A run was sent in this call of send.
    follows: bool,
    stations: Stations,
    places: Vec<Place>,
    sequence: u32,
    refusals: u32,
    answers: u32,
    /// Two segments of a message.
    message: Box<[u8]>,
}

/// A packet whose frames are being lent.
#[derive(Clone, Copy, Debug)]
struct Cut {
    slot: usize,
    /// In the link's memory.
    at: u32,
    end: u32,
    segment_bytes: u32,
    from: EthernetAddress,
}

impl Offload {
    /// The frames to send lie in `memory`, behind which the receive ring comes in the link's
    /// memory; slots of the other ring have the numbers below `first_slot`.
    pub fn open(
        interface: &Interface,
        options: &PacketOptions,
        memory: &GuestMemory,
        first_slot: usize,
    ) -> Result<(Self, GuestMemory), LinkError> {
        let LinkQueue { index, count } = options.queue;
        let share = (count > 1).then_some(FrameShare { byte_at: 0, index, count });
        let filter =
            OffloadFilter { addresses: [SOURCE, DESTINATION], port: options.ethertype, share };
        let slots = options.link.receive_frames.checked_div(FRAMES_PER_PACKET).unwrap_or(0);
        let shape = PacketRing::new(SLOT_BYTES, super::as_u32(slots.max(SLOTS_MIN)));
        let refused = LinkError::kernel::<io::Error>("open a packet socket with offload");
        let bypass = options.bypass_qdisc;
        let socket = OffloadSocket::new(interface, &filter, memory.clone(), &shape, bypass)
            .map_err(refused)?;
        let base = memory.len_bytes();
        let all = memory.with_memory(base, socket.received()).map_err(|error| {
            LinkError::Kernel { step: "map a packet ring", error: io::Error::other(error) }
        })?;
        let bytes = usize::try_from(all.len_bytes()).unwrap_or(usize::MAX);
        let too_much = || LinkError::TooMuchMemory { bytes };
        let _ = u32::try_from(all.len_bytes()).map_err(|_| too_much())?;
        let ring = super::slots(socket.received(), 0, &shape)?;
        let mtu_bytes = usize::try_from(interface.mtu_bytes).unwrap_or(usize::MAX);
        let frame_bytes = options.link.frame_bytes;
        let offload = Self {
            frames: vec![0; ring.slots()].into(),
            ring,
            socket,
            next: 0,
            cut: None,
            base: u32::try_from(base).map_err(|_| too_much())?,
            first_slot: super::as_u32(first_slot),
            own: EthernetAddress(interface.address),
            port: options.ethertype,
            frame_bytes,
            segment_bytes_max: mtu_bytes.saturating_sub(FAKE_HEADER_BYTES).min(frame_bytes),
            run: Run::new(),
            follows: false,
            stations: Stations::new(index),
            places: Vec::with_capacity(OFFLOAD_PLACES_MAX),
            sequence: 0,
            refusals: 0,
            answers: 0,
            message: vec![0; frame_bytes.saturating_mul(2).min(OFFLOAD_BYTES_MAX)].into(),
        };
        Ok((offload, all))
    }

    pub fn socket(&self) -> &OffloadSocket {
        &self.socket
    }

    // Sending.

    /// A call of send begins.
    pub fn begin_send(&mut self) {
        self.follows = false;
    }

    /// Puts a frame into the run, or gives it back if it does not fit there.
    pub fn join(
        &mut self,
        memory: &GuestMemory,
        buffer: Buffer,
        (to, len_bytes): (EthernetAddress, usize),
    ) -> Result<(), Buffer> {
        let is_short = len_bytes < SEGMENT_BYTES_MIN;
        if is_short && self.run.frames.is_empty() {
            return Err(buffer);
        }
        let mut queue = [0];
        buffer.pieces().read(memory, QUEUE_AT, &mut queue);
        let [queue] = queue;
        if !self.run.has_room(to, queue, len_bytes, self.segment_bytes_max) {
            return Err(buffer);
        }
        self.run.push(buffer, to, queue, len_bytes);
        Ok(())
    }

    /// Whether the run is to travel as one packet: a single frame only behind others, where the
    /// transmit ring would have to pass over their slots.
    pub fn has_run(&self) -> bool {
        self.run.frames.len() > usize::from(!self.follows)
    }

    /// Sends the run as one packet. False if its frames have to go one by one.
    pub fn send_run(&mut self, now: Nanos, stats: &LinkStats) -> bool {
        if !self.has_run() {
            return false;
        }
        let (to, queue) = (self.run.to, self.run.queue);
        let segment_bytes = u16::try_from(self.run.segment_bytes).unwrap_or(u16::MAX);
        let verdict = self.stations.check(now, to, segment_bytes);
        if let Some(question) = verdict.question {
            let asked_bytes = self.stations.asked_bytes(to);
            self.send_message(to, question, queue, asked_bytes);
        }
        if !verdict.is_proven {
            return false;
        }
        self.places.clear();
        for frame in &self.run.frames {
            let Some((_, len_bytes)) = frame.frame() else { return false };
            let Some(piece) = frame.pieces().part(0, len_bytes).next() else { return false };
            let start = u32::try_from(piece.address().0).unwrap_or(u32::MAX);
            self.places.push(Place { start, len_bytes: super::as_u32(piece.len_bytes()) });
        }
        let total_bytes = self.run.total_bytes;
        let Some(header) = self.header(to, Contents::Frames { queue }, segment_bytes, total_bytes)
        else {
            return false;
        };
        let cut_bytes = if self.places.len() > 1 { segment_bytes } else { 0 };
        match self.socket.send(&header, cut_bytes, &self.places) {
            Ok(()) => {
                self.refusals = 0;
                self.follows = true;
                stats.offloaded.add(self.places.len() as u64);
                true
            }
            Err(_) => {
                self.refusals = self.refusals.saturating_add(1);
                if self.refusals >= REFUSALS_MAX {
                    self.refusals = 0;
                    self.stations.forget(now, to);
                }
                stats.offload_refusals.add(1);
                false
            }
        }
    }

    fn header(
        &mut self,
        to: EthernetAddress,
        contents: Contents,
        segment_bytes: u16,
        payload_bytes: usize,
    ) -> Option<[u8; HEADERS_BYTES]> {
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(super::as_u32(payload_bytes));
        let fake = FakeHeader { contents, segment_bytes, sequence, port: self.port };
        let fake = fake.encode(payload_bytes)?;
        let bytes = to.0.into_iter().chain(self.own.0).chain(IPV4).chain(fake);
        let mut header = [0; HEADERS_BYTES];
        header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        Some(header)
    }

    /// Sends both segments of a message. One that is refused is lost: the asking link asks again.
    fn send_message(
        &mut self,
        to: EthernetAddress,
        message: Message,
        queue: u8,
        segment_bytes: u16,
    ) {
        let size = usize::from(segment_bytes);
        let total_bytes = size.saturating_mul(2);
        let contents = Contents::Message { queue };
        let Some(header) = self.header(to, contents, segment_bytes, total_bytes) else { return };
        for (segment, chunk) in self.message.chunks_mut(size.max(1)).take(2).enumerate() {
            let bytes = message.encode(u8::from(segment == 1));
            chunk.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
            chunk.get_mut(MESSAGE_BYTES..).unwrap_or_default().fill(0);
        }
        if let Some(payload) = self.message.get(..total_bytes) {
            let _ = self.socket.send_bytes(&header, segment_bytes, payload);
        }
    }

    // Receiving.

    /// Whether [`take`](Self::take) has something.
    pub fn has_next(&self) -> bool {
        self.cut.is_some() || self.has_packet()
    }

    fn has_packet(&self) -> bool {
        self.frames.get(self.next) == Some(&0)
            && self.ring.status(self.next) & packet_slot::USER != 0
    }

    /// When the next packet arrived, by the kernel's clock, if it is not being taken already.
    pub fn arrived_at(&self) -> Option<(u32, u32)> {
        self.has_packet().then(|| self.ring.arrived_at(self.next))
    }

    pub fn is_cutting(&self) -> bool {
        self.cut.is_some()
    }

    /// A call of receive begins.
    pub fn begin(&mut self) {
        self.answers = 0;
    }

    /// The next frame of a packet. Packets without one go back to the kernel.
    pub fn take(&mut self, memory: &GuestMemory) -> Option<Arrival> {
        if let Some(arrival) = self.next_frame() {
            return Some(arrival);
        }
        if !self.has_packet() {
            return None;
        }
        let slot = self.next;
        self.next = slot.wrapping_add(1);
        if self.next >= self.ring.slots() {
            self.next = 0;
        }
        match self.look(memory, slot) {
            Ok((cut, Contents::Frames { .. })) => {
                let bytes = cut.end.saturating_sub(cut.at);
                let frames = bytes.div_ceil(cut.segment_bytes.max(1));
                self.set_frames(slot, u16::try_from(frames).unwrap_or(u16::MAX));
                self.cut = Some(cut);
                self.next_frame()
            }
            Ok((cut, Contents::Message { .. })) => {
                self.take_message(memory, &cut);
                self.ring.set_status(slot, 0);
                Some(Arrival::Message)
            }
            Err(arrival) => {
                self.ring.set_status(slot, 0);
                Some(arrival)
            }
        }
    }

    fn set_frames(&mut self, slot: usize, count: u16) {
        if let Some(frames) = self.frames.get_mut(slot) {
            *frames = count;
        }
    }

    fn next_frame(&mut self) -> Option<Arrival> {
        let cut = self.cut.as_mut()?;
        let len_bytes = cut.end.saturating_sub(cut.at).min(cut.segment_bytes);
        let piece = Piece::new(cut.at, len_bytes);
        let slot = self.first_slot.saturating_add(super::as_u32(cut.slot));
        let from = cut.from;
        cut.at = cut.at.saturating_add(len_bytes);
        if cut.at >= cut.end {
            self.cut = None;
        }
        Some(Arrival::Frame { slot, piece, from })
    }

    /// The packet in a slot, or why it is none.
    fn look(&self, memory: &GuestMemory, slot: usize) -> Result<(Cut, Contents), Arrival> {
        let header = self.ring.header(slot);
        if header.snap_bytes < header.len_bytes {
            return Err(Arrival::Truncated);
        }
        let mac_at = u32::from(header.mac_at);
        let end = mac_at.checked_add(header.snap_bytes);
        let is_inside = end.is_some_and(|end| end <= SLOT_BYTES);
        let size = usize::try_from(header.snap_bytes).unwrap_or(0);
        let Some(after_bytes) = size.checked_sub(HEADERS_BYTES).filter(|_| is_inside) else {
            return Err(Arrival::Malformed);
        };
        if self.ring.status(slot) & packet_slot::VLAN_VALID != 0
            && header.vlan_tag & packet_slot::VLAN_NUMBER != 0
        {
            return Err(Arrival::Foreign);
        }
        let start = self.base.saturating_add(self.ring.start(slot)).saturating_add(mac_at);
        let at = |offset: u32| GuestAddress(start.saturating_add(offset).into());
        let mut hint = RegionHint::default();
        let malformed = |_| Arrival::Malformed;
        let from = memory.read_array(at(6), &mut hint).map_err(malformed)?;
        let fake = memory.read_array(at(ETHERNET_BYTES), &mut hint).map_err(malformed)?;
        let Some((fake, payload_bytes)) = FakeHeader::decode(&fake, after_bytes, self.port) else {
            return Err(Arrival::Malformed);
        };
        if usize::from(fake.segment_bytes) > self.frame_bytes {
            return Err(Arrival::Truncated);
        }
        let at = start.saturating_add(super::as_u32(HEADERS_BYTES));
        let end = at.saturating_add(super::as_u32(payload_bytes));
        let segment_bytes = u32::from(fake.segment_bytes);
        Ok((Cut { slot, at, end, segment_bytes, from: EthernetAddress(from) }, fake.contents))
    }

    /// Takes the message in the last segment of a packet.
    fn take_message(&mut self, memory: &GuestMemory, cut: &Cut) {
        let Cut { at, end, segment_bytes, from, .. } = *cut;
        let Some(last) = end.checked_sub(segment_bytes).filter(|last| *last >= at) else { return };
        let Ok(bytes) = memory.read_array(GuestAddress(last.into()), &mut RegionHint::default())
        else {
            return;
        };
        let Some(message) = Message::decode(&bytes) else { return };
        let size = u16::try_from(segment_bytes).unwrap_or(u16::MAX);
        match message.kind {
            MessageKind::Ask if self.answers < ANSWERS_MAX => {
                self.answers = self.answers.saturating_add(1);
                let answer = Message { kind: MessageKind::Answer, ..message };
                self.send_message(from, answer, message.queue, size);
            }
            MessageKind::Ask => {}
            MessageKind::Answer => self.stations.answered(from, message.nonce, size),
        }
    }

    pub fn give_back(&mut self, slot: u32) {
        let Some(slot) = slot.checked_sub(self.first_slot) else { return };
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        let Some(frames) = self.frames.get_mut(slot) else { return };
        *frames = frames.saturating_sub(1);
        if *frames == 0 {
            self.ring.set_status(slot, 0);
        }
    }
}
