//! The kind of a descriptor that a peer has sent, found without a call that the peer could delay.
//!
//! The last close of a file may wait: on a filesystem that the peer serves (FUSE) for the peer's
//! answer to the flush, of a TCP socket with SO_LINGER for its unsent data. fstat(2) may wait as
//! well, because it asks the filesystem.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The kind of file behind a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// A file in memory: a memfd, or one on tmpfs or hugetlbfs.
    Memory,
    /// An eventfd.
    Event,
    /// One end of a connected Unix stream socket. Its close may wait for the close of descriptors
    /// in unreceived messages.
    UnixStream,
    /// Another kind, by the kernel's name for the file.
    Other(String),
}

impl Descriptor {
    /// Finds the kind of `fd`, without a request to a filesystem.
    #[must_use]
    pub fn of(fd: impl AsFd) -> Self {
        let fd = fd.as_fd();
        // Only files in memory have seals, even if no seal is set (fcntl(2)); the kernel decides by
        // the kind of the file.
        if rustix::fs::fcntl_get_seals(fd).is_ok() {
            return Self::Memory;
        }
        match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
            // Compared whole: a peer chooses its files' names, but these start with a slash.
            Ok(name) if name.as_os_str() == "anon_inode:[eventfd]" => Self::Event,
            Ok(name)
                if name.as_os_str().as_encoded_bytes().starts_with(b"socket:[")
                    && is_unix_stream(fd) =>
            {
                Self::UnixStream
            }
            Ok(name) => Self::Other(name.display().to_string()),
            Err(error) => Self::Other(format!("unknown ({error})")),
        }
    }

    /// Whether the last close returns without waiting for a peer.
    #[must_use]
    pub const fn closes_at_once(&self) -> bool {
        matches!(self, Self::Memory | Self::Event)
    }
}

/// Whether `socket` is a connected Unix stream socket.
fn is_unix_stream(socket: BorrowedFd<'_>) -> bool {
    use rustix::net::{AddressFamily, SocketType, getpeername, sockopt};

    sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && getpeername(socket).is_ok()
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{MemfdFlags, OFlags};

    use super::*;

    #[test]
    fn memory_and_events_are_known_and_others_are_named() {
        let memfd = rustix::fs::memfd_create("anon_inode:[eventfd]", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(Descriptor::of(memfd), Descriptor::Memory);
        assert_eq!(Descriptor::of(eventfd(0, EventfdFlags::CLOEXEC).unwrap()), Descriptor::Event);
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        let (stream, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Descriptor::of(&stream), Descriptor::UnixStream);
        assert!(!Descriptor::of(&stream).closes_at_once());
        let directory = tempfile::tempdir().unwrap();
        let listener =
            std::os::unix::net::UnixListener::bind(directory.path().join("socket")).unwrap();
        let (datagram, _peer) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let path = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, rustix::fs::Mode::empty())
            .unwrap();
        for (fd, name) in [
            (pipe, "pipe:["),
            (listener.into(), "socket:["),
            (datagram.into(), "socket:["),
            (tcp.into(), "socket:["),
            (set, "anon_inode:[eventpoll]"),
            (file.into(), "/proc/"),
            (path, "/"),
        ] {
            let is = Descriptor::of(fd);
            assert!(matches!(&is, Descriptor::Other(its) if its.starts_with(name)), "{is:?}");
            assert!(!is.closes_at_once());
        }
    }
}
