//! One socket of a thread's: its listener, and the client that is served.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use sidecore_nvme::{HandedOver, PciFunction};
use sidecore_socket::{LastDisconnect, cause};
use tracing::Span;

use crate::closing::{Aside, Closing};
use crate::connection::Connection;
use crate::handover::LeftSocket;
use crate::served::{Fault, Served, Turn, Wants};
use crate::session::Session;
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

/// The one client.
enum Client {
    /// None, and nobody can connect for now: accepting failed, or the listener cannot be watched.
    Deaf,
    /// None; the listener is watched.
    None,
    Served(Box<Served>),
    /// Another process will go on with it, once the function says what it leaves.
    HandingOver(Box<Served>, Arc<Mutex<Answered>>),
    /// It has gone, and the function is not free yet, or its connection not closed.
    Leaving(Box<Ending>),
}

/// What is left of a client that is not there any more.
pub(crate) struct Ending {
    pub(crate) session: Session,
    pub(crate) closing: Closing<Box<dyn Send>>,
}

/// What the function leaves, as soon as it is known.
#[derive(Default)]
enum Answered {
    #[default]
    NotYet,
    Known(Option<Box<HandedOver>>),
}

/// Whom a socket begins with.
pub(crate) enum Begin {
    /// Nobody.
    Fresh,
    /// The client of another process.
    With(Box<Served>),
    /// What is left of one that could not be gone on with.
    After(Box<Ending>),
}

/// What everybody may know of a socket's client.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Whether there is one.
    pub(crate) connected: AtomicBool,
    pub(crate) last: LastDisconnect,
}

/// A socket of one thread's.
pub(crate) struct Slot {
    number: u64,
    listener: OwnedFd,
    function: Arc<dyn PciFunction>,
    known: Arc<Known>,
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
        known: Arc<Known>,
        wake: Wake,
    ) -> Self {
        let span = tracing::info_span!("vfio_user", function = function.name());
        let client = Client::Deaf;
        Self { number, listener, function, known, wake, client, closing: false, over: None, heir: None, span }
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
            Begin::After(ending) => {
                self.client = Client::Leaving(ending);
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
        if matches!(&self.client, Client::Served(served) if !served.connection.can_be_left()) {
            tracing::warn!("the VMM cannot be left to another process, it has sent what is no memory and no eventfd");
            self.heir = None;
            return self.hang_up(epoll);
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
                self.known.connected.store(false, Ordering::Release);
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

    /// Whether it has to listen again some time, or try again to close a connection.
    pub(crate) fn is_deaf(&self) -> bool {
        match &self.client {
            Client::Deaf => !self.closing,
            Client::Leaving(leaving) => !leaving.closing.has_begun(),
            Client::None | Client::Served(_) | Client::HandingOver(..) => false,
        }
    }

    /// Waits for a client, when the last one has left.
    pub(crate) fn listen(&mut self, epoll: &OwnedFd) {
        if let Client::Leaving(leaving) = &mut self.client {
            leaving.closing.try_again(&self.wake);
            return self.leave(epoll);
        }
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
        self.known.connected.store(true, Ordering::Release);
        let connection = Connection::new(UnixStream::from(stream));
        let session = Session::new(Arc::clone(&self.function), Arc::clone(&self.wake));
        self.client = Client::Served(Box::new(Served::new(connection, session)));
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
            // It may have waited for its connection only.
            Client::Leaving(_) => self.leave(epoll),
            Client::Deaf | Client::HandingOver(..) => {}
        }
    }

    /// Closes the socket: with it, those who wait to be accepted, and what they have sent.
    pub(crate) fn retire(self) {
        drop(Aside::new(self.listener));
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
            Err(error) => {
                tracing::warn!(cause = cause(&error), %error, "the connection to the VMM ended");
                self.known.last.set(error.to_string());
            }
        }
        self.hang_up(epoll);
    }

    /// Closes the connection and ends the session.
    fn hang_up(&mut self, epoll: &OwnedFd) {
        match std::mem::replace(&mut self.client, Client::Deaf) {
            Client::Served(served) => {
                let Served { session, connection, wants, .. } = *served;
                if wants.events().is_some()
                    && let Err(error) = epoll::delete(epoll, &connection)
                {
                    tracing::error!(%error, "cannot stop watching the connection");
                }
                connection.shut_down();
                let closing = Closing::begin(Box::new(connection) as Box<dyn Send>, &self.wake);
                self.client = Client::Leaving(Box::new(Ending { session, closing }));
            }
            other => self.client = other,
        }
        self.leave(epoll);
    }

    /// Goes on ending the session; when it is over, and the connection closed, the next client may come. There is none to
    /// come to a socket that is closing, so nobody waits for the connection then.
    fn leave(&mut self, epoll: &OwnedFd) {
        let Client::Leaving(leaving) = &mut self.client else { return };
        let is_free = leaving.session.end();
        let is_closed = self.closing || leaving.closing.is_over();
        if !is_free || !is_closed {
            return;
        }
        self.client = Client::Deaf;
        self.known.connected.store(false, Ordering::Release);
        if !self.closing {
            self.listen(epoll);
        }
    }
}
