//! The socket's file: made for this user only, and removed by no other.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

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

impl ServerError {
    /// What the system says of the socket at `path`.
    #[must_use]
    pub fn io(path: &Path, error: impl Into<io::Error>) -> Self {
        Self::Io { path: path.to_owned(), error: error.into() }
    }
}

/// A socket file of ours.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode, so as to remove no other's.
    inode: (u64, u64),
}

impl SocketFile {
    /// Makes the file and listens on it, in non-blocking mode; `backlog` connections may wait to be accepted. A file that
    /// a dead process left behind is replaced.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn listen(path: &Path, backlog: i32) -> Result<(Self, OwnedFd), ServerError> {
        let socket = listen_at(path, backlog)?;
        let metadata = fs::symlink_metadata(path).map_err(|error| ServerError::io(path, error))?;
        Ok((Self { path: path.to_owned(), inode: (metadata.dev(), metadata.ino()) }, socket))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file. To be done while it is still listened on: then nobody takes it for a dead process's and puts
    /// another in its place that would be removed.
    pub fn remove(&self) {
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
fn listen_at(path: &Path, backlog: i32) -> Result<OwnedFd, ServerError> {
    let io_error = |error: Errno| ServerError::io(path, error);
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
            Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(|error| ServerError::io(path, error))?,
            Err(Errno::NOENT) => {}
            // EAGAIN: it listens, and its backlog is full.
            Ok(()) | Err(Errno::AGAIN) => return Err(ServerError::InUse { path: path.to_owned() }),
            Err(error) => return Err(io_error(error)),
        }
        tracing::info!(path = %path.display(), "replacing the socket of a process that is gone");
        bound = bind(&socket, &address);
    }
    bound.map_err(io_error)?;
    listen(&socket, backlog).map_err(io_error)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        (directory, path)
    }

    #[test]
    fn the_file_is_for_its_owner_only_and_goes_when_removed() {
        let (_directory, path) = directory();
        let (file, _listener) = SocketFile::listen(&path, 8).unwrap();
        let metadata = fs::symlink_metadata(file.path()).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        file.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let (_directory, path) = directory();
        // Closing a listener leaves its file behind, as a crash does.
        drop(UnixListener::bind(&path).unwrap());
        let (_file, _listener) = SocketFile::listen(&path, 8).unwrap();
        assert!(matches!(SocketFile::listen(&path, 8), Err(ServerError::InUse { .. })));
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let (_directory, path) = directory();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(SocketFile::listen(&path, 8), Err(ServerError::NotASocket { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_path_that_cannot_be_bound_is_an_error() {
        let (directory, _) = directory();
        for path in [directory.path().join("missing/disk.sock"), directory.path().join("x".repeat(200))] {
            assert!(matches!(SocketFile::listen(&path, 8), Err(ServerError::Io { .. })));
        }
    }

    #[test]
    fn a_socket_that_someone_else_put_there_is_not_removed() {
        let (_directory, path) = directory();
        let (file, _listener) = SocketFile::listen(&path, 8).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        file.remove();
        assert!(path.exists());
    }
}
