//! A channel: the rings between one client and its IOhost, as one of the two sees them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rustix::fs::FallocateFlags;
use sidecore_memory::{GuestMemory, SharedPages, Words};
use sidecore_reactor::{EventFd, MakeSignal, Signal};
use sidecore_units::Nanos;

use super::layout::{self, CLIENT_SLEEPS, Direction, HOST_SLEEPS, Layout};
use super::ring::{Cursor, Entry};
use super::sleep::Sleep;
use crate::frame::{Piece, Pieces};
use crate::{Buffer, Frame, LinkAddress, LinkError, LinkOptions};

/// Buffers that are lent before the slots that came back are looked for, while there are others:
/// the peer has just written the cache line that names them.
const LENDS_PER_LOOK: usize = 8;

/// A client that has so many frames on their way does not wait for each of them.
const BUSY_FRAMES: usize = 3;

/// A slot's number in frames and buffers has the channel's place above it.
const PLACE_SHIFT: u32 = 16;

/// The two sides of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Host,
    Client,
}

/// Where a channel is in its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Its index among the link's channels.
    pub index: u16,
    /// The peer's number, as in [`LinkAddress::Peer`].
    pub number: u32,
    /// Where its memory begins in the link's.
    pub base: u32,
}

/// The peer has broken the rules of a ring.
#[derive(Debug)]
pub(super) struct Violation;

/// One channel.
#[derive(Debug)]
pub(super) struct Channel {
    pub place: Place,
    /// Size of its memory.
    pub len_bytes: u64,
    frame_bytes: usize,
    incoming: Incoming,
    outgoing: Outgoing,
    doorbell: Doorbell,
    /// Whether its peer is there.
    pub is_open: bool,
    /// Frames and buffers that are lent.
    lent: usize,
    /// The receive of its link that left frames of it behind, if that was its last one.
    backlog: Option<u32>,
    /// Until then the peer counts as one that sends.
    sends_until: Nanos,
    /// Until then the peer counts as one that has many frames on their way.
    busy_until: Nanos,
}

/// The direction towards this side.
#[derive(Debug)]
struct Incoming {
    direction: Direction,
    filled: Cursor,
    returned: Cursor,
    /// Whether the slot of this number is on this side.
    here: Box<[bool]>,
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
    /// Slots that are on the other side.
    away_count: usize,
    /// Buffers that were lent since the slots that came back were looked for.
    lends: usize,
    /// Whether the last request for buffers got too few.
    starved: bool,
}

/// How the two sides wake each other.
#[derive(Debug)]
struct Doorbell {
    sleep: Sleep<Words<AtomicU64>>,
    event: EventFd,
    signal: Box<dyn Signal>,
    /// Whether something was published since the peer's flag was looked at.
    owed: bool,
}

/// A channel that an IOhost has made, and not given to its client yet.
pub(super) struct NewChannel {
    pages: SharedPages,
    layout: Layout,
    options: LinkOptions,
    hosts: EventFd,
    clients: EventFd,
}

impl NewChannel {
    /// Makes the memory and the events for a client with these options, which are in range.
    pub fn new(options: &LinkOptions) -> Result<Self, LinkError> {
        let layout = Layout::new(options)?;
        let made = LinkError::kernel("make shared memory");
        let pages = SharedPages::new("sidecore-link", layout.len_bytes).map_err(made)?;
        // All of it at once, so that no frame waits for a page, or finds that there is none.
        rustix::fs::fallocate(pages.file(), FallocateFlags::empty(), 0, layout.len_bytes as u64)
            .map_err(LinkError::kernel("allocate shared memory"))?;
        let event = || EventFd::new().map_err(LinkError::kernel("make an eventfd"));
        Ok(Self { pages, layout, options: *options, hosts: event()?, clients: event()? })
    }

    /// The memory, the client's event and the IOhost's.
    pub fn descriptors(&self) -> Result<[OwnedFd; 3], LinkError> {
        let duplicate = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(LinkError::kernel("duplicate a descriptor"))
        };
        Ok([
            duplicate(self.pages.file())?,
            duplicate(self.clients.as_fd())?,
            duplicate(self.hosts.as_fd())?,
        ])
    }

    /// The IOhost's side, and its memory.
    pub fn host(
        self,
        place: Place,
        make_signal: MakeSignal,
    ) -> Result<(Channel, GuestMemory), LinkError> {
        let signal =
            make_signal(self.clients.as_fd()).map_err(LinkError::kernel("make a signal"))?;
        let Self { pages, layout, options, hosts, .. } = self;
        let channel = Channel::new(&pages, &options, &layout, place, hosts, signal, Side::Host)?;
        Ok((channel, pages.memory().clone()))
    }
}

