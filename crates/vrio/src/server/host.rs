//! The sessions of one link queue of an IOhost, and the clients that may have one.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::doorway::Doorway;
use super::nics::Nics;
use super::{Execute, Server, ServerOptions};
use crate::channel::send_clear;
use crate::greeting::{padded_bytes, send_greeting, split_greeting};
use crate::handshake::{HostHandshake, MESSAGE_MAX};
use crate::port::{Peer, Plain, Port};
use crate::wire::{
    DeviceEntry, Ending, FEATURES, Frame, FrameHeader, Greeting, Hello, Kind, MIN_FRAME_BYTES,
    VERSION, Welcome, ending,
};
use crate::{Reason, Rule, VrioStats};

/// A client's link queue that may have a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The client's name.
    pub client: [u8; 16],
    /// See [`Hello::queue`].
    pub queue: u8,
}

/// The setup of a host.
#[derive(Clone, Copy)]
pub struct HostOptions {
    /// The incarnation of the IOhost: a random number of this start, not 0.
    pub incarnation: u64,
    /// Random numbers of this start that no peer knows: session names and cookies follow from them.
    pub secret: [u64; 2],
    /// The IOhost's link queue that this host serves.
    pub queue: u8,
    /// So many handshakes are done at once; after those, one each
    /// [`handshake_every`](Self::handshake_every). A station has a quarter of that.
    pub handshake_burst: u32,
    /// The interval of handshakes in a flood of HELLOs, which leaves the sidecore to the sessions.
    pub handshake_every: Nanos,
    /// The station that a peer is at: one station may have many peers, as the ports of a host are.
    pub station: fn(Peer) -> u64,
    /// The limits of each session.
    pub server: ServerOptions,
}

impl fmt::Debug for HostOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the secret, from which cookies follow.
        let Self { incarnation, queue, handshake_burst, handshake_every, server, .. } = self;
        f.debug_struct("HostOptions")
            .field("incarnation", incarnation)
            .field("queue", queue)
            .field("handshake_burst", handshake_burst)
            .field("handshake_every", handshake_every)
            .field("server", server)
            .finish_non_exhaustive()
    }
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            incarnation: 1,
            secret: [0; 2],
            queue: 0,
            handshake_burst: 64,
            handshake_every: Nanos::from_millis(1),
            station: |peer| peer.0,
            server: ServerOptions::default(),
        }
    }
}

/// A HELLO, as it is known again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wish {
    life: u64,
    number: u64,
    handshake: u8,
    /// A hash of the handshake's message.
    digest: u64,
}

/// An ENDING outside of any session.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    to: Peer,
    /// The client's link queue.
    queue: u8,
    /// The session that the refused frame has named.
    session: u64,
    ending: Ending,
}

/// A session that was asked for and has not begun.
struct Next<P> {
    wish: Wish,
    hello: Hello,
    from: Peer,
    pending: P,
}

/// A place for a client, and its session.
pub(super) struct Place<H: HostHandshake> {
    /// `None` if the place is free.
    member: Option<Member>,
    pub(super) server: Server<H::Seal>,
    /// The HELLO of the session, or of the last one.
    current: Option<Wish>,
    /// When that session began.
    began_at: Nanos,
    /// The handshake's message in the WELCOME of the session.
    welcome: Vec<u8>,
    /// The next session. It begins when the store has nothing of the last one.
    next: Option<Next<H::Pending>>,
    /// The receiver of a WELCOME that is to be sent.
    owes_welcome: Option<Peer>,
    /// The place is in the host's list of those that have something to send or to begin.
    is_active: bool,
    /// It is in the list of those whose requests the store is to be given.
    is_ready: bool,
    /// It is in the list of those with a timer.
    is_timed: bool,
}

impl<H: HostHandshake> Place<H> {
    /// Whether something is to be sent or to begin.
    #[inline]
    fn has_work(&self) -> bool {
        self.server.has_frames() || self.owes_welcome.is_some() || self.next.is_some()
    }
}

