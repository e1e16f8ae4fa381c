//! A few threads that serve many sockets.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use sidecore_socket::{Access, Disconnect, ServerError, SocketFile, close_aside};

use crate::pool::Pool;
use crate::session::Endpoint;
use crate::slot::{Event, Known, Slot};
use crate::snapshot::Snapshot;
use crate::worker::{Mailbox, Order, Worker};

/// The number of connections that may wait while another one is served.
const BACKLOG: i32 = 8;
/// The number of threads for work that may wait, not counting those that a peer blocks for long.
const POOL_THREADS: usize = 4;

/// Threads that serve sockets of any protocol: each socket a device, each device one client at a
/// time.
///
/// Every socket belongs to one worker, which waits only for messages: a client that sends half a
/// message, or reads no replies, or whose last command takes long, delays only itself. A bounded
/// pool of threads carries out commands that may wait, and ends sessions and connections. The next
/// client of a device is accepted when the last one's connection is closed. The drop of the service
/// ends all its sockets.
pub struct Service {
    workers: Vec<Thread>,
    pool: Arc<Pool>,
    /// The number of the next socket, which also decides its worker.
    next: AtomicU64,
}

struct Thread {
    mailbox: Arc<Mailbox>,
    handle: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the workers.
    ///
    /// # Errors
    /// A thread cannot be started, or the process has no descriptor left for it.
    pub fn start(workers: NonZeroUsize) -> io::Result<Self> {
        let pool = Pool::new(POOL_THREADS);
        let mut service = Self { workers: Vec::new(), pool, next: AtomicU64::new(0) };
        for number in 0..workers.get() {
            let (mailbox, worker) = Worker::new(Arc::clone(&service.pool))?;
            let handle = thread::Builder::new()
                .name(format!("peer-{number}"))
                .spawn(move || worker.run())?;
            service.workers.push(Thread { mailbox, handle: Some(handle) });
        }
        Ok(service)
    }

    /// Creates the socket file with the rights of `access`, and serves a device on it. The socket
    /// file of a dead process is replaced. The client of a snapshot that another process has
    /// [exported](Socket::export) is resumed; if that fails, the client is disconnected, and the
    /// reason is logged.
    ///
    /// # Errors
    /// See [`ServerError`]. The snapshot's client is disconnected then, too.
    pub fn serve<E: Endpoint>(
        &self,
        path: &Path,
        access: Access,
        endpoint: E,
        snapshot: Option<Snapshot>,
    ) -> Result<Socket, ServerError> {
        match Listening::new(path, access) {
            Ok(listening) => self.serve_on(listening, endpoint, snapshot),
            Err(error) => {
                close_aside(snapshot);
                Err(error)
            }
        }
    }

    /// Serves a device on a socket that listens already, otherwise as [`serve`](Self::serve): the
    /// clients that have connected meanwhile are served first.
    ///
    /// # Errors
    /// The service has ended. The snapshot's client is disconnected then, too.
    pub fn serve_on<E: Endpoint>(
        &self,
        mut listening: Listening,
        endpoint: E,
        snapshot: Option<Snapshot>,
    ) -> Result<Socket, ServerError> {
        let ended = |path: &Path| ServerError::io(path, io::Error::other("the service has ended"));
        let Some((file, listener)) = listening.0.take() else { return Err(ended(Path::new(""))) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let worker =
            usize::try_from(number).unwrap_or(0).checked_rem(self.workers.len()).unwrap_or(0);
        let known = Arc::new(Known::default());
        let add = |mailbox: &Arc<Mailbox>| {
            let mut slot = Slot::new(
                number,
                listener,
                endpoint,
                Arc::clone(&known),
                mailbox.event_sender(number),
            );
            if let Some(snapshot) = snapshot {
                slot.resume(snapshot, Instant::now());
            }
            mailbox.send(Order::Add(number, Box::new(slot)))
        };
        match self.workers.get(worker).map(|worker| &worker.mailbox) {
            Some(mailbox) if add(mailbox) => {
                Ok(Socket { file, is_removed: false, number, mailbox: Arc::clone(mailbox), known })
            }
            _ => {
                file.remove();
                Err(ended(file.path()))
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.mailbox.send(Order::Stop);
        }
        for worker in &mut self.workers {
            if worker.handle.take().is_some_and(|handle| handle.join().is_err()) {
                tracing::error!("a thread that served sockets has panicked");
            }
        }
        self.pool.close();
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Service")
            .field("workers", &self.workers.len())
            .finish_non_exhaustive()
    }
}

/// A socket whose device does not exist yet. Clients can connect, and wait for the answer to their
/// first message. A waiting client takes no thread and no memory of the process, because the kernel
/// keeps its connection and messages.
///
/// The drop removes the file and disconnects the clients.
#[derive(Debug)]
pub struct Listening(
    /// `None` once it is served.
    Option<(SocketFile, OwnedFd)>,
);

impl Listening {
    /// Creates the socket file with the rights of `access`, and listens. The socket file of a dead
    /// process is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn new(path: &Path, access: Access) -> Result<Self, ServerError> {
        SocketFile::listen(path, access, BACKLOG).map(|listening| Self(Some(listening)))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some((file, listener)) = self.0.take() {
            file.remove();
            // Messages in the backlog may have descriptors whose close waits.
            close_aside(listener);
        }
    }
}

/// A socket that is served.
///
/// The drop removes the file, ends the connection, at every point of a message, and waits until the
/// session has ended: then the device is stopped and holds none of the client's memory. The drop
/// does not wait until the connection is closed. A thread that the device needs for its stop must
/// not drop the socket.
pub struct Socket {
    file: SocketFile,
    is_removed: bool,
    number: u64,
    mailbox: Arc<Mailbox>,
    known: Arc<Known>,
}

impl Socket {
    /// Returns the path of the socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether a client is connected, or a former client's session has not ended yet, or its
    /// connection is not closed yet.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.known.is_connected.load(Ordering::Acquire)
    }

    /// Whether a client is connected, or a former client's session has not ended yet.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.known.is_serving.load(Ordering::Acquire)
    }

    /// Returns the last disconnect that the client caused by an error.
    #[must_use]
    pub fn last_disconnect(&self) -> Option<Disconnect> {
        self.known.last.get()
    }

    /// Lets the session check for an event of which to [notify](crate::Session::notify) its client.
    pub fn notify(&self) {
        self.mailbox.send(Order::Event(self.number, Event::Notify));
    }

    /// Ends the socket as its drop does, but keeps the client connected, for another process to
    /// [resume](Service::serve). `None` if no client is connected, or the client cannot be
    /// exported.
    ///
    /// This call waits until nothing of the device is in flight, but never for the client.
    #[must_use]
    pub fn export(mut self) -> Option<Snapshot> {
        self.remove_file();
        let (successor, exported) = channel();
        self.mailbox.send(Order::Event(self.number, Event::Export(successor)));
        // The other end is dropped without a message if there is no client to export.
        exported.recv().ok()
    }

    fn remove_file(&mut self) {
        if !std::mem::replace(&mut self.is_removed, true) {
            self.file.remove();
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove_file();
        let (ended, wait) = channel();
        if self.mailbox.send(Order::Event(self.number, Event::End(Some(ended)))) {
            // No message is ever sent: the other end is dropped after the end of the session, or
            // with its thread.
            let _ = wait.recv();
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connected = self.is_connected();
        formatter
            .debug_struct("Socket")
            .field("path", &self.path())
            .field("connected", &connected)
            .finish()
    }
}
