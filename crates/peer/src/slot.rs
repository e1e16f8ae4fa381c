//! One socket of a worker: its listener, and its client. No call here waits.

use std::any::Any;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use sidecore_socket::LastDisconnect;
use tracing::Span;

use crate::client::{Client, Ending, Fault, Returned, Turn};
use crate::connection::Connection;
use crate::pool::Pool;
use crate::session::{Endpoint, Session};
use crate::snapshot::{ResumeError, ResumeFds, Snapshot, SocketState};

/// The time that a command may take before its client is disconnected.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
/// The time between two attempts when a listener fails (no file descriptors, no memory).
const RETRY: Duration = Duration::from_secs(1);

/// Sends an event to a socket, from any thread.
pub(crate) type SendEvent = Arc<dyn Fn(Event) + Send + Sync>;

/// The event loop around a slot, at one moment.
pub(crate) struct Context<'a> {
    pub(crate) epoll: &'a OwnedFd,
    pub(crate) pool: &'a Arc<Pool>,
    pub(crate) now: Instant,
}

/// An event of a socket.
pub(crate) enum Event {
    /// The worker has taken the socket over.
    Added,
    /// The listener is readable.
    Acceptable,
    /// The connection is readable, writable, or broken.
    Ready,
    /// A call of the session has ended, with a [`Returned`].
    Returned(Box<dyn Any + Send>),
    /// The session has ended: the device is free.
    Ended,
    /// The connection is closed.
    Closed,
    /// The session may have an event of which to notify its client.
    Notify,
    /// The slot's timer has expired.
    Timeout,
    /// Accept no more clients, and export the connected one. The sender is dropped if no client is
    /// connected, or the client cannot be exported.
    Export(Sender<Snapshot>),
    /// Accept no more clients, and end the connected one. The sender is dropped when the device is
    /// free.
    End(Option<Sender<Infallible>>),
}

/// A socket of any protocol.
pub(crate) trait AnySlot: Send {
    fn handle(&mut self, event: Event, context: &Context<'_>);

    /// The time of the next [`Event::Timeout`].
    fn timer(&self) -> Option<Instant>;

    /// Whether the socket has ended.
    fn is_over(&self) -> bool;

    /// Closes the listener, and with it the clients in its backlog and the descriptors that they
    /// have sent.
    fn retire(self: Box<Self>, context: &Context<'_>);
}

/// The keys of a socket's descriptors in the epoll set: its number, and one bit.
pub(crate) const fn listener_key(number: u64) -> u64 {
    number << 1
}

pub(crate) const fn connection_key(number: u64) -> u64 {
    number << 1 | 1
}

/// The state of a socket that other threads may read.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// True until the connection is closed.
    pub(crate) is_connected: AtomicBool,
    /// True until the session has ended.
    pub(crate) is_serving: AtomicBool,
    pub(crate) last: LastDisconnect,
}

enum State<S: Session> {
    /// No client; the listener is not watched. Watched again after `retry`, unless the socket ends.
    Unwatched {
        retry: Option<Instant>,
    },
    /// No client; the listener is watched.
    Listening,
    Serving(Box<Client<S>>),
    /// The client is gone. The pool ends it, or will end it when the session returns from its call.
    Ending(Option<Box<Ending<S>>>),
    /// The session has ended, and the pool closes the connection.
    Closing,
}

/// One socket of a worker.
pub(crate) struct Slot<E: Endpoint> {
    number: u64,
    listener: OwnedFd,
    endpoint: E,
    known: Arc<Known>,
    send_event: SendEvent,
    state: State<E::Session>,
    /// Whether the socket accepts no more clients.
    ends: bool,
    /// Dropped with the slot, which reports its end.
    _over: Option<Sender<Infallible>>,
    /// The process that gets the client after the reply to its last command.
    successor: Option<Sender<Snapshot>>,
    span: Span,
}

impl<E: Endpoint> Slot<E> {
    pub(crate) fn new(
        number: u64,
        listener: OwnedFd,
        endpoint: E,
        known: Arc<Known>,
        send_event: SendEvent,
    ) -> Self {
        let state = State::Unwatched { retry: None };
        let span = endpoint.span();
        Self {
            number,
            listener,
            endpoint,
            known,
            send_event,
            state,
            ends: false,
            _over: None,
            successor: None,
            span,
        }
    }