/// The name of a session: where it is, the client's link queue, and a random number.
fn session_name(random: u64, queue: u8, place: u16) -> u64 {
    // Never 0.
    let random = (random | 1 << 24) & !0x00ff_ffff;
    random | u64::from(queue) << 16 | u64::from(place)
}

/// The client's link queue in the name of a session.
const fn queue_of(session: u64) -> u8 {
    let [_, _, queue, ..] = session.to_le_bytes();
    queue
}

/// The sessions of one link queue. `H` makes their seals: [`Plain`] without encryption.
///
/// The work of a poll is that of the clients that have something to do: idle ones cost nothing.
pub struct Host<H: HostHandshake> {
    options: HostOptions,
    handshake: H,
    doorway: Doorway,
    pub(super) places: Vec<Place<H>>,
    pub(super) nics: Nics,
    active: VecDeque<u16>,
    /// The link had room for all that the last poll had to send.
    has_room: bool,
    ready: VecDeque<u16>,
    timed: VecDeque<u16>,
    /// No timer of a place ends before.
    next_timer: Nanos,
    /// An ENDING to a frame that belongs to no session; a second one before the next poll is
    /// dropped.
    ending: Option<Refusal>,
    pub(super) stats: Arc<VrioStats>,
}

impl<H: HostHandshake> fmt::Debug for Host<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without keys and secrets.
        let Self { places, active, ready, next_timer, .. } = self;
        f.debug_struct("Host")
            .field("places", &places.len())
            .field("active", active)
            .field("ready", ready)
            .field("next_timer", next_timer)
            .finish_non_exhaustive()
    }
}

impl<H: HostHandshake> Host<H> {
    /// A host without clients. `stats` counts the frames that are of none.
    #[must_use]
    pub fn new(options: HostOptions, handshake: H, stats: Arc<VrioStats>) -> Self {
        Self {
            options,
            handshake,
            doorway: Doorway::new(&options),
            places: Vec::new(),
            nics: Nics::default(),
            active: VecDeque::new(),
            has_room: true,
            ready: VecDeque::new(),
            timed: VecDeque::new(),
            next_timer: Nanos::MAX,
            ending: None,
            stats,
        }
    }

    /// Lets a client have a session from now on. Returns its place, which names it until it is
    /// [removed](Self::remove); `None` if it has one, or there are too many.
    pub fn add(&mut self, member: Member, stats: Arc<VrioStats>) -> Option<u16> {
        if self.places.iter().any(|place| place.member == Some(member)) {
            return None;
        }
        let is_free = |place: &Place<H>| {
            place.member.is_none() && place.server.session() == 0 && place.server.is_drained()
        };
        let index = self.places.iter().position(is_free).unwrap_or(self.places.len());
        let number = u16::try_from(index).ok()?;
        if let Some(place) = self.places.get_mut(index) {
            place.member = Some(member);
            place.current = None;
            place.server.hand_over(stats);
            return Some(number);
        }
        self.places.push(Place {
            member: Some(member),
            server: Server::new(self.options.server, number, stats),
            current: None,
            began_at: Nanos::ZERO,
            welcome: Vec::new(),
            next: None,
            owes_welcome: None,
            is_active: false,
            is_ready: false,
            is_timed: false,
        });
        let count = self.places.len();
        self.active.reserve(count.saturating_sub(self.active.len()));
        self.ready.reserve(count.saturating_sub(self.ready.len()));
        self.timed.reserve(count.saturating_sub(self.timed.len()));
        Some(number)
    }

    /// Ends a client's session at once, and lets it have none any more. Requests that the store has
    /// are completed as before.
    pub fn remove(&mut self, place: u16) {
        let Some(found) = self.places.get_mut(usize::from(place)) else { return };
        found.member = None;
        found.next = None;
        found.owes_welcome = None;
        found.server.dismiss(ending::UNKNOWN_CLIENT);
        self.activate(place);
    }

    /// The state of a client's session.
    #[must_use]
    pub fn session(&self, place: u16) -> Option<&Server<H::Seal>> {
        self.places.get(usize::from(place)).map(|place| &place.server)
    }

