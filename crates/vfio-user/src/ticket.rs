//! Waiting for a [`Done`] without a thread that waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use sidecore_nvme::Done;

/// Called when what a session waits for is done, once, from any thread.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// The call that the `Done` went into has not returned yet.
const CALLING: u8 = 0;
/// It has, and somebody has to be woken.
const WAITING: u8 = 1;
/// It is done.
const DONE: u8 = 2;

/// What is left of a [`Done`] with the one who gave it away.
#[derive(Debug)]
pub(crate) struct Ticket(Arc<AtomicU8>);

impl Ticket {
    /// A `Done`, and the ticket for it.
    pub(crate) fn issue(wake: &Wake) -> (Self, Done) {
        let state = Arc::new(AtomicU8::new(CALLING));
        let (shared, wake) = (Arc::clone(&state), Arc::clone(wake));
        let done = Done::new(move || {
            if shared.swap(DONE, Ordering::AcqRel) == WAITING {
                wake();
            }
        });
        (Self(state), done)
    }

    /// Whether it is done. If it is not, the wake comes when it is; until this was asked, it does not.
    pub(crate) fn is_done(&self) -> bool {
        match self.0.compare_exchange(CALLING, WAITING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => false,
            Err(state) => state == DONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn counting() -> (Wake, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let wake = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (Arc::new(wake), count)
    }

    #[test]
    fn what_is_done_at_once_wakes_nobody() {
        let (wake, count) = counting();
        let (ticket, done) = Ticket::issue(&wake);
        done.call();
        assert!(ticket.is_done() && ticket.is_done());
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_done_later_wakes_once() {
        let (wake, count) = counting();
        let (ticket, done) = Ticket::issue(&wake);
        assert!(!ticket.is_done() && !ticket.is_done());
        std::thread::spawn(move || drop(done)).join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
        assert!(ticket.is_done());
    }
}
