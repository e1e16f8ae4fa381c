//! The socket that the command is told in `$NOTIFY_SOCKET`.

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
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, recvmsg, socket_with,
};
use rustix::process::Pid;
use tempfile::TempDir;

/// Messages that are read between two looks at signals.
pub(super) const BATCH: usize = 64;

/// The longest message, as for systemd.
const MESSAGE_MAX: usize = 4096;

/// The most descriptors that Linux lets a message have: `SCM_MAX_FD`.
const FDS_MAX: usize = 253;

/// A datagram socket in a directory that only this user can enter.
#[derive(Debug)]
pub(super) struct NotifySocket {
    socket: OwnedFd,
    path: PathBuf,
    _directory: TempDir,
}

/// One message.
#[derive(Debug)]
pub(super) struct Datagram {
    /// Who sent it, by the kernel's word.
    pub(super) sender: Option<Pid>,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
    /// Some of it is missing.
    pub(super) truncated: bool,
}

impl NotifySocket {
    pub(super) fn bind() -> io::Result<Self> {
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix("sidecore-keep-").permissions(Permissions::from_mode(0o700)).tempdir()?;
        let path = directory.path().join("notify");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // Before anyone can send: what was sent before it has no sender.
        set_socket_passcred(&socket, true)?;
        bind(&socket, &SocketAddrUnix::new(&path)?)?;
        Ok(Self { socket, path, _directory: directory })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The next message, if there is one.
    pub(super) fn receive(&self) -> io::Result<Option<Datagram>> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; MESSAGE_MAX];
        let received = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
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
    fn a_message_comes_with_its_sender_and_an_empty_one_is_one() {
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
    fn a_message_that_is_too_long_says_so() {
        let socket = NotifySocket::bind().unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        sender.send_to(&[b'x'; MESSAGE_MAX + 1], socket.path()).unwrap();
        assert!(socket.receive().unwrap().unwrap().truncated);
    }

    #[test]
    fn the_directory_is_private_and_goes_away() {
        let socket = NotifySocket::bind().unwrap();
        let directory = socket.path().parent().unwrap().to_owned();
        assert_eq!(std::fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
        drop(socket);
        assert!(!directory.exists());
    }
}
