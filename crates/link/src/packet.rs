//! A link on an Ethernet interface, through the rings of a packet socket.

mod receiving;
mod ring;
mod transmitting;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use sidecore_linux::{FrameFilter, FrameShare, PacketRing, PacketSetup, PacketSocket};
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
use receiving::{Arrival, Receiving};
use ring::Ring;
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
    /// Options out of range; no such interface, or one with too small an MTU; no CAP_NET_RAW.
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
        };
        let memory = socket
            .set_up(&setup)
            .map_err(LinkError::kernel("make the rings of a packet socket"))?;
        let address = EthernetAddress(interface.address);
        let ring = Ring::new(&memory, receive.len_bytes(), &transmit)?;
        let transmitting = Transmitting::new(ring, frame_at, frame_len, address, options.ethertype);
        let receiving = Receiving::new(Ring::new(&memory, 0, &receive)?, slot_bytes, frame_len);
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
                payload_align_bytes: shape.payload_align_bytes,
                receive_frames: receiving.slots(),
                transmit_frames: transmitting.slots(),
                fills_in_order: true,
                batch_frames: SEND_BATCH,
                mode: "TPACKET_V2 rings",
            },
            stats: Arc::default(),
            interface: options.interface.clone(),
            socket,
            memory,
            receiving,
            transmitting,
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
        if let Ok(drops) = self.socket.take_drops() {
            self.stats.dropped_full.add(u64::from(drops));
        }
    }

    /// Takes note of an error of the socket, which would keep it readable.
    fn take_error(&mut self) {
        if self.socket.take_error().is_some_and(|error| is_down(&error)) {
            self.state = DOWN;
        }
    }

    fn watch(&mut self) {
        let mut events = EventFlags::IN | EventFlags::ET;
        events.set(EventFlags::OUT, self.transmitting.wants_room());
        self.watched = epoll::add(&self.epoll, &self.socket, EventData::new_u64(0), events).is_ok();
    }

    /// Forgets the events so far.
    fn drain_events(&mut self) {
        let mut events = [MaybeUninit::<Event>::uninit()];
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
        for _ in 0..limit {
            let Some(arrival) = self.receiving.take(&self.memory) else {
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
        frames.drain(..).for_each(|frame| self.receiving.give_back(frame.into_slot()));
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        self.transmitting.lend(count, buffers);
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        let (mut count, mut bytes) = (0_u64, 0_u64);
        for buffer in buffers.drain(..) {
            if let Some((LinkAddress::Ethernet(to), len_bytes)) = buffer.frame() {
                self.transmitting.send(&self.memory, buffer, to, len_bytes);
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
            self.flush(now);
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
        if self.receiving.has_next() || self.transmitting.has_wanted_room() {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.watched) {
            let _ = epoll::delete(&self.epoll, &self.socket);
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
        // The socket lives as long as a clone of its memory.
        if let Err(error) = self.socket.receive_nothing() {
            let interface = &self.interface;
            tracing::warn!(%interface, %error, "a packet socket goes on receiving");
        }
    }
}
