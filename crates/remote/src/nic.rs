//! The way of packets between a switch and the session that carries them, on sidecores that may be
//! two: docs/decisions/0071.
//!
//! ```text
//!    switch ─► RemoteNic ──── buffers with packets ────► NicEnd ─► vrio::Nic ─► LinkPort ─► link
//!                   ◄──────── empty ones ───────────────
//! ```
//!
//! Each direction has buffers of its own, and each buffer has one owner: a message that names it
//! hands it over. So no queue can be full, and nothing is locked or allocated for a packet.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments, SharedPages};
use sidecore_net::{
    DropReason, Frames, Loan, NoBuffers, Offloads, PortQueue, Properties, QueueState,
};
use sidecore_reactor::Arm;
use sidecore_spec_virtio::net::{ETHERNET_HEADER_BYTES, MAC_BYTES, PacketHeader};
use sidecore_units::Nanos;
use sidecore_vrio::wire::{MAX_PACKET_BYTES, NicEntry};
use sidecore_vrio::{Nic, Packet, VrioStats};

use crate::crossing::{Inbox, Sender, crossing};

/// Buffers of each direction. Those of packets to the wire come first.
const BUFFERS: u16 = 64;
/// From a buffer to the next one: buffers at multiples of a power of two would share a few sets of
/// the caches.
const STRIDE_BYTES: usize = MAX_PACKET_BYTES as usize + 4096;
/// Size of a VLAN tag (IEEE 802.1Q, 9.4).
const VLAN_TAG_BYTES: usize = 4;
/// Names of buffers are those of no request: requests are numbered below.
const NAME: u64 = 1 << 63;
const BUFFER_BITS: u32 = 16;

/// To the session.
enum ToWire {
    Send(Packet),
    Empty(u16),
}

/// To the switch.
enum ToSwitch {
    Arrived(Packet),
    Empty(u16),
}

/// Whether packets pass a remote NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicState {
    /// Packets pass.
    Up,
    /// No session has the NIC.
    Away,
    /// The IOhost has set the NIC's link down.
    Down,
    /// The unit of the session, or of the link, has ended.
    Ended,
}

impl NicState {
    const fn of(code: u8) -> Self {
        match code {
            0 => Self::Up,
            1 => Self::Away,
            2 => Self::Down,
            _ => Self::Ended,
        }
    }

    const fn code(self) -> u8 {
        match self {
            Self::Up => 0,
            Self::Away => 1,
            Self::Down => 2,
            Self::Ended => 3,
        }
    }

    /// That of several queues of a NIC which is nearest to [`Up`](Self::Up); `None` without any.
    #[must_use]
    pub fn furthest(states: impl Iterator<Item = Self>) -> Option<Self> {
        const fn distance(state: NicState) -> u8 {
            match state {
                NicState::Up => 0,
                NicState::Down => 1,
                NicState::Away => 2,
                NicState::Ended => 3,
            }
        }
        states.min_by_key(|state| distance(*state))
    }

    /// The state in a word, for reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Away => "away",
            Self::Down => "down",
            Self::Ended => "closed",
        }
    }

    /// The reason for which nothing passes; `None` if packets do.
    #[must_use]
    pub const fn reason(self) -> Option<&'static str> {
        match self {
            Self::Up => None,
            Self::Away => Some("no session has the NIC"),
            Self::Down => Some("the IOhost has set its link down"),
            Self::Ended => Some("the remote channel was stopped"),
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: AtomicU8,
    /// MAC address and MTU, as the IOhost's entry has them; 0 before there was one.
    entry: AtomicU64,
}

/// The state of a remote NIC, for any thread.
#[derive(Clone, Debug)]
pub struct NicMonitor(Arc<Shared>);

impl NicMonitor {
    /// Whether packets pass now.
    #[must_use]
    pub fn state(&self) -> NicState {
        NicState::of(self.0.state.load(Ordering::Relaxed))
    }

