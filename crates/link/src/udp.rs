//! A link over UDP, for hosts that are not on one Ethernet.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sidecore_linux::{Arrived, DatagramSocket, Departure, Place};
use sidecore_memory::{GuestMemory, SharedPages};
use sidecore_reactor::{Arm, WakeSet};
use sidecore_units::Nanos;

use crate::frame::{Piece, Pieces};
use crate::options::{SEND_BATCH, SlotShape};
use crate::{
    Buffer, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkQueue, LinkState, LinkStats,
    Properties, QUEUE_AT,
};

/// Room for what the kernel puts together: no packet is longer.
const COALESCED_BYTES_MAX: usize = 1 << 16;
/// The longest payload of a datagram, over IPv4 as over IPv6.
const DATAGRAM_BYTES_MAX: usize = 65_487;
/// Datagrams that the kernel cuts out of one message, or puts into one (udp(7)).
const SEGMENTS_MAX: usize = 64;
/// Messages that are moved by one system call.
const BATCH: usize = 64;
const COUNT_INTERVAL: Nanos = Nanos::from_millis(10);
const RETRY_INTERVAL: Nanos = Nanos::from_micros(50);
/// A link that is awake for so many receives is watched no longer: the kernel would tell the watch
/// of each datagram.
const WATCHED_RECEIVES: u32 = 8;

/// The options of a UDP link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpOptions {
    /// The address to receive at; port 0 is one of the kernel's choice.
    pub address: SocketAddr,
    /// Frames and rings.
    pub link: LinkOptions,
    /// The kernel delivers datagrams of one sender together (`UDP_GRO`): less work for long
    /// requests, but only the first payload of several is aligned, and a receive buffer takes 64
    /// KiB.
    pub coalesce: bool,
}

/// A link over UDP: frames for one address and of one size are given to the kernel as one message
/// (`UDP_SEGMENT`), and a batch of messages by one system call.
///
/// A poll of this link is a system call, also if nothing has arrived. An io_uring would save it, at
/// the price of a completion for each message; on a routed network neither is what a request waits
/// for.
#[derive(Debug)]
pub struct UdpLink {
    properties: Properties,
    stats: Arc<LinkStats>,
    local: SocketAddr,
    socket: DatagramSocket,
    watch: Watch,
    receiving: Receiving,
    transmit_shape: SlotShape,
    /// Where the transmit slots begin.
    transmit_at: u32,
    transmit_free: Vec<u32>,
    /// Sent, but not taken by the kernel.
    queue: VecDeque<Queued>,
    /// Whether the kernel cuts messages into datagrams.
    segments: bool,
    places: Vec<Place>,
    departures: Vec<Departure>,
    retry_at: Nanos,
    count_at: Nanos,
    seen_drops: u32,
    /// Frames have arrived since the drops were counted: a full buffer drops others, and has some.
    owes_count: bool,
}

/// The descriptor that wakes the link, and whether the socket is in it. A link that wakes for a
/// keepalive stays watched, since a change costs a system call.
#[derive(Debug)]
struct Watch {
    wake: WakeSet,
    is_on: bool,
    /// Receives since the last sleep, up to [`WATCHED_RECEIVES`].
    receives: u32,
}

impl Watch {
    fn new() -> Result<Self, LinkError> {
        let wake = WakeSet::new().map_err(LinkError::kernel("make an epoll descriptor"))?;
        Ok(Self { wake, is_on: false, receives: 0 })
    }

    /// Returns whether the socket is watched.
    fn on(&mut self, socket: &DatagramSocket) -> bool {
        self.receives = 0;
        self.is_on = self.is_on || self.wake.add(socket.as_fd()).is_ok();
        self.is_on
    }

    fn off(&mut self, socket: &DatagramSocket) {
        if std::mem::take(&mut self.is_on) {
            self.wake.remove(socket.as_fd());
        }
    }

    fn received(&mut self, socket: &DatagramSocket) {
        if self.receives < WATCHED_RECEIVES {
            self.receives = self.receives.saturating_add(1);
            if self.receives == WATCHED_RECEIVES {
                self.off(socket);
            }
        }
    }
}

