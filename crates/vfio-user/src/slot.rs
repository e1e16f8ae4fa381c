//! One socket of a thread's: its listener, and the client that is served.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use sidecore_nvme::{HandedOver, PciFunction};
use tracing::Span;

use crate::connection::{Connection, ConnectionError, Received};
use crate::handover::{Leaving, Left, LeftSocket, ResumeError, SocketState};
use crate::session::{Answer, ProtocolError, Session};
use crate::ticket::Wake;

/// What a descriptor in the epoll set is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Bell,
    Listener(u64),
    Connection(u64),
}

/// The bell's key; no socket has so large a number.
const BELL: u64 = u64::MAX;

impl From<Key> for u64 {
    fn from(key: Key) -> Self {
        match key {
            Key::Bell => BELL,
            Key::Listener(number) => number << 1,
            Key::Connection(number) => number << 1 | 1,
        }
    }
}

impl From<u64> for Key {
    fn from(key: u64) -> Self {
        match (key, key & 1) {
            (BELL, _) => Self::Bell,
            (_, 0) => Self::Listener(key >> 1),
            _ => Self::Connection(key >> 1),
        }
    }
}

/// QEMU gives a device up that takes five seconds to answer: an operator should know that it comes near.
const SLOW: Duration = Duration::from_secs(2);

