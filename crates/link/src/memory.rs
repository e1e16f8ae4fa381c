//! A link through memory that two processes of one host share.

mod layout;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use sidecore_memory::{GuestMemory, SharedPages, Words};
use sidecore_reactor::{Arm, EventFd, MakeSignal, Signal, WakeSet};
use sidecore_socket::{Blocking, close_aside, receive, send};
use sidecore_units::Nanos;

use crate::frame::{Piece, Pieces};
use crate::{
    Buffer, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkState, LinkStats, Properties,
};
pub use layout::OFFER_BYTES;
use layout::{CLIENT_SLEEPS, Direction, HOST_SLEEPS, Layout, Offer};
use ring::{Cursor, Entry};

/// How often an idle link looks whether its peer is still there.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(1);

/// One end of a link through shared memory.
///
/// The IOhost makes the memory, one for each client, and offers it over a Unix socket together with
/// an eventfd for each side. In each direction a ring carries the numbers of filled slots, and
/// another one carries them back. The socket stays open: its end is the end of the link.
///
/// Neither side trusts the other. An entry that names a slot which the peer does not have, or a
/// frame that is longer than a slot, closes the link. The memory can neither shrink nor grow, and
/// the peer's eventfd is signalled in a way that never waits.
#[derive(Debug)]
pub struct MemoryLink {
    properties: Properties,
    stats: Arc<LinkStats>,
    state: LinkState,
    pages: SharedPages,
    incoming: Incoming,
    outgoing: Outgoing,
    doorbell: Doorbell,
    /// `None` once the link is closed.
    socket: Option<OwnedFd>,
    wake: WakeSet,
    look_at: Nanos,
}

/// The direction towards this side.
#[derive(Debug)]
struct Incoming {
    direction: Direction,
    filled: Cursor,
    returned: Cursor,
    /// Whether the slot of this number is on this side.
    here: Box<[bool]>,
    scratch: Vec<Entry>,
}

/// The direction towards the peer.
#[derive(Debug)]
struct Outgoing {
    direction: Direction,
    filled: Cursor,
    returned: Cursor,
    /// Whether the slot of this number is on the other side.
    away: Box<[bool]>,
    /// The slots that are free here, those in the cache last.
    free: Vec<u16>,
    /// Whether the last request for buffers got too few.
    starved: bool,
    scratch: Vec<Entry>,
}

/// How the two sides wake each other.
#[derive(Debug)]
struct Doorbell {
    sleeps: Words<AtomicU64>,
    own_flag: usize,
    peer_flag: usize,
    event: EventFd,
    signal: Box<dyn Signal>,
    /// Whether something was published since the peer's flag was looked at.
    owed: bool,
}

/// The peer has broken the rules of a ring.
struct Violation;

const BROKEN: &str = "the peer broke the rules of the shared memory";
const GONE: &str = "the peer has closed the link";

impl Incoming {
    fn new(direction: Direction, memory: &GuestMemory) -> Result<Self, LinkError> {
        Ok(Self {
            direction,
            filled: direction.filled(memory)?,
            returned: direction.returned(memory)?,
            here: vec![false; direction.slots].into(),
            scratch: Vec::with_capacity(direction.slots),
        })
    }

    fn accept(&mut self, entry: Entry, frame_bytes: usize) -> Result<Frame, Violation> {
        let len_bytes = usize::try_from(entry.len_bytes).unwrap_or(usize::MAX);
        if !(1..=frame_bytes).contains(&len_bytes) {
            return Err(Violation);
        }
        match self.here.get_mut(usize::from(entry.slot)) {
            Some(here) if !*here => *here = true,
            _ => return Err(Violation),
        }
        let piece = Piece::new(self.direction.frame_at(entry.slot), entry.len_bytes);
        Ok(Frame::new(LinkAddress::Peer(0), Pieces::one(piece), u32::from(entry.slot)))
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        self.scratch.clear();
        for frame in frames.drain(..) {
            let slot = u16::try_from(frame.into_slot()).unwrap_or(u16::MAX);
            if let Some(here) = self.here.get_mut(usize::from(slot)) {
                *here = false;
                self.scratch.push(Entry { slot, len_bytes: 0 });
            }
        }
        self.returned.publish(&self.scratch);
    }
}

