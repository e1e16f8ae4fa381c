//! One socket file, one thread, one device, one VMM at a time.

use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use sidecore_virtio::VirtioDevice;

use crate::connection::{Connection, ConnectionError};
use crate::session::{ProtocolError, Session};

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;
/// How long to leave a failing accept alone (no file descriptors, no memory).
const ACCEPT_RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Someone answers on the socket already.
    #[error("{} is served by another process", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// There is something else at the path, which is left alone.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{}: {error}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What it says.
        error: io::Error,
    },
}

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
    path: PathBuf,
    /// Device and inode of the socket file, so as to remove no other's.
    inode: (u64, u64),
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
        let io_error = |error| ServerError::Io { path: path.to_owned(), error };
        let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| io_error(error.into()))?;
        let listener = listen_at(path)?;
        let metadata = fs::symlink_metadata(path).map_err(io_error)?;
        let shared = Arc::new(Shared { wake, gate: Mutex::default() });
        let inode = (metadata.dev(), metadata.ino());
        let mut server = Self { path: path.to_owned(), inode, shared: Arc::clone(&shared), thread: None };
        let name = device.name().replace('\0', "");
        let serve_all = move || {
            let _span = tracing::info_span!("vhost_user", device = device.name()).entered();
            accept_all(&listener, &shared, &device);
        };
        let thread = thread::Builder::new().name(format!("vu-{name}")).spawn(serve_all).map_err(io_error)?;
        server.thread = Some(thread);
        Ok(server)
    }

    /// The socket file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a VMM is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.gate().connection.is_some()
    }

    /// Ends the connection, wherever in a message it is, stops the device's
    /// queues and resets it, removes the socket file, and waits for the thread.
    pub fn shutdown(self) {}

    fn remove_socket(&self) {
        let removed = match fs::symlink_metadata(&self.path) {
            Ok(metadata) if (metadata.dev(), metadata.ino()) == self.inode => fs::remove_file(&self.path),
            Ok(_) => Err(io::Error::other("it is another's by now")),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // While the thread still listens: nobody takes the socket for a dead
        // process's and puts another in its place that we would remove.
        self.remove_socket();
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
            tracing::error!(path = %self.path.display(), "the thread that served the socket has panicked");
        }
    }
}

/// A listening socket at `path`, whoever was there before.
fn listen_at(path: &Path) -> Result<UnixListener, ServerError> {
    let io_error = |error: Errno| ServerError::Io { path: path.to_owned(), error: error.into() };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new_socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io_error);
    let address = SocketAddrUnix::new(path).map_err(io_error)?;

    let socket = new_socket()?;
    // The file inherits the socket's mode (less the umask), so that at no time
    // it is there with another one.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(io_error)?;
    let mut bound = bind(&socket, &address);
    if bound == Err(Errno::ADDRINUSE) {
        let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if !is_socket {
            return Err(ServerError::NotASocket { path: path.to_owned() });
        }
        match connect(new_socket()?, &address) {
            Err(Errno::CONNREFUSED) => {
                fs::remove_file(path).map_err(|error| ServerError::Io { path: path.to_owned(), error })?
            }
            Err(Errno::NOENT) => {}
            // EAGAIN: it listens, and its backlog is full.
            Ok(()) | Err(Errno::AGAIN) => return Err(ServerError::InUse { path: path.to_owned() }),
            Err(error) => return Err(io_error(error)),
        }
        tracing::info!(path = %path.display(), "replacing the socket of a process that is gone");
        bound = bind(&socket, &address);
    }
    bound.map_err(io_error)?;
    listen(&socket, BACKLOG).map_err(io_error)?;
    Ok(UnixListener::from(socket))
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
