//! A link on an Ethernet interface, through the rings of a packet socket.

mod fake_header;
mod offload;
mod receiving;
mod stations;
mod transmitting;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use sidecore_linux::{FrameFilter, FrameShare, PacketRing, PacketSetup, PacketSlots, PacketSocket};
use sidecore_memory::GuestMemory;
use sidecore_reactor::Arm;
use sidecore_units::Nanos;

use crate::frame::Pieces;
use crate::interface::{DOWN, DOWN_INTERVAL, LOOK_INTERVAL};
use crate::options::{SEND_BATCH, SlotShape};
use crate::{
    Buffer, EthernetAddress, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkQueue,
    LinkState, LinkStats, Properties, QUEUE_AT, interface,
};
pub use fake_header::{Contents, FAKE_HEADER_BYTES, FakeHeader, OFFLOAD_BYTES_MAX};
use offload::Offload;
use receiving::{Arrival, Receiving};
use transmitting::Transmitting;

const ETHERNET_BYTES: u32 = 14;
/// From the start of a slot to the payload of a received frame, if no more is asked for: the ring's
/// header (32 bytes), an address (20), and room for an Ethernet header, as a multiple of 16.
const LEAD_BYTES: usize = 80;
/// How soon frames are offered again that the interface did not take.
const RETRY_INTERVAL: Nanos = Nanos::from_micros(50);

/// The options of a packet link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketOptions {
    /// The interface's name.
    pub interface: String,
    /// The protocol of the frames.
    pub ethertype: u16,
    /// The queue of the link: each one has a socket, whose filter accepts its frames alone.
    pub queue: LinkQueue,
    /// Frames and rings.
    pub link: LinkOptions,
    /// Frames go to the driver's queue at once. If not, they go through the interface's queueing
    /// discipline, whose shapers and filters then see them, and so does tcpdump.
    pub bypass_qdisc: bool,
    /// Several frames of one size for one station are given to the interface as one packet, if the
    /// station's link has this option too.
    pub offload: bool,
}

impl PacketOptions {
    fn filter(&self) -> FrameFilter {
        let LinkQueue { index, count } = self.queue;
        let share = FrameShare { byte_at: as_u32(QUEUE_AT), index, count };
        FrameFilter { ethertype: self.ethertype, share: (count > 1).then_some(share) }
    }
}

/// A link through `AF_PACKET`, TPACKET_V2: the kernel copies a received frame into the ring, and
/// sends a frame out of it without a copy. A batch is sent by one system call, and received by
/// none.
#[derive(Debug)]
pub struct PacketLink {
    properties: Properties,
    stats: Arc<LinkStats>,
    interface: String,
    socket: PacketSocket,
    memory: GuestMemory,
    receiving: Receiving,
    transmitting: Transmitting,
    offload: Option<Box<Offload>>,
    state: LinkState,
    /// Watches the socket, edge-triggered, while the link is armed: the socket itself is readable
    /// also while a frame is lent, or after an error.
    epoll: OwnedFd,
    watched: bool,
    retry_at: Nanos,
    look_at: Nanos,
}

