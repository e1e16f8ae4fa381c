//! A connected client: its connection and its session, a message at a time.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SendError, Sender};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use sidecore_socket::{cause, close_aside};

use crate::connection::{Codec, Connection, Received};
use crate::session::{MessageOf, Session};
use crate::slot::{Context, DEADLINE, Event, SendEvent, connection_key};
use crate::snapshot::{ExportFds, ResumeFds, Snapshot, SocketState};

/// Commands that take longer are logged: QEMU gives up a vfio-user device after five seconds.
const SLOW: Duration = Duration::from_secs(2);

/// The reason why a connection ended, unless the peer closed it in order.
pub(crate) struct Fault {
    pub(crate) reason: String,
    /// The reason's kind, for the limits of the log.
    pub(crate) cause: String,
}

impl<E: Error> From<E> for Fault {
    fn from(error: E) -> Self {
        Self { reason: error.to_string(), cause: cause(&error) }
    }
}

impl Fault {
    fn new(reason: String, cause: &str) -> Self {
        Self { reason, cause: cause.to_owned() }
    }
}

/// The events to wait for: a message, or space for the rest of a reply. While a reply is being
/// sent, no message is read: a peer that does not read its replies is not served. During a call of
/// the session, one event: that the peer hangs up. Epoll would report it again and again.
pub(crate) type Wants = Option<EventFlags>;

const MESSAGE: Wants = Some(EventFlags::IN);
const ROOM: Wants = Some(EventFlags::OUT);
const HANG_UP: Wants = Some(EventFlags::RDHUP.union(EventFlags::ONESHOT));

/// The next step of a connection.
pub(crate) enum Turn {
    Wait(Wants),
    Gone,
    /// The peer is gone, and a call of its session has not ended.
    HungUp,
}

/// A call of the session by the pool.
struct Call {
    /// The command, for the log.
    name: String,
    since: Instant,
}

pub(crate) struct Client<S: Session> {
    pub(crate) connection: Connection<S::Codec>,
    /// `None` during a call.
    pub(crate) session: Option<S>,
    call: Option<Call>,
    /// The events for which epoll watches the connection.
    watched: Wants,
    /// The time of the last message, or of the last notification of the client.
    last: Instant,
    pub(crate) send_event: SendEvent,
}

impl<S: Session> Client<S> {
    pub(crate) const fn new(
        connection: Connection<S::Codec>,
        session: S,
        send_event: SendEvent,
        now: Instant,
    ) -> Self {
        Self {
            connection,
            session: Some(session),
            call: None,
            watched: None,
            last: now,
            send_event,
        }
    }

    /// Waits for the first message, or for space for a reply of the previous process.
    pub(crate) const fn first(&self) -> Turn {
        Turn::Wait(if self.connection.is_sending() { ROOM } else { MESSAGE })
    }

    /// Sends the rest of a reply, then reads a message and serves it. Only one message, so that
    /// other sockets have their turn.
    pub(crate) fn turn(&mut self, context: &Context<'_>) -> Result<Turn, Fault> {
        let Some(session) = &mut self.session else { return Ok(Turn::HungUp) };
        if !self.connection.flush()? {
            return Ok(Turn::Wait(ROOM));
        }
        let message = match self.connection.receive()? {
            Received::Message(message) => message,
            Received::Nothing => return Ok(Turn::Wait(MESSAGE)),
            Received::Closed => return Ok(Turn::Gone),
        };
        self.last = context.now;
        if !session.may_wait(&message) {
            let reply = session.handle(message);
            return self.reply(reply, context.now);
        }
        self.call = Some(Call { name: S::Codec::kind(&message).to_string(), since: context.now });
        let guard = CallGuard {
            session: self.session.take(),
            reply: None,
            send_event: SendEvent::clone(&self.send_event),
        };
        let job = move || {
            let mut guard = guard;
            guard.reply = guard.session.as_mut().map(|session| session.handle(message));
        };
        context.pool.run(context.now, Box::new(job));
        Ok(Turn::Wait(HANG_UP))
    }

    /// Takes the session back from its call.
    pub(crate) fn returned(
        &mut self,
        (session, reply): Returned<S>,
        now: Instant,
    ) -> Result<Turn, Fault> {
        self.session = session;
        let taken = self.call.take().map(|call| now.saturating_duration_since(call.since));
        if let Some(taken) = taken.filter(|taken| *taken >= SLOW) {
            tracing::warn!(?taken, "the VMM has waited long for a reply");
        }
        let panicked =
            || Fault::new("the thread that served the client panicked".to_owned(), "Panic");
        self.reply(reply.ok_or_else(panicked)?, now)
    }