impl Outgoing {
    fn new(direction: Direction, memory: &GuestMemory) -> Result<Self, LinkError> {
        let slots = u16::try_from(direction.slots).unwrap_or(u16::MAX);
        Ok(Self {
            direction,
            filled: direction.filled(memory)?,
            returned: direction.returned(memory)?,
            away: vec![false; direction.slots].into(),
            free: (0..slots).rev().collect(),
            starved: false,
            scratch: Vec::with_capacity(direction.slots),
        })
    }

    /// Takes what the peer has given back.
    fn reclaim(&mut self) -> Result<(), Violation> {
        // Bounded: a slot comes back once for each time that it went away.
        while let Some(entry) = self.returned.take() {
            match self.away.get_mut(usize::from(entry.slot)) {
                Some(away) if *away => *away = false,
                _ => return Err(Violation),
            }
            self.free.push(entry.slot);
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.returned.has_next()
    }

    fn lend(&mut self, count: usize, frame_bytes: usize, buffers: &mut Vec<Buffer>) {
        let len_bytes = u32::try_from(frame_bytes).unwrap_or(u32::MAX);
        for _ in 0..count {
            let Some(slot) = self.free.pop() else {
                break;
            };
            let piece = Piece::new(self.direction.frame_at(slot), len_bytes);
            buffers.push(Buffer::new(Pieces::one(piece), u32::from(slot)));
        }
    }

    fn take_back(&mut self, buffer: Buffer) {
        // Its number came from `free`.
        self.free.push(u16::try_from(buffer.into_slot()).unwrap_or(u16::MAX));
    }
}

impl Doorbell {
    fn flag(&self, index: usize) -> Option<&AtomicU64> {
        self.sleeps.get(index)
    }

    /// Wakes the peer if it sleeps. Returns whether it did.
    fn ring(&mut self) -> bool {
        self.owed = false;
        // Entries published so far are visible before the flag is read: either the peer sees them
        // when it looks once more, or its flag is seen here.
        fence(Ordering::SeqCst);
        let Some(flag) = self.flag(self.peer_flag) else {
            return false;
        };
        if flag.load(Ordering::Relaxed) == 0 {
            return false;
        }
        flag.store(0, Ordering::Relaxed);
        self.signal.signal();
        true
    }

    fn set_asleep(&self, asleep: bool) {
        if let Some(flag) = self.flag(self.own_flag) {
            flag.store(u64::from(asleep), Ordering::Relaxed);
        }
        if asleep {
            fence(Ordering::SeqCst);
        }
    }
}

/// The two sides of a link.
#[derive(Clone, Copy)]
enum Side {
    Host,
    Client,
}

impl MemoryLink {
    /// Makes a link and offers it to the client at the other end of `socket`, a connected Unix
    /// stream socket. The client's frames are refused or counted from here on; it may never come.
    ///
    /// # Errors
    /// Options out of range; the kernel has no memory or descriptors, or the client is gone.
    pub fn offer(
        socket: OwnedFd,
        options: &LinkOptions,
        make_signal: MakeSignal,
    ) -> Result<Self, LinkError> {
        options.check()?;
        let layout = Layout::new(options, options.transmit_frames, options.receive_frames)?;
        let made = LinkError::kernel("make shared memory");
        let pages = SharedPages::new("sidecore-link", layout.len_bytes).map_err(made)?;
        // All of it at once, so that no frame waits for a page, or finds that there is none.
        rustix::fs::fallocate(pages.file(), FallocateFlags::empty(), 0, layout.len_bytes as u64)
            .map_err(LinkError::kernel("allocate shared memory"))?;
        let event = || EventFd::new().map_err(LinkError::kernel("make an eventfd"));
        let (own, clients) = (event()?, event()?);
        let duplicate = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(LinkError::kernel("duplicate a descriptor"))
        };
        let fds = [duplicate(pages.file())?, duplicate(clients.as_fd())?, duplicate(own.as_fd())?];
        let signal = make_signal(clients.as_fd()).map_err(LinkError::kernel("make a signal"))?;
        let link = Self::new(socket, pages, options, &layout, own, signal, Side::Host)?;
        let Some(socket) = &link.socket else {
            return Err(LinkError::Offer(GONE));
        };
        let sent = send(socket, &Offer::of(options).encode(), &fds, fds.len(), Blocking::Never);
        match sent {
            Ok(OFFER_BYTES) => Ok(link),
            // The first message of a connection fits into any socket's buffer.
            Ok(_) => Err(LinkError::Offer("the socket is full")),
            Err(error) => {
                Err(LinkError::Kernel { step: "offer a link", error: io::Error::other(error) })
            }
        }
    }

