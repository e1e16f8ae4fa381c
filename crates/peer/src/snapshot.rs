//! The snapshot of a connection, with which one process hands it over to the next.
//!
//! QEMU's vfio-user client connects once: a daemon that ends takes its guests' functions with it, unless
//! the connection stays open for the next one. A snapshot is data, and descriptors that the data names by
//! their places.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A session's part of a snapshot: the keys of a JSON object.
pub type SessionState = Map<String, Value>;

/// A session's part of a snapshot, as an object. Empty, which cannot be resumed, if it cannot be written
/// down.
pub fn session_state(state: &impl Serialize) -> SessionState {
    match serde_json::to_value(state) {
        Ok(Value::Object(state)) => state,
        other => {
            tracing::error!(error = ?other.err(), "the state of a session cannot be written down");
            SessionState::new()
        }
    }
}

/// A socket with its client, as one process has exported it.
#[derive(Debug)]
pub struct Snapshot {
    /// All but the descriptors.
    pub state: SocketState,
    /// The descriptors, in the order of their places in the state.
    pub fds: Vec<OwnedFd>,
}

/// All of a socket's client but its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct SocketState {
    pub(crate) connection: ConnectionState,
    /// The session's own.
    #[serde(flatten)]
    pub session: SessionState,
}

/// The stream, and the messages that are partly read or sent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ConnectionState {
    pub stream: FdPlace,
    pub incoming: Vec<u8>,
    pub incoming_fds: Vec<FdPlace>,
    pub outgoing: Vec<u8>,
    pub outgoing_fds: Vec<FdPlace>,
    #[serde(default)]
    pub sockets: Vec<FdPlace>,
}

/// The place of a descriptor in a snapshot's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FdPlace(usize);

/// The descriptors of a snapshot that is being made.
#[derive(Debug, Default)]
pub struct ExportFds(pub(crate) Vec<OwnedFd>);

impl ExportFds {
    /// Adds a descriptor.
    pub fn put(&mut self, fd: OwnedFd) -> FdPlace {
        let place = FdPlace(self.0.len());
        self.0.push(fd);
        place
    }

    /// Adds descriptors.
    pub fn put_all(&mut self, fds: Vec<OwnedFd>) -> Vec<FdPlace> {
        fds.into_iter().map(|fd| self.put(fd)).collect()
    }
}

/// The descriptors of a snapshot that is being resumed, each to be taken once.
#[derive(Debug)]
pub struct ResumeFds(Vec<Option<OwnedFd>>);

impl ResumeFds {
    /// All of a snapshot.
    #[must_use]
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// The descriptor of this place.
    ///
    /// # Errors
    /// There is none, or it was taken before.
    pub fn take(&mut self, place: FdPlace) -> Result<OwnedFd, ResumeError> {
        self.0.get_mut(place.0).and_then(Option::take).ok_or(ResumeError::Descriptor)
    }

    /// The descriptors of these places.
    ///
    /// # Errors
    /// As [`ResumeFds::take`].
    pub fn take_all(&mut self, places: &[FdPlace]) -> Result<Vec<OwnedFd>, ResumeError> {
        places.iter().map(|place| self.take(*place)).collect()
    }
}

/// Why a connection cannot be resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// A descriptor that the state names is not there.
    #[error("a file descriptor of it is missing")]
    Descriptor,
    /// The bytes that were read are no message.
    #[error("{0}")]
    Connection(String),
    /// The session's state cannot be read.
    #[error("its state cannot be read: {0}")]
    State(#[from] serde_json::Error),
    /// The session cannot go on.
    #[error(transparent)]
    Session(Box<dyn std::error::Error + Send + Sync>),
}