    /// The MAC address and the MTU that the IOhost has given the NIC; `None` before it has.
    #[must_use]
    pub fn address(&self) -> Option<([u8; MAC_BYTES], u16)> {
        let [mac @ .., low, high] = self.0.entry.load(Ordering::Relaxed).to_le_bytes();
        let mtu = u16::from_le_bytes([low, high]);
        (mtu > 0).then_some((mac, mtu))
    }
}

/// A remote NIC as a queue of a port of a switch.
pub struct RemoteNic {
    memory: GuestMemory,
    hint: RegionHint,
    properties: Properties,
    inbox: Inbox<ToSwitch>,
    sender: Sender<ToWire>,
    /// Empty buffers for packets to the wire.
    empty: Vec<u16>,
    /// The loan that is out.
    loan: Option<Packet>,
    /// Packets from the wire that the switch has not been lent.
    arrived: VecDeque<Packet>,
    /// Buffers of those that it was lent, in their order.
    lent: VecDeque<u16>,
    shared: Arc<Shared>,
    /// The code of the state that the switch has seen last.
    seen: Cell<u8>,
}

/// The other end: that of the unit of a link or a session.
pub struct NicEnd {
    memory: GuestMemory,
    inbox: Inbox<ToWire>,
    sender: Sender<ToSwitch>,
    shared: Arc<Shared>,
}

/// Makes both ends of a remote NIC whose packets have up to `mtu` bytes without Ethernet header.
///
/// # Errors
/// The kernel has no memory or no descriptor left.
pub fn remote_nic(mtu: u16) -> io::Result<(RemoteNic, NicEnd)> {
    let count = usize::from(BUFFERS);
    let pages = SharedPages::new("nic", count.saturating_mul(2).saturating_mul(STRIDE_BYTES))?;
    // A buffer is named by one message at a time.
    let (to_wire, from_switch) = crossing(count.saturating_mul(2))?;
    let (to_switch, from_wire) = crossing(count.saturating_mul(2))?;
    let shared =
        Arc::new(Shared { state: AtomicU8::new(NicState::Away.code()), entry: AtomicU64::new(0) });
    let ethernet = usize::try_from(ETHERNET_HEADER_BYTES).unwrap_or(0);
    let properties = Properties {
        header_bytes: PacketHeader::BYTES,
        frame_bytes: usize::from(mtu).saturating_add(ethernet).saturating_add(VLAN_TAG_BYTES),
        // There is a switch at the other end, too, which cuts and sums for its stations.
        sends: Offloads::ALL,
        takes: Offloads::ALL,
        frame_segments: 1,
        buffer_segments: 1,
    };
    let nic = RemoteNic {
        memory: pages.memory().clone(),
        hint: RegionHint::default(),
        properties,
        inbox: from_wire,
        sender: to_wire,
        empty: (0..BUFFERS).rev().collect(),
        loan: None,
        arrived: VecDeque::with_capacity(count),
        lent: VecDeque::with_capacity(count),
        shared: Arc::clone(&shared),
        seen: Cell::new(NicState::Away.code()),
    };
    let memory = pages.memory().clone();
    let end = NicEnd { memory, inbox: from_switch, sender: to_switch, shared };
    Ok((nic, end))
}

const fn address(buffer: u16) -> GuestAddress {
    GuestAddress((buffer as u64).saturating_mul(STRIDE_BYTES as u64))
}

impl RemoteNic {
    /// The state of the NIC, for other threads.
    #[must_use]
    pub fn monitor(&self) -> NicMonitor {
        NicMonitor(Arc::clone(&self.shared))
    }

    fn take_messages(&mut self) {
        while let Some(message) = self.inbox.receive() {
            match message {
                ToSwitch::Arrived(packet) => self.arrived.push_back(packet),
                ToSwitch::Empty(buffer) => self.empty.push(buffer),
            }
        }
    }
}

impl PortQueue for RemoteNic {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn state(&self) -> QueueState {
        let code = self.shared.state.load(Ordering::Relaxed);
        self.seen.set(code);
        match NicState::of(code).reason() {
            None => QueueState::Up,
            Some(reason) => QueueState::Down(reason),
        }
    }

