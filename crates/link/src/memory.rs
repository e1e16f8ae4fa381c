//! A link through memory that processes of one host share.

mod channel;
mod complaints;
mod connector;
mod layout;
mod listener;
mod post;
mod ring;
mod service;
mod sleep;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_reactor::{Arm, EventFd, MakeSignal};
use sidecore_units::Nanos;

use crate::options::SlotShape;
use crate::{
    Buffer, Frame, Link, LinkAddress, LinkError, LinkOptions, LinkState, LinkStats, Properties,
};
use channel::{Channel, NewChannel, Place, Side};
use post::{Post, ToLink, ToService};
pub use service::{CLIENTS_MAX, MemoryEnd, MemoryOptions};
use service::{Places, spawn_connector, spawn_listener};

/// Receives after which sleeping peers are looked at, if each of them found frames.
const RING_INTERVAL: u32 = 8;
/// Frames that a client has sent say for so long how it sends.
const MEMORY: Nanos = Nanos::from_millis(10);
/// Frames of each client that a receive takes while several send, and all of them have many frames
/// on their way.
const SHARE_FRAMES: usize = 8;
/// Frames that are published together: half a cache line of a ring.
const SEND_BATCH: usize = 4;
const BROKEN: &str = "the peer broke the rules of the shared memory";
const GONE: &str = "the peer has closed the link";
const CONNECTING: &str = "no IOhost has answered at the socket yet";

/// One end of a link through shared memory: an IOhost's end has a channel to each of its clients, a
/// client's end has one to its IOhost.
///
/// The IOhost makes the memory, one for each client, and gives it away over a Unix socket together
/// with an eventfd for each side. In each direction a ring carries the numbers of filled slots, and
/// another one carries them back. The socket stays open: its end is the end of the channel. A
/// thread of its own connects, and tells the link by messages; a client's end connects again.
///
/// Neither side trusts the other. An entry that names a slot which the peer does not have, or a
/// frame that is longer than a slot, closes the channel. The memory can neither shrink nor grow,
/// and the peer's eventfd is signalled in a way that never waits.
#[derive(Debug)]
pub struct MemoryLink {
    properties: Properties,
    stats: Arc<LinkStats>,
    side: Side,
    /// Of all channels.
    memory: GuestMemory,
    /// By their places. One that is closed stays until nothing of it is lent.
    channels: Box<[Option<Box<Channel>>]>,
    /// The places of those that are open.
    open: Vec<u16>,
    /// Where the next receive begins: among the channels of which the last one left nothing behind,
    /// and among the others.
    next: [usize; 2],
    /// The last receive left frames behind.
    has_backlogs: bool,
    /// The channel that the newest frame came from.
    newest: Option<u16>,
    /// Until then several clients count as sending.
    shared_until: Nanos,
    /// Clients that have sent frames a short time ago, as the last receive has counted them.
    senders: usize,
    /// Until then one of them counts as having few frames on their way.
    little_until: Nanos,
    down: &'static str,
    receives: u32,
    /// Frames were published, or slots given back, and the peers were not asked whether they sleep.
    owes_wakes: bool,
    post: Arc<Post>,
    outbox: Vec<ToService>,
}

impl MemoryLink {
    /// Both ends of a link within one process, for tests and measurements: the IOhost's and its
    /// only client's. The options are the client's.
    ///
    /// # Errors
    /// Options out of range; the kernel has no memory or descriptors.
    pub fn pair(options: &LinkOptions, make_signal: MakeSignal) -> Result<(Self, Self), LinkError> {
        options.check()?;
        let new = NewChannel::new(options)?;
        let fds = new.descriptors()?;
        let end = |side, options: &LinkOptions| {
            let event = EventFd::new().map_err(LinkError::kernel("make an eventfd"))?;
            let post = Arc::new(Post::new(Arc::new(event))?);
            let places = Places::new(options, 1)?;
            Ok::<_, LinkError>((Self::new(side, options, places.count(), Arc::clone(&post)), post))
        };
        let hosts = LinkOptions {
            receive_frames: options.transmit_frames,
            transmit_frames: options.receive_frames,
            ..*options
        };
        let (mut host, hosts_post) = end(Side::Host, &hosts)?;
        let (mut client, clients_post) = end(Side::Client, options)?;
        let place = Place { index: 0, number: 0, base: 0 };
        let (channel, memory) = new.host(place, make_signal)?;
        hosts_post.watch(channel.event())?;
        host.join(Box::new(channel), memory);
        let (channel, memory) = Channel::client(options, &fds, place, make_signal)?;
        clients_post.watch(channel.event())?;
        client.join(Box::new(channel), memory);
        Ok((host, client))
    }