    /// Resumes the client of another process; starts without a client if that fails. Called before
    /// the worker has the slot.
    pub(crate) fn resume(&mut self, snapshot: Snapshot, now: Instant) {
        let _span = self.span.clone().entered();
        let Snapshot { state: SocketState { connection: state, session: session_state }, fds } =
            snapshot;
        let mut fds = ResumeFds::new(fds);
        let mut session = self.endpoint.session();
        let mut connection = None;
        let resumed = fds.take(state.stream).and_then(|stream| {
            connection
                .insert(Connection::new(UnixStream::from(stream)))
                .resume(&state, &mut fds)?;
            session.resume_from(session_state, &mut fds)
        });
        self.set_connected(true);
        self.state = match (resumed, connection) {
            (Ok(()), Some(connection)) => {
                tracing::info!("resumed the VMM that is connected");
                State::Serving(Box::new(Client::new(
                    connection,
                    session,
                    SendEvent::clone(&self.send_event),
                    now,
                )))
            }
            (resumed, connection) => {
                let error = resumed.err().unwrap_or(ResumeError::Descriptor);
                tracing::error!(
                    %error,
                    "cannot resume the VMM that was connected, its guest has lost the device"
                );
                connection.iter().for_each(Connection::shut_down);
                let (session, fds, send_event) =
                    (Some(session), Some(fds), SendEvent::clone(&self.send_event));
                State::Ending(Some(Box::new(Ending { session, connection, fds, send_event })))
            }
        };
    }

    fn set_connected(&self, is_connected: bool) {
        self.known.is_connected.store(is_connected, Ordering::Release);
        self.known.is_serving.store(is_connected, Ordering::Release);
    }

    fn added(&mut self, context: &Context<'_>) {
        match &self.state {
            State::Serving(_) => self.advance(context, |client| Ok(client.first())),
            State::Ending(_) => self.returned((None, None), context),
            _ => self.listen(context),
        }
    }

    /// Waits for a client.
    fn listen(&mut self, context: &Context<'_>) {
        let key = epoll::EventData::new_u64(listener_key(self.number));
        self.state = match epoll::add(context.epoll, &self.listener, key, EventFlags::IN) {
            Ok(()) => State::Listening,
            Err(error) => {
                tracing::warn!(%error, "cannot watch the socket");
                State::Unwatched { retry: context.now.checked_add(RETRY) }
            }
        };
    }

    fn stop_listening(&mut self, retry: Option<Instant>, context: &Context<'_>) {
        if let Err(error) = epoll::delete(context.epoll, &self.listener) {
            tracing::error!(%error, "cannot stop watching the socket");
        }
        self.state = State::Unwatched { retry };
    }

