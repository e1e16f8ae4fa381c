//! Waking a peer that is not trusted.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use crate::EventFd;

/// What wakes a peer: a call, or an interrupt. Each has one owner, which needs no lock to signal.
pub trait Signal: Send + fmt::Debug {
    /// Adds one to the peer's counter, waking whoever sleeps on it; nothing if the counter is full, which has woken them.
    /// Allocates nothing.
    fn signal(&mut self);
}

/// Makes a signal of what a peer has sent, which is refused unless it is an eventfd. What it has sent is not needed any
/// longer after that.
///
/// Sidecores and shared threads need one whose `signal` never waits, whatever the peer does to its eventfd: Linux has that
/// (`sidecore_linux::peer_event`). [`EventFd::peer_signal`] makes one for tests and simulations.
pub type MakeSignal = fn(BorrowedFd<'_>) -> io::Result<Box<dyn Signal>>;

impl EventFd {
    /// A signal by write: it waits if the peer has filled its counter and made it blocking.
    ///
    /// # Errors
    /// It is no eventfd, or there is no descriptor for it.
    pub fn peer_signal(fd: BorrowedFd<'_>) -> io::Result<Box<dyn Signal>> {
        Ok(Box::new(Self::from_peer(fd.try_clone_to_owned()?)?))
    }
}

impl Signal for EventFd {
    #[inline]
    fn signal(&mut self) {
        Self::signal(self);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_peers_event_is_signalled_by_a_descriptor_of_its_own() {
        let event = EventFd::new().unwrap();
        let mut signal = EventFd::peer_signal(event.as_fd()).unwrap();
        signal.signal();
        assert_eq!(event.drain(), 1);
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        assert!(EventFd::peer_signal(pipe.as_fd()).is_err());
    }
}
