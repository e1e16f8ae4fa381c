//! Waking an untrusted peer.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use crate::EventFd;

/// A way to wake a peer: a call, or an interrupt. Each signal has one owner, and needs no lock.
pub trait Signal: Send + fmt::Debug {
    /// Adds one to the peer's counter and wakes the peer; has no effect if the counter is full,
    /// because then the peer is awake. Does not allocate.
    fn signal(&mut self);
}

/// Makes a signal from a peer's descriptor, which is refused unless it is an eventfd. The caller
/// may close the descriptor afterwards.
///
/// Sidecores and shared threads need a signal whose `signal` never waits, even if the peer changes
/// its eventfd: Linux has that (`sidecore_linux::peer_event`). [`EventFd::peer_signal`] makes a
/// signal for tests and simulations.
pub type MakeSignal = fn(BorrowedFd<'_>) -> io::Result<Box<dyn Signal>>;

impl EventFd {
    /// Makes a signal that writes: it waits if the peer has filled its counter and made it
    /// blocking.
    ///
    /// # Errors
    /// The descriptor is no eventfd, or the process has no descriptor left.
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
