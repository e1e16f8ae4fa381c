//! The seam between the service and a protocol.

use std::error::Error;
use std::time::Duration;

use tracing::Span;

use crate::connection::Codec;
use crate::snapshot::{ExportFds, ResumeError, ResumeFds, SessionState};

/// The messages of a session's protocol.
pub(crate) type MessageOf<S> = <<S as Session>::Codec as Codec>::Message;

/// A protocol's side of one connection, as a state machine that knows no socket.
///
/// A worker calls the methods that must not wait; a thread of the pool calls the others: one call at a
/// time, in the order of the client's messages, and no message is read while the pool has the session.
pub trait Session: Sized + Send + 'static {
    /// The messages.
    type Codec: Codec;
    /// Why a command ends the connection.
    type Error: Error + Send + 'static;

    /// The client sees the end of its connection only when its session has ended, not before.
    const HANGS_UP_LAST: bool = false;

    /// Whether [`handle`](Self::handle) may wait for this message: for a sidecore, a store, or the
    /// kernel's memory management. It is called by the pool then.
    fn may_wait(&self, message: &MessageOf<Self>) -> bool;

    /// Carries out a command. The reply, if there is one.
    ///
    /// # Errors
    /// The connection ends.
    fn handle(&mut self, message: MessageOf<Self>) -> Result<Option<MessageOf<Self>>, Self::Error>;

    /// The client has gone: stops what runs, and unmaps its memory. Called by the pool.
    fn disconnect(&mut self);

    /// If the client is to be notified of something: after which time without a message of its own.
    fn notifies_after(&self) -> Option<Duration> {
        None
    }

    /// Notifies the client. Called by a worker.
    fn notify(&mut self) {}

    /// Stops what runs, without the client noticing, so that another process can go on from there. False
    /// if the client cannot be handed over. Called by the pool.
    fn prepare_export(&mut self) -> bool {
        false
    }

    /// The session as it was prepared. Called once, by the pool, and nothing is called after it.
    fn export(&mut self, fds: &mut ExportFds) -> SessionState {
        let _ = fds;
        SessionState::new()
    }

    /// Goes on with a client of another process. Called once, first, by the thread that adds the socket.
    ///
    /// # Errors
    /// The client is disconnected; [`disconnect`](Self::disconnect) is called then.
    fn resume_from(&mut self, state: SessionState, fds: &mut ResumeFds) -> Result<(), ResumeError>;
}

/// A device behind a socket: makes a session for each of its clients, one after the other.
pub trait Endpoint: Send + 'static {
    /// The protocol.
    type Session: Session;

    /// The span of its log lines, with its name.
    fn span(&self) -> Span;

    /// A session for a new client.
    fn session(&self) -> Self::Session;
}