    /// Opens all queues of a link. An IOhost's clients are divided evenly among its queues; each
    /// queue of a client's end is a client.
    ///
    /// # Errors
    /// Options out of range; the IOhost cannot listen at the path. A client's end waits for its
    /// IOhost: its state says so.
    pub fn open_queues(options: &MemoryOptions, count: usize) -> Result<Vec<Self>, LinkError> {
        match &options.end {
            MemoryEnd::Listen { .. } => spawn_listener(options, count),
            MemoryEnd::Connect => spawn_connector(options, count),
        }
    }

    fn new(side: Side, options: &LinkOptions, places: usize, post: Arc<Post>) -> Self {
        Self {
            properties: Properties {
                address: LinkAddress::Peer(0),
                frame_bytes: options.frame_bytes,
                header_bytes: options.header_bytes,
                payload_align_bytes: SlotShape::new(options, 0).payload_align_bytes,
                receive_frames: options.receive_frames,
                transmit_frames: options.transmit_frames,
                fills_in_order: false,
                batch_frames: SEND_BATCH,
                mode: "shared memory",
            },
            stats: Arc::default(),
            side,
            memory: GuestMemory::empty(),
            channels: (0..places).map(|_| None).collect(),
            open: Vec::with_capacity(places),
            next: [0; 2],
            has_backlogs: false,
            newest: None,
            shared_until: Nanos::ZERO,
            senders: 0,
            little_until: Nanos::ZERO,
            down: CONNECTING,
            receives: 0,
            owes_wakes: false,
            post,
            outbox: Vec::new(),
        }
    }

    fn channel(&mut self, place: u16) -> Option<&mut Channel> {
        self.channels.get_mut(usize::from(place))?.as_deref_mut()
    }

    fn join(&mut self, channel: Box<Channel>, memory: GuestMemory) {
        let place = channel.place.index;
        self.memory = memory;
        if let Some(entry) = self.channels.get_mut(usize::from(place)) {
            *entry = Some(channel);
            self.open.push(place);
        }
    }

    /// Closes a channel, which goes back to the service when nothing of it is lent.
    fn close(&mut self, place: u16, reason: &'static str) {
        let before = self.open.len();
        self.open.retain(|open| *open != place);
        if self.open.len() == before {
            return;
        }
        if let Some(channel) = self.channel(place) {
            channel.is_open = false;
        }
        self.down = reason;
        if reason == BROKEN {
            self.stats.dropped_malformed.add(1);
            self.outbox.push(ToService::Broken(place));
        }
        self.release(place);
    }

    /// Gives a closed channel back, if nothing of it is lent.
    fn release(&mut self, place: u16) {
        let Some(entry) = self.channels.get_mut(usize::from(place)) else {
            return;
        };
        if entry.as_ref().is_some_and(|channel| !channel.is_open && !channel.is_lent())
            && let Some(channel) = entry.take()
        {
            self.outbox.push(ToService::Closed(channel));
        }
    }

    /// Reads and writes messages.
    #[cold]
    fn exchange_messages(&mut self) {
        while self.post.has_mail()
            && let Some(message) = self.post.receive()
        {
            match message {
                ToLink::Joined(channel, memory) => self.join(channel, memory),
                ToLink::Left(place) => self.close(place, GONE),
                ToLink::Down(reason) => self.down = reason,
                ToLink::Memory(memory) => self.memory = memory,
            }
        }
        if !self.outbox.is_empty() {
            self.post.reply(&mut self.outbox);
        }
    }

    fn has_messages(&self) -> bool {
        self.post.has_mail() || !self.outbox.is_empty()
    }

    /// Wakes peers that wait for what was published.
    fn ring_doorbells(&mut self) {
        self.owes_wakes = false;
        let mut wakes = 0_u64;
        for place in &self.open {
            if let Some(Some(channel)) = self.channels.get_mut(usize::from(*place)) {
                wakes = wakes.saturating_add(u64::from(channel.ring()));
            }
        }
        if wakes > 0 {
            self.stats.wakes.add(wakes);
        }
    }

