//! The socket to a device's server.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::error::ClientError;

/// Connects; from then on nothing waits for longer than `timeout`.
pub(crate) fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, ClientError> {
    let socket = UnixStream::connect(path)
        .map_err(|source| ClientError::Io { what: "connecting to the device", source })?;
    limit(&socket, timeout)?;
    Ok(socket)
}

/// Has nothing on the socket wait for longer than `timeout`.
pub(crate) fn limit(socket: &UnixStream, timeout: Duration) -> Result<(), ClientError> {
    socket
        .set_read_timeout(Some(timeout))
        .and_then(|()| socket.set_write_timeout(Some(timeout)))
        .map_err(|source| ClientError::Io { what: "setting a time limit", source })
}

/// Why a message of this name got no further.
pub(crate) fn failed(request: &'static str, source: io::Error) -> ClientError {
    match source.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => ClientError::HungUp { request },
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Timeout { request },
        _ => ClientError::Io { what: request, source },
    }
}
