//! A link on an Ethernet interface, through AF_XDP.

mod pieces;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use sidecore_linux::{
    CHUNK_BYTES, Interface, KERNEL_HEADROOM_BYTES, PacketSocket, XdpMode, XdpProgram, XdpRing,
    XdpRings, XdpSocket, XdpStatistics,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};
use sidecore_reactor::{Arm, WakeSet};
use sidecore_units::Nanos;

use crate::frame::{PIECES_MAX, Piece, Pieces};
use crate::interface::{DOWN, DOWN_INTERVAL, LOOK_INTERVAL};
use crate::options::{FRAME_BYTES_MIN, SEND_BATCH};
use crate::{
    Buffer, EthernetAddress, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkQueue,
    LinkState, LinkStats, Properties, interface,
};
use pieces::{Partial, payload};
use ring::{CONTINUED, Descriptor, Ring};

const ETHERNET_BYTES: u32 = 14;
/// Chunks are too small for whole pages of payload behind headers: payloads begin a cache line.
const ALIGN_BYTES: u32 = 64;
const RETRY_INTERVAL: Nanos = Nanos::from_micros(50);

/// The options of an AF_XDP link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpOptions {
    /// The interface's name.
    pub interface: String,
    /// The protocol of the frames.
    pub ethertype: u16,
    /// Frames and rings.
    pub link: LinkOptions,
    /// The mode wanted; `None` is the first that the interface has, of zero copy, the driver's, and
    /// the generic one.
    pub mode: Option<XdpMode>,
}

/// A link through AF_XDP. Frames lie in chunks of a page, so a jumbo frame has several pieces.
#[derive(Debug)]
pub struct XdpLink {
    properties: Properties,
    address: EthernetAddress,
    ethertype: u16,
    stats: Arc<LinkStats>,
    interface: String,
    /// Looks at the interface.
    finder: PacketSocket,
    /// Of all queues of the link.
    _program: Arc<XdpProgram>,
    socket: XdpSocket,
    umem: GuestMemory,
    state: LinkState,
    receive: Ring,
    fill: Ring,
    transmit: Ring,
    completion: Ring,
    /// A frame of which not all pieces have been taken.
    partial: Partial,
    /// Where the transmit chunks begin.
    transmit_at: u32,
    shape: Shape,
    free: Vec<u32>,
    /// Chunks of the transmit slot of this number that the kernel has.
    sending: Box<[u8]>,
    starved: bool,
    wake: WakeSet,
    watched: bool,
    seen: XdpStatistics,
    now: Nanos,
    retry_at: Nanos,
    look_at: Nanos,
}

/// How frames lie in chunks.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// From a chunk's start to the Ethernet header of a frame.
    start: u32,
    /// Chunks of the longest frame received.
    receive_chunks: u32,
    /// Chunks of the longest frame sent.
    transmit_chunks: u32,
}

impl Shape {
    fn new(frame_bytes: usize, header_bytes: usize) -> Self {
        let header_bytes = as_u32(header_bytes).saturating_add(ETHERNET_BYTES);
        let payload_at =
            KERNEL_HEADROOM_BYTES.saturating_add(header_bytes).next_multiple_of(ALIGN_BYTES);
        let start = payload_at.saturating_sub(header_bytes);
        let bytes = as_u32(frame_bytes).saturating_add(ETHERNET_BYTES);
        let room = CHUNK_BYTES.saturating_sub(start);
        let rest = bytes.saturating_sub(room);
        Self {
            start,
            // The kernel leaves the headroom in each chunk, and so does not use it for the rest.
            receive_chunks: bytes.div_ceil(room.max(1)),
            transmit_chunks: rest.div_ceil(CHUNK_BYTES).saturating_add(1),
        }
    }
}

