//! A few threads that serve many sockets.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use sidecore_nvme::PciFunction;
use sidecore_socket::{Access, Disconnect, ServerError, SocketFile, close_aside};

use crate::handover::LeftSocket;
use crate::served::Served;
use crate::slot::{Begin, Known};
use crate::worker::{Mailbox, Order, Worker};

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;

/// Threads that serve sockets: each socket a function, each function to one VMM at a time.
///
/// Every socket belongs to one thread, which waits for nothing but messages: a VMM that sends half of one, or reads no
/// answers, or whose last command takes long, holds up itself only. Its connection, and what it has sent that no message
/// has, are closed by a thread of their own, which takes as long as the VMM likes; the function's next client comes after
/// that. Dropping the service ends all that it serves.
#[derive(Debug)]
pub struct Service {
    threads: Vec<Thread>,
    /// The number of the next socket, which also says what thread it is on.
    next: AtomicU64,
}

#[derive(Debug)]
struct Thread {
    mailbox: Arc<Mailbox>,
    handle: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the threads.
    ///
    /// # Errors
    /// No thread, or no descriptor for it, is to be had.
    pub fn start(threads: NonZeroUsize) -> io::Result<Self> {
        let mut service = Self { threads: Vec::new(), next: AtomicU64::new(0) };
        for number in 0..threads.get() {
            let (mailbox, worker) = Worker::new()?;
            let handle = thread::Builder::new().name(format!("vfu-{number}")).spawn(move || worker.run())?;
            service.threads.push(Thread { mailbox, handle: Some(handle) });
        }
        Ok(service)
    }

    /// Creates the socket file, for those whom `access` names, and serves `function` on it. A socket file that a dead process left
    /// behind is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn serve(&self, path: &Path, access: Access, function: Arc<dyn PciFunction>) -> Result<Socket, ServerError> {
        self.start_socket(path, access, function, None)
    }

    /// The same, and goes on with a client that another process has [left](Socket::hand_over). If that is not possible the
    /// client is disconnected, and the log says why.
    ///
    /// # Errors
    /// See [`ServerError`]. The client is disconnected then, too.
    pub fn take_over(
        &self,
        path: &Path,
        access: Access,
        function: Arc<dyn PciFunction>,
        left: LeftSocket,
    ) -> Result<Socket, ServerError> {
        self.start_socket(path, access, function, Some(left))
    }

    fn start_socket(
        &self,
        path: &Path,
        access: Access,
        function: Arc<dyn PciFunction>,
        left: Option<LeftSocket>,
    ) -> Result<Socket, ServerError> {
        let (file, listener) = match SocketFile::listen(path, access, BACKLOG) {
            Ok(listening) => listening,
            Err(error) => {
                close_aside(left);
                return Err(error);
            }
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let turn = usize::try_from(number).unwrap_or(0).checked_rem(self.threads.len()).unwrap_or(0);
        let known = Arc::new(Known::default());
        let serve = |mailbox: &Arc<Mailbox>| {
            let begin = match left {
                None => Begin::Fresh,
                Some(left) => {
                    let span = tracing::info_span!("vfio_user", function = function.name());
                    span.in_scope(|| Served::take_over(Arc::clone(&function), left, &mailbox.wake(number)))
                }
            };
            known.connected.store(!matches!(begin, Begin::Fresh), Ordering::Release);
            mailbox.send(Order::Serve { number, listener, function, known: Arc::clone(&known), begin })
        };
        match self.threads.get(turn).map(|thread| &thread.mailbox) {
            Some(mailbox) if serve(mailbox) => {
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
        for thread in &self.threads {
            thread.mailbox.send(Order::Stop);
        }
        for thread in &mut self.threads {
            if thread.handle.take().is_some_and(|handle| handle.join().is_err()) {
                tracing::error!("a thread that served vfio-user has panicked");
            }
        }
    }
}

/// A socket that is served.
///
/// Dropping it removes the file, ends the connection, wherever in a message it is, and waits until the function is reset
/// and holds none of the client's memory; not until the connection is closed. So it may be dropped by no thread that the
/// function needs for that.
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

    /// Whether a VMM is connected, or the function still busy with one that has gone, or its connection not closed yet.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.known.connected.load(Ordering::Acquire)
    }

    /// The last client that was disconnected for what it did.
    #[must_use]
    pub fn last_disconnect(&self) -> Option<Disconnect> {
        self.known.last.get()
    }
}

impl Socket {
    /// Ends the socket as dropping it does, but for the client: that stays connected, for another process to
    /// [go on with](Service::take_over). `None` if there is no client, or it cannot be left.
    ///
    /// This waits until nothing of the function's is in flight, and for nothing of the client's.
    #[must_use]
    pub fn hand_over(mut self) -> Option<LeftSocket> {
        self.remove_file();
        let (heir, left) = channel();
        self.mailbox.send(Order::HandOver { number: self.number, heir });
        // The other end is dropped, with nothing sent, if there is nothing to be left.
        left.recv().ok()
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
        if self.mailbox.send(Order::End { number: self.number, over }) {
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