    fn open_channels(&self) -> impl Iterator<Item = &Channel> {
        let channel = |place: &u16| self.channels.get(usize::from(*place))?.as_deref();
        self.open.iter().filter_map(channel)
    }

    /// The peer of a channel sees the slots that came back.
    #[inline(always)]
    fn publish_returned(&mut self, place: u16) {
        let Some(channel) = self.channel(place) else { return };
        channel.publish_returned();
        let is_open = channel.is_open;
        self.owes_wakes = true;
        if !is_open {
            self.release(place);
        }
    }

    /// The peer of a channel sees the frames that were sent.
    #[inline(always)]
    fn publish_filled(&mut self, place: u16) {
        let Some(channel) = self.channels.get_mut(usize::from(place)).and_then(Option::as_mut)
        else {
            return;
        };
        channel.publish_filled();
        // A peer that sleeps is woken now. Whether it is just going to sleep is a question that has
        // to wait for the caches, and is asked in a receive that finds nothing.
        if channel.seems_asleep() && channel.ring() {
            self.stats.wakes.add(1);
        }
        self.owes_wakes = true;
        if !channel.is_open {
            self.release(place);
        }
    }

    /// Takes up to `limit` frames of all open channels, and few of each while several clients send
    /// some. Returns their bytes.
    fn take_in_turn(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) -> u64 {
        let end = frames.len().saturating_add(limit);
        // A part of the batch is left to those that come second.
        let (share, rest) = match (now < self.shared_until, now < self.little_until) {
            (false, _) => (limit, 0),
            (true, false) => (SHARE_FRAMES, limit / 4),
            // One of them has few frames on their way. The caller answers those of a receive before
            // it takes more: of a flood no more than the clients beside it and this one have sent.
            (true, true) => (self.senders.saturating_sub(2).max(1), limit / 4),
        };
        let had_backlogs = std::mem::take(&mut self.has_backlogs);
        let rest = if had_backlogs { rest } else { 0 };
        self.senders = 0;
        // Clients that send little come first.
        let bytes = self.take_of(now, false, (share, end.saturating_sub(rest)), frames);
        if !had_backlogs {
            return bytes;
        }
        bytes.saturating_add(self.take_of(now, true, (share, end), frames))
    }

    /// Takes up to `share` frames of each open channel of which the last receive left some behind,
    /// or of all others, until there are `end`. Returns their bytes.
    fn take_of(
        &mut self,
        now: Nanos,
        had_backlog: bool,
        (share, end): (usize, usize),
        frames: &mut Vec<Frame>,
    ) -> u64 {
        let (receive, mut bytes) = (self.receives, 0_u64);
        let [next, next_of_busy] = self.next;
        let mut index = if had_backlog { next_of_busy } else { next };
        for _ in 0..self.open.len() {
            if index >= self.open.len() {
                index = 0;
            }
            let Some(place) = self.open.get(index).copied() else { break };
            let Some(channel) = self.channel(place) else { break };
            let sends = !had_backlog && channel.sends(now);
            if channel.had_backlog() == had_backlog && !channel.has_left(receive) {
                let before = frames.len();
                let left = end.saturating_sub(before);
                if left == 0 {
                    self.has_backlogs |= had_backlog;
                    break;
                }
                bytes = bytes.saturating_add(self.take(place, share.min(left), frames));
                let taken = frames.len().saturating_sub(before);
                if taken > 0 || had_backlog {
                    self.note(now, place, taken);
                }
            }
            self.senders = self.senders.saturating_add(usize::from(sends));
            index = index.saturating_add(1);
        }
        // The next receive begins with the next client.
        if let Some(next) = self.next.get_mut(usize::from(had_backlog)) {
            *next = index;
        }
        bytes
    }

    /// So many frames of a channel have been taken.
    #[inline]
    fn note(&mut self, now: Nanos, place: u16, taken: usize) {
        let receive = self.receives;
        let Some(Some(channel)) = self.channels.get_mut(usize::from(place)) else { return };
        self.has_backlogs |= channel.note_backlog(receive);
        if taken == 0 {
            return;
        }
        if channel.sends_little(now, taken, MEMORY) {
            self.little_until = now.after(MEMORY);
        }
        if self.newest.replace(place) != Some(place) {
            self.shared_until = now.after(MEMORY);
        }
    }