impl Shape {
    /// The chunks for frames received, those for frames sent, and the bytes of all.
    fn chunks(&self, link: &LinkOptions) -> Result<(u32, u32, usize), LinkError> {
        if self.receive_chunks.max(self.transmit_chunks) > as_u32(PIECES_MAX) {
            let max = usize::try_from(CHUNK_BYTES.saturating_mul(3)).unwrap_or(0);
            let (value, min) = (link.frame_bytes, FRAME_BYTES_MIN);
            return Err(LinkError::Option {
                name: "frame_bytes",
                value,
                min,
                max,
                power_of_two: false,
            });
        }
        let receive = as_u32(link.receive_frames).saturating_mul(self.receive_chunks);
        let transmit = as_u32(link.transmit_frames).saturating_mul(self.transmit_chunks);
        let chunks = u64::from(receive).saturating_add(u64::from(transmit));
        let bytes =
            usize::try_from(chunks.saturating_mul(u64::from(CHUNK_BYTES))).unwrap_or(usize::MAX);
        if u32::try_from(bytes).is_err() {
            return Err(LinkError::TooMuchMemory { bytes });
        }
        Ok((receive, transmit, bytes))
    }
}

/// The capabilities that a link through AF_XDP needs.
const CAPABILITIES: &str = "CAP_NET_RAW CAP_NET_ADMIN CAP_BPF";

/// The link and its remedy, for an error of the kernel's.
fn refused(interface: &str, mode: XdpMode, error: io::Error) -> LinkError {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let remedy = match errno {
        Some(Errno::PERM | Errno::ACCESS) => {
            let step = "open an AF_XDP socket";
            return LinkError::Capability { step, capabilities: CAPABILITIES };
        }
        Some(Errno::AFNOSUPPORT) => "the kernel has none: use a link of type `packet`",
        Some(Errno::BUSY | Errno::EXIST) => {
            "another socket has the queue, or another program the interface: `ip link show` names \
             it"
        }
        Some(Errno::NOBUFS | Errno::NOMEM) => {
            "its memory is locked: raise LimitMEMLOCK of the daemon's unit, or use fewer frames"
        }
        _ if mode == XdpMode::ZeroCopy => {
            "the driver has no zero copy, or none for so long frames: leave `mode` out, or shorten \
             the MTU"
        }
        _ if mode == XdpMode::Driver => {
            "the driver has no XDP for so long frames: leave `mode` out, or shorten the MTU"
        }
        _ => "use a link of type `packet`",
    };
    LinkError::Xdp { interface: interface.to_owned(), error, remedy }
}

/// The mode, for reports.
const fn text(mode: XdpMode) -> &'static str {
    match mode {
        XdpMode::ZeroCopy => "AF_XDP, zero copy",
        XdpMode::Driver => "AF_XDP, copied, in the driver",
        XdpMode::Generic => "AF_XDP, copied, generic",
    }
}

/// The fill ring of a new socket, with all chunks for frames to be received.
fn first_fill(ring: &XdpRing, chunks: u32, socket: &XdpSocket) -> Result<Ring, LinkError> {
    let mut fill = Ring::new(ring, 1)?;
    for chunk in 0..chunks {
        let address = u64::from(chunk).saturating_mul(u64::from(CHUNK_BYTES));
        fill.push(Descriptor { address, len_bytes: 0, flags: 0 });
    }
    fill.publish();
    if fill.needs_wake_up() {
        socket.wake_receive();
    }
    Ok(fill)
}

impl XdpLink {
    /// Opens a link with one queue on an interface of this thread's network namespace.
    ///
    /// # Errors
    /// As [`XdpLink::open_queues`].
    pub fn open(options: &XdpOptions) -> Result<Self, LinkError> {
        let mut links = Self::open_queues(options, 1)?;
        links.pop().ok_or(LinkError::Offer("no queue"))
    }

