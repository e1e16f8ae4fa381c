//! The way from other threads to a sidecore.
//!
//! Mail is for the control path: it starts, stops and changes pollables. The reactor takes it once
//! a turn; an empty mailbox costs one atomic load.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{EventFd, Reactor};

/// A closure that runs on the sidecore's own thread.
pub type Mail<S> = Box<dyn FnOnce(&mut Reactor<S>) + Send>;

struct Shared<S> {
    /// True from the first unread mail until the last one is taken.
    pending: AtomicBool,
    queue: Mutex<VecDeque<Mail<S>>>,
    closed: AtomicBool,
    /// Readable while there is mail, for a sidecore that sleeps.
    wake: EventFd,
}

impl<S> Shared<S> {
    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Mail<S>>> {
        // Mail is boxed closures, which no panic leaves half-written.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sidecore's end of a mailbox.
pub struct Mailbox<S>(Arc<Shared<S>>);

/// A sender's end of a mailbox.
pub struct Post<S>(Arc<Shared<S>>);

impl<S> Clone for Post<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The error of mail to a stopped sidecore. The mail was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the sidecore has stopped")
    }
}

impl std::error::Error for Closed {}

/// Makes a mailbox and its sending end.
///
/// # Errors
/// The process has no descriptor left for the eventfd.
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
    /// Delivers mail by the sidecore's next turn, and wakes the sidecore if it sleeps.
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
    /// Takes the next mail; `None` if the mailbox is empty.
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
        // Dropped outside of the lock: mail may hold another `Post` of this mailbox.
        drop(undelivered);
    }
}
