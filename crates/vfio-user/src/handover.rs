//! What a socket leaves to another process, which goes on with the client that is connected to it.
//!
//! QEMU's client connects once: a daemon that ends takes its guests' functions with it, unless somebody keeps the connection
//! open for the next one. What is left is a state, which is data, and descriptors, which it names by their places.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use sidecore_nvme::{FunctionState, TakeOverError};

use crate::connection::ConnectionError;

/// A socket with a client, as it was left.
#[derive(Debug)]
pub struct LeftSocket {
    /// What it is doing.
    pub state: SocketState,
    /// Its descriptors, in the order of their places in the state.
    pub fds: Vec<OwnedFd>,
}

/// All of a socket but its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct SocketState {
    pub(crate) connection: ConnectionState,
    pub(crate) session: SessionState,
    pub(crate) function: FunctionState,
    /// By vector.
    pub(crate) events: Vec<(u16, Place)>,
    /// The file of the doorbells.
    pub(crate) doorbells: Option<Place>,
}

impl LeftSocket {
    /// A socket of a process whose state does not name the doorbells: they are the last of its descriptors.
    #[must_use]
    pub fn with_doorbells_last(mut self) -> Self {
        self.state.doorbells = self.fds.len().checked_sub(1).map(Place);
        self
    }
}

/// The bytes that are under way.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ConnectionState {
    pub stream: Place,
    /// What has been read of a message.
    pub incoming: Vec<u8>,
    pub incoming_fds: Vec<Place>,
    /// What has not been sent of an answer.
    pub outgoing: Vec<u8>,
    pub outgoing_fds: Vec<Place>,
}

/// What the client has said.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SessionState {
    /// Whether the version is settled.
    pub is_serving: bool,
    pub maps: Vec<MapState>,
}

/// A map, with its file if it is memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MapState {
    pub address: u64,
    pub len_bytes: u64,
    pub file: Option<(Place, u64)>,
}

/// Where in a list a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place(usize);

/// Descriptors to be left.
#[derive(Debug, Default)]
pub(crate) struct Leaving(pub Vec<OwnedFd>);

impl Leaving {
    pub(crate) fn put(&mut self, fd: OwnedFd) -> Place {
        let place = Place(self.0.len());
        self.0.push(fd);
        place
    }

    pub(crate) fn put_all(&mut self, fds: Vec<OwnedFd>) -> Vec<Place> {
        fds.into_iter().map(|fd| self.put(fd)).collect()
    }
}

/// Descriptors that were left, each to be taken once.
#[derive(Debug)]
pub(crate) struct Left(Vec<Option<OwnedFd>>);

impl Left {
    pub(crate) fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    pub(crate) fn take(&mut self, place: Place) -> Result<OwnedFd, ResumeError> {
        self.0.get_mut(place.0).and_then(Option::take).ok_or(ResumeError::Descriptor)
    }

    pub(crate) fn take_all(&mut self, places: &[Place]) -> Result<Vec<OwnedFd>, ResumeError> {
        places.iter().map(|place| self.take(*place)).collect()
    }
}

/// Why it is not possible to go on with a client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// A descriptor that the state names is not there.
    #[error("a file descriptor of it is missing")]
    Descriptor,
    /// What was under way is no message.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The client's memory cannot be mapped again.
    #[error("its memory cannot be mapped again: {0}")]
    Memory(String),
    /// The function cannot go on.
    #[error(transparent)]
    Function(#[from] TakeOverError),
}
