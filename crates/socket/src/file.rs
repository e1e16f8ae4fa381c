//! The socket's file: its creation, its access rights, and its removal.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, chmod, chownat, fstat, open};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// The reason why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Another process answers on the socket.
    #[error("{} is served by another process", path.display())]
    InUse {
        /// The socket's path, as configured.
        path: PathBuf,
    },
    /// This process answers on the socket already.
    #[error("{} is another socket of this daemon; give each its own", path.display())]
    Ours {
        /// The socket's path, as configured.
        path: PathBuf,
    },
    /// The path names another kind of file, which is left alone.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// The socket's path, as configured.
        path: PathBuf,
    },
    /// The owner, group or mode of the socket cannot be set.
    #[error(
        "{} cannot be given to {access}: {error}; to give a socket to another user takes root, or \
         CAP_CHOWN, and to give it to a group takes a member of the group",
        path.display()
    )]
    Access {
        /// The socket's path, as configured.
        path: PathBuf,
        /// The owner, group and mode that were to be set.
        access: Access,
        /// The error of the system call.
        error: io::Error,
    },
    /// The socket's directory is missing and cannot be made.
    #[error(
        "the directory {} of a socket cannot be made: {error}; make it, or choose another path",
        path.display()
    )]
    Directory {
        /// The path of the directory.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
    /// A system call failed.
    #[error("{}: {error}", path.display())]
    Io {
        /// The socket's path, as configured.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
}

impl ServerError {
    /// An error of a system call for the socket at `path`.
    #[must_use]
    pub fn io(path: &Path, error: impl Into<io::Error>) -> Self {
        Self::Io { path: path.to_owned(), error: error.into() }
    }
}

/// The owner, group and mode of a socket file. Connecting takes the permission to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The user id; `None` for this process's.
    pub owner: Option<u32>,
    /// The group id; `None` for this process's.
    pub group: Option<u32>,
    /// The permission bits of the file.
    pub mode: u32,
}

impl Access {
    /// The default mode: for the owner only.
    pub const OWNER_ONLY: u32 = 0o600;
    /// The default mode of a socket with a group.
    pub const WITH_GROUP: u32 = 0o660;
}

impl Default for Access {
    /// This process's user only.
    fn default() -> Self {
        Self { owner: None, group: None, mode: Self::OWNER_ONLY }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(owner) = self.owner {
            write!(formatter, "user {owner}, ")?;
        }
        if let Some(group) = self.group {
            write!(formatter, "group {group}, ")?;
        }
        write!(formatter, "mode {:04o}", self.mode)
    }
}

/// The socket files that this process has made, by device and inode: tells its own sockets from
/// those of other processes.
static OURS: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

fn ours() -> MutexGuard<'static, BTreeSet<(u64, u64)>> {
    // A panic cannot leave a set of numbers half changed.
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket file that this process has made.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode, so that another process's file is never removed.
    inode: (u64, u64),
}

impl SocketFile {
    /// Makes the file and listens on it, in non-blocking mode; `backlog` connections may wait to be
    /// accepted. A file that a dead process left behind is replaced. A missing directory is made
    /// (0755), if its parent exists.
    ///
    /// Only the users in `access` can connect, at any time: until owner, group and mode are set,
    /// the file is accessible to its maker only, and the socket does not listen.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn listen(
        path: &Path,
        access: Access,
        backlog: i32,
    ) -> Result<(Self, OwnedFd), ServerError> {
        let socket = bind_at(path)?;
        let metadata = fs::symlink_metadata(path).map_err(|error| ServerError::io(path, error))?;
        let file = Self { path: path.to_owned(), inode: (metadata.dev(), metadata.ino()) };
        ours().insert(file.inode);
        let given = file.give(access).map_err(|error| ServerError::Access {
            path: path.to_owned(),
            access,
            error,
        });
        let listens = given
            .and_then(|()| listen(&socket, backlog).map_err(|error| ServerError::io(path, error)));
        match listens {
            Ok(()) => Ok((file, socket)),
            Err(error) => {
                file.remove();
                Err(error)
            }
        }
    }

    /// The path as given to [`listen`](Self::listen).
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets owner, group and mode. Not by the file's name: any user who may write to the directory
    /// could have replaced the file meanwhile by another one that is worth stealing.
    fn give(&self, access: Access) -> io::Result<()> {
        let fd =
            open(&self.path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = fstat(&fd)?;
        if (stat.st_dev, stat.st_ino) != self.inode || stat.st_nlink != 1 {
            return Err(io::Error::other("another program has replaced the file"));
        }
        let (owner, group) = (access.owner.map(Uid::from_raw), access.group.map(Gid::from_raw));
        if owner.is_some() || group.is_some() {
            chownat(&fd, "", owner, group, AtFlags::EMPTY_PATH)?;
        }
        // A descriptor with O_PATH has no fchmod.
        Ok(chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), Mode::from_raw_mode(access.mode))?)
    }

    /// Removes the file. Call it while the socket still listens: until then no process takes the
    /// file for a dead process's, and replaces it by a file that would be removed here.
    pub fn remove(&self) {
        let removed = match fs::symlink_metadata(&self.path) {
            Ok(metadata) if (metadata.dev(), metadata.ino()) == self.inode => {
                fs::remove_file(&self.path)
            }
            Ok(_) => Err(io::Error::other("the file is another program's by now")),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        ours().remove(&self.inode);
    }
}

/// The error for a path at which another socket answers.
fn in_use(path: &Path) -> ServerError {
    let path = path.to_owned();
    match fs::symlink_metadata(&path) {
        Ok(metadata) if ours().contains(&(metadata.dev(), metadata.ino())) => {
            ServerError::Ours { path }
        }
        _ => ServerError::InUse { path },
    }
}