    /// Says what devices a client has. A device whose epoch has changed ends the session, which the
    /// client is told: another owner may have served it meanwhile. The numbers of devices are the
    /// caller's, and stay theirs while they exist.
    pub fn set_devices(&mut self, now: Nanos, place: u16, devices: &[DeviceEntry]) {
        if let Some(found) = self.places.get_mut(usize::from(place)) {
            let server = &mut found.server;
            server.set_devices(now, devices);
            self.nics.retain(place, &server.stats, |nic| server.attachment(nic).is_some());
            self.activate(place);
        }
    }

    /// Lets a client use this many slots from now on, of those that it has. It may have requests
    /// unanswered in the others. With none, requests that the store does not have are dropped.
    pub fn set_slot_limit(&mut self, now: Nanos, place: u16, slot_limit: u16) {
        if let Some(found) = self.places.get_mut(usize::from(place)) {
            found.server.set_slot_limit(now, slot_limit);
            self.activate(place);
        }
    }

    /// Takes a frame of `frame_bytes`, padding included, that came from `from`. `first` are its
    /// first [`DATA_HEADER_BYTES`](crate::wire::DATA_HEADER_BYTES), or all if there are fewer;
    /// `received` is the port's name for it. A frame that makes no sense is dropped and counted.
    pub fn receive<P: Port>(
        &mut self,
        now: Nanos,
        (from, first, frame_bytes): (Peer, &[u8], usize),
        received: &mut P::Received,
        port: &mut P,
    ) {
        let stats = match self.take(now, from, (first, frame_bytes), received, port) {
            (place, Ok(())) => self.stats_of(place),
            (place, Err(reason)) => {
                let stats = self.stats_of(place);
                stats.count_drop(reason);
                stats
            }
        };
        stats.frames_received.add(1);
    }

    /// The counters of a client, or of frames that are of none.
    fn stats_of(&self, place: Option<u16>) -> &VrioStats {
        let place = place.and_then(|place| self.places.get(usize::from(place)));
        place.map_or(&self.stats, |place| &place.server.stats)
    }

