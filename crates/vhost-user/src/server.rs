//! One socket file, one thread, one device, one VMM at a time.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sidecore_socket::{Access, Disconnect, LastDisconnect, ServerError, SocketFile, cause};
use sidecore_virtio::VirtioDevice;

use crate::connection::{Connection, ConnectionError};
use crate::session::{ProtocolError, Session};

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;
/// How long to leave a failing accept alone (no file descriptors, no memory).
const ACCEPT_RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long the front end must have sent nothing before it is told of a change
/// of the configuration space. QEMU answers by reading the space, and 6.0 to 7.2
/// do so also in the middle of waiting for another request's reply, which they
/// then take for the answer.
const QUIET: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

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
}

/// What the thread and those who stop it share.
#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    gate: Mutex<Gate>,
    /// Told when the device changes hands.
    handed: Condvar,
    last: LastDisconnect,
}

#[derive(Debug)]
struct Gate {
    stopping: bool,
    /// The connection that is being served, for shutting it down.
    connection: Option<UnixStream>,
    device: Holder,
}

/// Who has the device.
enum Holder {
    /// The thread.
    Thread,
    /// Nobody: the thread closes what its client has left, which takes as long
    /// as the client likes. Whoever stops the server takes the device then.
    Nobody(Arc<dyn VirtioDevice>),
    /// The thread has given it up for good, or whoever stops the server has it.
    Gone,
}

impl Holder {
    /// Takes the device from nobody.
    fn take(&mut self, next: Self) -> Option<Arc<dyn VirtioDevice>> {
        match std::mem::replace(self, next) {
            Self::Nobody(device) => Some(device),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Thread => "Thread",
            Self::Nobody(_) => "Nobody",
            Self::Gone => "Gone",
        })
    }
}

/// Why the thread has stopped waiting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// The socket has something, or its peer has gone.
    Readable,
    /// The device's configuration space has changed.
    Called,
    /// Nothing came in time.
    Timeout,
    /// The server ends.
    Stopping,
}

/// Says, when it is dropped, that the thread has given up the device.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        if thread::panicking() {
            tracing::error!("the thread that served the socket has panicked");
        }
        self.0.gate().device = Holder::Gone;
        self.0.handed.notify_all();
    }
}