impl Channel {
    /// The client's side of a channel that an IOhost has made for these options, and its memory.
    pub fn client(
        options: &LinkOptions,
        fds: &[OwnedFd],
        place: Place,
        make_signal: MakeSignal,
    ) -> Result<(Self, GuestMemory), LinkError> {
        let [memory, own, hosts] = fds else {
            return Err(LinkError::Offer("it comes without its three descriptors"));
        };
        // Duplicates, so that none of the peer's descriptors is closed here.
        let duplicate =
            |fd: &OwnedFd| fd.try_clone().map_err(LinkError::kernel("duplicate a descriptor"));
        let not_an_event = |_| LinkError::Offer("a descriptor is no eventfd");
        let signal = make_signal(hosts.as_fd()).map_err(not_an_event)?;
        let own = EventFd::from_peer(duplicate(own)?).map_err(not_an_event)?;
        let layout = Layout::new(options)?;
        let pages = SharedPages::from_file(duplicate(memory)?, layout.len_bytes)
            .map_err(|_| LinkError::Offer("the memory has another size, or could change it"))?;
        let channel = Self::new(&pages, options, &layout, place, own, signal, Side::Client)?;
        Ok((channel, pages.memory().clone()))
    }

    fn new(
        pages: &SharedPages,
        options: &LinkOptions,
        layout: &Layout,
        place: Place,
        event: EventFd,
        signal: Box<dyn Signal>,
        side: Side,
    ) -> Result<Self, LinkError> {
        let (incoming, outgoing, own, peer) = match side {
            Side::Host => (layout.to_host, layout.to_client, HOST_SLEEPS, CLIENT_SLEEPS),
            Side::Client => (layout.to_client, layout.to_host, CLIENT_SLEEPS, HOST_SLEEPS),
        };
        let memory = pages.memory();
        let flags = layout::words(memory, 0, CLIENT_SLEEPS.saturating_add(1))?;
        let sleep = Sleep { flags, own, peer };
        Ok(Self {
            place,
            len_bytes: layout.len_bytes as u64,
            frame_bytes: options.frame_bytes,
            incoming: Incoming::new(incoming, memory)?,
            outgoing: Outgoing::new(outgoing, memory)?,
            doorbell: Doorbell { sleep, event, signal, owed: false },
            is_open: true,
            lent: 0,
            backlog: None,
            sends_until: Nanos::ZERO,
            busy_until: Nanos::ZERO,
        })
    }

    /// The channel and the slot of a number in a frame or a buffer.
    #[inline]
    pub fn split(number: u32) -> (u16, u16) {
        let [slot_low, slot_high, place_low, place_high] = number.to_le_bytes();
        (u16::from_le_bytes([place_low, place_high]), u16::from_le_bytes([slot_low, slot_high]))
    }

    #[inline]
    fn number(&self, slot: u16) -> u32 {
        (u32::from(self.place.index) << PLACE_SHIFT) | u32::from(slot)
    }

    #[inline]
    fn piece(&self, direction: &Direction, slot: u16, len_bytes: u32) -> Pieces {
        let start = direction.frame_at(slot).wrapping_add(self.place.base);
        Pieces::one(Piece::new(start, len_bytes))
    }