    /// Opens all queues of a link on an interface of this thread's network namespace. They are the
    /// first queues of the interface: a program can give a frame to the socket of the queue that it
    /// arrived at, and to no other, so it is the interface that steers.
    ///
    /// # Errors
    /// Options out of range; no such interface, or one with too small an MTU or too few queues; no
    /// mode that both the options and the interface have; no capabilities.
    pub fn open_queues(options: &XdpOptions, count: usize) -> Result<Vec<Self>, LinkError> {
        options.link.check()?;
        // Only for its check of the number.
        drop(LinkQueue::all(count)?);
        let name = options.interface.as_str();
        let finder = interface::packet_socket(CAPABILITIES)?;
        let (interface, link) = interface::find(&finder, name, &options.link)?;
        let has = finder
            .receive_queues(name)
            .map_err(LinkError::kernel("count the queues of an interface"))?;
        let has = usize::try_from(has).unwrap_or(usize::MAX);
        if has < count {
            return Err(LinkError::Queues { interface: name.to_owned(), has, wanted: count });
        }
        if has > count {
            tracing::warn!(
                interface = name,
                "the interface has {has} receive queues and the link {count}, and frames at the \
                 others do not arrive: \
                 `ethtool --set-channels {name} combined {count}`"
            );
        }
        let modes = match options.mode {
            Some(mode) => vec![mode],
            None => vec![XdpMode::ZeroCopy, XdpMode::Driver, XdpMode::Generic],
        };
        let mut last = None;
        for mode in modes {
            match Self::open_mode(options, &link, &interface, count, mode) {
                Ok(links) => return Ok(links),
                Err(error) => {
                    tracing::debug!(interface = name, ?mode, %error, "AF_XDP mode refused");
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or(LinkError::Offer("no mode")))
    }

    fn open_mode(
        options: &XdpOptions,
        link: &LinkOptions,
        interface: &Interface,
        count: usize,
        mode: XdpMode,
    ) -> Result<Vec<Self>, LinkError> {
        let refused = |error| refused(&options.interface, mode, error);
        let program = XdpProgram::attach(interface, options.ethertype, as_u32(count), mode);
        let program = Arc::new(program.map_err(refused)?);
        (0..as_u32(count))
            .map(|queue| {
                let opened = Self::open_queue(options, link, interface, &program, queue, mode)?;
                program.serve(queue, &opened.socket).map_err(refused)?;
                Ok(opened)
            })
            .collect()
    }

    fn open_queue(
        options: &XdpOptions,
        link: &LinkOptions,
        interface: &Interface,
        program: &Arc<XdpProgram>,
        queue: u32,
        mode: XdpMode,
    ) -> Result<Self, LinkError> {
        let shape = Shape::new(link.frame_bytes, link.header_bytes);
        let (receive_chunks, transmit_chunks, bytes) = shape.chunks(link)?;
        let pages = SharedPages::new("sidecore-xdp", bytes)
            .map_err(LinkError::kernel("make memory for frames"))?;
        let umem = pages.memory().clone();
        let rings = XdpRings {
            receive: receive_chunks.next_power_of_two(),
            transmit: transmit_chunks.next_power_of_two(),
            fill: receive_chunks.next_power_of_two(),
            completion: transmit_chunks.next_power_of_two(),
        };
        let headroom = shape.start.saturating_sub(KERNEL_HEADROOM_BYTES);
        let ethertype = options.ethertype;
        let is_split = shape.receive_chunks.max(shape.transmit_chunks) > 1;
        let (socket, mapped) =
            XdpSocket::open(interface.index, queue, pages, headroom, rings, mode, is_split)
                .map_err(|error| refused(&options.interface, mode, error))?;
        let fill = first_fill(&mapped.fill, receive_chunks, &socket)?;
        let address = EthernetAddress(interface.address);
        Ok(Self {
            properties: Properties {
                address: LinkAddress::Ethernet(address),
                frame_bytes: link.frame_bytes,
                header_bytes: link.header_bytes,
                payload_align_bytes: usize::try_from(ALIGN_BYTES).unwrap_or(1),
                receive_frames: link.receive_frames,
                transmit_frames: link.transmit_frames,
                fills_in_order: false,
                batch_frames: SEND_BATCH,
                mode: text(socket.mode()),
            },
            address,
            ethertype,
            stats: Arc::default(),
            interface: options.interface.clone(),
            finder: interface::packet_socket(CAPABILITIES)?,
            _program: Arc::clone(program),
            umem,
            state: LinkState::Up,
            receive: Ring::new(&mapped.receive, 2)?,
            fill,
            transmit: Ring::new(&mapped.transmit, 2)?,
            completion: Ring::new(&mapped.completion, 1)?,
            partial: Partial::default(),
            transmit_at: receive_chunks.saturating_mul(CHUNK_BYTES),
            shape,
            free: (0..as_u32(link.transmit_frames)).rev().collect(),
            sending: vec![0; link.transmit_frames].into(),
            starved: false,
            wake: WakeSet::new().map_err(LinkError::kernel("make an epoll descriptor"))?,
            watched: false,
            seen: XdpStatistics::default(),
            now: Nanos::ZERO,
            retry_at: Nanos::ZERO,
            look_at: Nanos::ZERO,
            socket,
        })
    }

    /// Returns the chunks of a received frame to the kernel, which sees them after `publish`.
    fn refill(&mut self, pieces: &Pieces) {
        pieces.part(0, usize::MAX).for_each(|piece| self.refill_one(piece));
    }

    /// Returns the chunk of a piece, which may be empty.
    fn refill_one(&mut self, piece: Piece) {
        let address = piece.address().0 & !u64::from(CHUNK_BYTES).wrapping_sub(1);
        self.fill.push(Descriptor { address, len_bytes: 0, flags: 0 });
    }

    fn publish_fill(&mut self) {
        self.fill.publish();
        if self.fill.needs_wake_up() {
            self.socket.wake_receive();
        }
    }

    /// The frame of these pieces, the first of which begins with an Ethernet header.
    fn frame(&self, pieces: Pieces, overflow: bool) -> Result<Frame, &sidecore_telemetry::Counter> {
        let mut header = [0; ETHERNET_BYTES as usize];
        if pieces.read(&self.umem, 0, &mut header) < header.len() {
            return Err(&self.stats.dropped_malformed);
        }
        let frame = payload(&pieces).ok_or(&self.stats.dropped_malformed)?;
        if overflow || frame.len_bytes() > self.properties.frame_bytes {
            return Err(&self.stats.dropped_truncated);
        }
        let [_, _, _, _, _, _, source @ .., _, _] = header;
        Ok(Frame::new(LinkAddress::Ethernet(EthernetAddress(source)), frame, 0))
    }

    /// The pieces of a transmit slot, from the Ethernet header on.
    fn slot(&self, slot: u32, len_bytes: u32) -> Pieces {
        let chunks = slot.saturating_mul(self.shape.transmit_chunks);
        let mut at = chunks.saturating_mul(CHUNK_BYTES).saturating_add(self.transmit_at);
        let (mut skip, mut rest) = (self.shape.start, len_bytes);
        let mut pieces = Pieces::default();
        while rest > 0 {
            let len = CHUNK_BYTES.saturating_sub(skip).min(rest);
            pieces.push(Piece::new(at.saturating_add(skip), len));
            at = at.saturating_add(CHUNK_BYTES);
            rest = rest.saturating_sub(len);
            skip = 0;
        }
        pieces
    }

    fn submit(&mut self, slot: u32, to: EthernetAddress, len_bytes: u32) {
        let pieces = self.slot(slot, len_bytes.saturating_add(ETHERNET_BYTES));
        let mut header = [0; ETHERNET_BYTES as usize];
        let bytes = to.0.into_iter().chain(self.address.0).chain(self.ethertype.to_be_bytes());
        header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        if let Some(first) = pieces.part(0, usize::MAX).next() {
            let at = GuestAddress(first.address().0);
            // In range, as the slot is.
            let _ = self.umem.write_slice(at, &header, &mut RegionHint::default());
        }
        let count = pieces.part(0, usize::MAX).count();
        for (index, piece) in pieces.part(0, usize::MAX).enumerate() {
            let flags = if index.saturating_add(1) < count { CONTINUED } else { 0 };
            let len_bytes = as_u32(piece.len_bytes());
            self.transmit.push(Descriptor { address: piece.address().0, len_bytes, flags });
        }
        if let Some(sending) = self.sending.get_mut(usize::try_from(slot).unwrap_or(usize::MAX)) {
            *sending = u8::try_from(count).unwrap_or(0);
        }
    }

    /// Has the kernel send what was submitted.
    fn flush(&mut self) {
        loop {
            let before = self.transmit.pending();
            if before == 0 {
                return;
            }
            if !self.transmit.needs_wake_up() {
                // The driver looks by itself.
                return;
            }
            let asked = self.socket.transmit();
            let error = match asked {
                Ok(()) => {
                    if self.state == DOWN {
                        self.look();
                    }
                    None
                }
                Err(error) => error.raw_os_error().map(Errno::from_raw_os_error),
            };
            if matches!(error, Some(Errno::NETDOWN | Errno::NXIO | Errno::NODEV)) {
                self.state = DOWN;
                self.retry_at = self.now.after(DOWN_INTERVAL);
                return;
            }
            // The kernel takes a batch at a time, and says so by EAGAIN.
            if self.transmit.pending() == before {
                self.retry_at = self.now.after(RETRY_INTERVAL);
                self.stats.congestions.add(1);
                return;
            }
        }
    }

    /// Takes the buffers back whose frames were sent.
    fn reap(&mut self) {
        let available = self.completion.available();
        for _ in 0..available {
            let Descriptor { address, .. } = self.completion.take();
            let offset =
                u32::try_from(address).unwrap_or(u32::MAX).saturating_sub(self.transmit_at);
            let chunk = offset.checked_div(CHUNK_BYTES).unwrap_or(u32::MAX);
            let slot = chunk.checked_div(self.shape.transmit_chunks).unwrap_or(u32::MAX);
            let Some(sending) = self.sending.get_mut(usize::try_from(slot).unwrap_or(usize::MAX))
            else {
                continue;
            };
            *sending = sending.saturating_sub(1);
            if *sending == 0 {
                self.free.push(slot);
            }
        }
        if available > 0 {
            self.completion.release();
        }
    }

    /// Looks at the interface, whose state no frame may tell, and at the drops.
    #[cold]
    fn look(&mut self) {
        self.count_drops();
        self.state = interface::state(&self.finder, &self.interface);
        let up = self.state == LinkState::Up;
        self.look_at = self.now.after(if up { LOOK_INTERVAL } else { DOWN_INTERVAL });
    }

    fn count_drops(&mut self) {
        let Ok(now) = self.socket.statistics() else {
            return;
        };
        let seen = std::mem::replace(&mut self.seen, now);
        let since = |now: u64, before: u64| now.wrapping_sub(before);
        self.stats.dropped_full.add(since(now.rx_dropped, seen.rx_dropped));
        self.stats.dropped_full.add(since(now.rx_ring_full, seen.rx_ring_full));
        self.stats.dropped_refused.add(since(now.tx_invalid, seen.tx_invalid));
        self.stats.starvations.add(since(now.fill_ring_empty, seen.fill_ring_empty));
    }
}

/// Numbers that the options bound.
fn as_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Link for XdpLink {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn memory(&self) -> &GuestMemory {
        &self.umem
    }

    fn stats(&self) -> &Arc<LinkStats> {
        &self.stats
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        self.now = self.now.max(now);
        let (mut count, mut bytes, mut refilled) = (0_usize, 0_u64, false);
        let available = self.receive.available();
        let mut taken = 0;
        while taken < available && count < limit {
            taken = taken.saturating_add(1);
            let Descriptor { address, len_bytes, flags } = self.receive.take();
            let piece = Piece::new(u32::try_from(address).unwrap_or(u32::MAX), len_bytes);
            if !self.partial.push(piece) {
                self.refill_one(piece);
                refilled = true;
            }
            if flags & CONTINUED != 0 {
                continue;
            }
            let Partial { pieces, overflow } = std::mem::take(&mut self.partial);
            match self.frame(pieces, overflow) {
                Ok(frame) => {
                    count = count.saturating_add(1);
                    bytes = bytes.saturating_add(frame.len_bytes() as u64);
                    frames.push(frame);
                }
                Err(reason) => {
                    reason.add(1);
                    self.refill(&pieces);
                    refilled = true;
                }
            }
        }
        if taken > 0 {
            self.receive.release();
        }
        if refilled {
            self.publish_fill();
        }
        if count > 0 {
            self.stats.received.add(count as u64);
            self.stats.received_bytes.add(bytes);
            self.stats.received_batches.add(1);
        }
        if now >= self.look_at {
            self.look();
        }
        if self.transmit.pending() > 0 && now >= self.retry_at {
            self.flush();
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        if frames.is_empty() {
            return;
        }
        for frame in frames.drain(..) {
            let pieces = *frame.pieces();
            let _ = frame.into_slot();
            self.refill(&pieces);
        }
        self.publish_fill();
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        if self.free.len() < count {
            self.reap();
        }
        self.starved = self.free.len() < count;
        let whole = usize::try_from(ETHERNET_BYTES).unwrap_or(0);
        for _ in 0..count {
            let Some(slot) = self.free.pop() else {
                break;
            };
            let all =
                self.slot(slot, as_u32(self.properties.frame_bytes).saturating_add(ETHERNET_BYTES));
            let mut pieces = Pieces::default();
            for piece in all.part(whole, usize::MAX) {
                pieces.push(piece);
            }
            buffers.push(Buffer::new(pieces, slot));
        }
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        self.now = self.now.max(now);
        let (mut count, mut bytes) = (0_u64, 0_u64);
        for buffer in buffers.drain(..) {
            let frame = buffer.frame();
            let slot = buffer.into_slot();
            if let Some((LinkAddress::Ethernet(to), len_bytes)) = frame {
                self.submit(slot, to, as_u32(len_bytes));
                count = count.saturating_add(1);
                bytes = bytes.saturating_add(len_bytes as u64);
            } else {
                self.free.push(slot);
                self.stats.dropped_unsendable.add(1);
            }
        }
        if count > 0 {
            self.transmit.publish();
            self.stats.sent.add(count);
            self.stats.sent_bytes.add(bytes);
            self.stats.sent_batches.add(1);
            self.flush();
        }
    }

    fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
        self.free.extend(buffers.drain(..).map(Buffer::into_slot));
    }

    fn arm(&mut self) -> Arm {
        self.count_drops();
        if !self.watched {
            self.watched = self.wake.add(self.socket.as_fd()).is_ok();
        }
        if !self.watched {
            return Arm::CannotSleep;
        }
        if self.starved {
            self.reap();
        }
        if self.receive.available() > 0 || (self.starved && !self.free.is_empty()) {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.watched) {
            self.wake.remove(self.socket.as_fd());
        }
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn on_wake(&mut self) {
        // An error would keep the socket readable.
        if self.socket.take_error().is_some() {
            self.state = DOWN;
        }
    }

    fn state(&self) -> LinkState {
        self.state
    }

    fn deadline(&self) -> Option<Nanos> {
        let waits = self.transmit.pending() > 0 && self.transmit.needs_wake_up();
        let sent = if waits {
            Some(self.retry_at)
        } else {
            // Nothing tells when a frame has been sent.
            self.starved.then(|| self.now.after(RETRY_INTERVAL))
        };
        let down = (self.state != LinkState::Up).then_some(self.look_at);
        sent.into_iter().chain(down).min()
    }
}