    /// Takes up to `limit` frames of the open channel at a place. Returns their bytes.
    #[inline(always)]
    fn take(&mut self, place: u16, limit: usize, frames: &mut Vec<Frame>) -> u64 {
        let Some(channel) = self.channel(place) else { return 0 };
        let taken = channel.take(limit, frames);
        if taken.is_err() {
            self.close(place, BROKEN);
        }
        taken.unwrap_or(0)
    }
}

impl Link for MemoryLink {
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
        match self.side {
            Side::Client if self.open.is_empty() => LinkState::Down(self.down),
            _ => LinkState::Up,
        }
    }

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        if self.has_messages() {
            self.exchange_messages();
        }
        let before = frames.len();
        let bytes = match *self.open.as_slice() {
            [place] => self.take(place, limit, frames),
            _ => self.take_in_turn(now, limit, frames),
        };
        let count = frames.len().saturating_sub(before);
        if count > 0 {
            self.stats.received.add(count as u64);
            self.stats.received_bytes.add(bytes);
            self.stats.received_batches.add(1);
        }
        self.receives = self.receives.wrapping_add(1);
        // A peer that was just going to sleep is woken although others keep this side busy.
        if self.owes_wakes && (count == 0 || self.receives.is_multiple_of(RING_INTERVAL)) {
            self.ring_doorbells();
        }
    }

    fn give_back(&mut self, frames: &mut Vec<Frame>) {
        let mut before = None;
        for frame in frames.drain(..) {
            let (place, slot) = Channel::split(frame.into_slot());
            if before != Some(place)
                && let Some(before) = before.replace(place)
            {
                self.publish_returned(before);
            }
            if let Some(channel) = self.channel(place) {
                channel.give_back(slot);
            }
        }
        if let Some(before) = before {
            self.publish_returned(before);
        }
    }

    fn buffers(&mut self, to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>) {
        let LinkAddress::Peer(number) = to else { return };
        let place = match self.side {
            Side::Client => self.open.first().copied(),
            Side::Host => Some(Places::index_of(number)),
        };
        let Some(place) = place else { return };
        let channel = self.channel(place);
        let is_it = |channel: &&mut Channel| channel.place.number == number && channel.is_open;
        let Some(channel) = channel.filter(is_it) else { return };
        if channel.lend(count, buffers).is_err() {
            self.close(place, BROKEN);
        }
    }

    fn send(&mut self, _now: Nanos, buffers: &mut Vec<Buffer>) {
        let (mut count, mut bytes, mut before) = (0_u64, 0_u64, None);
        for buffer in buffers.drain(..) {
            let frame = buffer.frame();
            let (place, slot) = Channel::split(buffer.into_slot());
            if before != Some(place)
                && let Some(before) = before.replace(place)
            {
                self.publish_filled(before);
            }
            let channel = self.channels.get_mut(usize::from(place)).and_then(Option::as_mut);
            let Some(channel) = channel else { continue };
            let reason = match frame {
                Some((LinkAddress::Peer(to), len_bytes)) if to == channel.place.number => {
                    if channel.is_open {
                        channel.send(slot, u32::try_from(len_bytes).unwrap_or(u32::MAX));
                        count = count.saturating_add(1);
                        bytes = bytes.saturating_add(len_bytes as u64);
                        continue;
                    }
                    &self.stats.dropped_refused
                }
                _ => &self.stats.dropped_unsendable,
            };
            reason.add(1);
            channel.cancel(slot);
        }
        if let Some(before) = before {
            self.publish_filled(before);
        }
        if count > 0 {
            self.stats.sent.add(count);
            self.stats.sent_bytes.add(bytes);
            self.stats.sent_batches.add(1);
        }
    }

    fn cancel(&mut self, buffers: &mut Vec<Buffer>) {
        for buffer in buffers.drain(..) {
            let (place, slot) = Channel::split(buffer.into_slot());
            if let Some(channel) = self.channel(place) {
                channel.cancel(slot);
            }
            self.release(place);
        }
    }

    fn arm(&mut self) -> Arm {
        if self.has_messages() {
            self.exchange_messages();
        }
        self.ring_doorbells();
        self.open_channels().for_each(|channel| channel.set_asleep(true));
        if self.has_messages() || self.open_channels().any(Channel::has_work) {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        self.open_channels().for_each(|channel| channel.set_asleep(false));
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.post.wake_fd()
    }

    fn on_wake(&mut self) {
        self.post.clear_wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.post.end();
    }
}

#[cfg(test)]
mod tests;