    /// Takes the offer of an IOhost, which has arrived at `socket`: wait until it is readable. The
    /// client's frames have headers of `header_bytes`.
    ///
    /// # Errors
    /// The offer breaks a rule, or is not there; the kernel refuses what it needs.
    pub fn join(
        socket: OwnedFd,
        header_bytes: usize,
        make_signal: MakeSignal,
    ) -> Result<Self, LinkError> {
        let (mut bytes, mut fds) = ([0; OFFER_BYTES], Vec::new());
        let received = receive(&socket, &mut bytes, &mut fds, 3, Blocking::Never);
        let made = match received {
            Ok(OFFER_BYTES) => {
                Self::from_offer(socket, &Offer::decode(&bytes), &fds, header_bytes, make_signal)
            }
            Ok(0) => Err(LinkError::Offer(GONE)),
            Ok(_) => Err(LinkError::Offer("it is cut short")),
            Err(error) => {
                Err(LinkError::Kernel { step: "receive an offer", error: io::Error::other(error) })
            }
        };
        if made.is_err() && !fds.is_empty() {
            // Descriptors of a peer that need not be what they should be.
            close_aside(fds);
        }
        made
    }

    fn from_offer(
        socket: OwnedFd,
        offer: &Offer,
        fds: &[OwnedFd],
        header_bytes: usize,
        make_signal: MakeSignal,
    ) -> Result<Self, LinkError> {
        let options = offer.client_options()?;
        if options.header_bytes != header_bytes {
            return Err(LinkError::Offer(
                "its headers have another size: run the same release on both sides",
            ));
        }
        let [memory, own, hosts] = fds else {
            return Err(LinkError::Offer("it comes without its three descriptors"));
        };
        // Duplicates, so that none of the peer's descriptors is closed here.
        let duplicate =
            |fd: &OwnedFd| fd.try_clone().map_err(LinkError::kernel("duplicate a descriptor"));
        let not_an_event = |_| LinkError::Offer("a descriptor is no eventfd");
        let signal = make_signal(hosts.as_fd()).map_err(not_an_event)?;
        let own = EventFd::from_peer(duplicate(own)?).map_err(not_an_event)?;
        let layout = Layout::new(&options, options.receive_frames, options.transmit_frames)?;
        let pages = SharedPages::from_file(duplicate(memory)?, layout.len_bytes)
            .map_err(|_| LinkError::Offer("the memory has another size, or could change it"))?;
        Self::new(socket, pages, &options, &layout, own, signal, Side::Client)
    }

    fn new(
        socket: OwnedFd,
        pages: SharedPages,
        options: &LinkOptions,
        layout: &Layout,
        event: EventFd,
        signal: Box<dyn Signal>,
        side: Side,
    ) -> Result<Self, LinkError> {
        let (incoming, outgoing, own_flag, peer_flag) = match side {
            Side::Host => (layout.to_host, layout.to_client, HOST_SLEEPS, CLIENT_SLEEPS),
            Side::Client => (layout.to_client, layout.to_host, CLIENT_SLEEPS, HOST_SLEEPS),
        };
        let memory = pages.memory();
        let wake = WakeSet::new().map_err(LinkError::kernel("make an epoll descriptor"))?;
        wake.add(event.as_fd()).map_err(LinkError::kernel("watch an eventfd"))?;
        wake.add(socket.as_fd()).map_err(LinkError::kernel("watch a socket"))?;
        let sleeps = layout::words(memory, 0, CLIENT_SLEEPS.saturating_add(1))?;
        Ok(Self {
            properties: Properties {
                address: LinkAddress::Peer(0),
                frame_bytes: options.frame_bytes,
                header_bytes: options.header_bytes,
                payload_align_bytes: layout.shape.payload_align_bytes,
                receive_frames: incoming.slots,
                transmit_frames: outgoing.slots,
                fills_in_order: false,
                mode: "shared memory",
            },
            stats: Arc::default(),
            state: LinkState::Up,
            incoming: Incoming::new(incoming, memory)?,
            outgoing: Outgoing::new(outgoing, memory)?,
            doorbell: Doorbell { sleeps, own_flag, peer_flag, event, signal, owed: false },
            pages,
            socket: Some(socket),
            wake,
            look_at: Nanos::ZERO,
        })
    }

    fn close(&mut self, reason: &'static str) {
        if matches!(self.state, LinkState::Closed(_)) {
            return;
        }
        self.state = LinkState::Closed(reason);
        if reason == BROKEN {
            self.stats.dropped_malformed.add(1);
        }
        if let Some(socket) = self.socket.take() {
            // A socket at its end stays readable, and would wake the sidecore for ever.
            self.wake.remove(socket.as_fd());
            close_aside(socket);
        }
    }

