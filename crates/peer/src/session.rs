//! The interface between the service and a protocol.

use std::error::Error;
use std::time::Duration;

use tracing::Span;

use crate::connection::Codec;
use crate::snapshot::{ExportFds, ResumeError, ResumeFds, SessionState};

/// The messages of a session's protocol.
pub(crate) type MessageOf<S> = <<S as Session>::Codec as Codec>::Message;

/// A protocol's side of one connection, as a state machine without a socket.
///
/// A worker calls the methods that must not wait; a thread of the pool calls the others: one call
/// at a time, in the order of the client's messages. No message is read during a call of the pool.
pub trait Session: Sized + Send + 'static {
    /// The codec of the protocol's messages.
    type Codec: Codec;
    /// The reason why a command ends the connection.
    type Error: Error + Send + 'static;

    /// Whether the client sees the end of its connection only after the end of its session.
    const HANGS_UP_LAST: bool = false;

    /// Whether [`handle`](Self::handle) may wait for this message: for a sidecore, a store, or the
    /// kernel's memory management. The pool calls `handle` then.
    fn may_wait(&self, message: &MessageOf<Self>) -> bool;

    /// Carries out a command. Returns the reply, if there is one.
    ///
    /// # Errors
    /// The connection has to be closed.
    fn handle(&mut self, message: MessageOf<Self>) -> Result<Option<MessageOf<Self>>, Self::Error>;

    /// Ends the session: stops the device, and unmaps the client's memory. Called by the pool after
    /// the client is gone.
    fn disconnect(&mut self);

    /// If the client has to be notified: the time without a message of the client after which to do
    /// so.
    fn notifies_after(&self) -> Option<Duration> {
        None
    }

    /// Notifies the client. Called by a worker.
    fn notify(&mut self) {}

    /// Stops the device, without the client noticing, so that another process can resume. False if
    /// the client cannot be handed over. Called by the pool.
    fn prepare_export(&mut self) -> bool {
        false
    }

    /// Exports the prepared session. Called once, by the pool, as the last call.
    fn export(&mut self, fds: &mut ExportFds) -> SessionState {
        let _ = fds;
        SessionState::new()
    }

    /// Resumes a client of another process. Called once, first, by the thread that adds the socket.
    ///
    /// # Errors
    /// The client is disconnected, after a call of [`disconnect`](Self::disconnect).
    fn resume_from(&mut self, state: SessionState, fds: &mut ResumeFds) -> Result<(), ResumeError>;
}

/// A device behind a socket: makes a session for each of its clients, one after the other.
pub trait Endpoint: Send + 'static {
    /// The protocol of the device's clients.
    type Session: Session;

    /// Returns the span for the device's log lines, with its name.
    fn span(&self) -> Span;

    /// Makes a session for a new client.
    fn session(&self) -> Self::Session;

    /// The client has closed its end of the connection, or its process has ended: it reads no reply
    /// and no result any more. Called by a worker, before the session ends, and possibly during a
    /// call of that. Not called when the connection ends for another reason.
    fn gone(&self) {}
}