/// Makes the directory of the socket at `path`, but not the directories above it, so that a
/// mistyped path is an error.
fn make_directory(path: &Path) -> Result<(), ServerError> {
    let Some(directory) = path.parent() else { return Ok(()) };
    match fs::DirBuilder::new().mode(0o755).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(ServerError::Directory { path: directory.to_owned(), error })
        }
        made => {
            if made.is_ok() {
                tracing::info!(path = %directory.display(), "made the directory of a socket");
            }
            Ok(())
        }
    }
}

/// Binds a non-blocking socket at `path`, in place of a dead process's socket if there is one. Only
/// this user may connect, once the socket listens.
fn bind_at(path: &Path) -> Result<OwnedFd, ServerError> {
    let io_error = |error: Errno| ServerError::io(path, error);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new_socket =
        || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io_error);
    let address = SocketAddrUnix::new(path).map_err(io_error)?;

    let socket = new_socket()?;
    // The file inherits the socket's mode (less the umask), so that the file never has another
    // mode.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(io_error)?;
    let mut bound = bind(&socket, &address);
    if bound == Err(Errno::NOENT) {
        make_directory(path)?;
        bound = bind(&socket, &address);
    }
    if bound == Err(Errno::ADDRINUSE) {
        let is_socket =
            fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if !is_socket {
            return Err(ServerError::NotASocket { path: path.to_owned() });
        }
        match connect(new_socket()?, &address) {
            Err(Errno::CONNREFUSED) => {
                fs::remove_file(path).map_err(|error| ServerError::io(path, error))?
            }
            Err(Errno::NOENT) => {}
            // EAGAIN: the socket listens, and its backlog is full.
            Ok(()) | Err(Errno::AGAIN) => return Err(in_use(path)),
            Err(error) => return Err(io_error(error)),
        }
        tracing::info!(path = %path.display(), "replacing the socket of a process that is gone");
        bound = bind(&socket, &address);
    }
    bound.map_err(io_error)?;
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
        let (file, _listener) = SocketFile::listen(&path, Access::default(), 8).unwrap();
        let metadata = fs::symlink_metadata(file.path()).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        file.remove();
        assert!(!path.exists());
    }

    #[test]
    fn the_file_has_the_owner_group_and_mode_that_were_given() {
        let (_directory, path) = directory();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // Only root may give a file away.
        let (owner, group) = if uid == 0 { (12345, 23456) } else { (uid, gid) };
        for (access, expected) in [
            (Access { mode: 0o666, ..Access::default() }, (uid, gid, 0o666)),
            (
                Access { group: Some(group), mode: Access::WITH_GROUP, ..Access::default() },
                (uid, group, 0o660),
            ),
            (Access { owner: Some(owner), group: Some(group), mode: 0o622 }, (owner, group, 0o622)),
        ] {
            let (file, _listener) = SocketFile::listen(&path, access, 8).unwrap();
            let metadata = fs::symlink_metadata(&path).unwrap();
            assert_eq!(
                (metadata.uid(), metadata.gid(), metadata.permissions().mode() & 0o7777),
                expected
            );
            UnixStream::connect(&path).unwrap();
            file.remove();
        }
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let (_directory, path) = directory();
        // Closing a listener leaves its file behind, as a crash does.
        drop(UnixListener::bind(&path).unwrap());
        let (_file, _listener) = SocketFile::listen(&path, Access::default(), 8).unwrap();
        // The error names this process's own sockets.
        let error = SocketFile::listen(&path, Access::default(), 8).unwrap_err();
        assert!(matches!(error, ServerError::Ours { .. }), "{error}");
        UnixStream::connect(&path).unwrap();
        let path = path.with_file_name("other.sock");
        let _other = UnixListener::bind(&path).unwrap();
        let error = SocketFile::listen(&path, Access::default(), 8).unwrap_err();
        assert!(matches!(error, ServerError::InUse { .. }), "{error}");
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let (_directory, path) = directory();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(
            SocketFile::listen(&path, Access::default(), 8),
            Err(ServerError::NotASocket { .. })
        ));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_path_that_cannot_be_bound_is_an_error() {
        let (directory, _) = directory();
        let path = directory.path().join("x".repeat(200));
        assert!(matches!(
            SocketFile::listen(&path, Access::default(), 8),
            Err(ServerError::Io { .. })
        ));
    }

    #[test]
    fn a_missing_directory_is_made_but_not_the_directories_above() {
        let (directory, _) = directory();
        let path = directory.path().join("run/disk.sock");
        let (_file, _listener) = SocketFile::listen(&path, Access::default(), 8).unwrap();
        let mode = fs::metadata(directory.path().join("run")).unwrap().permissions().mode();
        // The umask of this process applies to every directory alike.
        fs::create_dir(directory.path().join("other")).unwrap();
        let other = fs::metadata(directory.path().join("other")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, other & 0o755);
        let above = directory.path().join("missing");
        let error =
            SocketFile::listen(&above.join("run/disk.sock"), Access::default(), 8).unwrap_err();
        assert!(
            matches!(&error, ServerError::Directory { path, .. } if *path == above.join("run")),
            "{error}"
        );
        assert!(!above.exists());
        // A link without a target is no directory either.
        std::os::unix::fs::symlink(&above, directory.path().join("link")).unwrap();
        let error =
            SocketFile::listen(&directory.path().join("link/disk.sock"), Access::default(), 8)
                .unwrap_err();
        assert!(matches!(error, ServerError::Io { .. }), "{error}");
    }

    #[test]
    fn the_socket_of_another_program_is_not_removed() {
        let (_directory, path) = directory();
        let (file, _listener) = SocketFile::listen(&path, Access::default(), 8).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        file.remove();
        assert!(path.exists());
    }
}
