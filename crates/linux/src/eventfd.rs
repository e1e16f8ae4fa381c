//! Kicks and calls.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// Why a descriptor is not taken for a kick or a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventFdError {
    /// It is something else: writing to it could block, or do harm.
    #[error("the descriptor is not an eventfd but {what}")]
    NotAnEventFd {
        /// What `/proc` calls it.
        what: String,
    },
    /// The kernel refuses to say or to change what it is.
    #[error("cannot inspect the descriptor: {0}")]
    Kernel(#[from] io::Error),
}

/// An event counter, which never makes a sidecore wait.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A counter of our own, at zero.
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Takes a descriptor from a peer, who may have sent anything: only an
    /// eventfd is accepted, because a write to a full pipe or to a file waits.
    ///
    /// The open file is shared with the peer, and so is its `O_NONBLOCK`, which
    /// is set here and which the peer could clear again. Reading does not
    /// depend on it; see [`EventFd::signal`] for writing.
    ///
    /// # Errors
    /// It is not an eventfd, or `/proc` is not mounted.
    pub fn from_peer(fd: OwnedFd) -> Result<Self, EventFdError> {
        let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        // The kernel's name for it has been this since 2.6.22; no path looks
        // like it, because paths are absolute there.
        if what.as_os_str() != "anon_inode:[eventfd]" {
            return Err(EventFdError::NotAnEventFd { what: what.to_string_lossy().into_owned() });
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(io::Error::from)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
        Ok(Self(fd))
    }

    /// Adds one. A counter that is full already stays as it is: whoever waits
    /// for it will find it readable.
    ///
    /// A peer that fills the counter *and* clears `O_NONBLOCK` behind our back
    /// makes this wait; Linux has no write to an eventfd that would not.
    ///
    /// # Errors
    /// The kernel's; none is known.
    #[inline]
    pub fn signal(&self) -> io::Result<()> {
        loop {
            match rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
                Ok(_) | Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Resets the counter, and says what it was: zero if nobody has signalled.
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
        read.map_or(0, |_| u64::from_ne_bytes(count))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> Self {
        event.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_add_up_and_draining_resets() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.drain(), 0);
        for _ in 0..3 {
            event.signal().unwrap();
        }
        assert_eq!(event.drain(), 3);
        assert_eq!(event.drain(), 0);
    }

    #[test]
    fn a_full_counter_does_not_block() {
        let event = EventFd::new().unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal().unwrap();
        assert_eq!(event.drain(), u64::MAX - 1);
    }

    #[test]
    fn a_blocking_one_from_a_peer_is_made_nonblocking() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let mirror = theirs.try_clone().unwrap();
        let ours = EventFd::from_peer(theirs).unwrap();
        assert!(rustix::fs::fcntl_getfl(&mirror).unwrap().contains(OFlags::NONBLOCK));
        assert_eq!(ours.drain(), 0);
        ours.signal().unwrap();
        assert_eq!(ours.drain(), 1);
    }

    #[test]
    fn a_peer_that_clears_nonblock_does_not_make_us_wait_for_its_kick() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let mirror = theirs.try_clone().unwrap();
        let ours = EventFd::from_peer(theirs).unwrap();
        rustix::fs::fcntl_setfl(&mirror, OFlags::empty()).unwrap();
        assert_eq!(ours.drain(), 0);
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        let file = rustix::fs::memfd_create("anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        for (fd, name) in [(pipe, "pipe:"), (file, "memfd:"), (epoll, "eventpoll")] {
            let error = EventFd::from_peer(fd).unwrap_err();
            assert!(matches!(&error, EventFdError::NotAnEventFd { what } if what.contains(name)), "{error}");
        }
    }
}