/// A frame on its way to the kernel.
#[derive(Debug)]
struct Queued {
    buffer: Buffer,
    to: SocketAddr,
    len_bytes: u32,
    /// The receiver's queue: one message is for one queue.
    queue: u8,
}

/// Receive buffers, each of which may have several frames in it.
#[derive(Debug)]
struct Receiving {
    shape: SlotShape,
    /// Bytes of a buffer that datagrams go to.
    room_bytes: u32,
    free: Vec<u32>,
    /// Frames of the buffer of this number that are lent, or still to be lent.
    frames: Box<[u32]>,
    /// Arrived, but not lent.
    arrived: VecDeque<Coalesced>,
}

/// Frames of one sender and one size, in one buffer.
#[derive(Clone, Copy, Debug)]
struct Coalesced {
    buffer: u32,
    from: SocketAddr,
    at: u32,
    end: u32,
    segment_bytes: u32,
}

impl Receiving {
    fn new(shape: SlotShape, room_bytes: usize, buffers: usize) -> Self {
        Self {
            shape,
            room_bytes: as_u32(room_bytes),
            free: (0..as_u32(buffers)).rev().collect(),
            frames: vec![0; buffers].into(),
            arrived: VecDeque::with_capacity(buffers),
        }
    }

    fn start(&self, buffer: u32) -> u32 {
        as_u32(self.shape.slot_bytes)
            .saturating_mul(buffer)
            .saturating_add(as_u32(self.shape.frame_at))
    }

    /// The places of the next buffers to be filled.
    fn rooms(&self, count: usize, places: &mut Vec<Place>) {
        places.clear();
        let next = self.free.iter().rev().take(count);
        places.extend(
            next.map(|buffer| Place { start: self.start(*buffer), len_bytes: self.room_bytes }),
        );
    }

    /// Takes the next buffer, which has been filled.
    fn accept(&mut self, arrived: &Arrived, frame_bytes: u32, stats: &LinkStats) {
        let Some(buffer) = self.free.pop() else {
            return;
        };
        let count = arrived.len_bytes.div_ceil(arrived.segment_bytes.max(1));
        let reason = if arrived.truncated
            || arrived.segment_bytes.min(arrived.len_bytes) > frame_bytes
        {
            &stats.dropped_truncated
        } else if arrived.len_bytes == 0 {
            &stats.dropped_malformed
        } else {
            if let Some(frames) = self.frames.get_mut(usize::try_from(buffer).unwrap_or(usize::MAX))
            {
                *frames = count;
            }
            let at = self.start(buffer);
            let end = at.saturating_add(arrived.len_bytes);
            let segment_bytes = arrived.segment_bytes;
            self.arrived.push_back(Coalesced {
                buffer,
                from: arrived.from,
                at,
                end,
                segment_bytes,
            });
            return;
        };
        reason.add(u64::from(count.max(1)));
        // Refilled last, so that the order of the others stays.
        self.free.insert(0, buffer);
    }

    /// Lends up to `limit` of the frames that have arrived; returns how many, and their bytes.
    fn lend(&mut self, limit: usize, frames: &mut Vec<Frame>) -> (usize, u64) {
        let (mut count, mut bytes) = (0_usize, 0_u64);
        while count < limit
            && let Some(next) = self.arrived.front_mut()
        {
            let len_bytes = next.end.saturating_sub(next.at).min(next.segment_bytes);
            let piece = Piece::new(next.at, len_bytes);
            frames.push(Frame::new(LinkAddress::Udp(next.from), Pieces::one(piece), next.buffer));
            count = count.saturating_add(1);
            bytes = bytes.saturating_add(u64::from(len_bytes));
            next.at = next.at.saturating_add(len_bytes);
            if next.at >= next.end {
                self.arrived.pop_front();
            }
        }
        (count, bytes)
    }

