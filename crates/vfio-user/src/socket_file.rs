//! The socket's file: made for this user only, and removed by no other.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

/// Connections that may wait while another is served.
const BACKLOG: i32 = 8;

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
    /// The threads of the service have ended.
    #[error("{}: the service has ended", path.display())]
    Ended {
        /// The socket.
        path: PathBuf,
    },
}

/// A socket file of ours.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode, so as to remove no other's.
    inode: (u64, u64),
}

impl SocketFile {
    /// Makes the file and listens on it. One that a dead process left behind is replaced.
    pub(crate) fn listen(path: &Path) -> Result<(Self, OwnedFd), ServerError> {
        let socket = listen_at(path)?;
        let metadata = fs::symlink_metadata(path).map_err(|error| ServerError::Io { path: path.to_owned(), error })?;
        Ok((Self { path: path.to_owned(), inode: (metadata.dev(), metadata.ino()) }, socket))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, while it is still listened on: nobody takes it for a dead process's and puts another in its
    /// place that would be removed.
    pub(crate) fn remove(&self) {
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

/// A listening, non-blocking socket at `path`, whoever was there before.
fn listen_at(path: &Path) -> Result<OwnedFd, ServerError> {
    let io_error = |error: Errno| ServerError::Io { path: path.to_owned(), error: error.into() };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new_socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io_error);
    let address = SocketAddrUnix::new(path).map_err(io_error)?;

    let socket = new_socket()?;
    // The file inherits the socket's mode (less the umask), so that at no time it is there with another one.
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
    Ok(socket)
}