/// Why a connection ended, other than by being closed.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error("cannot watch the connection: {0}")]
    Watch(#[from] Errno),
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wants {
    /// A message.
    Message,
    /// Room for the rest of an answer. No message is read before: a peer that does not read is not listened to.
    Room,
    /// The function. The socket is not watched at all: a peer that hangs up would be reported without end.
    Function,
}

impl Wants {
    const fn events(self) -> Option<epoll::EventFlags> {
        match self {
            Self::Message => Some(epoll::EventFlags::IN),
            Self::Room => Some(epoll::EventFlags::OUT),
            Self::Function => None,
        }
    }
}

/// Whether the client is still there.
enum Turn {
    Wants(Wants),
    Gone,
}

/// The one client.
enum Client {
    /// None, and nobody can connect for now: accepting failed, or the listener cannot be watched.
    Deaf,
    /// None; the listener is watched.
    None,
    Served(Box<Served>),
    /// Another process will go on with it, once the function says what it leaves.
    HandingOver(Box<Served>, Arc<Mutex<Answered>>),
    /// It has gone, and the function is not free yet.
    Leaving(Box<Session>),
}

/// What the function leaves, as soon as it is known.
#[derive(Default)]
enum Answered {
    #[default]
    NotYet,
    Known(Option<Box<HandedOver>>),
}

pub(crate) struct Served {
    connection: Connection,
    session: Session,
    wants: Wants,
    /// Since when the function has been waited for.
    since: Option<Instant>,
}

/// Whom a socket begins with.
pub(crate) enum Begin {
    /// Nobody.
    Fresh,
    /// The client of another process.
    With(Box<Served>),
    /// What is left of one that could not be gone on with.
    After(Box<Session>),
}

/// A socket of one thread's.
pub(crate) struct Slot {
    number: u64,
    listener: OwnedFd,
    function: Arc<dyn PciFunction>,
    connected: Arc<AtomicBool>,
    wake: Wake,
    client: Client,
    /// No client is taken any longer.
    closing: bool,
    /// Dropped with the slot: someone waits for its end.
    over: Option<Sender<Infallible>>,
    /// Who is to have the client, with all that belongs to it.
    heir: Option<Sender<LeftSocket>>,
    span: Span,
}

impl Slot {
    pub(crate) fn new(
        number: u64,
        listener: OwnedFd,
        function: Arc<dyn PciFunction>,
        connected: Arc<AtomicBool>,
        wake: Wake,
    ) -> Self {
        let span = tracing::info_span!("vfio_user", function = function.name());
        let client = Client::Deaf;
        Self { number, listener, function, connected, wake, client, closing: false, over: None, heir: None, span }
    }

    /// Begins to serve. Whether there is somebody is known to all by now.
    pub(crate) fn begin(&mut self, begin: Begin, epoll: &OwnedFd) {
        match begin {
            Begin::Fresh => self.listen(epoll),
            Begin::With(served) => {
                tracing::info!("going on with the VMM that is connected");
                self.client = Client::Served(served);
                self.go_on(epoll, |served| Ok(Turn::Wants(served.first_want())));
            }
            Begin::After(session) => {
                self.client = Client::Leaving(session);
                self.leave(epoll);
            }
        }
    }

    /// Takes no client any longer, and leaves the one there is to `heir`, when nothing of it is in flight. It is dropped if
    /// there is none, or it cannot be left.
    pub(crate) fn hand_over(&mut self, heir: Sender<LeftSocket>, epoll: &OwnedFd) {
        self.closing = true;
        match &self.client {
            Client::None => self.stop_listening(epoll),
            Client::Served(_) => {
                self.heir = Some(heir);
                self.leave_to_heir(epoll);
            }
            Client::Deaf | Client::HandingOver(..) | Client::Leaving(_) => {}
        }
    }

    /// Asks the function what it leaves, unless the client still waits for it.
    fn leave_to_heir(&mut self, epoll: &OwnedFd) {
        if self.heir.is_none() || !matches!(&self.client, Client::Served(served) if !served.session.is_waiting()) {
            return;
        }
        // What comes from now on is for whoever goes on; closing it here does not take it out of the set.
        self.go_on(epoll, |_| Ok(Turn::Wants(Wants::Function)));
        match std::mem::replace(&mut self.client, Client::Deaf) {
            Client::Served(served) => {
                let answer = Arc::new(Mutex::new(Answered::NotYet));
                let (answered, wake) = (Arc::clone(&answer), Arc::clone(&self.wake));
                let function = Arc::clone(served.session.function());
                self.client = Client::HandingOver(served, answer);
                function.hand_over(Box::new(move |left| {
                    *answered.lock().unwrap_or_else(PoisonError::into_inner) = Answered::Known(left.map(Box::new));
                    wake();
                }));
            }
            other => self.client = other,
        }
    }

    /// Leaves the client, if the function has answered; ends it if that cannot be.
    fn left(&mut self, epoll: &OwnedFd) {
        let Client::HandingOver(_, answer) = &self.client else { return };
        let answer = std::mem::take(&mut *answer.lock().unwrap_or_else(PoisonError::into_inner));
        let Answered::Known(function) = answer else { return };
        let Client::HandingOver(served, _) = std::mem::replace(&mut self.client, Client::Deaf) else { return };
        let heir = self.heir.take();
        match (function, heir) {
            (Some(function), Some(heir)) => {
                tracing::info!("leaving the VMM to the next process");
                // Nobody may be there any more: then the connection is closed with what is left.
                let _ = heir.send(served.leave(*function));
                self.connected.store(false, Ordering::Release);
            }
            _ => {
                tracing::warn!("the VMM cannot be left to another process");
                self.client = Client::Served(served);
                self.hang_up(epoll);
            }
        }
    }

    pub(crate) const fn span(&self) -> &Span {
        &self.span
    }

    /// Whether nothing is left to be done.
    pub(crate) const fn is_over(&self) -> bool {
        self.closing && matches!(self.client, Client::Deaf | Client::None)
    }

    /// Whether it has to listen again some time.
    pub(crate) const fn is_deaf(&self) -> bool {
        matches!(self.client, Client::Deaf) && !self.closing
    }

    /// Waits for a client.
    pub(crate) fn listen(&mut self, epoll: &OwnedFd) {
        let key = epoll::EventData::new_u64(Key::Listener(self.number).into());
        self.client = match epoll::add(epoll, &self.listener, key, epoll::EventFlags::IN) {
            Ok(()) => Client::None,
            Err(error) => {
                tracing::warn!(%error, "cannot watch the socket");
                Client::Deaf
            }
        };
    }

    /// Takes a client. The others wait in the backlog until this one has gone.
    pub(crate) fn accept(&mut self, epoll: &OwnedFd) {
        if !matches!(self.client, Client::None) {
            return;
        }
        let stream = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(stream) => stream,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                self.stop_listening(epoll);
                return;
            }
        };
        self.stop_listening(epoll);
        tracing::info!("a VMM connected");
        self.connected.store(true, Ordering::Release);
        let connection = Connection::new(UnixStream::from(stream));
        let session = Session::new(Arc::clone(&self.function), Arc::clone(&self.wake));
        let served = Served { connection, session, wants: Wants::Function, since: None };
        self.client = Client::Served(Box::new(served));
        self.go_on(epoll, |_| Ok(Turn::Wants(Wants::Message)));
    }

    /// The connection is readable, or writable, or broken.
    pub(crate) fn turn(&mut self, epoll: &OwnedFd) {
        self.go_on(epoll, Served::turn);
    }

    /// What the session waited for is done.
    pub(crate) fn resume(&mut self, epoll: &OwnedFd) {
        match &self.client {
            Client::Served(_) => {
                self.go_on(epoll, Served::resume);
                self.leave_to_heir(epoll);
            }
            Client::HandingOver(..) => self.left(epoll),
            Client::Leaving(_) => self.leave(epoll),
            Client::Deaf | Client::None => {}
        }
    }

    /// Takes no client any longer, and ends the one there is.
    pub(crate) fn close(&mut self, over: Option<Sender<Infallible>>, epoll: &OwnedFd) {
        self.closing = true;
        self.over = over.or_else(|| self.over.take());
        match &self.client {
            Client::None => self.stop_listening(epoll),
            Client::Served(_) => {
                tracing::info!("disconnecting the VMM");
                self.hang_up(epoll);
            }
            Client::Deaf | Client::HandingOver(..) | Client::Leaving(_) => {}
        }
    }

    fn stop_listening(&mut self, epoll: &OwnedFd) {
        if let Err(error) = epoll::delete(epoll, &self.listener) {
            tracing::error!(%error, "cannot stop watching the socket");
        }
        self.client = Client::Deaf;
    }

    /// Lets the client have a turn, and sees what it wants then.
    fn go_on(&mut self, epoll: &OwnedFd, turn: impl FnOnce(&mut Served) -> Result<Turn, Fault>) {
        let Client::Served(served) = &mut self.client else { return };
        let watched = turn(served).and_then(|turn| match turn {
            Turn::Gone => Ok(false),
            Turn::Wants(wants) => {
                served.watch(wants, Key::Connection(self.number), epoll)?;
                Ok(true)
            }
        });
        match watched {
            Ok(true) => return,
            Ok(false) => tracing::info!("the VMM disconnected"),
            Err(error) => tracing::warn!(%error, "the connection to the VMM ended"),
        }
        self.hang_up(epoll);
    }

    /// Closes the connection and ends the session.
    fn hang_up(&mut self, epoll: &OwnedFd) {
        match std::mem::replace(&mut self.client, Client::Deaf) {
            // Closed, it is in no epoll set: no other descriptor is for the same socket.
            Client::Served(served) => {
                let Served { session, .. } = *served;
                self.client = Client::Leaving(Box::new(session));
            }
            other => self.client = other,
        }
        self.leave(epoll);
    }

    /// Goes on ending the session; when it is over, the next client may come.
    fn leave(&mut self, epoll: &OwnedFd) {
        let Client::Leaving(session) = &mut self.client else { return };
        if !session.end() {
            return;
        }
        self.client = Client::Deaf;
        self.connected.store(false, Ordering::Release);
        if !self.closing {
            self.listen(epoll);
        }
    }
}