    fn give_back(&mut self, buffer: u32) {
        let Some(frames) = self.frames.get_mut(usize::try_from(buffer).unwrap_or(usize::MAX))
        else {
            return;
        };
        *frames = frames.saturating_sub(1);
        if *frames == 0 {
            self.free.push(buffer);
        }
    }
}

impl UdpLink {
    /// Opens a link at an address of this thread's network namespace.
    ///
    /// # Errors
    /// Options out of range; the address is not to be had.
    pub fn open(options: &UdpOptions) -> Result<Self, LinkError> {
        Self::open_one(options, false)
    }

    /// Opens all queues of a link, which have one address: the kernel gives each datagram to the
    /// queue that its byte at [`QUEUE_AT`] names. Such queues do not coalesce, because the kernel
    /// would put datagrams of several queues together.
    ///
    /// # Errors
    /// As [`UdpLink::open`]; a number of queues out of range.
    pub fn open_queues(options: &UdpOptions, count: usize) -> Result<Vec<Self>, LinkError> {
        let queues = LinkQueue::all(count)?;
        if count == 1 {
            return Ok(vec![Self::open(options)?]);
        }
        let mut options = UdpOptions { coalesce: false, ..options.clone() };
        // A socket that shares its address would share it with another daemon of this user, too.
        let alone = Self::open(&options)?;
        options.address = alone.local;
        drop(alone);
        let links =
            queues.map(|_| Self::open_one(&options, true)).collect::<Result<Vec<_>, _>>()?;
        if let Some(first) = links.first() {
            let count = u8::try_from(count).unwrap_or(u8::MAX);
            first
                .socket
                .share_by(as_u32(QUEUE_AT), count)
                .map_err(LinkError::kernel("divide a UDP port among queues"))?;
        }
        Ok(links)
    }

    fn open_one(options: &UdpOptions, shared: bool) -> Result<Self, LinkError> {
        options.link.check()?;
        let LinkOptions { frame_bytes, header_bytes, receive_frames, transmit_frames } =
            options.link;
        if frame_bytes > DATAGRAM_BYTES_MAX {
            let (name, value) = ("frame_bytes", frame_bytes);
            let (min, max) = (crate::FRAME_BYTES_MIN, DATAGRAM_BYTES_MAX);
            return Err(LinkError::Option { name, value, min, max, power_of_two: false });
        }
        let transmit_shape = SlotShape::new(&options.link, 0);
        let room_bytes = if options.coalesce { COALESCED_BYTES_MAX } else { frame_bytes };
        let receive_shape =
            SlotShape::new(&LinkOptions { frame_bytes: room_bytes, ..options.link }, 0);
        let transmit_at = receive_shape.slot_bytes.saturating_mul(receive_frames);
        let len_bytes =
            transmit_shape.slot_bytes.saturating_mul(transmit_frames).saturating_add(transmit_at);
        if u32::try_from(len_bytes).is_err() {
            return Err(LinkError::TooMuchMemory { bytes: len_bytes });
        }
        let pages = SharedPages::new("sidecore-udp", len_bytes.next_multiple_of(4096))
            .map_err(LinkError::kernel("make memory for frames"))?;
        let buffer_bytes = receive_frames
            .max(transmit_frames)
            .saturating_mul(frame_bytes)
            .clamp(1 << 20, 64 << 20);
        let socket = DatagramSocket::bind(
            options.address,
            pages.memory().clone(),
            buffer_bytes,
            options.coalesce,
            shared,
        )
        .map_err(LinkError::kernel("bind a UDP socket"))?;
        let address =
            socket.local_address().map_err(LinkError::kernel("read a socket's address"))?;
        let (payload_align_bytes, mode) = if options.coalesce {
            (1, "UDP, segmented and coalesced")
        } else {
            (transmit_shape.payload_align_bytes, "UDP, segmented")
        };
        Ok(Self {
            properties: Properties {
                address: LinkAddress::Udp(address),
                frame_bytes,
                header_bytes,
                payload_align_bytes,
                receive_frames,
                transmit_frames,
                fills_in_order: false,
                batch_frames: SEND_BATCH,
                mode,
            },
            stats: Arc::default(),
            local: address,
            socket,
            watch: Watch::new()?,
            receiving: Receiving::new(receive_shape, room_bytes, receive_frames),
            transmit_shape,
            transmit_at: as_u32(transmit_at),
            transmit_free: (0..as_u32(transmit_frames)).rev().collect(),
            queue: VecDeque::with_capacity(transmit_frames),
            segments: true,
            places: Vec::with_capacity(receive_frames.max(transmit_frames)),
            departures: Vec::with_capacity(BATCH),
            retry_at: Nanos::ZERO,
            count_at: Nanos::ZERO,
            seen_drops: 0,
            owes_count: false,
        })
    }