    /// Accepts a client. Others wait in the backlog until this one is gone.
    fn accept(&mut self, context: &Context<'_>) {
        if !matches!(self.state, State::Listening) {
            return;
        }
        let stream = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            Ok(stream) => stream,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                return self.stop_listening(context.now.checked_add(RETRY), context);
            }
        };
        self.stop_listening(None, context);
        tracing::info!("a VMM connected");
        self.set_connected(true);
        let connection = Connection::new(UnixStream::from(stream));
        let client = Client::new(
            connection,
            self.endpoint.session(),
            SendEvent::clone(&self.send_event),
            context.now,
        );
        self.state = State::Serving(Box::new(client));
        self.advance(context, |client| Ok(client.first()));
    }

    /// Runs a step of the client, and handles its result.
    fn advance(
        &mut self,
        context: &Context<'_>,
        turn: impl FnOnce(&mut Client<E::Session>) -> Result<Turn, Fault>,
    ) {
        let State::Serving(client) = &mut self.state else { return };
        let waits = turn(client).and_then(|turn| match turn {
            Turn::Gone => Ok(false),
            Turn::HungUp => Ok(true),
            Turn::Wait(wants) => {
                client.watch(wants, self.number, context.epoll)?;
                Ok(true)
            }
        });
        let has_call = client.session.is_none();
        let is_gone = match &waits {
            Ok(true) => has_call && client.connection.is_hung_up(),
            Ok(false) => true,
            Err(_) => client.connection.is_hung_up(),
        };
        if is_gone {
            self.endpoint.gone();
        }
        match waits {
            Ok(true) if self.successor.is_none() => {}
            Ok(true) => self.export(context),
            Ok(false) => {
                tracing::info!("the VMM disconnected");
                self.end_client(context);
            }
            Err(Fault { reason, cause }) => {
                tracing::warn!(cause, error = %reason, "the connection to the VMM ended");
                self.known.last.set(reason);
                self.end_client(context);
            }
        }
    }

    /// Takes the session back from a call.
    fn returned(&mut self, returned: Returned<E::Session>, context: &Context<'_>) {
        match &mut self.state {
            State::Serving(_) => {
                self.advance(context, |client| client.returned(returned, context.now))
            }
            State::Ending(ending) => {
                if let Some(mut ending) = ending.take() {
                    ending.session = ending.session.take().or(returned.0);
                    context.pool.run(context.now, Box::new(move || ending.end()));
                }
            }
            _ => {}
        }
    }

    /// Stops watching the client, and takes it, to end or to export it.
    fn take_client(&mut self, context: &Context<'_>) -> Option<Ending<E::Session>> {
        let state = std::mem::replace(&mut self.state, State::Ending(None));
        let State::Serving(mut client) = state else {
            self.state = state;
            return None;
        };
        if let Err(error) = client.watch(None, self.number, context.epoll) {
            tracing::error!(%error, "cannot stop watching the connection");
        }
        let Client { session, connection, send_event, .. } = *client;
        Some(Ending { session, connection: Some(connection), fds: None, send_event })
    }

    /// Ends the client.
    fn end_client(&mut self, context: &Context<'_>) {
        let Some(ending) = self.take_client(context) else { return };
        let is_here = ending.session.is_some();
        // A client whose command takes too long does not wait for the command's end.
        if !E::Session::HANGS_UP_LAST || !is_here {
            ending.connection.iter().for_each(Connection::shut_down);
        }
        self.state = State::Ending(Some(Box::new(ending)));
        if is_here {
            self.returned((None, None), context);
        }
    }

    /// Exports the client, unless a command is being served.
    fn export(&mut self, context: &Context<'_>) {
        let State::Serving(client) = &self.state else { return };
        if client.session.is_none() {
            return;
        }
        let Some(successor) = self.successor.take() else { return };
        if !client.connection.can_be_exported() {
            tracing::warn!(
                "the VMM cannot be handed over, it has sent a descriptor that is neither memory \
                 nor an eventfd"
            );
            return self.end_client(context);
        }
        // The next process reads further messages. The close of the connection here does not remove
        // it from the set.
        if let Some(ending) = self.take_client(context) {
            context.pool.run(context.now, Box::new(move || ending.export(&successor)));
        }
    }

    /// Handles the end of the session. A socket that ends accepts no client, so it does not wait
    /// for the close of the connection.
    fn ended(&mut self) {
        self.known.is_serving.store(false, Ordering::Release);
        self.state = State::Closing;
        self.close_if_ending();
    }

    fn close_if_ending(&mut self) {
        if self.ends && matches!(self.state, State::Closing) {
            self.known.is_connected.store(false, Ordering::Release);
            self.state = State::Unwatched { retry: None };
        }
    }

    /// Handles the close of the connection: the next client may connect.
    fn closed(&mut self, context: &Context<'_>) {
        if matches!(self.state, State::Closing) {
            self.known.is_connected.store(false, Ordering::Release);
            self.listen(context);
        }
    }

    /// Stops accepting clients. True if one is connected.
    fn end(&mut self, context: &Context<'_>) -> bool {
        self.ends = true;
        if matches!(self.state, State::Listening) {
            self.stop_listening(None, context);
        }
        self.close_if_ending();
        matches!(self.state, State::Serving(_))
    }
}

impl<E: Endpoint> AnySlot for Slot<E> {
    fn handle(&mut self, event: Event, context: &Context<'_>) {
        let _span = self.span.clone().entered();
        match event {
            Event::Added => self.added(context),
            Event::Acceptable => self.accept(context),
            Event::Ready => self.advance(context, |client| client.turn(context)),
            Event::Returned(returned) => {
                if let Ok(returned) = returned.downcast() {
                    self.returned(*returned, context);
                }
            }
            Event::Ended => self.ended(),
            Event::Closed => self.closed(context),
            Event::Timeout if self.timer().is_some_and(|due| due <= context.now) => {
                match self.state {
                    State::Unwatched { .. } => self.listen(context),
                    _ => self.advance(context, |client| client.timeout(context.now)),
                }
            }
            Event::Timeout | Event::Notify => {}
            Event::Export(successor) => {
                if self.end(context) {
                    self.successor = Some(successor);
                    self.export(context);
                }
            }
            Event::End(over) => {
                self._over = over.or_else(|| self._over.take());
                if self.end(context) {
                    tracing::info!("disconnecting the VMM");
                    self.end_client(context);
                }
            }
        }
    }

    fn timer(&self) -> Option<Instant> {
        match &self.state {
            State::Unwatched { retry } if !self.ends => *retry,
            State::Serving(client) => client.timer(),
            _ => None,
        }
    }

    fn is_over(&self) -> bool {
        self.ends && matches!(self.state, State::Unwatched { .. })
    }

    fn retire(self: Box<Self>, context: &Context<'_>) {
        let listener = self.listener;
        context.pool.run(context.now, Box::new(move || drop(listener)));
    }
}

#[cfg(test)]
mod tests;
