//! A client that is served: its connection and its session, a message at a time.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use sidecore_nvme::{HandedOver, PciFunction};

use crate::closing::Closing;
use crate::connection::{Connection, ConnectionError, Received};
use crate::handover::{Leaving, Left, LeftSocket, ResumeError, SocketState};
use crate::session::{Answer, ProtocolError, Session};
use crate::slot::{Begin, Ending, Key};
use crate::ticket::Wake;

/// QEMU gives a device up that takes five seconds to answer: an operator should know that it comes near.
const SLOW: Duration = Duration::from_secs(2);

/// Why a connection ended, other than by being closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error("cannot watch the connection: {0}")]
    Watch(#[from] Errno),
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// A message.
    Message,
    /// Room for the rest of an answer. No message is read before: a peer that does not read is not listened to.
    Room,
    /// The function. The socket is not watched at all: a peer that hangs up would be reported without end.
    Function,
}

impl Wants {
    pub(crate) const fn events(self) -> Option<epoll::EventFlags> {
        match self {
            Self::Message => Some(epoll::EventFlags::IN),
            Self::Room => Some(epoll::EventFlags::OUT),
            Self::Function => None,
        }
    }
}

/// Whether the client is still there.
pub(crate) enum Turn {
    Wants(Wants),
    Gone,
}

pub(crate) struct Served {
    pub(crate) connection: Connection,
    pub(crate) session: Session,
    pub(crate) wants: Wants,
    /// Since when the function has been waited for.
    since: Option<Instant>,
}

impl Served {
    /// One that has just connected, and is not watched yet.
    pub(crate) const fn new(connection: Connection, session: Session) -> Self {
        Self { connection, session, wants: Wants::Function, since: None }
    }

    /// A client that another process has left, or what is left of it.
    pub(crate) fn take_over(function: Arc<dyn PciFunction>, left: LeftSocket, wake: &Wake) -> Begin {
        let LeftSocket { state, fds } = left;
        let mut fds = Left::new(fds);
        let mut session = Session::new(function, Arc::clone(wake));
        let mut connection = None;
        match resume(state, &mut fds, &mut session, &mut connection) {
            Ok(connection) => Begin::With(Box::new(Self::new(connection, session))),
            Err(error) => {
                tracing::error!(%error, "cannot go on with the VMM that was connected, its guest has lost the device");
                if let Some(connection) = &connection {
                    connection.shut_down();
                }
                let closing = Closing::begin(Box::new((connection, fds)) as Box<dyn Send>, wake);
                Begin::After(Box::new(Ending { session, closing }))
            }
        }
    }

    /// Leaves everything to another process.
    pub(crate) fn leave(self, function: HandedOver) -> LeftSocket {
        let Self { connection, mut session, .. } = self;
        let mut fds = Leaving::default();
        let connection = connection.leave(&mut fds);
        let session = session.leave(&mut fds);
        let HandedOver { state: function, events, doorbells } = function;
        let events = events.into_iter().map(|(vector, event)| (vector, fds.put(event))).collect();
        let doorbells = Some(fds.put(doorbells));
        LeftSocket { state: SocketState { connection, session, function, events, doorbells }, fds: fds.0 }
    }

    /// What a connection that was taken over waits for.
    pub(crate) const fn first_want(&self) -> Wants {
        if self.connection.is_sending() { Wants::Room } else { Wants::Message }
    }

    /// Sends what is left of an answer, then serves a message. One only: other sockets have their turn too.
    pub(crate) fn turn(&mut self) -> Result<Turn, Fault> {
        if self.session.is_waiting() {
            return Ok(Turn::Wants(Wants::Function));
        }
        if !self.connection.flush()? {
            return Ok(Turn::Wants(Wants::Room));
        }
        match self.connection.receive()? {
            Received::Nothing => Ok(Turn::Wants(Wants::Message)),
            Received::Closed => Ok(Turn::Gone),
            Received::Message(message) => {
                let answer = self.session.handle(message)?;
                self.answer(answer)
            }
        }
    }

    pub(crate) fn resume(&mut self) -> Result<Turn, Fault> {
        if !self.session.is_waiting() {
            return Ok(Turn::Wants(self.wants));
        }
        let answer = self.session.resume();
        if let Some(taken) = self.since.take().map(|since| since.elapsed()).filter(|taken| *taken >= SLOW) {
            tracing::warn!(?taken, "the VMM has waited long for an answer");
        }
        self.answer(answer)
    }

    fn answer(&mut self, answer: Answer) -> Result<Turn, Fault> {
        let wants = match answer {
            Answer::Reply(message) => {
                let sent = self.connection.send(message)?;
                if sent { Wants::Message } else { Wants::Room }
            }
            Answer::Nothing => Wants::Message,
            Answer::Later => {
                self.since = Some(Instant::now());
                Wants::Function
            }
        };
        Ok(Turn::Wants(wants))
    }

    pub(crate) fn watch(&mut self, wants: Wants, key: Key, epoll: &OwnedFd) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(key.into());
        if wants == self.wants {
            return Ok(());
        }
        match (self.wants.events(), wants.events()) {
            (None, Some(events)) => epoll::add(epoll, &self.connection, data, events)?,
            (Some(_), Some(events)) => epoll::modify(epoll, &self.connection, data, events)?,
            (Some(_), None) => epoll::delete(epoll, &self.connection)?,
            (None, None) => {}
        }
        self.wants = wants;
        Ok(())
    }
}

/// Goes on with what was left. If that fails, what there is of it is where it was, to be closed elsewhere.
fn resume(
    state: SocketState,
    fds: &mut Left,
    session: &mut Session,
    opened: &mut Option<Connection>,
) -> Result<Connection, ResumeError> {
    let SocketState { connection: under_way, session: said, function, events, doorbells } = state;
    let connection = opened.insert(Connection::new(UnixStream::from(fds.take(under_way.stream)?)));
    connection.resume(&under_way, fds)?;
    let events = events.iter().map(|(vector, place)| Ok((*vector, fds.take(*place)?)));
    let events = events.collect::<Result<Vec<_>, ResumeError>>()?;
    let doorbells = fds.take(doorbells.ok_or(ResumeError::Descriptor)?)?;
    session.resume_left(&said, HandedOver { state: function, events, doorbells }, fds)?;
    opened.take().ok_or(ResumeError::Descriptor)
}