    /// Makes messages of the frames at the front of the queue.
    fn gather(&mut self) {
        self.places.clear();
        self.departures.clear();
        let mut bytes = 0_usize;
        // Whether the last message can have no more: its last datagram is shorter than the others.
        let mut complete = true;
        let mut last_queue = 0;
        for Queued { buffer, to, len_bytes, queue } in &self.queue {
            let index = self.places.len();
            let Some(piece) =
                buffer.pieces().part(0, usize::try_from(*len_bytes).unwrap_or(0)).next()
            else {
                break;
            };
            let start = u32::try_from(piece.address().0).unwrap_or(u32::MAX);
            let len = usize::try_from(*len_bytes).unwrap_or(usize::MAX);
            let sum = bytes.saturating_add(len);
            let segment = u16::try_from(*len_bytes).unwrap_or(u16::MAX);
            let is_full = self.departures.len() >= BATCH;
            match self.departures.last_mut() {
                Some(last)
                    if !complete
                        && last.to == *to
                        && last_queue == *queue
                        && last.places.len() < SEGMENTS_MAX
                        && sum <= DATAGRAM_BYTES_MAX
                        && segment <= last.segment_bytes =>
                {
                    complete = segment < last.segment_bytes;
                    last.places.end = index.saturating_add(1);
                    bytes = sum;
                }
                _ if is_full => break,
                _ => {
                    let places = index..index.saturating_add(1);
                    self.departures.push(Departure { to: *to, places, segment_bytes: segment });
                    complete = !self.segments;
                    bytes = len;
                }
            }
            last_queue = *queue;
            self.places.push(Place { start, len_bytes: *len_bytes });
        }
        for departure in &mut self.departures {
            if departure.places.len() == 1 {
                departure.segment_bytes = 0;
            }
        }
    }

    /// Hands what is queued to the kernel.
    fn flush(&mut self, now: Nanos) {
        while !self.queue.is_empty() {
            self.gather();
            match self.socket.send(&self.departures, &self.places) {
                Ok(count) => {
                    let frames = self
                        .departures
                        .get(count.saturating_sub(1))
                        .map_or(0, |last| last.places.end);
                    self.release(frames);
                }
                Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::INTR) => {}
                    Some(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                        self.retry_at = now.after(RETRY_INTERVAL);
                        self.stats.congestions.add(1);
                        return;
                    }
                    // The interface cannot compute checksums of datagrams that it does not see.
                    Some(Errno::IO | Errno::OPNOTSUPP) if self.first_is_segmented() => {
                        self.segments = false
                    }
                    _ => {
                        let frames = self.departures.first().map_or(1, |first| first.places.len());
                        self.stats.dropped_refused.add(frames as u64);
                        self.release(frames);
                    }
                },
            }
        }
    }

    fn first_is_segmented(&self) -> bool {
        self.departures.first().is_some_and(|first| first.segment_bytes > 0)
    }

    /// Takes the buffers of the first frames of the queue back.
    fn release(&mut self, frames: usize) {
        for _ in 0..frames {
            if let Some(Queued { buffer, .. }) = self.queue.pop_front() {
                self.transmit_free.push(buffer.into_slot());
            }
        }
    }

    fn count_drops(&mut self) {
        self.owes_count = false;
        if let Ok(drops) = self.socket.drops() {
            self.stats.dropped_full.add(u64::from(drops.wrapping_sub(self.seen_drops)));
            self.seen_drops = drops;
        }
    }

    /// Moves what has arrived into buffers.
    fn fill(&mut self, count: usize) {
        self.receiving.rooms(count.min(BATCH), &mut self.places);
        if self.places.is_empty() {
            return;
        }
        let frame_bytes = as_u32(self.properties.frame_bytes);
        let (receiving, stats) = (&mut self.receiving, &self.stats);
        // An error is that nothing has arrived, or tells of a frame that was sent: neither matters
        // here.
        let _ = self
            .socket
            .receive(&self.places, |arrived| receiving.accept(&arrived, frame_bytes, stats));
    }
}