    fn is_up(&self) -> bool {
        self.state == LinkState::Up
    }

    /// Closes the link if the peer has closed it, or writes to the socket.
    fn look_at_peer(&mut self) {
        let Some(socket) = &self.socket else {
            return;
        };
        // Only a look: descriptors that come with a byte are not accepted by it.
        match rustix::net::recv(socket, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((0, _)) | Err(_) => self.close(GONE),
            Ok(_) => self.close(BROKEN),
        }
    }

    fn ring_doorbell(&mut self) {
        if self.doorbell.ring() {
            self.stats.wakes.add(1);
        }
    }

    /// The slow path of a receive that found nothing.
    #[cold]
    fn idle(&mut self, now: Nanos) {
        if self.doorbell.owed {
            self.ring_doorbell();
        }
        if now >= self.look_at {
            self.look_at = now.after(LOOK_INTERVAL);
            self.look_at_peer();
        }
    }
}

impl Link for MemoryLink {
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
        self.state
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        if !self.is_up() {
            return;
        }
        let (mut count, mut bytes) = (0_usize, 0_u64);
        while count < limit
            && let Some(entry) = self.incoming.filled.take()
        {
            let Ok(frame) = self.incoming.accept(entry, self.properties.frame_bytes) else {
                self.close(BROKEN);
                break;
            };
            frames.push(frame);
            count = count.saturating_add(1);
            bytes = bytes.saturating_add(u64::from(entry.len_bytes));
        }
        if count > 0 {
            self.stats.received.add(count as u64);
            self.stats.received_bytes.add(bytes);
            self.stats.received_batches.add(1);
        } else {
            self.idle(now);
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        if frames.is_empty() {
            return;
        }
        self.incoming.give_back(frames);
        // A peer that waits for room is woken with the next frames, or in the next idle turn.
        self.doorbell.owed = true;
    }

    fn buffers(&mut self, _to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        if !self.is_up() {
            return;
        }
        if self.outgoing.free.len() < count && self.outgoing.reclaim().is_err() {
            self.close(BROKEN);
            return;
        }
        self.outgoing.starved = self.outgoing.free.len() < count;
        self.outgoing.lend(count, self.properties.frame_bytes, buffers);
    }

    fn send(&mut self, _now: Nanos, buffers: &mut Vec<Buffer>) {
        let up = self.is_up();
        self.outgoing.scratch.clear();
        let mut bytes = 0_u64;
        for buffer in buffers.drain(..) {
            let slot = u16::try_from(buffer.slot()).unwrap_or(u16::MAX);
            match buffer.frame() {
                Some((LinkAddress::Peer(0), len_bytes)) if up => {
                    let _ = buffer.into_slot();
                    if let Some(away) = self.outgoing.away.get_mut(usize::from(slot)) {
                        *away = true;
                    }
                    let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
                    self.outgoing.scratch.push(Entry { slot, len_bytes });
                    bytes = bytes.saturating_add(u64::from(len_bytes));
                }
                frame => {
                    let sendable = matches!(frame, Some((LinkAddress::Peer(0), _)));
                    let reason = if sendable {
                        &self.stats.dropped_refused
                    } else {
                        &self.stats.dropped_unsendable
                    };
                    reason.add(1);
                    self.outgoing.take_back(buffer);
                }
            }
        }
        let count = self.outgoing.scratch.len() as u64;
        if count > 0 {
            self.outgoing.filled.publish(&self.outgoing.scratch);
            self.stats.sent.add(count);
            self.stats.sent_bytes.add(bytes);
            self.stats.sent_batches.add(1);
            self.ring_doorbell();
        }
    }

    fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
        buffers.drain(..).for_each(|buffer| self.outgoing.take_back(buffer));
    }

    fn arm(&mut self) -> Arm {
        if !self.is_up() {
            return Arm::Armed;
        }
        if self.doorbell.owed {
            self.ring_doorbell();
        }
        self.doorbell.set_asleep(true);
        if self.incoming.filled.has_next() || (self.outgoing.starved && self.outgoing.has_room()) {
            self.doorbell.set_asleep(false);
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        self.doorbell.set_asleep(false);
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn on_wake(&mut self) {
        self.doorbell.event.drain();
        self.look_at_peer();
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            close_aside(socket);
        }
    }
}

#[cfg(test)]
mod tests;
