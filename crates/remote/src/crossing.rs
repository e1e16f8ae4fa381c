//! Messages from a unit to a unit of another sidecore.
//!
//! A message takes no lock and no allocation: the queue has a fixed number of places. The receiver
//! is woken only if it sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};

use sidecore_reactor::{Arm, Bell, Listener};

/// The sending end. Its drop is seen by the receiver as the end of the messages.
pub(crate) struct Sender<T> {
    /// `None` only in the middle of a drop.
    queue: Option<SyncSender<T>>,
    bell: Arc<Bell>,
    /// Messages were sent, and the receiver was not woken since.
    is_quiet: bool,
}

/// The receiving end.
pub(crate) struct Inbox<T> {
    queue: Receiver<T>,
    listener: Listener,
    /// A message that [`arm`](Self::arm) has found.
    found: Option<T>,
    is_over: bool,
}

/// Makes a queue for `capacity` messages.
///
/// # Errors
/// The process has no descriptor left.
pub(crate) fn crossing<T>(capacity: usize) -> io::Result<(Sender<T>, Inbox<T>)> {
    let listener = Listener::new()?;
    // Of one place at least: a queue without any is a rendezvous.
    let (sender, queue) = sync_channel(capacity.max(1));
    let sender = Sender { queue: Some(sender), bell: listener.bell(), is_quiet: false };
    Ok((sender, Inbox { queue, listener, found: None, is_over: false }))
}

impl<T> Sender<T> {
    /// Queues a message; [`wake`](Self::wake) follows, once for a batch. A receiver that is gone
    /// takes all messages.
    ///
    /// # Errors
    /// The queue is full.
    #[inline]
    pub fn send(&mut self, message: T) -> Result<(), T> {
        let Some(queue) = &self.queue else { return Ok(()) };
        match queue.try_send(message) {
            Ok(()) => {
                self.is_quiet = true;
                Ok(())
            }
            Err(TrySendError::Full(message)) => Err(message),
            Err(TrySendError::Disconnected(_)) => Ok(()),
        }
    }

    /// Wakes the receiver if it sleeps and has messages.
    #[inline]
    pub fn wake(&mut self) {
        if std::mem::take(&mut self.is_quiet) {
            self.bell.ring();
        }
    }

    /// Wakes the receiver if it sleeps, because something beside the messages has changed.
    pub fn ring(&self) {
        self.bell.ring();
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.queue = None;
        self.bell.ring();
    }
}

impl<T> Inbox<T> {
    /// The next message.
    #[inline]
    pub fn receive(&mut self) -> Option<T> {
        if let Some(found) = self.found.take() {
            return Some(found);
        }
        match self.queue.try_recv() {
            Ok(message) => Some(message),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.is_over = true;
                None
            }
        }
    }

    /// Whether the sender is gone, and no message is left.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.is_over
    }

    /// Turns wake-ups on, *then* looks once more.
    pub fn arm(&mut self) -> Arm {
        self.listener.sleep();
        let was_over = self.is_over;
        self.found = self.receive();
        if self.found.is_some() || self.is_over != was_over {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    /// Turns wake-ups off.
    pub fn disarm(&mut self) {
        self.listener.wake();
    }

    /// The descriptor that wakes an armed receiver.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Clears the descriptor.
    pub fn on_wake(&self) {
        self.listener.wake();
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_signalled<T>(inbox: &Inbox<T>) -> bool {
        let fd = inbox.wake_fd();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn messages_come_in_order_and_a_full_queue_gives_them_back() {
        let (mut sender, mut inbox) = crossing(2).unwrap();
        assert_eq!((sender.send(1), sender.send(2), sender.send(3)), (Ok(()), Ok(()), Err(3)));
        assert_eq!((inbox.receive(), inbox.receive(), inbox.receive()), (Some(1), Some(2), None));
        assert!(!inbox.is_over());
        drop(sender);
        assert_eq!(inbox.receive(), None);
        assert!(inbox.is_over());
        let (mut sender, inbox) = crossing(1).unwrap();
        drop(inbox);
        assert_eq!((sender.send(1), sender.send(2)), (Ok(()), Ok(())));
    }

    #[test]
    fn a_receiver_is_woken_if_it_sleeps_and_not_otherwise() {
        let (mut sender, mut inbox) = crossing(4).unwrap();
        sender.send(1).unwrap();
        sender.wake();
        assert!(!is_signalled(&inbox), "it did not sleep");
        assert_eq!(inbox.arm(), Arm::WorkPending);
        assert_eq!((inbox.receive(), inbox.arm()), (Some(1), Arm::Armed));
        sender.wake();
        assert!(!is_signalled(&inbox), "there is no message");
        sender.send(2).unwrap();
        sender.send(3).unwrap();
        sender.wake();
        sender.wake();
        assert!(is_signalled(&inbox));
        inbox.on_wake();
        assert!(!is_signalled(&inbox));
        assert_eq!((inbox.receive(), inbox.receive()), (Some(2), Some(3)));
        assert_eq!(inbox.arm(), Arm::Armed);
        drop(sender);
        assert!(is_signalled(&inbox), "the end is a message");
        assert_eq!((inbox.receive(), inbox.is_over(), inbox.arm()), (None, true, Arm::Armed));
    }
}
