//! The kernel's counter that one side adds to and the other sleeps on: a kick
//! or a call in a descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// An eventfd that never blocks.
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

    /// One that a peer has sent. Anything but an eventfd is refused: writing
    /// to a full pipe, say, would block the sidecore.
    ///
    /// # Errors
    /// It is something else, or cannot be made non-blocking.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if !kind.as_os_str().to_string_lossy().contains("[eventfd]") {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("not an eventfd but {}", kind.display())));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Adds one to the counter, waking whoever sleeps on it.
    pub fn signal(&self) {
        // It can only fail by the counter being full, which wakes as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the counter's value and sets it to zero.
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
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
    fn a_pipe_is_not_an_eventfd() {
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let error = EventFd::from_peer(read).unwrap_err();
        assert!(error.to_string().contains("not an eventfd"), "{error}");
    }
}
