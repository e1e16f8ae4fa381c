//! The sessions of one link queue of an IOhost, and who may have one.

use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::{Execute, Server, ServerOptions};
use crate::channel::{padded, send};
use crate::wire::{
    Challenge, DeviceEntry, Ending, Frame, FrameHeader, Hello, Kind, MIN_FRAME_BYTES, VERSION,
    Welcome, ending,
};
use crate::{Data, Peer, Reason, Rule, Seal, Transmit, VrioStats};

/// A client's sidecore and link queue that may have a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The client's name.
    pub client: [u8; 16],
    /// See [`Hello::queue`].
    pub queue: u16,
}

/// How a host is set up.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// The incarnation of the IOhost: a random number of this start, not 0.
    pub incarnation: u64,
    /// The start of the host's random numbers. They name sessions, and make it unlikely that a
    /// frame of another incarnation is taken for one of this. They are no secret: that is the
    /// seal's business.
    pub seed: u64,
    /// The limits of each session.
    pub server: ServerOptions,
}

/// A member, its session, and what it has asked for.
#[derive(Debug)]
struct Place<S> {
    member: Member,
    server: Server<S>,
    /// The HELLO of the session, or of the last one.
    current: Option<Hello>,
    /// The HELLO of the next session, which begins when the store has nothing of the last one.
    next: Option<(Hello, Peer)>,
    /// Cookies follow from it. It changes with each session, so that a cookie is good for one.
    salt: u64,
    /// The HELLO that is to be challenged.
    challenge: Option<(Hello, Peer)>,
    owes_welcome: bool,
}

/// The sessions of one link queue.
#[derive(Debug)]
pub struct Host<S> {
    options: HostOptions,
    random: u64,
    /// Opens and seals the frames of handshakes.
    seal: S,
    places: Vec<Place<S>>,
    /// An ENDING to a frame that belongs to no session; a second one before the next poll is
    /// dropped.
    ending: Option<(Peer, u64, Ending)>,
    stats: Arc<VrioStats>,
}

impl<S: Seal + Clone> Host<S> {
    /// A host for these members, whose devices are set by [`set_devices`](Self::set_devices).
    #[must_use]
    pub fn new(options: HostOptions, members: &[Member], seal: S, stats: Arc<VrioStats>) -> Self {
        let mut host =
            Self { options, random: options.seed, seal, places: Vec::new(), ending: None, stats };
        for (place, member) in (0..=u16::MAX).zip(members) {
            let server =
                Server::new(options.server, host.seal.clone(), place, Arc::clone(&host.stats));
            let salt = host.random();
            host.places.push(Place {
                member: *member,
                server,
                current: None,
                next: None,
                salt,
                challenge: None,
                owes_welcome: false,
            });
        }
        host
    }