impl PacketLink {
    /// Opens a link on an interface of this thread's network namespace.
    ///
    /// # Errors
    /// Options out of range; no such interface, or one with too small an MTU; no CAP_NET_RAW; a
    /// kernel without segmentation offload for packet sockets, if that is an option.
    pub fn open(options: &PacketOptions) -> Result<Self, LinkError> {
        options.link.check()?;
        let socket = interface::packet_socket("CAP_NET_RAW")?;
        let (interface, link) = interface::find(&socket, &options.interface, &options.link)?;
        let frame_bytes = link.frame_bytes;
        let shape = SlotShape::new(&link, LEAD_BYTES);
        let [slot_bytes, frame_at, frame_len] =
            [shape.slot_bytes, shape.frame_at, frame_bytes].map(as_u32);
        let (receive, transmit) = (
            PacketRing::new(slot_bytes, as_u32(link.receive_frames)),
            PacketRing::new(slot_bytes, as_u32(link.transmit_frames)),
        );
        let setup = PacketSetup {
            receive,
            transmit,
            reserve_bytes: as_u32(shape.frame_at.saturating_sub(LEAD_BYTES)),
            bypass_qdisc: options.bypass_qdisc,
            has_virtio_headers: false,
        };
        let mut memory = socket
            .set_up(&setup)
            .map_err(LinkError::kernel("make the rings of a packet socket"))?;
        let address = EthernetAddress(interface.address);
        let ring = slots(&memory, receive.len_bytes(), &transmit)?;
        let transmitting = Transmitting::new(ring, frame_at, frame_len, address, options.ethertype);
        let receiving = Receiving::new(slots(&memory, 0, &receive)?, slot_bytes, frame_len);
        let mut offload = None;
        if options.offload {
            let options = PacketOptions { link, ..options.clone() };
            let slots = receiving.slots();
            let (opened, all) = Offload::open(&interface, &options, &memory, slots)?;
            (offload, memory) = (Some(Box::new(opened)), all);
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(LinkError::kernel("make an epoll descriptor"))?;
        socket
            .bind(&interface, &options.filter())
            .map_err(LinkError::kernel("bind a packet socket"))?;
        Ok(Self {
            properties: Properties {
                address: LinkAddress::Ethernet(address),
                frame_bytes,
                header_bytes: link.header_bytes,
                // In a packet of several frames only the first one could be aligned.
                payload_align_bytes: if options.offload { 1 } else { shape.payload_align_bytes },
                receive_frames: receiving.slots(),
                transmit_frames: transmitting.slots(),
                fills_in_order: true,
                batch_frames: SEND_BATCH,
                mode: if options.offload {
                    "TPACKET_V2 rings, segmentation offload"
                } else {
                    "TPACKET_V2 rings"
                },
            },
            stats: Arc::default(),
            interface: options.interface.clone(),
            socket,
            memory,
            receiving,
            transmitting,
            offload,
            state: LinkState::Up,
            epoll,
            watched: false,
            retry_at: Nanos::ZERO,
            look_at: Nanos::ZERO,
        })
    }

    /// Hands what is submitted to the kernel.
    fn flush(&mut self, now: Nanos) {
        self.transmitting.submit_queue(&self.memory);
        let late = self.transmitting.take_late_copies();
        self.stats.late_copies.add(late);
        let mut sent = self.socket.transmit();
        if sent.as_ref().is_err_and(is_down) {
            // Perhaps it only was down: then the socket has kept the error until now.
            sent = self.socket.transmit();
        }
        let mut taken = 0_u64;
        self.transmitting.reap(|size| taken = taken.saturating_add(u64::from(size)));
        match sent {
            Ok(bytes) => {
                if self.state == DOWN {
                    self.look(now);
                }
                if (bytes as u64) < taken {
                    self.count_refused(taken.saturating_sub(bytes as u64));
                }
            }
            Err(error) if is_down(&error) => self.state = DOWN,
            Err(_) => {}
        }
        if self.transmitting.has_unsent() {
            let up = self.state == LinkState::Up;
            self.retry_at = now.after(if up { RETRY_INTERVAL } else { DOWN_INTERVAL });
            self.stats.congestions.add(1);
        }
    }

    /// The kernel has passed over frames of so many bytes: the interface's MTU has been lowered.
    #[cold]
    fn count_refused(&mut self, bytes: u64) {
        let frame_bytes = u64::try_from(self.properties.frame_bytes).unwrap_or(u64::MAX);
        // Their number, if they were of the largest size; one at least.
        let largest = frame_bytes.saturating_add(u64::from(ETHERNET_BYTES));
        let frames = bytes.checked_div(largest).unwrap_or(0).max(1);
        self.stats.dropped_refused.add(frames);
        tracing::warn!(
            interface = %self.interface,
            bytes,
            "frames are longer than the interface sends: raise its MTU"
        );
    }

    /// Looks at the interface, whose state no frame may tell, and at the drops.
    #[cold]
    fn look(&mut self, now: Nanos) {
        self.count_drops();
        self.state = interface::state(&self.socket, &self.interface);
        let up = self.state == LinkState::Up;
        self.look_at = now.after(if up { LOOK_INTERVAL } else { DOWN_INTERVAL });
    }

    fn count_drops(&self) {
        let offload = self.offload.as_ref().map(|offload| offload.socket().take_drops());
        for drops in [Some(self.socket.take_drops()), offload].into_iter().flatten().flatten() {
            self.stats.dropped_full.add(u64::from(drops));
        }
    }

    /// Takes note of the errors of the sockets, which would keep them readable.
    fn take_error(&mut self) {
        let offload = self.offload.as_ref().and_then(|offload| offload.socket().take_error());
        if [self.socket.take_error(), offload].into_iter().flatten().any(|error| is_down(&error)) {
            self.state = DOWN;
        }
    }

    /// The next arrival at either ring: the earlier one if there are two.
    fn take(&mut self) -> Option<Arrival> {
        let Some(offload) = &mut self.offload else { return self.receiving.take(&self.memory) };
        if offload.is_cutting() {
            return offload.take(&self.memory);
        }
        let mut frame = self.receiving.arrived_at();
        let packet = offload.arrived_at();
        if frame.is_none() && packet.is_some() {
            // Between the two looks an earlier frame may have come.
            frame = self.receiving.arrived_at();
        }
        match (frame, packet) {
            (Some(frame), packet) if packet.is_none_or(|packet| frame <= packet) => {
                self.receiving.take(&self.memory)
            }
            (_, Some(_)) => offload.take(&self.memory),
            _ => None,
        }
    }

    /// Gives a frame to the transmit ring, or to the frames that are to travel with it.
    fn transmit(&mut self, now: Nanos, buffer: Buffer, to: EthernetAddress, len_bytes: usize) {
        let mut buffer = buffer;
        if let Some(offload) = &mut self.offload {
            match offload.join(&self.memory, buffer, (to, len_bytes)) {
                Ok(()) => return,
                Err(back) => buffer = back,
            }
            if !offload.run.frames.is_empty() {
                self.end_run(now);
                return self.transmit(now, buffer, to, len_bytes);
            }
        }
        self.transmitting.send(&self.memory, buffer, to, len_bytes);
    }

    /// Sends the frames that travel together.
    fn end_run(&mut self, now: Nanos) {
        let has_run = self.offload.as_ref().is_some_and(|offload| offload.has_run());
        if has_run && self.transmitting.has_unsent() {
            // Frames of before leave before.
            self.flush(now);
        }
        let Some(offload) = &mut self.offload else { return };
        let sent = !self.transmitting.has_unsent() && offload.send_run(now, &self.stats);
        let to = offload.run.to;
        for buffer in offload.run.frames.drain(..) {
            if sent {
                self.transmitting.cancel(buffer);
            } else if let Some((_, len_bytes)) = buffer.frame() {
                self.transmitting.send(&self.memory, buffer, to, len_bytes);
            }
        }
    }

    fn watch(&mut self) {
        let mut events = EventFlags::IN | EventFlags::ET;
        events.set(EventFlags::OUT, self.transmitting.wants_room());
        let add = |fd: BorrowedFd<'_>, events| {
            epoll::add(&self.epoll, fd, EventData::new_u64(0), events).is_ok()
        };
        self.watched = add(self.socket.as_fd(), events);
        if let Some(offload) = &self.offload
            && self.watched
            && !add(offload.socket().as_fd(), EventFlags::IN | EventFlags::ET)
        {
            self.disarm();
        }
    }