    #[inline]
    fn receive(&mut self, _now: Nanos, frames: &mut Frames) {
        self.take_messages();
        while frames.room() > 0
            && let Some(Packet { buffer, len_bytes }) = self.arrived.pop_front()
        {
            let Self { memory, hint, lent, .. } = self;
            lent.push_back(buffer);
            frames.append(|segments| {
                segments.bind(memory);
                let pushed = segments.push(address(buffer), len_bytes.into(), hint);
                pushed.map_err(|_| DropReason::Fragmented)
            });
        }
    }

    #[inline]
    fn give_back(&mut self, count: usize) {
        for buffer in self.lent.drain(..count.min(self.lent.len())) {
            let sent = self.sender.send(ToWire::Empty(buffer));
            debug_assert!(sent.is_ok(), "there is a place for each buffer");
        }
    }

    #[inline]
    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers> {
        let asked = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        if asked > MAX_PACKET_BYTES {
            return Err(NoBuffers::Never(DropReason::SmallBuffers));
        }
        if self.empty.is_empty() {
            self.take_messages();
        }
        let buffer = *self.empty.last().ok_or(NoBuffers::Later)?;
        loan.segments.bind(&self.memory);
        loan.segments
            .push(address(buffer), asked.into(), &mut self.hint)
            .map_err(|_| NoBuffers::Never(DropReason::Unusable))?;
        loan.buffers = 1;
        self.loan = Some(Packet { buffer, len_bytes: asked });
        Ok(())
    }

    #[inline]
    fn commit(&mut self) {
        if let Some(packet) = self.loan.take() {
            self.empty.pop();
            let sent = self.sender.send(ToWire::Send(packet));
            debug_assert!(sent.is_ok(), "there is a place for each buffer");
        }
    }

    fn cancel(&mut self) {
        self.loan = None;
    }

    #[inline]
    fn publish(&mut self) {
        self.sender.wake();
    }

    fn end_turn(&mut self, _now: Nanos, _busy: bool) {}

    fn arm(&mut self) -> Arm {
        let armed = if self.arrived.is_empty() { self.inbox.arm() } else { Arm::WorkPending };
        // Another state wakes the switch, unless it has changed before.
        if armed == Arm::Armed && self.shared.state.load(Ordering::Relaxed) != self.seen.get() {
            self.inbox.disarm();
            return Arm::WorkPending;
        }
        armed
    }

    fn disarm(&mut self) {
        self.inbox.disarm();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.inbox.wake_fd());
    }

    fn on_wake(&mut self) {
        self.inbox.on_wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}

impl NicEnd {
    /// The engine's NIC, whose buffers are those that `buffers` has for this end.
    pub(crate) fn nic(&self, buffers: &mut NicBuffers) -> io::Result<Nic> {
        let mut nic = Nic::new(buffers.add(&self.memory)?, BUFFERS);
        (BUFFERS..BUFFERS.saturating_mul(2)).for_each(|buffer| nic.lend(buffer));
        Ok(nic)
    }

    /// Takes what the switch has sent. Returns the number of packets and buffers.
    #[inline]
    pub(crate) fn take(&mut self, nic: &mut Nic, stats: &VrioStats) -> usize {
        let mut count = 0_usize;
        while let Some(message) = self.inbox.receive() {
            match message {
                ToWire::Send(packet) => nic.send(packet, stats),
                ToWire::Empty(buffer) => nic.lend(buffer),
            }
            count = count.saturating_add(1);
        }
        count
    }

    /// Gives the switch what has arrived, and the buffers of what was sent. Returns their number.
    #[inline]
    pub(crate) fn give(&mut self, nic: &mut Nic) -> usize {
        let mut count = 0_usize;
        let mut send = |message| {
            let sent = self.sender.send(message);
            debug_assert!(sent.is_ok(), "there is a place for each buffer");
            count = count.saturating_add(1);
        };
        while let Some(packet) = nic.next_arrived() {
            send(ToSwitch::Arrived(packet));
        }
        while let Some(buffer) = nic.next_sent() {
            send(ToSwitch::Empty(buffer));
        }
        if count > 0 {
            self.sender.wake();
        }
        count
    }