    /// The next random number (SplitMix64).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.random)
    }

    /// The session of a member, by its index among those of [`new`](Self::new).
    pub fn server(&mut self, place: u16) -> Option<&mut Server<S>> {
        self.places.get_mut(usize::from(place)).map(|place| &mut place.server)
    }

    /// Says what devices a member has.
    pub fn set_devices(&mut self, place: u16, devices: &[DeviceEntry]) {
        if let Some(server) = self.server(place) {
            server.set_devices(devices);
        }
    }

    /// Takes a frame that came from `from`. A frame that makes no sense is dropped and counted.
    pub fn receive(&mut self, now: Nanos, from: Peer, bytes: &[u8], data: &mut impl Data) {
        self.stats.frames_received.add(1);
        if let Err(reason) = self.take(now, from, bytes, data) {
            self.stats.count_drop(reason);
        }
    }

    fn take(
        &mut self,
        now: Nanos,
        from: Peer,
        bytes: &[u8],
        data: &mut impl Data,
    ) -> Result<(), Reason> {
        let frame = Frame::parse(bytes, S::TAG_BYTES)?;
        if frame.kind == Kind::Hello {
            let payload = self
                .seal
                .open(frame.header.counter, frame.associated, frame.sealed)
                .ok_or(Reason::Seal)?;
            let hello = Hello::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
            return self.hello(from, &hello, bytes.len());
        }
        if frame.kind.is_handshake() {
            return Err(Reason::Kind);
        }
        let session = frame.header.session;
        let place = self.places.get_mut((session & 0xffff) as usize);
        match place.filter(|place| session != 0 && place.server.session() == session) {
            Some(place) => place.server.receive(now, from, &frame, data),
            None => {
                // Not to an ENDING, which would come back for ever.
                if frame.kind != Kind::Ending {
                    self.refuse(
                        from,
                        session,
                        Ending { code: ending::UNKNOWN_SESSION, ..Ending::default() },
                    );
                }
                Err(Reason::Session)
            }
        }
    }

    fn refuse(&mut self, to: Peer, session: u64, ending: Ending) {
        self.ending.get_or_insert((to, session, ending));
    }

    fn hello(&mut self, from: Peer, hello: &Hello, frame_bytes: usize) -> Result<(), Reason> {
        let (life, number) = (hello.life, hello.number);
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            self.refuse(from, 0, Ending { life, number, code: ending::VERSION });
            return Err(Reason::Version);
        }
        let member = Member { client: hello.client, queue: hello.queue };
        let Some(place) = self.places.iter_mut().find(|place| place.member == member) else {
            self.refuse(from, 0, Ending { life, number, code: ending::UNKNOWN_CLIENT });
            return Err(Reason::Client);
        };
        // The frame shows how much the path carries: no answer is larger.
        let shown_bytes = u32::try_from(frame_bytes).unwrap_or(u32::MAX);
        if hello.frame_bytes < MIN_FRAME_BYTES
            || hello.frame_bytes > shown_bytes
            || hello.number == 0
        {
            return Err(Reason::Malformed);
        }
        if let Some(current) = place.current.filter(|current| current.life == life) {
            if current.number == number && place.server.session() != 0 {
                place.owes_welcome = true;
                place.server.channel.peer = from;
                return Ok(());
            }
            if number < current.number {
                return Err(Reason::Replayed);
            }
        }
        if hello.cookie != cookie(place.salt, hello) {
            place.challenge = Some((*hello, from));
            return Ok(());
        }
        place.server.end();
        place.owes_welcome = false;
        place.next = Some((*hello, from));
        if !place.server.is_drained() {
            // The same cookie again: the client sees that it was heard, and waits.
            place.challenge = place.next;
        }
        Ok(())
    }

    /// The next request for the store, of any session.
    pub fn next_execute(&mut self) -> Option<Execute> {
        self.places.iter_mut().find_map(|place| place.server.next_execute())
    }

    /// The store has ended a request of any session.
    pub fn complete(&mut self, ticket: u64, result: Result<(), BlockError>) {
        let place = (ticket.wrapping_shr(16) & 0xffff) as u16;
        if let Some(server) = self.server(place) {
            server.complete(ticket, result);
        }
    }

    /// Sends what is to be sent, as far as the link has room, and begins sessions.
    pub fn poll(&mut self, now: Nanos, link: &mut impl Transmit, data: &mut impl Data) {
        if let Some((to, session, ending)) = self.ending {
            let header = FrameHeader { session, ..self.header(Kind::Ending, Ending::BYTES) };
            if send(&mut self.seal, link, to, &header, None, padded(&ending.encode())) {
                self.stats.frames_sent.add(1);
                self.ending = None;
            }
        }
        for index in 0..self.places.len() {
            self.begin(now, index);
            self.send_handshake(index, link);
            if let Some(place) = self.places.get_mut(index) {
                place.server.poll(now, link, data);
            }
        }
    }

    /// When to poll next, if no frame arrives and nothing is completed; `None` for no such time.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        let owes = |place: &Place<S>| place.owes_welcome || place.challenge.is_some();
        if self.ending.is_some() || self.places.iter().any(owes) {
            return Some(Nanos::ZERO);
        }
        self.places.iter().filter_map(|place| place.server.deadline()).min()
    }

    /// Begins the session that a member has asked for, once the store has nothing of its last one:
    /// a late write of that would overwrite a newer one.
    fn begin(&mut self, now: Nanos, index: usize) {
        let keeps = self.options.server.neglected.keeps(Rule::Drain);
        let is_due =
            |place: &Place<S>| place.next.is_some() && (place.server.is_drained() || !keeps);
        if !self.places.get(index).is_some_and(is_due) {
            return;
        }
        let salt = self.random();
        // The low bits say where the session is; the others are never all zero.
        let session = (self.random() | 1 << 16) & !0xffff | (index as u64 & 0xffff);
        let incarnation = self.options.incarnation;
        let Some(place) = self.places.get_mut(index) else { return };
        let Some((hello, from)) = place.next.take() else { return };
        place.server.start(now, session, incarnation, from, &hello);
        place.current = Some(hello);
        place.challenge = None;
        place.salt = salt;
        place.owes_welcome = true;
    }

    fn send_handshake(&mut self, index: usize, link: &mut impl Transmit) {
        let challenge_header = self.header(Kind::Challenge, Challenge::BYTES);
        let welcome_header = self.header(Kind::Welcome, 0);
        let Some(place) = self.places.get_mut(index) else { return };
        if let Some((hello, to)) = place.challenge {
            let Hello { life, number, .. } = hello;
            let challenge = Challenge { life, number, cookie: cookie(place.salt, &hello) }.encode();
            if send(&mut self.seal, link, to, &challenge_header, None, padded(&challenge)) {
                self.stats.frames_sent.add(1);
                place.challenge = None;
            }
        }
        let Some(Hello { life, number, .. }) = place.current.filter(|_| place.owes_welcome) else {
            return;
        };
        let server = &place.server;
        let frame_bytes = server.terms.frame_bytes;
        let welcome = Welcome {
            life,
            number,
            session: server.session(),
            features: 0,
            frame_bytes,
            devices_version: server.devices_version,
            slots: server.granted,
            slot_limit: server.slot_limit.min(server.granted),
            version: VERSION,
        };
        let overhead = FrameHeader::BYTES.saturating_add(S::TAG_BYTES);
        let payload_bytes = usize::try_from(frame_bytes).unwrap_or(0).saturating_sub(overhead);
        let payload_bytes = u16::try_from(payload_bytes.max(Welcome::BYTES)).unwrap_or(u16::MAX);
        let header = FrameHeader { payload_bytes, ..welcome_header };
        if send(&mut self.seal, link, server.channel.peer, &header, None, padded(&welcome.encode()))
        {
            self.stats.frames_sent.add(1);
            place.owes_welcome = false;
        }
    }

    /// The header of a frame outside of any session.
    fn header(&self, kind: Kind, payload_bytes: usize) -> FrameHeader {
        FrameHeader {
            version: VERSION,
            kind: kind.code(),
            incarnation: self.options.incarnation,
            payload_bytes: u16::try_from(payload_bytes).unwrap_or(u16::MAX),
            ..FrameHeader::default()
        }
    }
}

/// The cookie for this HELLO; not 0.
fn cookie(salt: u64, hello: &Hello) -> u64 {
    mix(salt ^ mix(hello.life ^ mix(hello.number))) | 1
}

fn mix(word: u64) -> u64 {
    let mut mixed = word;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