    /// The descriptor that becomes readable with each wake-up by the peer.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.doorbell.event.as_fd()
    }

    pub fn address(&self) -> LinkAddress {
        LinkAddress::Peer(self.place.number)
    }

    pub fn is_lent(&self) -> bool {
        self.lent > 0
    }

    /// Takes up to `limit` frames. Returns their bytes. If there is none, takes back the slots that
    /// the peer has returned: there is time to wait for their cache line now.
    #[inline]
    pub fn take(&mut self, limit: usize, frames: &mut Vec<Frame>) -> Result<u64, Violation> {
        let mut bytes = 0_u64;
        for _ in 0..limit {
            let Some(entry) = self.incoming.filled.take() else { break };
            self.incoming.accept(entry, self.frame_bytes)?;
            self.lent = self.lent.wrapping_add(1);
            bytes = bytes.wrapping_add(entry.len_bytes.into());
            let pieces = self.piece(&self.incoming.direction, entry.slot, entry.len_bytes);
            frames.push(Frame::new(self.address(), pieces, self.number(entry.slot)));
        }
        if bytes == 0 && self.outgoing.away_count > 0 {
            self.outgoing.reclaim()?;
        }
        Ok(bytes)
    }

    /// Whether the receive before the one of this number left frames behind.
    #[inline]
    pub fn had_backlog(&self) -> bool {
        self.backlog.is_some()
    }

    /// Whether this receive has left frames behind already.
    #[inline]
    pub fn has_left(&self, receive: u32) -> bool {
        self.backlog == Some(receive)
    }

    /// A receive has taken its frames: notes and returns whether it leaves some behind.
    #[inline]
    pub fn note_backlog(&mut self, receive: u32) -> bool {
        let has_more = self.incoming.filled.has_next();
        self.backlog = has_more.then_some(receive);
        has_more
    }

    /// A receive has taken so many frames, at least one. Returns whether the peer has had few of
    /// them on their way at a time, for as long as `memory`.
    #[inline]
    pub fn sends_little(&mut self, now: Nanos, taken: usize, memory: Nanos) -> bool {
        let more = BUSY_FRAMES.saturating_sub(taken) as u64;
        if more == 0 || self.incoming.filled.has(more) {
            self.busy_until = now.after(memory);
        }
        self.sends_until = now.after(memory);
        now >= self.busy_until
    }

    /// Whether the peer has sent frames a short time ago.
    #[inline]
    pub fn sends(&self, now: Nanos) -> bool {
        now < self.sends_until
    }

    /// Takes a frame back; the peer sees it after [`publish_returned`](Self::publish_returned).
    #[inline]
    pub fn give_back(&mut self, slot: u16) {
        self.lent = self.lent.saturating_sub(1);
        if let Some(here) = self.incoming.here.get_mut(usize::from(slot)) {
            *here = false;
            self.incoming.returned.stage(Entry { slot, len_bytes: 0 });
        }
    }

    #[inline]
    pub fn publish_returned(&mut self) {
        self.incoming.returned.publish();
        // A peer that waits for room is woken with the next frames, or in the next idle turn.
        self.doorbell.owed = true;
    }

    /// Lends buffers.
    #[inline]
    pub fn lend(&mut self, count: usize, buffers: &mut Vec<Buffer>) -> Result<(), Violation> {
        // The slots that came back last are lent first: a ring that goes through all of its slots
        // goes through megabytes, and finds none of them in a cache.
        self.outgoing.lends = self.outgoing.lends.wrapping_add(count);
        if self.outgoing.free.len() < count || self.outgoing.lends >= LENDS_PER_LOOK {
            self.outgoing.reclaim()?;
        }
        self.outgoing.starved = self.outgoing.free.len() < count;
        let len_bytes = u32::try_from(self.frame_bytes).unwrap_or(u32::MAX);
        for _ in 0..count {
            let Some(slot) = self.outgoing.free.pop() else {
                break;
            };
            let pieces = self.piece(&self.outgoing.direction, slot, len_bytes);
            buffers.push(Buffer::new(pieces, self.number(slot)));
            self.lent = self.lent.wrapping_add(1);
        }
        Ok(())
    }

    /// Takes a buffer back unsent.
    #[inline]
    pub fn cancel(&mut self, slot: u16) {
        self.lent = self.lent.saturating_sub(1);
        // Its number came from `free`.
        self.outgoing.free.push(slot);
    }

    /// Sends a frame; the peer sees it after [`publish_filled`](Self::publish_filled).
    #[inline]
    pub fn send(&mut self, slot: u16, len_bytes: u32) {
        self.lent = self.lent.saturating_sub(1);
        if let Some(away) = self.outgoing.away.get_mut(usize::from(slot)) {
            *away = true;
        }
        self.outgoing.away_count = self.outgoing.away_count.wrapping_add(1);
        self.outgoing.filled.stage(Entry { slot, len_bytes });
    }

    #[inline]
    pub fn publish_filled(&mut self) {
        self.outgoing.filled.publish();
        self.doorbell.owed = true;
    }

    /// Wakes the peer if it sleeps and something was published since the last call. Returns whether
    /// it did.
    #[inline]
    pub fn ring(&mut self) -> bool {
        std::mem::take(&mut self.doorbell.owed) && self.doorbell.ring()
    }

    /// Whether the peer sleeps, as far as this core has seen.
    #[inline]
    pub fn seems_asleep(&self) -> bool {
        self.doorbell.sleep.seems_asleep()
    }

    pub fn set_asleep(&self, asleep: bool) {
        self.doorbell.sleep.set(asleep);
    }

    /// Whether there is a frame, or a buffer that was missing.
    pub fn has_work(&self) -> bool {
        self.incoming.filled.has_next() || (self.outgoing.starved && self.outgoing.has_room())
    }
}

impl Incoming {
    fn new(direction: Direction, memory: &GuestMemory) -> Result<Self, LinkError> {
        Ok(Self {
            direction,
            filled: direction.filled(memory)?,
            returned: direction.returned(memory)?,
            here: vec![false; direction.slots].into(),
        })
    }

    /// Checks an entry, and notes that its slot is here.
    #[inline]
    fn accept(&mut self, entry: Entry, frame_bytes: usize) -> Result<(), Violation> {
        let len_bytes = usize::try_from(entry.len_bytes).unwrap_or(usize::MAX);
        if !(1..=frame_bytes).contains(&len_bytes) {
            return Err(Violation);
        }
        match self.here.get_mut(usize::from(entry.slot)) {
            Some(here) if !*here => *here = true,
            _ => return Err(Violation),
        }
        Ok(())
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
            away_count: 0,
            lends: 0,
            starved: false,
        })
    }

    /// Takes what the peer has given back.
    #[inline]
    fn reclaim(&mut self) -> Result<(), Violation> {
        self.lends = 0;
        // Bounded: a slot comes back once for each time that it went away.
        while let Some(entry) = self.returned.take() {
            match self.away.get_mut(usize::from(entry.slot)) {
                Some(away) if *away => *away = false,
                _ => return Err(Violation),
            }
            self.away_count = self.away_count.saturating_sub(1);
            self.free.push(entry.slot);
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.returned.has_next()
    }
}

impl Doorbell {
    /// Wakes the peer if it sleeps. Returns whether it did.
    fn ring(&mut self) -> bool {
        let sleeper = self.sleep.take_sleeper();
        if sleeper {
            self.signal.signal();
        }
        sleeper
    }
}
