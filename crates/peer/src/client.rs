//! A client that is served: its connection and its session, a message at a time.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SendError, Sender};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use sidecore_socket::{cause, close_aside};

use crate::connection::{Codec, Connection, Received};
use crate::session::{MessageOf, Session};
use crate::slot::{Context, DEADLINE, Event, Tell, connection_key};
use crate::snapshot::{ExportFds, ResumeFds, Snapshot, SocketState};

/// A command that takes longer is logged: QEMU gives up a vfio-user device after five seconds.
const SLOW: Duration = Duration::from_secs(2);

/// Why a connection ended, other than by being closed.
pub(crate) struct Fault {
    pub(crate) reason: String,
    /// Its kind, for the limits of the log.
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

/// The events to wait for: a message, or room for the rest of a reply. No message is read before: a peer
/// that does not read is not listened to. None during a call of the session: a peer that hangs up would
/// be reported without end.
pub(crate) type Wants = Option<EventFlags>;

const MESSAGE: Wants = Some(EventFlags::IN);
const ROOM: Wants = Some(EventFlags::OUT);

/// The next step of a connection.
pub(crate) enum Turn {
    Wait(Wants),
    Gone,
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
    /// The events that the connection is watched for.
    watched: Wants,
    /// When the last message came, or the client was notified.
    last: Instant,
    pub(crate) tell: Tell,
}

impl<S: Session> Client<S> {
    pub(crate) const fn new(connection: Connection<S::Codec>, session: S, tell: Tell, now: Instant) -> Self {
        Self { connection, session: Some(session), call: None, watched: None, last: now, tell }
    }

    /// Waits for the first message, or for room for a reply of the process before.
    pub(crate) const fn first(&self) -> Turn {
        Turn::Wait(if self.connection.is_sending() { ROOM } else { MESSAGE })
    }

    /// Sends what is left of a reply, then reads a message and serves it. One only: other sockets have
    /// their turn, too.
    pub(crate) fn turn(&mut self, context: &Context<'_>) -> Result<Turn, Fault> {
        let Some(session) = &mut self.session else { return Ok(Turn::Wait(None)) };
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
        let back = GivingBack { session: self.session.take(), reply: None, tell: Tell::clone(&self.tell) };
        let job = move || {
            let mut back = back;
            back.reply = back.session.as_mut().map(|session| session.handle(message));
        };
        context.pool.run(context.now, Box::new(job));
        Ok(Turn::Wait(None))
    }

    /// The session is back from its call.
    pub(crate) fn returned(&mut self, (session, reply): Returned<S>, now: Instant) -> Result<Turn, Fault> {
        self.session = session;
        let taken = self.call.take().map(|call| now.saturating_duration_since(call.since));
        if let Some(taken) = taken.filter(|taken| *taken >= SLOW) {
            tracing::warn!(?taken, "the VMM has waited long for an answer");
        }
        let panicked = || Fault::new("the thread that served it panicked".to_owned(), "Panic");
        self.reply(reply.ok_or_else(panicked)?, now)
    }

    /// Sends a reply, if there is one.
    fn reply(&mut self, reply: Result<Option<MessageOf<S>>, S::Error>, now: Instant) -> Result<Turn, Fault> {
        self.last = now;
        let is_sent = match reply? {
            Some(reply) => self.connection.send(reply)?,
            None => true,
        };
        Ok(Turn::Wait(if is_sent { MESSAGE } else { ROOM }))
    }

    /// The timer has expired: notifies the client; a call that takes too long is an error.
    pub(crate) fn timeout(&mut self, now: Instant) -> Result<Turn, Fault> {
        if let Some(call) = &self.call {
            return Err(Fault::new(format!("{} has taken longer than {DEADLINE:?}", call.name), "Deadline"));
        }
        if let Some(session) = &mut self.session {
            session.notify();
        }
        self.last = now;
        Ok(Turn::Wait(self.watched))
    }

    /// When the client is to be notified, or to be disconnected because a command takes too long.
    pub(crate) fn timer(&self) -> Option<Instant> {
        match (&self.call, &self.session) {
            (Some(call), _) => call.since.checked_add(DEADLINE),
            (None, Some(session)) => session.notifies_after().and_then(|time| self.last.checked_add(time)),
            (None, None) => None,
        }
    }

    pub(crate) fn watch(&mut self, wants: Wants, number: u64, epoll: &OwnedFd) -> Result<(), Errno> {
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

/// A session after its call, unless that panicked, and the reply.
pub(crate) type Returned<S> = (Option<S>, Option<Result<Option<MessageOf<S>>, <S as Session>::Error>>);

/// A session in a call, which it comes back from when this is dropped, also by a panic.
struct GivingBack<S: Session> {
    session: Option<S>,
    reply: Option<Result<Option<MessageOf<S>>, S::Error>>,
    tell: Tell,
}

impl<S: Session> Drop for GivingBack<S> {
    fn drop(&mut self) {
        let returned: Returned<S> = (self.session.take(), self.reply.take());
        (self.tell)(Event::Returned(Box::new(returned)));
    }
}

/// The rest of a client that has gone. Dropping it reports the end of the session, closes the connection, and
/// reports that.
pub(crate) struct Ending<S: Session> {
    pub(crate) session: Option<S>,
    pub(crate) connection: Option<Connection<S::Codec>>,
    /// Descriptors of a snapshot that could not be resumed.
    pub(crate) fds: Option<ResumeFds>,
    pub(crate) tell: Tell,
}

impl<S: Session> Ending<S> {
    /// Ends the session. To be called by the pool.
    pub(crate) fn end(mut self) {
        if let Some(session) = &mut self.session {
            session.disconnect();
        }
    }

    /// Sends the client to another process, or ends the session if that cannot be. To be called by the
    /// pool.
    pub(crate) fn export(mut self, successor: &Sender<Snapshot>) {
        let is_ready = self.session.as_mut().is_some_and(Session::prepare_export);
        let (Some(connection), Some(session)) = (self.connection.take_if(|_| is_ready), &mut self.session) else {
            tracing::warn!("the VMM cannot be handed over");
            return self.end();
        };
        tracing::info!("handing the VMM over to the next process");
        let mut fds = ExportFds::default();
        let state = SocketState { connection: connection.export(&mut fds), session: session.export(&mut fds) };
        if let Err(SendError(snapshot)) = successor.send(Snapshot { state, fds: fds.0 }) {
            close_aside(snapshot);
        }
    }
}

impl<S: Session> Drop for Ending<S> {
    fn drop(&mut self) {
        self.connection.iter().for_each(Connection::shut_down);
        (self.tell)(Event::Ended);
        drop((self.session.take(), self.connection.take(), self.fds.take()));
        (self.tell)(Event::Closed);
    }
}
