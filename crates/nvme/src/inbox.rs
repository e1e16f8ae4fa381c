//! Messages from other threads to a controller.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use crate::manager::{ManageError, Reply};
use crate::{Done, QueuesState};

/// Identifies a wait of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Token(pub u64);

/// An event of a queue that no completion can report, passed to
/// [`NvmeFunction::report`](crate::NvmeFunction::report).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueEvent {
    /// The driver wrote a doorbell value that the queue cannot have (NVMe base 2.0, figure 147:
    /// Invalid Doorbell Write Value).
    InvalidDoorbellValue {
        /// Queue identifier.
        queue: u16,
    },
    /// The queue is unusable until the driver resets the controller (CSTS.CFS).
    Fatal {
        /// Queue identifier.
        queue: u16,
    },
    /// The shutdown's flush failed: acknowledged writes may not survive a power cut.
    FlushFailed,
}

/// A message to a controller.
#[derive(Debug)]
pub(crate) enum Message {
    Done(Token),
    Managed(Token, Result<u32, ManageError>),
    Queue(QueueEvent),
    /// The I/O queues are exported to another process.
    HandedOver(Option<QueuesState>),
}

/// Queues messages for the thread that runs the controller next, and wakes such a thread: a
/// sidecore never waits for the controller's lock.
pub(crate) struct Inbox {
    messages: Mutex<VecDeque<Message>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Inbox {
    pub(crate) fn new(wake: Box<dyn Fn() + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { messages: Mutex::new(VecDeque::new()), wake })
    }

    pub(crate) fn put(&self, messages: Message) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push_back(messages);
        self.wake();
    }

    pub(crate) fn take(&self) -> Option<Message> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Asks for a run of the controller soon.
    pub(crate) fn wake(&self) {
        (self.wake)();
    }

    /// A callback that answers to `token`.
    pub(crate) fn done(self: &Arc<Self>, token: Token) -> Done {
        let inbox = self.clone();
        Done::new(move || inbox.put(Message::Done(token)))
    }

    /// A callback that answers to `token` with a result.
    pub(crate) fn reply(self: &Arc<Self>, token: Token) -> Reply {
        let inbox = self.clone();
        Reply::new(move |result| inbox.put(Message::Managed(token, result)))
    }
}
