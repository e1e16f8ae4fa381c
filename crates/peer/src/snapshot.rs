//! The snapshot of a connection, by which one process hands it over to the next.
//!
//! QEMU's vfio-user client connects once: a daemon that ends takes its guests' functions with it,
//! unless the connection stays open for the next daemon. A snapshot is data, and descriptors that
//! the data names by their places.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A session's part of a snapshot: the keys of a JSON object.
pub type SessionState = Map<String, Value>;

/// Converts a session's part of a snapshot to an object. The object is empty, and cannot be
/// resumed, if the conversion fails.
pub fn session_state(state: &impl Serialize) -> SessionState {
    match serde_json::to_value(state) {
        Ok(Value::Object(state)) => state,
        other => {
            tracing::error!(error = ?other.err(), "the state of a session cannot be serialized");
            SessionState::new()
        }
    }
}

/// A socket with its client, as exported by one process.
#[derive(Debug)]
pub struct Snapshot {
    /// The data, without the descriptors.
    pub state: SocketState,
    /// The descriptors, in the order of their places in the state.
    pub fds: Vec<OwnedFd>,
}

/// The data of a socket's client, without its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct SocketState {
    pub(crate) connection: ConnectionState,
    /// The protocol's part.
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
    /// Adds a descriptor, and returns its place.
    pub fn put(&mut self, fd: OwnedFd) -> FdPlace {
        let place = FdPlace(self.0.len());
        self.0.push(fd);
        place
    }

    /// Adds descriptors, and returns their places.
    pub fn put_all(&mut self, fds: Vec<OwnedFd>) -> Vec<FdPlace> {
        fds.into_iter().map(|fd| self.put(fd)).collect()
    }
}

/// The descriptors of a snapshot that is being resumed. Each can be taken once.
#[derive(Debug)]
pub struct ResumeFds(Vec<Option<OwnedFd>>);

impl ResumeFds {
    /// Takes all descriptors of a snapshot.
    #[must_use]
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// Takes the descriptor of this place.
    ///
    /// # Errors
    /// The snapshot has no descriptor in this place, or it was taken before.
    pub fn take(&mut self, place: FdPlace) -> Result<OwnedFd, ResumeError> {
        self.0.get_mut(place.0).and_then(Option::take).ok_or(ResumeError::Descriptor)
    }

    /// Takes the descriptors of these places.
    ///
    /// # Errors
    /// Like [`ResumeFds::take`].
    pub fn take_all(&mut self, places: &[FdPlace]) -> Result<Vec<OwnedFd>, ResumeError> {
        places.iter().map(|place| self.take(*place)).collect()
    }
}

/// The reason why a connection cannot be resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The snapshot does not have a descriptor that the state names.
    #[error("a file descriptor of the snapshot is missing")]
    Descriptor,
    /// The received bytes are no message.
    #[error("{0}")]
    Connection(String),
    /// The session's state cannot be parsed.
    #[error("the session's state cannot be read: {0}")]
    State(#[from] serde_json::Error),
    /// The session cannot be resumed.
    #[error(transparent)]
    Session(Box<dyn std::error::Error + Send + Sync>),
}
