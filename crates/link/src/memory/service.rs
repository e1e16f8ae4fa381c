//! The threads that connect links through shared memory: what they have in common.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_memory::{GuestAddress, GuestMemory, UserAddress};
use sidecore_reactor::{EventFd, MakeSignal};
use sidecore_socket::{Access, SocketFile};

use super::MemoryLink;
use super::channel::{Channel, Place, Side};
use super::complaints::Complaints;
use super::connector::Connector;
use super::layout::{Ask, Layout};
use super::listener::Listener;
use super::post::Post;
use crate::{LinkError, LinkOptions, LinkQueue};

/// The most clients of an IOhost's link.
pub const CLIENTS_MAX: usize = 200;
/// A place's number is the low byte of its peer's.
const PLACES_MAX: usize = 256;
/// Connections that wait until they are accepted.
const BACKLOG: i32 = 64;

/// The options of a link through shared memory.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// The path of the Unix socket at which the IOhost listens.
    pub path: PathBuf,
    /// Which end this is.
    pub end: MemoryEnd,
    /// Frames and rings of each channel. An IOhost grants a client the client's own, if its frames
    /// are no longer than the IOhost's, and no ring is larger than the IOhost's larger one.
    pub link: LinkOptions,
    /// Makes the signal for a peer's eventfd.
    pub make_signal: MakeSignal,
}

/// An end of a link through shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryEnd {
    /// The IOhost's.
    Listen {
        /// The users whose processes may connect; none is the user of this process alone.
        users: Vec<u32>,
        /// The most clients at a time: each takes the memory of its rings.
        clients: usize,
    },
    /// A client's.
    Connect,
}

/// The places of a link's channels, and the memory of those that have one.
#[derive(Debug)]
pub(super) struct Places {
    side: Side,
    stride: u64,
    used: Box<[bool]>,
    generation: u32,
    memory: GuestMemory,
}

impl Places {
    /// Places for so many peers at a time, and for as many that are gone and of which something is
    /// still lent, as far as a link's memory permits.
    pub fn new(options: &LinkOptions, peers: usize) -> Result<Self, LinkError> {
        let stride = Layout::new(options)?.len_bytes;
        let room = usize::try_from(u32::MAX).unwrap_or(0).checked_div(stride).unwrap_or(0);
        if room < peers {
            return Err(LinkError::TooMuchMemory { bytes: stride.saturating_mul(peers) });
        }
        let count = peers.saturating_mul(2).saturating_add(2).min(room).min(PLACES_MAX);
        Ok(Self {
            side: Side::Host,
            stride: stride as u64,
            used: vec![false; count].into(),
            generation: 0,
            memory: GuestMemory::empty(),
        })
    }

    /// The same for a client, whose only peer has the number 0.
    pub fn of_client(self) -> Self {
        Self { side: Side::Client, ..self }
    }

    pub fn count(&self) -> usize {
        self.used.len()
    }

    /// The place of a peer of this number, at an IOhost.
    pub fn index_of(number: u32) -> u16 {
        let [index, ..] = number.to_le_bytes();
        u16::from(index)
    }

    /// A free place, which is taken by [`join`](Self::join).
    pub fn free(&mut self) -> Option<Place> {
        let index = self.used.iter().position(|used| !used)?;
        let base = self.stride.saturating_mul(index as u64);
        self.generation = self.generation.wrapping_add(1);
        let number = match self.side {
            Side::Host => (self.generation << 8) | u32::try_from(index).ok()?,
            Side::Client => 0,
        };
        Some(Place { index: u16::try_from(index).ok()?, number, base: u32::try_from(base).ok()? })
    }

    /// Takes a place. Returns the memory of all channels.
    pub fn join(&mut self, place: Place, memory: &GuestMemory) -> Result<GuestMemory, LinkError> {
        self.memory = self.memory.with_memory(u64::from(place.base), memory).map_err(|error| {
            LinkError::Kernel { step: "map a channel", error: std::io::Error::other(error) }
        })?;
        if let Some(used) = self.used.get_mut(usize::from(place.index)) {
            *used = true;
        }
        Ok(self.memory.clone())
    }

