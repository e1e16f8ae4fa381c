//! How anything crosses from another thread to a sidecore.
//!
//! Mail is for the control path: starting, stopping and changing what a
//! sidecore polls. It is taken once a turn, at the price of one relaxed load
//! when there is none.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{EventFd, Reactor};

/// Something to be done on the sidecore's own thread.
pub type Mail<S> = Box<dyn FnOnce(&mut Reactor<S>) + Send>;

struct Shared<S> {
    /// True from the sending of mail until it is taken.
    pending: AtomicBool,
    queue: Mutex<VecDeque<Mail<S>>>,
    closed: AtomicBool,
    /// Readable when there is mail, for a sidecore that sleeps.
    wake: EventFd,
}

impl<S> Shared<S> {
    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Mail<S>>> {
        // Mail is boxed closures, which no panic leaves half-written.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sidecore's end.
pub struct Mailbox<S>(Arc<Shared<S>>);

/// The sender's end; clone it as often as needed.
pub struct Post<S>(Arc<Shared<S>>);

impl<S> Clone for Post<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The sidecore has stopped; the mail was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the sidecore has stopped")
    }
}

impl std::error::Error for Closed {}

/// Makes a mailbox and the way to send to it.
///
/// # Errors
/// No eventfd can be had.
pub fn mailbox<S>() -> io::Result<(Post<S>, Mailbox<S>)> {
    let shared = Arc::new(Shared {
        pending: AtomicBool::new(false),
        queue: Mutex::new(VecDeque::new()),
        closed: AtomicBool::new(false),
        wake: EventFd::new()?,
    });
    Ok((Post(Arc::clone(&shared)), Mailbox(shared)))
}

impl<S> Post<S> {
    /// Delivers mail by the sidecore's next turn, waking it if it sleeps.
    ///
    /// # Errors
    /// [`Closed`] once the reactor is gone.
    pub fn send(&self, mail: Mail<S>) -> Result<(), Closed> {
        {
            let mut queue = self.0.queue();
            if self.0.closed.load(Ordering::Relaxed) {
                return Err(Closed);
            }
            queue.push_back(mail);
            self.0.pending.store(true, Ordering::Release);
        }
        self.0.wake.signal();
        Ok(())
    }
}

impl<S> Mailbox<S> {
    /// The next mail, `None` if there is none.
    #[inline]
    pub(crate) fn take(&self) -> Option<Mail<S>> {
        if !self.0.pending.load(Ordering::Acquire) {
            return None;
        }
        let mut queue = self.0.queue();
        let mail = queue.pop_front();
        if queue.is_empty() {
            self.0.pending.store(false, Ordering::Relaxed);
        }
        mail
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    pub(crate) fn clear_wake(&self) {
        self.0.wake.drain();
    }
}

impl<S> Drop for Mailbox<S> {
    fn drop(&mut self) {
        let undelivered = {
            let mut queue = self.0.queue();
            self.0.closed.store(true, Ordering::Relaxed);
            std::mem::take(&mut *queue)
        };
        // Dropped outside the lock: mail may hold another `Post` of this box.
        drop(undelivered);
    }
}