    /// Forgets the events so far.
    fn drain_events(&mut self) {
        let mut events = [const { MaybeUninit::<Event>::uninit() }; 2];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events[..], Some(&zero)) else {
            return;
        };
        let is_error = |event: &Event| {
            // Copied: the structure is packed.
            let flags = event.flags;
            flags.intersects(EventFlags::ERR | EventFlags::HUP)
        };
        if events.iter().any(is_error) {
            self.take_error();
        }
    }
}

/// The ring that begins at this place of the socket's memory.
fn slots(memory: &GuestMemory, at: u64, shape: &PacketRing) -> Result<PacketSlots, LinkError> {
    PacketSlots::new(memory, at, shape).map_err(LinkError::kernel("map a packet ring"))
}

/// Numbers that the options bound.
fn as_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn is_down(error: &std::io::Error) -> bool {
    [Errno::NETDOWN, Errno::NXIO, Errno::NODEV]
        .iter()
        .any(|down| error.raw_os_error() == Some(down.raw_os_error()))
}

impl Link for PacketLink {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn stats(&self) -> &Arc<LinkStats> {
        &self.stats
    }

    fn state(&self) -> LinkState {
        self.state
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        let (mut count, mut bytes) = (0_usize, 0_u64);
        // Slots without a frame for us count as well: a flood of them takes no more than its share.
        if let Some(offload) = &mut self.offload {
            offload.begin();
        }
        for _ in 0..limit {
            let Some(arrival) = self.take() else {
                break;
            };
            let reason = match arrival {
                Arrival::Frame { slot, piece, from } => {
                    frames.push(Frame::new(LinkAddress::Ethernet(from), Pieces::one(piece), slot));
                    count = count.saturating_add(1);
                    bytes = bytes.saturating_add(piece.len_bytes() as u64);
                    continue;
                }
                Arrival::Truncated => &self.stats.dropped_truncated,
                Arrival::Foreign => &self.stats.dropped_foreign,
                Arrival::Malformed => &self.stats.dropped_malformed,
                Arrival::Message => continue,
            };
            reason.add(1);
        }
        if count > 0 {
            self.stats.received.add(count as u64);
            self.stats.received_bytes.add(bytes);
            self.stats.received_batches.add(1);
        }
        if now >= self.look_at {
            self.look(now);
        }
        if self.transmitting.has_unsent() && now >= self.retry_at {
            self.flush(now);
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        let slots = as_u32(self.receiving.slots());
        for frame in frames.drain(..) {
            match (frame.into_slot(), &mut self.offload) {
                (slot, Some(offload)) if slot >= slots => offload.give_back(slot),
                (slot, _) => self.receiving.give_back(slot),
            }
        }
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        self.transmitting.lend(count, buffers);
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        let (mut count, mut bytes) = (0_u64, 0_u64);
        if let Some(offload) = &mut self.offload {
            offload.begin_send();
        }
        for buffer in buffers.drain(..) {
            if let Some((LinkAddress::Ethernet(to), len_bytes)) = buffer.frame() {
                self.transmit(now, buffer, to, len_bytes);
                count = count.saturating_add(1);
                bytes = bytes.saturating_add(len_bytes as u64);
            } else {
                self.transmitting.cancel(buffer);
                self.stats.dropped_unsendable.add(1);
            }
        }
        if count > 0 {
            self.stats.sent.add(count);
            self.stats.sent_bytes.add(bytes);
            self.stats.sent_batches.add(1);
            self.end_run(now);
            if self.transmitting.has_unsent() {
                self.flush(now);
            }
        }
    }

    fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
        buffers.drain(..).for_each(|buffer| self.transmitting.cancel(buffer));
    }