    /// Returns the place of the session that the frame is of.
    fn take<P: Port>(
        &mut self,
        now: Nanos,
        from: Peer,
        (first, frame_bytes): (&[u8], usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> (Option<u16>, Result<(), Reason>) {
        let frame = match Frame::parse(first) {
            Ok(frame) => frame,
            Err(reason) => return (None, Err(reason)),
        };
        if frame.kind == Kind::Hello {
            return (None, self.hello(now, from, (&frame, frame_bytes), received, port));
        }
        if frame.kind.is_handshake() {
            return (None, Err(Reason::Kind));
        }
        let session = frame.header.session;
        let number = (session & 0xffff) as u16;
        let place = self.places.get_mut(usize::from(number));
        if let Some(place) = place.filter(|place| session != 0 && place.server.session() == session)
        {
            let around = (port, &mut self.nics);
            let frame = (&frame, frame_bytes);
            let taken = place.server.receive(now, from, frame, received, around);
            self.activate(number);
            return (Some(number), taken);
        }
        // Not to an ENDING, which would come back for ever.
        if frame.kind != Kind::Ending {
            let ending = Ending { code: ending::UNKNOWN_SESSION, ..Ending::default() };
            // An IOhost that has been restarted has given the name itself, too.
            let queue = queue_of(session);
            self.ending.get_or_insert(Refusal { to: from, queue, session, ending });
        }
        (None, Err(Reason::Session))
    }

    /// Refuses a HELLO.
    fn refuse(&mut self, to: Peer, greeting: &Greeting, code: u16) {
        let Greeting { life, number, queue, .. } = *greeting;
        let ending = Ending { life, number, code };
        self.ending.get_or_insert(Refusal { to, queue, session: 0, ending });
    }

    /// Takes a HELLO. Nothing is asked of the handshake for a sender that has not shown its
    /// address, or for a message that was opened before.
    fn hello<P: Port>(
        &mut self,
        now: Nanos,
        from: Peer,
        (frame, frame_bytes): (&Frame<'_>, usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        frame.check_size(frame_bytes, 0)?;
        if !port.open(received, frame.head, frame.payload_bytes(), 0, &mut Plain) {
            return Err(Reason::Seal);
        }
        let mut room = [0; Greeting::BYTES.saturating_add(MESSAGE_MAX)];
        let len = port.message(received, &mut room);
        let (greeting, message) =
            room.get(..len).and_then(split_greeting).ok_or(Reason::Malformed)?;
        if greeting.number == 0 {
            return Err(Reason::Malformed);
        }
        if !self.doorway.knows(now, from, &greeting) {
            self.doorway.challenge(from, &greeting);
            return Ok(());
        }
        let Greeting { life, number, handshake, .. } = greeting;
        let digest = self.doorway.digest(handshake, message);
        let wish = Wish { life, number, handshake, digest };
        if self.is_known(from, &greeting, &wish) {
            return Ok(());
        }
        self.doorway.admit(now, from)?;
        let Some((hello, pending)) = self.handshake.hello(greeting.handshake, message) else {
            self.refuse(from, &greeting, ending::UNKNOWN_CLIENT);
            return Err(Reason::Client);
        };
        if (hello.life, hello.number) != (life, number) {
            return Err(Reason::Malformed);
        }
        // The message was recorded, and the cookie is new.
        if hello.cookie != greeting.cookie {
            return Err(Reason::Replayed);
        }
        self.opened(from, &greeting, frame_bytes, Next { wish, hello, from, pending })
    }

    /// Whether this HELLO was opened before: its session has begun, or waits for the store.
    fn is_known(&mut self, from: Peer, greeting: &Greeting, wish: &Wish) -> bool {
        for (number, place) in (0_u16..).zip(&mut self.places) {
            if place.current == Some(*wish) && place.server.session() != 0 {
                place.owes_welcome = Some(from);
                self.activate(number);
                return true;
            }
            if place.next.as_ref().is_some_and(|next| next.wish == *wish) {
                // The client sees that it was heard, and waits.
                self.doorway.challenge(from, greeting);
                return true;
            }
        }
        false
    }

    /// Takes the fields of a HELLO whose client is proved.
    fn opened(
        &mut self,
        from: Peer,
        greeting: &Greeting,
        frame_bytes: usize,
        next: Next<H::Pending>,
    ) -> Result<(), Reason> {
        let Next { wish: Wish { life, number, .. }, hello, .. } = next;
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            self.refuse(from, greeting, ending::VERSION);
            return Err(Reason::Version);
        }
        let member = Some(Member { client: hello.client, queue: hello.queue });
        let found = (0_u16..).zip(&mut self.places).find(|(_, place)| place.member == member);
        let Some((index, place)) = found else {
            self.refuse(from, greeting, ending::UNKNOWN_CLIENT);
            return Err(Reason::Client);
        };
        self.doorway.proved(from);
        // The frame shows how much the path carries: no answer is larger.
        let shown_bytes = u32::try_from(frame_bytes).unwrap_or(u32::MAX);
        if !(MIN_FRAME_BYTES..=shown_bytes).contains(&hello.frame_bytes) {
            return Err(Reason::Malformed);
        }
        match place.current {
            Some(current) if current.life == life && number < current.number => {
                return Err(Reason::Replayed);
            }
            // A HELLO of an earlier life, which the network has kept.
            Some(current) if current.life != life && greeting.challenged_ns <= place.began_at.0 => {
                self.doorway.challenge(from, greeting);
                return Ok(());
            }
            _ => {}
        }
        place.server.end();
        place.owes_welcome = None;
        place.next = Some(next);
        if !place.server.is_drained() {
            self.doorway.challenge(from, greeting);
        }
        self.activate(index);
        Ok(())
    }

    /// The next request for the store. Clients take turns.
    pub fn next_execute(&mut self) -> Option<Execute> {
        while let Some(number) = self.ready.pop_front() {
            let Some(place) = self.places.get_mut(usize::from(number)) else { continue };
            let execute = place.server.next_execute();
            place.is_ready = place.server.has_ready();
            if place.is_ready {
                self.ready.push_back(number);
            }
            if execute.is_some() {
                return execute;
            }
        }
        None
    }

    /// Whether a [`poll`](Self::poll) at `now` has nothing to do, and
    /// [`next_execute`](Self::next_execute) has no request.
    #[must_use]
    #[inline]
    pub fn is_idle(&self, now: Nanos) -> bool {
        self.active.is_empty()
            && self.ready.is_empty()
            && self.nics.is_idle(now)
            && now < self.next_timer
            && self.ending.is_none()
            && !self.doorway.has_challenges()
    }

    /// The store has ended a request.
    pub fn complete(&mut self, ticket: u64, result: Result<(), BlockError>) {
        let place = (ticket.wrapping_shr(16) & 0xffff) as u16;
        if let Some(found) = self.places.get_mut(usize::from(place)) {
            found.server.complete(ticket, result);
            // Neither a timer nor what is ready has changed.
            if !found.is_active && found.has_work() {
                found.is_active = true;
                self.active.push_back(place);
            }
        }
    }

    /// Puts a place into the lists that its state asks for.
    #[inline]
    fn activate(&mut self, number: u16) {
        let Some(place) = self.places.get_mut(usize::from(number)) else { return };
        if !place.is_active && place.has_work() {
            place.is_active = true;
            self.active.push_back(number);
        }
        if place.server.has_ready() && !std::mem::replace(&mut place.is_ready, true) {
            self.ready.push_back(number);
        }
        let timer = place.server.next_acknowledge();
        if timer < Nanos::MAX {
            self.next_timer = self.next_timer.min(timer);
            if !std::mem::replace(&mut place.is_timed, true) {
                self.timed.push_back(number);
            }
        }
    }

    /// Sends what is to be sent, as far as the link has room, and begins sessions.
    pub fn poll(&mut self, now: Nanos, port: &mut impl Port) {
        if self.next_timer <= now {
            self.expire(now);
        }
        self.send_clear(now, port);
        let packets_first = self.nics.goes_first;
        self.has_room = !packets_first || self.send_packets(now, port);
        for _ in 0..self.active.len() {
            let Some(number) = self.active.pop_front() else { return };
            self.begin(now, number);
            port.next_session();
            let has_room = self.welcome(number, port)
                && self
                    .places
                    .get_mut(usize::from(number))
                    .is_none_or(|place| place.server.poll(now, port));
            if let Some(place) = self.places.get_mut(usize::from(number)) {
                // A place that waits for its store is activated when that completes a request.
                let waits = place.next.is_some();
                let owes_welcome = place.owes_welcome.is_some() && !waits;
                place.is_active = place.server.has_frames() || owes_welcome;
                // Sending makes no request ready and starts no timer: frames do, as they arrive.
                debug_assert!(place.is_ready || !place.server.has_ready());
                debug_assert!(place.is_timed || place.server.next_acknowledge() == Nanos::MAX);
                if place.is_active {
                    self.active.push_back(number);
                }
            }
            // A link may have room for one client and none for another.
            self.has_room &= has_room;
        }
        if !packets_first {
            self.has_room &= self.send_packets(now, port);
        }
        if !self.has_room && !self.active.is_empty() {
            // The next poll begins with the next client.
            self.active.rotate_left(1);
        }
    }

    /// Acknowledges requests that the store has had for a client's round trip.
    fn expire(&mut self, now: Nanos) {
        self.next_timer = Nanos::MAX;
        for _ in 0..self.timed.len() {
            let Some(number) = self.timed.pop_front() else { return };
            let Some(place) = self.places.get_mut(usize::from(number)) else { continue };
            place.is_timed = false;
            place.server.acknowledge(now);
            self.activate(number);
        }
    }

    /// Sends the frames that are outside of any session, but for WELCOMEs. Those that find no room
    /// are lost: a peer that leaves none must not keep the others waiting, and asks again if it is
    /// there.
    fn send_clear(&mut self, now: Nanos, port: &mut impl Port) {
        let incarnation = self.options.incarnation;
        let header = |kind: Kind, session, queue| FrameHeader {
            kind: kind.code(),
            session,
            incarnation,
            queue,
            ..FrameHeader::default()
        };
        let mut sent = 0_u64;
        if let Some(Refusal { to, queue, session, ending }) = self.ending.take() {
            let header = header(Kind::Ending, session, queue);
            sent = u64::from(send_clear(port, to, &header, &ending.encode()));
        }
        while let Some((to, challenge)) = self.doorway.next_challenge(now) {
            let header = header(Kind::Challenge, 0, challenge.queue);
            let was_sent = send_clear(port, to, &header, &challenge.encode());
            sent = sent.saturating_add(u64::from(was_sent));
        }
        if sent > 0 {
            self.stats.frames_sent.add(sent);
        }
    }

    /// When to poll next, if no frame arrives and nothing is completed; `None` for no such time.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        // A link without room wakes its sidecore when there is some.
        let sends = self.has_room && (!self.active.is_empty() || self.nics.has_queued());
        if self.ending.is_some() || self.doorway.has_challenges() || sends {
            return Some(Nanos::ZERO);
        }
        let timer = (self.next_timer < Nanos::MAX).then_some(self.next_timer);
        timer.into_iter().chain(self.nics.deadline()).min()
    }

    /// Begins the session that a client has asked for, once the store has nothing of its last one:
    /// a late write of that would overwrite a newer one.
    fn begin(&mut self, now: Nanos, number: u16) {
        let HostOptions { incarnation, queue, server: options, .. } = self.options;
        let Some(place) = self.places.get_mut(usize::from(number)) else { return };
        if !place.server.is_drained() && options.neglected.keeps(Rule::Drain) {
            return;
        }
        let Some(Next { wish, hello, from, pending }) = place.next.take() else { return };
        let name = session_name(self.doorway.random(), hello.queue, number);
        let welcome = Welcome {
            life: wish.life,
            number: wish.number,
            session: name,
            incarnation,
            features: hello.features & options.features & FEATURES,
            version: VERSION,
            queue,
            ..place.server.terms_for(&hello)
        };
        let mut room = [0; MESSAGE_MAX];
        let answered = self.handshake.welcome(pending, &welcome, &mut room);
        let Some((message, seal)) = answered.and_then(|(len, seal)| Some((room.get(..len)?, seal)))
        else {
            return;
        };
        place.welcome.clear();
        place.welcome.extend_from_slice(message);
        self.nics.leave(number, &place.server.stats);
        place.server.start(now, from, &hello, &welcome, seal);
        place.current = Some(wish);
        place.began_at = now;
        place.owes_welcome = Some(from);
    }

    /// Sends the WELCOME that a client is owed. False if the link has no room.
    fn welcome(&mut self, number: u16, port: &mut impl Port) -> bool {
        let Some(place) = self.places.get_mut(usize::from(number)) else { return true };
        let (Some(to), Some(wish)) = (place.owes_welcome, place.current) else { return true };
        let header = FrameHeader {
            kind: Kind::Welcome.code(),
            incarnation: self.options.incarnation,
            queue: place.member.map_or(0, |member| member.queue),
            payload_bytes: padded_bytes(place.server.frame_bytes()),
            ..FrameHeader::default()
        };
        let greeting = Greeting {
            life: wish.life,
            number: wish.number,
            handshake: wish.handshake,
            message_bytes: u16::try_from(place.welcome.len()).unwrap_or(u16::MAX),
            ..Greeting::default()
        };
        let was_sent = send_greeting(port, to, &header, &greeting, &place.welcome);
        if was_sent {
            place.server.stats.frames_sent.add(1);
            place.owes_welcome = None;
        }
        was_sent
    }
}