    /// Takes a closed channel's place back. Returns the memory of the others.
    pub fn leave(&mut self, channel: &Channel) -> GuestMemory {
        let base = u64::from(channel.place.base);
        let rest =
            self.memory.without_region(GuestAddress(base), UserAddress(base), channel.len_bytes);
        if let Ok(rest) = rest {
            self.memory = rest;
        }
        if let Some(used) = self.used.get_mut(usize::from(channel.place.index)) {
            *used = false;
        }
        self.memory.clone()
    }
}

/// Opens the queues of an IOhost's end.
pub(super) fn spawn_listener(
    options: &MemoryOptions,
    count: usize,
) -> Result<Vec<MemoryLink>, LinkError> {
    let MemoryEnd::Listen { users, clients } = &options.end else {
        return Err(LinkError::Offer("not an IOhost's end"));
    };
    if !(1..=CLIENTS_MAX).contains(clients) {
        let (name, value, min, max) = ("clients", *clients, 1, CLIENTS_MAX);
        return Err(LinkError::Option { name, value, min, max, power_of_two: false });
    }
    let event = Arc::new(EventFd::new().map_err(LinkError::kernel("make an eventfd"))?);
    let (links, queues) = ends(options, count, &event, Side::Host, *clients)?;
    // The mode admits every user, and the listener then asks the kernel which one it is.
    let mode = if users.is_empty() { Access::OWNER_ONLY } else { 0o666 };
    let access = Access { mode, ..Access::default() };
    let (file, socket) = SocketFile::listen(&options.path, access, BACKLOG)?;
    let own = rustix::process::geteuid().as_raw();
    let users = if users.is_empty() { vec![own] } else { users.clone() };
    let stats = links.first().map(|link| Arc::clone(&link.stats)).unwrap_or_default();
    let (admission, complaints) = ((users, *clients), Complaints::new(stats));
    let listener = Listener::new(file, socket, event, queues, options, admission, complaints);
    spawn(move || listener.run())?;
    Ok(links)
}

/// Opens the queues of a client's end.
pub(super) fn spawn_connector(
    options: &MemoryOptions,
    count: usize,
) -> Result<Vec<MemoryLink>, LinkError> {
    let event = Arc::new(EventFd::new().map_err(LinkError::kernel("make an eventfd"))?);
    let (links, queues) = ends(options, count, &event, Side::Client, 1)?;
    let connector = Connector::new(event, queues, options);
    spawn(move || connector.run())?;
    Ok(links)
}

/// A queue as the service sees it.
pub(super) type ServiceEnd = (Arc<Post>, Places);

fn ends(
    options: &MemoryOptions,
    count: usize,
    event: &Arc<EventFd>,
    side: Side,
    peers: usize,
) -> Result<(Vec<MemoryLink>, Vec<ServiceEnd>), LinkError> {
    options.link.check()?;
    let (mut links, mut services) = (Vec::new(), Vec::new());
    for _ in LinkQueue::all(count)? {
        let places = match side {
            Side::Host => Places::new(&Ask::largest(&options.link), peers)?,
            Side::Client => Places::new(&options.link, peers)?.of_client(),
        };
        let post = Arc::new(Post::new(Arc::clone(event))?);
        links.push(MemoryLink::new(side, &options.link, places.count(), Arc::clone(&post)));
        services.push((post, places));
    }
    Ok((links, services))
}

fn spawn(run: impl FnOnce() + Send + 'static) -> Result<(), LinkError> {
    std::thread::Builder::new()
        .name("memory-link".to_owned())
        .spawn(run)
        .map(drop)
        .map_err(LinkError::kernel("start a thread"))
}

/// Waits until a descriptor is readable, or it is `until`. Returns whether each one is.
pub(super) fn wait<'a>(
    fds: impl Iterator<Item = &'a dyn AsFd>,
    until: Option<Instant>,
) -> Vec<bool> {
    let mut polled: Vec<_> =
        fds.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        // Rounded up, so that it is time when the wait ends.
        let left = left.saturating_add(std::time::Duration::from_micros(1));
        Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
    });
    if poll(&mut polled, timeout.as_ref()).is_err() {
        return vec![false; polled.len()];
    }
    polled.iter().map(|fd| !fd.revents().is_empty()).collect()
}
