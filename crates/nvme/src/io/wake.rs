//! The one descriptor that wakes a queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use sidecore_reactor::EventFd;

/// The kick and the store's descriptor behind one of our own: what a reactor watches has to stay the same, and the store's
/// changes with the namespace.
#[derive(Debug)]
pub(super) struct Wake {
    epoll: OwnedFd,
    pub(super) kick: Arc<EventFd>,
}

impl Wake {
    pub(super) fn new(kick: Arc<EventFd>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, kick.as_ref(), EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { epoll, kick })
    }

    /// A store's descriptor from now on.
    pub(super) fn watch(&self, store: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, store, EventData::new_u64(1), EventFlags::IN)?)
    }

    /// Not that one any more; it is still open.
    pub(super) fn unwatch(&self, store: BorrowedFd<'_>) {
        // It may not have been watched.
        let _ = epoll::delete(&self.epoll, store);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
