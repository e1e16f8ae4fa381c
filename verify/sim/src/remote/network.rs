//! The paths between clients and an IOhost.

use std::collections::BTreeMap;

use sidecore_units::Nanos;
use sidecore_vrio::Peer;
use sidecore_vrio::slices::Transmit;
use sidecore_vrio::wire::MIN_FRAME_BYTES;

use crate::Random;

/// How bad the path is. Chances are in 1000.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weather {
    /// A frame is lost.
    pub loss: u64,
    /// A frame arrives twice.
    pub doubles: u64,
    /// A bit of a frame is flipped.
    pub damage: u64,
    /// A frame is late.
    pub late: u64,
    /// How late at most.
    pub late_by: Nanos,
}

/// One end's frames, on their way to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the client.
    ToHost,
    /// From the IOhost.
    ToClient,
}

/// The address of a client, for the IOhost.
#[must_use]
pub const fn address_of(client: usize) -> Peer {
    Peer(client as u64 + 1)
}

fn client_at(address: Peer) -> usize {
    (address.0 - 1) as usize
}

/// The usual time of a frame on its way.
const HOP_NS: u64 = 10_000;

/// The path of one client.
#[derive(Clone, Copy, Debug, Default)]
struct Path {
    /// Until when frames are lost, for each way.
    cut_until: [Nanos; 2],
    /// Until when large frames are lost.
    narrow_until: Nanos,
}

/// A frame of a client, by its way and the number of its client.
type Arrival = (Way, usize, Vec<u8>);

/// Frames on their way.
#[derive(Debug)]
pub struct Network {
    random: Random,
    /// How bad it is now.
    pub weather: Weather,
    paths: Vec<Path>,
    /// The link of two that each client uses.
    links: Vec<usize>,
    /// The link that the IOhost is on. Frames of the other one get lost.
    pub host_link: usize,
    /// By the time of their arrival, each with its link.
    frames: BTreeMap<(Nanos, u64), (usize, Arrival)>,
    sent: u64,
}

impl Network {
    /// The paths of so many clients, without frames.
    #[must_use]
    pub fn new(random: Random, weather: Weather, clients: usize) -> Self {
        Self {
            random,
            weather,
            paths: vec![Path::default(); clients],
            links: vec![0; clients],
            host_link: 0,
            frames: BTreeMap::new(),
            sent: 0,
        }
    }

    /// All frames of a client of this way are lost until `until`.
    pub fn cut(&mut self, way: Way, client: usize, until: Nanos) {
        self.paths[client].cut_until[way as usize] = until;
    }

    /// Frames of a client that are larger than the smallest ones are lost until `until`.
    pub fn narrow(&mut self, client: usize, until: Nanos) {
        self.paths[client].narrow_until = until;
    }

    /// A client uses this link from now on.
    pub fn change_link(&mut self, client: usize, link: usize) {
        self.links[client] = link;
    }

    fn link_at(&self, end: Way, client: usize) -> usize {
        if end == Way::ToHost { self.host_link } else { self.links[client] }
    }

    /// Frames that were sent and not lost.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// From now on all paths are perfect.
    pub fn heal(&mut self) {
        self.weather = Weather::default();
        self.paths.fill(Path::default());
    }

    /// When the next frame arrives.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.frames.first_key_value().map_or(Nanos::MAX, |((at, _), _)| *at)
    }

    /// Takes a frame that has arrived by `now`, with its client.
    pub fn take(&mut self, now: Nanos) -> Option<Arrival> {
        while self.next() <= now {
            let (_, (link, frame)) = self.frames.pop_first()?;
            if link == self.link_at(frame.0, frame.1) {
                return Some(frame);
            }
        }
        None
    }

    /// A client's end, with its buffer.
    pub fn client<'a>(
        &'a mut self,
        client: usize,
        now: Nanos,
        buffer: &'a mut Vec<u8>,
    ) -> Link<'a> {
        Link { network: self, client: Some(client), now, buffer, len_bytes: 0, copies: None }
    }

    /// The IOhost's end, with its buffer.
    pub fn host<'a>(&'a mut self, now: Nanos, buffer: &'a mut Vec<u8>) -> Link<'a> {
        Link { network: self, client: None, now, buffer, len_bytes: 0, copies: None }
    }

    fn chance(&mut self, of_1000: u64) -> bool {
        of_1000 > 0 && self.random.below(1000) < of_1000
    }

    /// Puts a frame of this client and way on its way.
    pub fn send(&mut self, now: Nanos, (way, client): (Way, usize), mut frame: Vec<u8>) {
        let Weather { loss, doubles, damage, late, late_by } = self.weather;
        let Path { cut_until, narrow_until } = self.paths[client];
        let is_too_large = now < narrow_until && frame.len() > MIN_FRAME_BYTES as usize;
        if is_too_large || now < cut_until[way as usize] || self.chance(loss) {
            return;
        }
        if self.chance(doubles) {
            self.arrive(now, (way, client), frame.clone(), (late, late_by));
        }
        if self.chance(damage) {
            let bit = self.random.below(frame.len() as u64 * 8);
            frame[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        self.arrive(now, (way, client), frame, (late, late_by));
    }

    fn arrive(
        &mut self,
        now: Nanos,
        (way, client): (Way, usize),
        frame: Vec<u8>,
        (late, late_by): (u64, Nanos),
    ) {
        let mut after = HOP_NS;
        if late_by > Nanos::ZERO {
            after += self.random.below(HOP_NS);
            if self.chance(late) {
                after += self.random.below(late_by.0.max(1));
            }
        }
        self.sent += 1;
        let from = if way == Way::ToHost { Way::ToClient } else { Way::ToHost };
        let link = self.link_at(from, client);
        let frame = (link, (way, client, frame));
        self.frames.insert((now.after(Nanos(after)), self.sent), frame);
    }
}

/// One end's link: a ring whose buffers still have former frames in them.
#[derive(Debug)]
pub struct Link<'a> {
    /// The paths.
    pub network: &'a mut Network,
    /// The client whose end it is; `None` for the IOhost's.
    pub client: Option<usize>,
    /// When it is sent.
    pub now: Nanos,
    /// The ring's buffer.
    pub buffer: &'a mut Vec<u8>,
    /// Size of the frame in the buffer.
    pub len_bytes: usize,
    /// Copies of the frames that were sent, if they are wanted.
    pub copies: Option<&'a mut Vec<Vec<u8>>>,
}

impl Transmit for Link<'_> {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        // Sometimes the ring is full.
        if self.network.weather.late_by > Nanos::ZERO && self.network.random.once_in(64) {
            return None;
        }
        self.len_bytes = len_bytes;
        if self.buffer.len() < len_bytes {
            self.buffer.resize(len_bytes, 0xee);
        }
        self.buffer.get_mut(..len_bytes)
    }

    fn commit(&mut self, to: Peer) {
        let frame = self.buffer[..self.len_bytes].to_vec();
        if let Some(copies) = &mut self.copies {
            copies.push(frame.clone());
        }
        let path = match self.client {
            Some(client) => (Way::ToHost, client),
            None => (Way::ToClient, client_at(to)),
        };
        self.network.send(self.now, path, frame);
    }
}