    /// Sends a reply, if there is one.
    fn reply(
        &mut self,
        reply: Result<Option<MessageOf<S>>, S::Error>,
        now: Instant,
    ) -> Result<Turn, Fault> {
        self.last = now;
        let is_sent = match reply? {
            Some(reply) => self.connection.send(reply)?,
            None => true,
        };
        Ok(Turn::Wait(if is_sent { MESSAGE } else { ROOM }))
    }

    /// Handles the expired timer: notifies the client; a call that takes too long is an error.
    pub(crate) fn timeout(&mut self, now: Instant) -> Result<Turn, Fault> {
        if let Some(call) = &self.call {
            return Err(Fault::new(
                format!("{} has taken longer than {DEADLINE:?}", call.name),
                "Deadline",
            ));
        }
        if let Some(session) = &mut self.session {
            session.notify();
        }
        self.last = now;
        Ok(Turn::Wait(self.watched))
    }

    /// The time to notify the client, or to disconnect it because a command takes too long.
    pub(crate) fn timer(&self) -> Option<Instant> {
        match (&self.call, &self.session) {
            (Some(call), _) => call.since.checked_add(DEADLINE),
            (None, Some(session)) => {
                session.notifies_after().and_then(|time| self.last.checked_add(time))
            }
            (None, None) => None,
        }
    }

    pub(crate) fn watch(
        &mut self,
        wants: Wants,
        number: u64,
        epoll: &OwnedFd,
    ) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(connection_key(number));
        match (self.watched, wants) {
            _ if wants == self.watched => return Ok(()),
            (None, Some(events)) => epoll::add(epoll, &self.connection, data, events)?,
            (Some(_), Some(events)) => epoll::modify(epoll, &self.connection, data, events)?,
            (_, None) => epoll::delete(epoll, &self.connection)?,
        }
        self.watched = wants;
        Ok(())
    }
}

/// A session after its call, or `None` after a panic, and the reply.
pub(crate) type Returned<S> =
    (Option<S>, Option<Result<Option<MessageOf<S>>, <S as Session>::Error>>);

/// A session in a call. The drop returns the session to its slot, also after a panic.
struct CallGuard<S: Session> {
    session: Option<S>,
    reply: Option<Result<Option<MessageOf<S>>, S::Error>>,
    send_event: SendEvent,
}

impl<S: Session> Drop for CallGuard<S> {
    fn drop(&mut self) {
        let returned: Returned<S> = (self.session.take(), self.reply.take());
        (self.send_event)(Event::Returned(Box::new(returned)));
    }
}

/// The rest of a client that is gone. The drop reports the end of the session, closes the
/// connection, and reports the close.
pub(crate) struct Ending<S: Session> {
    pub(crate) session: Option<S>,
    pub(crate) connection: Option<Connection<S::Codec>>,
    /// Descriptors of a snapshot that could not be resumed.
    pub(crate) fds: Option<ResumeFds>,
    pub(crate) send_event: SendEvent,
}

impl<S: Session> Ending<S> {
    /// Ends the session. Called by the pool.
    pub(crate) fn end(mut self) {
        if let Some(session) = &mut self.session {
            session.disconnect();
        }
    }

    /// Sends the client to another process, or ends the session if the client cannot be exported.
    /// Called by the pool.
    pub(crate) fn export(mut self, successor: &Sender<Snapshot>) {
        let is_ready = self.session.as_mut().is_some_and(Session::prepare_export);
        let (Some(connection), Some(session)) =
            (self.connection.take_if(|_| is_ready), &mut self.session)
        else {
            tracing::warn!("the VMM cannot be handed over");
            return self.end();
        };
        tracing::info!("handing the VMM over to the next process");
        let mut fds = ExportFds::default();
        let state = SocketState {
            connection: connection.export(&mut fds),
            session: session.export(&mut fds),
        };
        if let Err(SendError(snapshot)) = successor.send(Snapshot { state, fds: fds.0 }) {
            close_aside(snapshot);
        }
    }
}

impl<S: Session> Drop for Ending<S> {
    fn drop(&mut self) {
        self.connection.iter().for_each(Connection::shut_down);
        (self.send_event)(Event::Ended);
        drop((self.session.take(), self.connection.take(), self.fds.take()));
        (self.send_event)(Event::Closed);
    }
}
