//! The kernel's counter that one side adds to and the other sleeps on: a kick
//! or a call in a descriptor.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// An eventfd that never makes a sidecore wait, as long as [`EventFd::signal`] is for our own ones.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, at zero.
    ///
    /// # Errors
    /// No descriptor is to be had.
    pub fn new() -> io::Result<Self> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// One that a peer has sent, who may have sent anything: only an eventfd
    /// is accepted, because a write to a full pipe or to a file waits.
    ///
    /// The open file is shared with the peer, and so is its `O_NONBLOCK`, which
    /// is set here and which the peer could clear again. Reading does not
    /// depend on it; to signal one, see [`Signal`](crate::Signal).
    ///
    /// # Errors
    /// It is something else, or cannot be made non-blocking.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        // Compared whole: a file's name is the peer's choice, but starts with
        // a slash.
        if kind.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("not an eventfd but {}", kind.display())));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Adds one to the counter, waking whoever sleeps on it.
    ///
    /// A peer that fills the counter *and* clears `O_NONBLOCK` behind our back
    /// makes this wait, for Linux has no write to an eventfd that would not:
    /// what a peer has sent is signalled by [`Signal`](crate::Signal).
    #[inline]
    pub fn signal(&self) {
        // It can only fail by the counter being full, which wakes as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the counter's value and sets it to zero.
    #[inline]
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        // RWF_NOWAIT never waits, whatever the shared file's flags are (the
        // offset -1 means "as read(2)"). Kernels before 5.8 refuse it here.
        let read = rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        let read = match read {
            Err(Errno::OPNOTSUPP) => rustix::io::read(&self.0, &mut count),
            other => other,
        };
        match read {
            Ok(8) => u64::from_ne_bytes(count),
            _ => 0,
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_add_up_until_drained() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.drain(), 0);
        event.signal();
        event.signal();
        assert_eq!(event.drain(), 2);
        assert_eq!(event.drain(), 0);
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let event = EventFd::new().unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal();
        assert_eq!(event.drain(), u64::MAX - 1);
    }

    #[test]
    fn a_peer_that_clears_nonblock_does_not_make_us_wait_for_its_kick() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let mirror = theirs.try_clone().unwrap();
        let ours = EventFd::from_peer(theirs).unwrap();
        assert!(rustix::fs::fcntl_getfl(&mirror).unwrap().contains(OFlags::NONBLOCK));
        rustix::fs::fcntl_setfl(&mirror, OFlags::empty()).unwrap();
        assert_eq!(ours.drain(), 0);
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        // The peer chooses the name of this one.
        let file = rustix::fs::memfd_create("anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        for (fd, name) in [(pipe, "pipe:"), (file, "memfd:"), (epoll, "eventpoll")] {
            let error = EventFd::from_peer(fd).unwrap_err().to_string();
            assert!(error.contains("not an eventfd") && error.contains(name), "{error}");
        }
    }
}