impl Served {
    /// A client that another process has left, or what is left of it.
    pub(crate) fn take_over(function: Arc<dyn PciFunction>, left: LeftSocket, wake: Wake) -> Begin {
        let LeftSocket { state, fds } = left;
        let SocketState { connection, session: said, function: of_function, events } = state;
        let mut fds = Left::new(fds);
        let mut session = Session::new(function, wake);
        let resume = || {
            let connection = Connection::resume(&connection, &mut fds)?;
            let events = events.iter().map(|(vector, place)| Ok((*vector, fds.take(*place)?)));
            let events = events.collect::<Result<Vec<_>, ResumeError>>()?;
            session.resume_left(&said, HandedOver { state: of_function, events }, &mut fds)?;
            Ok::<_, ResumeError>(connection)
        };
        match resume() {
            Ok(connection) => Begin::With(Box::new(Self { connection, session, wants: Wants::Function, since: None })),
            Err(error) => {
                tracing::error!(%error, "cannot go on with the VMM that was connected, its guest has lost the device");
                Begin::After(Box::new(session))
            }
        }
    }

    /// Leaves everything to another process.
    fn leave(self, function: HandedOver) -> LeftSocket {
        let Self { connection, mut session, .. } = self;
        let mut fds = Leaving::default();
        let connection = connection.leave(&mut fds);
        let session = session.leave(&mut fds);
        let HandedOver { state: function, events } = function;
        let events = events.into_iter().map(|(vector, event)| (vector, fds.put(event))).collect();
        LeftSocket { state: SocketState { connection, session, function, events }, fds: fds.0 }
    }

    /// What a connection that was taken over waits for.
    const fn first_want(&self) -> Wants {
        if self.connection.is_sending() { Wants::Room } else { Wants::Message }
    }

    /// Sends what is left of an answer, then serves a message. One only: other sockets have their turn too.
    fn turn(&mut self) -> Result<Turn, Fault> {
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

    fn resume(&mut self) -> Result<Turn, Fault> {
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

    fn watch(&mut self, wants: Wants, key: Key, epoll: &OwnedFd) -> Result<(), Errno> {
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
