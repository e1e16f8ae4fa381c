//! A few threads that serve many sockets.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
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

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;
/// Threads for what may wait, besides those that a peer makes wait for long.
const POOL_THREADS: usize = 4;

/// Threads that serve sockets of any protocol: each socket a device, each device to one client at a
/// time.
///
/// Every socket belongs to one worker, which waits for nothing but messages: a client that sends half of
/// one, or reads no answers, or whose last command takes long, holds up itself only. Commands that may
/// wait, and the ends of sessions and connections, are carried out by a bounded pool of threads. The next
/// client of a device comes when the last one's connection is closed. Dropping the service ends all its
/// sockets.
pub struct Service {
    workers: Vec<Thread>,
    pool: Arc<Pool>,
    /// The number of the next socket, which also says which worker it belongs to.
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
    /// No thread, or no descriptor for it, is to be had.
    pub fn start(workers: NonZeroUsize) -> io::Result<Self> {
        let pool = Pool::new(POOL_THREADS);
        let mut service = Self { workers: Vec::new(), pool, next: AtomicU64::new(0) };
        for number in 0..workers.get() {
            let (mailbox, worker) = Worker::new(Arc::clone(&service.pool))?;
            let handle = thread::Builder::new().name(format!("peer-{number}")).spawn(move || worker.run())?;
            service.workers.push(Thread { mailbox, handle: Some(handle) });
        }
        Ok(service)
    }

    /// Creates the socket file, for those whom `access` names, and serves a device on it. A socket file
    /// that a dead process left behind is replaced. The client of a snapshot that another process has
    /// [exported](Socket::export) is resumed; if that is not possible it is disconnected, and the log says
    /// why.
    ///
    /// # Errors
    /// See [`ServerError`]. The client is disconnected then, too.
    pub fn serve<E: Endpoint>(
        &self,
        path: &Path,
        access: Access,
        endpoint: E,
        snapshot: Option<Snapshot>,
    ) -> Result<Socket, ServerError> {
        let (file, listener) = match SocketFile::listen(path, access, BACKLOG) {
            Ok(listening) => listening,
            Err(error) => {
                close_aside(snapshot);
                return Err(error);
            }
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let turn = usize::try_from(number).unwrap_or(0).checked_rem(self.workers.len()).unwrap_or(0);
        let known = Arc::new(Known::default());
        let add = |mailbox: &Arc<Mailbox>| {
            let mut slot = Slot::new(number, listener, endpoint, Arc::clone(&known), mailbox.tell(number));
            if let Some(snapshot) = snapshot {
                slot.resume(snapshot, Instant::now());
            }
            mailbox.send(Order::Add(number, Box::new(slot)))
        };
        match self.workers.get(turn).map(|worker| &worker.mailbox) {
            Some(mailbox) if add(mailbox) => {
                Ok(Socket { file, is_removed: false, number, mailbox: Arc::clone(mailbox), known })
            }
            _ => {
                file.remove();
                Err(ServerError::io(path, io::Error::other("the service has ended")))
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
        formatter.debug_struct("Service").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}

/// A socket that is served.
///
/// Dropping it removes the file, ends the connection, wherever in a message it is, and waits until the
/// session has ended: its device is stopped and holds none of the client's memory. It does not wait until
/// the connection is closed. So it may be dropped by no thread that the device needs for that.
pub struct Socket {
    file: SocketFile,
    is_removed: bool,
    number: u64,
    mailbox: Arc<Mailbox>,
    known: Arc<Known>,
}

impl Socket {
    /// The socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether a client is connected, or the session of one that has gone not ended yet, or its
    /// connection not closed.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.known.is_connected.load(Ordering::Acquire)
    }

    /// Whether a client is connected, or the session of one that has gone not ended yet.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.known.is_serving.load(Ordering::Acquire)
    }

    /// The last client that was disconnected for what it did.
    #[must_use]
    pub fn last_disconnect(&self) -> Option<Disconnect> {
        self.known.last.get()
    }

    /// Has the session look for something to [notify](crate::Session::notify) its client of.
    pub fn notify(&self) {
        self.mailbox.send(Order::Tell(self.number, Event::Notify));
    }

    /// Ends the socket as dropping it does, but for the client: that stays connected, for another process
    /// to [resume](Service::serve). `None` if there is no client, or it cannot be exported.
    ///
    /// This waits until nothing of the device's is in flight, and for nothing of the client's.
    #[must_use]
    pub fn export(mut self) -> Option<Snapshot> {
        self.remove_file();
        let (successor, exported) = channel();
        self.mailbox.send(Order::Tell(self.number, Event::Export(successor)));
        // The other end is dropped, with nothing sent, if there is nothing to be exported.
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
        let (over, wait) = channel();
        if self.mailbox.send(Order::Tell(self.number, Event::End(Some(over)))) {
            // Nothing is ever sent: the other end is dropped when it is over, or with its thread.
            let _ = wait.recv();
        }
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connected = self.is_connected();
        formatter.debug_struct("Socket").field("path", &self.path()).field("connected", &connected).finish()
    }
}
