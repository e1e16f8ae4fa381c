//! One socket file, one thread, one device, one VMM at a time.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sidecore_socket::{ServerError, SocketFile};
use sidecore_virtio::VirtioDevice;

use crate::connection::{Connection, ConnectionError};
use crate::session::{ProtocolError, Session};

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;
/// How long to leave a failing accept alone (no file descriptors, no memory).
const ACCEPT_RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why a connection ended, other than by being closed.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// Serves a device on a socket file, from a thread of its own.
///
/// One VMM is served at a time; others wait in the socket's backlog, and the
/// next is served when the first is gone. Dropping the server shuts it down.
#[derive(Debug)]
pub struct Server {
    file: SocketFile,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and those who stop it share.
#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    gate: Mutex<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    stopping: bool,
    /// The connection that is being served, for shutting it down.
    connection: Option<UnixStream>,
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Creates the socket file, for this user only, and serves `device` on it.
    /// A socket file that a dead process left behind is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(path: &Path, device: Arc<dyn VirtioDevice>) -> Result<Self, ServerError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| ServerError::io(path, error))?;
        let (file, listener) = SocketFile::listen(path, BACKLOG)?;
        let listener = UnixListener::from(listener);
        let shared = Arc::new(Shared { wake, gate: Mutex::default() });
        let mut server = Self { file, shared: Arc::clone(&shared), thread: None };
        let name = device.name().replace('\0', "");
        let serve_all = move || {
            let _span = tracing::info_span!("vhost_user", device = device.name()).entered();
            accept_all(&listener, &shared, &device);
        };
        let thread = thread::Builder::new().name(format!("vu-{name}")).spawn(serve_all);
        server.thread = Some(thread.map_err(|error| ServerError::io(path, error))?);
        Ok(server)
    }

    /// The socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether a VMM is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.gate().connection.is_some()
    }

    /// Ends the connection, wherever in a message it is, stops the device's
    /// queues and resets it, removes the socket file, and waits for the thread.
    pub fn shutdown(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        self.file.remove();
        {
            let mut gate = self.shared.gate();
            gate.stopping = true;
            if let Some(connection) = &gate.connection {
                // It fails if the peer has closed it, which is as good.
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
        if let Err(error) = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot wake the thread that serves the socket");
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(path = %self.path().display(), "the thread that served the socket has panicked");
        }
    }
}

/// The thread: one connection after the other, until told to stop.
fn accept_all(listener: &UnixListener, shared: &Shared, device: &Arc<dyn VirtioDevice>) {
    loop {
        let stream = match accept(listener, shared) {
            Ok(Some(stream)) => stream,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                wait(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&ACCEPT_RETRY));
                continue;
            }
        };
        tracing::info!("a VMM connected");
        match serve(Connection::new(stream), device) {
            Ok(()) => tracing::info!("the VMM disconnected"),
            Err(_) if shared.gate().stopping => tracing::info!("disconnected from the VMM"),
            Err(error) => tracing::warn!(%error, "the connection to the VMM ended"),
        }
        shared.gate().connection = None;
    }
}

/// Waits for a connection; `None` if the server is to stop.
fn accept(listener: &UnixListener, shared: &Shared) -> io::Result<Option<UnixStream>> {
    loop {
        wait(&mut [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)], None);
        if shared.gate().stopping {
            return Ok(None);
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(error) => return Err(error),
        };
        let handle = stream.try_clone()?;
        let mut gate = shared.gate();
        if gate.stopping {
            return Ok(None);
        }
        gate.connection = Some(handle);
        return Ok(Some(stream));
    }
}

/// What makes poll fail besides a signal is a lack of memory, and then a look
/// at the sockets is as good as waiting.
fn wait(fds: &mut [PollFd<'_>], timeout: Option<&Timespec>) {
    let _ = poll(fds, timeout);
}

/// Serves one connection until the peer closes it. The device is stopped and
/// reset when it returns.
fn serve(mut connection: Connection, device: &Arc<dyn VirtioDevice>) -> Result<(), Fault> {
    let mut session = Session::new(Arc::clone(device));
    while let Some(message) = connection.receive()? {
        if let Some(reply) = session.handle(message)? {
            connection.send(&reply)?;
        }
    }
    session.end();
    Ok(())
}

#[cfg(test)]
mod tests;
