//! The service manager that started this process: notifications to it, and descriptors that it
//! keeps for the next process.
//!
//! The protocol is systemd's, which other managers speak as well (`sidecore keep` is one):
//! `sd_notify(3)`, datagrams to the socket `$NOTIFY_SOCKET`; and `sd_listen_fds(3)` for the kept
//! descriptors. The code does not use systemd's library. The manager never replies:
//! [`ServiceManager::barrier`] waits until a message has arrived.

mod kept;

pub use kept::{KeptDescriptor, take_kept};

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

/// The time for which a manager may leave its socket full before a message fails.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest name of a descriptor, in bytes: systemd's `FDNAME_MAX`.
const NAME_MAX: usize = 255;

/// A variable of the environment has an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the environment has {variable}={value:?}: expected {expected}")]
pub struct EnvironmentError {
    variable: &'static str,
    value: OsString,
    expected: &'static str,
}

/// A service manager that expects notifications.
///
/// Messages are sent in order and one by one, from any thread.
#[derive(Clone, Debug)]
pub struct ServiceManager {
    address: SocketAddr,
}

impl ServiceManager {
    /// Returns the service manager in `$NOTIFY_SOCKET`; `None` if the variable is not set.
    ///
    /// # Errors
    /// The variable holds neither an absolute path nor `@` and an abstract name, or the name is too
    /// long for a socket.
    pub fn from_environment() -> Result<Option<Self>, EnvironmentError> {
        match std::env::var_os("NOTIFY_SOCKET") {
            Some(value) if !value.is_empty() => Self::at(&value).map(Some),
            _ => Ok(None),
        }
    }

    fn at(value: &OsStr) -> Result<Self, EnvironmentError> {
        let address = match value.as_bytes() {
            [b'/', ..] => SocketAddr::from_pathname(value).ok(),
            [b'@', name @ ..] if !name.is_empty() => SocketAddr::from_abstract_name(name).ok(),
            _ => None,
        };
        let expected = "an absolute path or @ and a name, short enough for a Unix socket";
        let error =
            || EnvironmentError { variable: "NOTIFY_SOCKET", value: value.to_owned(), expected };
        Ok(Self { address: address.ok_or_else(error)? })
    }

    /// Reports that the start is done.
    ///
    /// # Errors
    /// The manager is gone, or has not read its messages for five seconds; the same holds for all
    /// other messages.
    pub fn ready(&self) -> io::Result<()> {
        self.send("READY=1", None)
    }

    /// Reports that the end has begun.
    ///
    /// # Errors
    /// See [`ready`](Self::ready).
    pub fn stopping(&self) -> io::Result<()> {
        self.send("STOPPING=1", None)
    }

    /// Gives the manager a copy of `fd` for the next process, under a name: from 1 to 255 printable
    /// ASCII characters without a colon. Several descriptors may have the same name.
    ///
    /// A sent message is no promise: a manager that keeps no descriptors, or has no more space for
    /// them, drops the copy silently.
    ///
    /// # Errors
    /// The name is invalid. See also [`ready`](Self::ready).
    pub fn store(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        check(name)?;
        // Without FDPOLL=0 systemd drops a descriptor whose other end hangs up, as the other ends
        // of most of this process's descriptors do while the process ends.
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), Some(fd))
    }

    /// Makes the manager drop all descriptors of this name. A name without descriptors is no error.
    ///
    /// # Errors
    /// The name is invalid. See also [`ready`](Self::ready).
    pub fn forget(&self, name: &str) -> io::Result<()> {
        check(name)?;
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None)
    }

    /// Waits until the manager has handled all messages before this one.
    ///
    /// # Errors
    /// The manager has not within `timeout`, or does not know this message (systemd does since
    /// version 246). See also [`ready`](Self::ready).
    pub fn barrier(&self, timeout: Duration) -> io::Result<()> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        self.send("BARRIER=1", Some(writer.as_fd()))?;
        drop(writer);
        // The manager replies by closing its copy of the writer.
        let timeout = Timespec::try_from(timeout).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut fds = [PollFd::new(&reader, PollFlags::empty())];
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&timeout)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    fn send(&self, message: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&self.address)?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let fds = fd.as_slice();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::NOBUFS.into());
        }
        let bytes = [IoSlice::new(message.as_bytes())];
        // A datagram is sent completely or not at all.
        rustix::io::retry_on_intr(|| sendmsg(&socket, &bytes, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }
}

fn check(name: &str) -> io::Result<()> {
    let printable = name.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b':');
    if name.is_empty() || name.len() > NAME_MAX || !printable {
        let message = format!(
            "{name:?} cannot name a kept descriptor: 1 to 255 printable characters without a colon"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