    /// Notes the state that the switch sees, and the IOhost's entry.
    #[inline]
    pub(crate) fn set_state(&self, state: NicState, entry: Option<&NicEntry>) {
        let code = state.code();
        let is_other = self.shared.state.load(Ordering::Relaxed) != code;
        if let Some(NicEntry { mac: [a, b, c, d, e, f], mtu, .. }) = entry {
            let [low, high] = mtu.to_le_bytes();
            let word = u64::from_le_bytes([*a, *b, *c, *d, *e, *f, low, high]);
            if self.shared.entry.load(Ordering::Relaxed) != word {
                self.shared.entry.store(word, Ordering::Relaxed);
            }
        }
        if is_other {
            self.shared.state.store(code, Ordering::Relaxed);
            self.sender.ring();
        }
    }

    /// Whether the port is gone.
    #[inline]
    pub(crate) const fn is_over(&self) -> bool {
        self.inbox.is_over()
    }

    pub(crate) fn arm(&mut self) -> Arm {
        self.inbox.arm()
    }

    pub(crate) fn disarm(&mut self) {
        self.inbox.disarm();
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inbox.wake_fd()
    }

    pub(crate) fn on_wake(&self) {
        self.inbox.on_wake();
    }
}

/// Arms the ends of these NICs, all of them or none.
pub(crate) fn arm_all<N>(nics: &mut [N], end: impl Fn(&mut N) -> &mut NicEnd) -> Arm {
    for at in 0..nics.len() {
        let armed = nics.get_mut(at).map_or(Arm::Armed, |nic| end(nic).arm());
        if armed != Arm::Armed {
            nics.iter_mut().take(at).for_each(|nic| end(nic).disarm());
            return armed;
        }
    }
    Arm::Armed
}

impl Drop for NicEnd {
    fn drop(&mut self) {
        self.shared.state.store(NicState::Ended.code(), Ordering::Relaxed);
    }
}

/// The buffers of remote NICs, by the names that an engine's [`Nic`] has for them.
#[derive(Debug, Default)]
pub(crate) struct NicBuffers(Vec<Option<Box<[Segments]>>>);

impl NicBuffers {
    /// Whether this is the name of a buffer, and of no request.
    #[inline]
    pub fn is_name(request: u64) -> bool {
        request & NAME != 0
    }

    /// Adds the buffers of a NIC. Returns the name of the first one.
    fn add(&mut self, memory: &GuestMemory) -> io::Result<u64> {
        let list = |buffer: u16| {
            let mut list = Segments::with_capacity(1);
            list.bind(memory);
            list.push(address(buffer), MAX_PACKET_BYTES.into(), &mut RegionHint::default())
                .map_err(io::Error::other)?;
            Ok(list)
        };
        let lists = (0..BUFFERS.saturating_mul(2)).map(list).collect::<io::Result<_>>()?;
        let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        match self.0.get_mut(free) {
            Some(place) => *place = Some(lists),
            None => self.0.push(Some(lists)),
        }
        Ok(NAME | (free as u64).wrapping_shl(BUFFER_BITS))
    }

    /// Removes the buffers of a NIC, by the name of the first one.
    pub fn remove(&mut self, name: u64) {
        if let Some(place) = self.0.get_mut(index_of(name)) {
            *place = None;
        }
    }

    /// The memory of a buffer.
    #[inline]
    pub fn segments(&self, name: u64) -> Option<&Segments> {
        let buffer = name & 1_u64.wrapping_shl(BUFFER_BITS).wrapping_sub(1);
        self.0.get(index_of(name))?.as_ref()?.get(usize::try_from(buffer).ok()?)
    }
}

#[inline]
fn index_of(name: u64) -> usize {
    usize::try_from((name & !NAME).wrapping_shr(BUFFER_BITS)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
