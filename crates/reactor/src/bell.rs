//! Waking a thread that sleeps, at no system call while it polls.
//!
//! Senders publish a message and then [ring](Bell::ring). The receiver, before it sleeps, raises a
//! flag and looks for messages once more: either it sees the message, or the sender sees the flag.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crate::EventFd;

/// The senders' end: shared by all that send to one receiver.
#[derive(Debug)]
pub struct Bell {
    /// The receiver sleeps, or is about to.
    sleeps: AtomicBool,
    event: EventFd,
}

/// The receiver's end.
#[derive(Debug)]
pub struct Listener {
    bell: Arc<Bell>,
    /// [`sleep`](Self::sleep) was called after the last [`wake`](Self::wake).
    is_asleep: Cell<bool>,
    /// Signals that were sent and have not arrived.
    owed: Cell<u64>,
}

impl Bell {
    /// Wakes the receiver if it sleeps. The message has been published before. Returns whether it
    /// did.
    #[inline]
    pub fn ring(&self) -> bool {
        // Either the receiver sees the message when it looks once more, or its flag is seen here.
        fence(Ordering::SeqCst);
        if !self.sleeps.load(Ordering::Relaxed) || !self.sleeps.swap(false, Ordering::AcqRel) {
            return false;
        }
        self.event.signal();
        true
    }
}

impl Listener {
    /// A receiver that is awake.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let bell = Bell { sleeps: AtomicBool::new(false), event: EventFd::new()? };
        Ok(Self { bell: Arc::new(bell), is_asleep: Cell::new(false), owed: Cell::new(0) })
    }

    /// The senders' end.
    #[must_use]
    pub fn bell(&self) -> Arc<Bell> {
        Arc::clone(&self.bell)
    }

    /// Has the next message signal the descriptor. The receiver looks for messages once more
    /// afterwards.
    pub fn sleep(&self) {
        if !self.is_asleep.replace(true) {
            self.bell.sleeps.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
    }

    /// Ends the signals, and takes those that were sent: a signal that stays would keep the
    /// sidecore awake.
    #[inline]
    pub fn wake(&self) {
        if self.is_asleep.replace(false) && !self.bell.sleeps.swap(false, Ordering::AcqRel) {
            self.owed.set(self.owed.get().saturating_add(1));
        }
        if self.owed.get() > 0 {
            let arrived = self.bell.event.drain();
            self.owed.set(self.owed.get().saturating_sub(arrived));
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.event.as_fd()
    }
}

#[cfg(test)]
mod tests;
