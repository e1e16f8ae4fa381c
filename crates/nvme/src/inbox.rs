//! What other threads have to say to a controller.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use crate::manager::{ManageError, Reply};
use crate::{Done, QueuesState};

/// Which wait of the controller's is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Token(pub u64);

/// What a queue has to report that no completion can say. It is reported with
/// [`NvmeFunction::report`](crate::NvmeFunction::report).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueEvent {
    /// The driver wrote a doorbell value that the queue cannot have (NVMe base 2.0, figure 147:
    /// Invalid Doorbell Write Value).
    InvalidDoorbellValue {
        /// Which I/O queue.
        queue: u16,
    },
    /// The queue cannot go on, and the driver has to reset the controller (CSTS.CFS).
    Fatal {
        /// Which I/O queue.
        queue: u16,
    },
    /// What was written may not survive a power cut, though the store was asked to see to it.
    FlushFailed,
}

/// One piece of it.
#[derive(Debug)]
pub(crate) enum News {
    Done(Token),
    Managed(Token, Result<u32, ManageError>),
    Queue(QueueEvent),
    /// The I/O queues are another process's from now on.
    HandedOver(Option<QueuesState>),
}

/// Leaves news for the thread that runs the controller next, and calls for one: a sidecore never
/// waits for the controller's lock.
pub(crate) struct Inbox {
    news: Mutex<VecDeque<News>>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Inbox {
    pub(crate) fn new(wake: Box<dyn Fn() + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { news: Mutex::new(VecDeque::new()), wake })
    }

    pub(crate) fn put(&self, news: News) {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).push_back(news);
        self.wake();
    }

    pub(crate) fn take(&self) -> Option<News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Somebody is to run the controller soon.
    pub(crate) fn wake(&self) {
        (self.wake)();
    }

    /// Answers to `token`.
    pub(crate) fn done(self: &Arc<Self>, token: Token) -> Done {
        let inbox = self.clone();
        Done::new(move || inbox.put(News::Done(token)))
    }

    /// Answers to `token` with a result.
    pub(crate) fn reply(self: &Arc<Self>, token: Token) -> Reply {
        let inbox = self.clone();
        Reply::new(move |result| inbox.put(News::Managed(token, result)))
    }
}