/// Numbers that the options bound.
fn as_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Link for UdpLink {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> &GuestMemory {
        self.socket.memory()
    }

    fn stats(&self) -> &Arc<LinkStats> {
        &self.stats
    }

    fn state(&self) -> LinkState {
        LinkState::Up
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        let (mut count, mut bytes) = self.receiving.lend(limit, frames);
        if count < limit {
            self.fill(limit.saturating_sub(count));
            let more = self.receiving.lend(limit.saturating_sub(count), frames);
            count = count.saturating_add(more.0);
            bytes = bytes.saturating_add(more.1);
        }
        if count > 0 {
            self.stats.received.add(count as u64);
            self.stats.received_bytes.add(bytes);
            self.stats.received_batches.add(1);
            self.owes_count = true;
        }
        if self.owes_count && now >= self.count_at {
            self.count_at = now.after(COUNT_INTERVAL);
            self.count_drops();
        }
        self.watch.received(&self.socket);
        if !self.queue.is_empty() && now >= self.retry_at {
            self.flush(now);
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        frames.drain(..).for_each(|frame| self.receiving.give_back(frame.into_slot()));
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        let shape = self.transmit_shape;
        for _ in 0..count {
            let Some(slot) = self.transmit_free.pop() else {
                break;
            };
            let start = as_u32(shape.slot_bytes)
                .saturating_mul(slot)
                .saturating_add(as_u32(shape.frame_at));
            let piece = Piece::new(
                start.saturating_add(self.transmit_at),
                as_u32(self.properties.frame_bytes),
            );
            buffers.push(Buffer::new(Pieces::one(piece), slot));
        }
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        let (mut count, mut bytes) = (0_u64, 0_u64);
        for buffer in buffers.drain(..) {
            if let Some((LinkAddress::Udp(to), len_bytes)) = buffer.frame() {
                let mut queue = [0];
                buffer.pieces().read(self.socket.memory(), QUEUE_AT, &mut queue);
                let [queue] = queue;
                self.queue.push_back(Queued { buffer, to, len_bytes: as_u32(len_bytes), queue });
                count = count.saturating_add(1);
                bytes = bytes.saturating_add(len_bytes as u64);
            } else {
                self.transmit_free.push(buffer.into_slot());
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
        self.transmit_free.extend(buffers.drain(..).map(Buffer::into_slot));
    }

    fn arm(&mut self) -> Arm {
        if self.owes_count {
            self.count_drops();
        }
        if !self.receiving.arrived.is_empty() {
            return Arm::WorkPending;
        }
        if self.receiving.free.is_empty() {
            // Nothing can be received before a frame is given back.
            self.watch.off(&self.socket);
            return Arm::Armed;
        }
        if !self.watch.on(&self.socket) {
            return Arm::CannotSleep;
        }
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&zero)) {
            Ok(0) => Arm::Armed,
            _ => Arm::WorkPending,
        }
    }

    fn disarm(&mut self) {}

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.watch.wake.as_fd()
    }

    fn on_wake(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        (!self.queue.is_empty()).then_some(self.retry_at)
    }
}

impl Drop for UdpLink {
    fn drop(&mut self) {
        let unsent = self.queue.len();
        self.release(unsent);
    }
}