impl Shared {
    /// Wakes the thread.
    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot wake the thread that serves the socket");
        }
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `fd` can be read (or has failed), the server is called, or
    /// time is up.
    ///
    /// A call is consumed here. The flag is looked at after that and before the
    /// next wait, and it is set before the server is called: so no end is missed.
    fn wait(&self, fd: impl AsFd, timeout: Option<&Timespec>) -> Woken {
        if self.gate().stopping {
            return Woken::Stopping;
        }
        let mut fds = [PollFd::new(&fd, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
        // Only a signal or a lack of memory makes it fail, and then a look at the
        // flag and at the connection is as good as waiting.
        let count = poll(&mut fds, timeout).unwrap_or(fds.len());
        let [readable, called] = fds.map(|fd| !fd.revents().is_empty());
        if called {
            // It has been signalled, so this does not wait.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        match () {
            () if self.gate().stopping => Woken::Stopping,
            () if readable => Woken::Readable,
            () if count == 0 => Woken::Timeout,
            () => Woken::Called,
        }
    }

    /// Takes note of a connection that is going to be served. False if the
    /// server is to stop.
    fn admit(&self, stream: &UnixStream) -> io::Result<bool> {
        let handle = stream.try_clone()?;
        let mut gate = self.gate();
        if !gate.stopping {
            gate.connection = Some(handle);
        }
        Ok(!gate.stopping)
    }
}

impl Server {
    /// Creates the socket file, for those whom `access` names, and serves `device` on it.
    /// A socket file that a dead process left behind is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(path: &Path, access: Access, device: Arc<dyn VirtioDevice>) -> Result<Self, ServerError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| ServerError::io(path, error))?;
        let (file, listener) = SocketFile::listen(path, access, BACKLOG)?;
        let listener = UnixListener::from(listener);
        let gate = Mutex::new(Gate { stopping: false, connection: None, device: Holder::Thread });
        let shared = Arc::new(Shared { wake, gate, handed: Condvar::new(), last: LastDisconnect::default() });
        let server = Self { file, shared: Arc::clone(&shared) };
        let ending = Ending(Arc::clone(&shared));
        let name = device.name().replace('\0', "");
        let serve_all = move || {
            let _ending = ending;
            let _span = tracing::info_span!("vhost_user", device = device.name()).entered();
            accept_all(&listener, &shared, device);
            // The listener is closed last, and with it what clients in its
            // backlog have sent.
        };
        // It is not waited for: what it closes in the end may take for ever.
        let thread = thread::Builder::new().name(format!("vu-{name}")).spawn(serve_all);
        thread.map_err(|error| ServerError::io(path, error))?;
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

    /// The last client that was disconnected for what it did.
    #[must_use]
    pub fn last_disconnect(&self) -> Option<Disconnect> {
        self.shared.last.get()
    }

    /// Tells the VMM, if one is connected, that the device's configuration space
    /// has changed ([`VirtioDevice::config_generation`]).
    pub fn config_changed(&self) {
        self.shared.wake();
    }

    /// Ends the connection, wherever in a message it is, stops the device's
    /// queues and resets it, removes the socket file, and waits for all that;
    /// not for the closing of what the client has sent.
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
        self.shared.wake();
        let mut gate = self.shared.gate();
        while !matches!(gate.device, Holder::Gone) {
            if let Some(device) = gate.device.take(Holder::Gone) {
                drop(gate);
                drop(device);
                return;
            }
            gate = self.shared.handed.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The thread: one connection after the other, until told to stop.
fn accept_all(listener: &UnixListener, shared: &Shared, mut device: Arc<dyn VirtioDevice>) {
    loop {
        let stream = match accept(listener, shared) {
            Ok(Some(stream)) => stream,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                let _ = poll(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&ACCEPT_RETRY));
                continue;
            }
        };
        let mut connection = Connection::new(stream);
        match shared.admit(connection.stream()) {
            Ok(true) => {
                tracing::info!("a VMM connected");
                match serve(&mut connection, &device, shared) {
                    Ok(()) => tracing::info!("the VMM disconnected"),
                    Err(_) if shared.gate().stopping => tracing::info!("disconnected from the VMM"),
                    Err(error) => {
                        tracing::warn!(cause = cause(&error), %error, "the connection to the VMM ended");
                        shared.last.set(error.to_string());
                    }
                }
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(cause = cause(&error), %error, "cannot serve a connection"),
        }
        // The peer sees the end now, and the rest is nobody's business.
        let _ = connection.stream().shutdown(Shutdown::Both);
        let handle = {
            let mut gate = shared.gate();
            gate.device = Holder::Nobody(device);
            shared.handed.notify_all();
            gate.connection.take()
        };
        drop((handle, connection));
        match shared.gate().device.take(Holder::Thread) {
            Some(again) => device = again,
            None => return,
        }
    }
}

/// Waits for a connection; `None` if the server is to stop.
fn accept(listener: &UnixListener, shared: &Shared) -> io::Result<Option<UnixStream>> {
    loop {
        if shared.wait(listener, None) == Woken::Stopping {
            return Ok(None);
        }
        match listener.accept() {
            Ok((stream, _)) => return Ok(Some(stream)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Serves one connection until the peer closes it. The device is stopped and
/// reset when it returns.
fn serve(connection: &mut Connection, device: &Arc<dyn VirtioDevice>, shared: &Shared) -> Result<(), Fault> {
    let mut session = Session::new(Arc::clone(device));
    loop {
        let quiet = session.owes_config_change().then_some(&QUIET);
        match shared.wait(connection.stream(), quiet) {
            Woken::Readable | Woken::Stopping => {}
            Woken::Timeout => {
                session.send_config_change();
                continue;
            }
            Woken::Called => continue,
        }
        let Some(message) = connection.receive()? else { break };
        if let Some(reply) = session.handle(message)? {
            connection.send(&reply)?;
        }
    }
    session.end();
    Ok(())
}

#[cfg(test)]
mod tests;
