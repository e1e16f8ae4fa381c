//! A counter in the kernel, behind a descriptor, that one thread increments and another waits for:
//! a kick or a call.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// An eventfd that never makes a sidecore wait, as long as [`EventFd::signal`] is used for this
/// process's own eventfds only.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes an eventfd, at zero.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Takes a descriptor that a peer has sent. Only an eventfd is accepted, because a write to a
    /// full pipe or to a file waits.
    ///
    /// The peer shares the open file, and so its `O_NONBLOCK`, which is set here and which the peer
    /// could clear again. A read does not depend on the flag; [`Signal`](crate::Signal) signals
    /// such an eventfd.
    ///
    /// # Errors
    /// The descriptor is no eventfd, or cannot be made non-blocking.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        // Compared whole: a peer chooses its files' names, but these start with a slash.
        if kind.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("not an eventfd but {}", kind.display()),
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Adds one to the counter, and wakes the thread that sleeps on it.
    ///
    /// A peer that fills the counter *and* clears `O_NONBLOCK` makes this call wait, because Linux
    /// has no write to an eventfd that would not: a peer's eventfd is signalled by
    /// [`Signal`](crate::Signal).
    #[inline]
    pub fn signal(&self) {
        // The only error is a full counter, which wakes as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Returns the counter's value and sets it to zero.
    #[inline]
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        // RWF_NOWAIT never waits, whatever the shared file's flags are (the offset -1 means "as
        // read(2)"). Kernels before 5.8 refuse it here.
        let read = rustix::io::preadv2(
            &self.0,
            &mut [IoSliceMut::new(&mut count)],
            u64::MAX,
            ReadWriteFlags::NOWAIT,
        );
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
    fn a_drain_does_not_wait_if_the_peer_clears_nonblock() {
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let mirror = theirs.try_clone().unwrap();
        let ours = EventFd::from_peer(theirs).unwrap();
        assert!(rustix::fs::fcntl_getfl(&mirror).unwrap().contains(OFlags::NONBLOCK));
        rustix::fs::fcntl_setfl(&mirror, OFlags::empty()).unwrap();
        assert_eq!(ours.drain(), 0);
    }

    #[test]
    fn other_descriptors_are_refused_by_name() {
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        // The peer chooses the name of a memfd.
        let file =
            rustix::fs::memfd_create("anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC)
                .unwrap();
        let epoll =
            rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        for (fd, name) in [(pipe, "pipe:"), (file, "memfd:"), (epoll, "eventpoll")] {
            let error = EventFd::from_peer(fd).unwrap_err().to_string();
            assert!(error.contains("not an eventfd") && error.contains(name), "{error}");
        }
    }
}