    fn arm(&mut self) -> Arm {
        self.count_drops();
        if !self.watched {
            self.watch();
        }
        if !self.watched {
            return Arm::CannotSleep;
        }
        // The first event tells the state as it was: it is looked at below.
        self.drain_events();
        let has_packet = self.offload.as_ref().is_some_and(|offload| offload.has_next());
        if has_packet || self.receiving.has_next() || self.transmitting.has_wanted_room() {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.watched) {
            let _ = epoll::delete(&self.epoll, &self.socket);
            if let Some(offload) = &self.offload {
                let _ = epoll::delete(&self.epoll, offload.socket());
            }
        }
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn on_wake(&mut self) {
        self.drain_events();
    }

    fn deadline(&self) -> Option<Nanos> {
        let unsent = self.transmitting.has_unsent().then_some(self.retry_at);
        let down = (self.state != LinkState::Up).then_some(self.look_at);
        unsent.into_iter().chain(down).min()
    }
}

impl Drop for PacketLink {
    fn drop(&mut self) {
        self.transmitting.clear();
        // A socket lives as long as a clone of its memory.
        let offload = self.offload.as_ref().map(|offload| offload.socket().receive_nothing());
        if let Err(error) = self.socket.receive_nothing().and(offload.unwrap_or(Ok(()))) {
            let interface = &self.interface;
            tracing::warn!(%interface, %error, "a packet socket goes on receiving");
        }
    }
}
