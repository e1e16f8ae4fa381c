//! The socket in `$NOTIFY_SOCKET`, to which the command sends messages.

use std::fs::Permissions;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg, socket_with,
};
use rustix::process::Pid;
use tempfile::TempDir;

/// The most messages that are read between two checks for signals.
pub(super) const BATCH: usize = 64;

/// The longest message, as for systemd.
const MESSAGE_MAX: usize = 4096;

/// The most descriptors of a message in Linux: `SCM_MAX_FD`.
const FDS_MAX: usize = 253;

/// A datagram socket in a directory that only this user can enter.
#[derive(Debug)]
pub(super) struct NotifySocket {
    socket: OwnedFd,
    path: PathBuf,
    _directory: TempDir,
}

#[derive(Debug)]
pub(super) struct Datagram {
    /// The process that sent the message, by the kernel's word.
    pub(super) sender: Option<Pid>,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
    /// Whether a part of the message or of its descriptors is missing.
    pub(super) truncated: bool,
}

impl NotifySocket {
    pub(super) fn bind() -> io::Result<Self> {
        let mut builder = tempfile::Builder::new();
        let directory = builder
            .prefix("sidecore-keep-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()?;
        let path = directory.path().join("notify");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // Set before the socket has a name: messages sent before that would have no sender.
        set_socket_passcred(&socket, true)?;
        bind(&socket, &SocketAddrUnix::new(&path)?)?;
        Ok(Self { socket, path, _directory: directory })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Receives the next message, if there is one.
    pub(super) fn receive(&self) -> io::Result<Option<Datagram>> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; MESSAGE_MAX];
        let received = loop {
            match recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                received => break received?,
            }
        };
        let (mut sender, mut fds) = (None, Vec::new());
        for message in control.drain() {
            match message {
                RecvAncillaryMessage::ScmRights(some) => fds.extend(some),
                RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials.pid),
                _ => {}
            }
        }
        bytes.truncate(received.bytes);
        let truncated = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        Ok(Some(Datagram { sender, bytes, fds, truncated }))
    }
}

impl AsFd for NotifySocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn a_message_comes_with_its_sender_even_if_it_is_empty() {
        let socket = NotifySocket::bind().unwrap();
        assert!(socket.receive().unwrap().is_none());
        let sender = UnixDatagram::unbound().unwrap();
        for text in ["READY=1", ""] {
            sender.send_to(text.as_bytes(), socket.path()).unwrap();
            let datagram = socket.receive().unwrap().unwrap();
            assert_eq!((datagram.bytes.as_slice(), datagram.truncated), (text.as_bytes(), false));
            assert_eq!(datagram.sender, Some(rustix::process::getpid()));
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_marked_as_truncated() {
        let socket = NotifySocket::bind().unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        sender.send_to(&[b'x'; MESSAGE_MAX + 1], socket.path()).unwrap();
        assert!(socket.receive().unwrap().unwrap().truncated);
    }

    #[test]
    fn the_directory_is_private_and_removed_on_drop() {
        let socket = NotifySocket::bind().unwrap();
        let directory = socket.path().parent().unwrap().to_owned();
        assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
        drop(socket);
        assert!(!directory.exists());
    }
}
