//! The way of requests from a queue on one sidecore to a session on another one, and back.
//!
//! A request is handed over as the box that it is, with its hold on guest memory, through a bounded
//! queue in each direction: no allocation, and no lock while neither side waits. Each side counts
//! what it has sent, so the other one sees with one load that there is nothing.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use sidecore_block::{Batch, BlockChannel, BlockError, BlockRequest, Next, Readiness};
use sidecore_reactor::{Bell, Listener};
use sidecore_units::Nanos;

use super::iohost::{Command, Shared};
use super::store::{Opened, OpeningShared};

/// The part of a line that both sides see.
#[derive(Debug)]
pub(super) struct HandoverShared {
    /// Requests that the queue has sent.
    given: AtomicU64,
    /// Requests that the session has sent back.
    returned: AtomicU64,
    /// Wakes the queue.
    bell: Arc<Bell>,
}

/// The session's end of a line.
pub(super) struct HandoverEnd {
    pub(super) shared: Arc<HandoverShared>,
    pub(super) opened: Opened,
    pub(super) depth: usize,
    requests: Receiver<Box<BlockRequest>>,
    returns: SyncSender<Box<BlockRequest>>,
    taken: u64,
    /// Requests were sent back since the queue was looked after last.
    owes_ring: bool,
}

impl HandoverEnd {
    /// Whether the queue has sent a request that was not taken.
    #[inline]
    pub(super) fn has_requests(&self) -> bool {
        self.shared.given.load(Ordering::Acquire) != self.taken
    }

    /// Takes the next request of the queue.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Box<BlockRequest>> {
        if !self.has_requests() {
            return None;
        }
        let request = self.requests.try_recv().ok()?;
        self.taken = self.taken.wrapping_add(1);
        Some(request)
    }

    /// Sends a request back.
    #[inline]
    pub(super) fn give_back(&mut self, request: Box<BlockRequest>) {
        // Without its queue nothing completes it: its tag reports the loss.
        if self.returns.try_send(request).is_ok() {
            let returned = self.shared.returned.load(Ordering::Relaxed);
            self.shared.returned.store(returned.wrapping_add(1), Ordering::Release);
            self.owes_ring = true;
        }
    }

    /// Wakes the queue if it sleeps and requests were sent back. Returns whether it did.
    #[inline]
    pub(super) fn ring(&mut self) -> bool {
        std::mem::take(&mut self.owes_ring) && self.shared.bell.ring()
    }
}

/// A queue's channel to a session on another sidecore.
pub(super) struct HandoverChannel {
    session: Arc<Shared>,
    shared: Arc<HandoverShared>,
    depth: usize,
    requests: SyncSender<Box<BlockRequest>>,
    returns: Receiver<Box<BlockRequest>>,
    /// Requests that were sent.
    given: u64,
    /// Requests that came back, or were refused.
    taken: u64,
    /// Requests that could not be sent, because the session has ended.
    refused: Batch,
    listener: Listener,
    /// When the request was sent before which none is unanswered.
    waits_since: Cell<Option<Nanos>>,
    /// Dropped last.
    _opening: Arc<OpeningShared>,
}

/// Makes a line for a queue of `depth`.
///
/// # Errors
/// The process has no descriptor left.
pub(super) fn line(
    session: &Arc<Shared>,
    (opened, opening): (&Opened, Arc<OpeningShared>),
    depth: usize,
) -> io::Result<HandoverChannel> {
    let listener = Listener::new()?;
    let shared = Arc::new(HandoverShared {
        given: AtomicU64::new(0),
        returned: AtomicU64::new(0),
        bell: listener.bell(),
    });
    let (requests, to_session) = sync_channel(depth.max(1));
    let (from_session, returns) = sync_channel(depth.max(1));
    let end = HandoverEnd {
        shared: Arc::clone(&shared),
        opened: opened.clone(),
        depth,
        requests: to_session,
        returns: from_session,
        taken: 0,
        owes_ring: false,
    };
    session.tell(Command::OpenLine(end));
    Ok(HandoverChannel {
        session: Arc::clone(session),
        shared,
        depth,
        requests,
        returns,
        given: 0,
        taken: 0,
        refused: Batch::with_capacity(depth),
        listener,
        waits_since: Cell::new(None),
        _opening: opening,
    })
}

impl HandoverChannel {
    fn at_session(&self) -> usize {
        usize::try_from(self.given.wrapping_sub(self.taken)).unwrap_or(usize::MAX)
    }

    fn has_returns(&self) -> bool {
        self.shared.returned.load(Ordering::Acquire) != self.taken
    }
}

impl BlockChannel for HandoverChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let in_flight = self.at_session().saturating_add(self.refused.len());
        let room = self.depth.saturating_sub(in_flight).min(batch.len());
        if room == 0 {
            return;
        }
        if self.at_session() == 0 {
            self.waits_since.set(Some(now));
        }
        for request in batch.drain(..room) {
            match self.requests.try_send(request) {
                Ok(()) => self.given = self.given.wrapping_add(1),
                Err(TrySendError::Full(mut request) | TrySendError::Disconnected(mut request)) => {
                    request.result = Err(BlockError::EIO);
                    self.refused.push(request);
                }
            }
        }
        self.shared.given.store(self.given, Ordering::Release);
        self.session.bell.ring();
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.listener.wake();
        completed.append(&mut self.refused);
        if !self.has_returns() {
            return;
        }
        while self.has_returns()
            && let Ok(request) = self.returns.try_recv()
        {
            self.taken = self.taken.wrapping_add(1);
            completed.push(request);
        }
        self.waits_since.set((self.at_session() > 0).then_some(now));
    }

    fn takes_write_through(&self) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        let at_session = self.at_session();
        let in_flight = at_session.saturating_add(self.refused.len());
        if !self.refused.is_empty() {
            return Readiness { in_flight, next: Next::Now };
        }
        if at_session > 0 {
            // Its queue is about to sleep.
            self.listener.sleep();
            if self.has_returns() {
                return Readiness { in_flight, next: Next::Now };
            }
        }
        Readiness { in_flight, next: Next::OnWake }
    }

    fn waits_since(&self) -> Option<Nanos> {
        // Of the session's sidecore, and beyond that of the IOhost.
        self.waits_since.get()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.listener.as_fd())
    }
}

impl Drop for HandoverChannel {
    fn drop(&mut self) {
        self.session.tell(Command::CloseLine(Arc::clone(&self.shared)));
    }
}
