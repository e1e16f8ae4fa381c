//! A store that is not current: the first channel with a read or a write opens it again.

use std::sync::Arc;
use std::task::Poll;

use sidecore_block::{Batch, BlockError, BlockRequest, Operation};
use sidecore_units::Nanos;

use super::IntegrityChannel;
use crate::disk::Task;
use crate::error::IntegrityError;
use crate::opening::open_again;
use crate::parts::Label;
use crate::users::Turn;

/// The time after a failed opening in which the channel does not try again.
const PAUSE: Nanos = Nanos::from_millis(10);

/// A channel's wait for a store that is opened again.
pub(super) struct Opening {
    /// The channel has read or written, and the store is current, which it stays for the channel's
    /// life.
    pub(super) is_over: bool,
    /// Requests that wait for that.
    pub(super) queued: Batch,
    /// The opening, if this channel does it.
    task: Option<Task>,
    /// When an opening of this channel failed last.
    failed_at: Option<Nanos>,
}

impl Opening {
    pub(super) fn new(depth: usize) -> Self {
        let queued = Batch::with_capacity(depth);
        Self { is_over: false, queued, task: None, failed_at: None }
    }

    /// Whether a read or a write waits. A flush may be one outside of any queue, also while the
    /// store belongs to another host: it opens nothing.
    fn has_use(&self) -> bool {
        self.queued.iter().any(|request| request.operation != Operation::Flush)
    }

    fn has_just_failed(&self, now: Nanos) -> bool {
        self.failed_at.is_some_and(|at| now.since(at) < PAUSE)
    }
}

impl IntegrityChannel {
    /// Goes on with the opening. The channel has no other request at the store meanwhile.
    #[cold]
    pub(super) fn advance_opening(&mut self) {
        if self.opening.queued.is_empty() {
            return;
        }
        if self.opening.task.is_none() {
            match self.user.turn() {
                Turn::Current => return self.end_opening(Ok(())),
                Turn::Wait => {
                    self.is_blocked = true;
                    return;
                }
                Turn::Open if self.opening.has_use() => {}
                Turn::Open | Turn::Gone => return self.end_opening(Err(BlockError::EIO)),
            }
            if self.opening.has_just_failed(self.now) {
                return self.end_opening(Err(BlockError::EIO));
            }
            if !self.user.begin_opening() {
                self.is_blocked = true;
                return;
            }
            let shared = Arc::clone(&self.shared);
            let task = Task::new(|mut disk| async move { open_again(&shared, &mut disk).await });
            match task {
                Ok(task) => self.opening.task = Some(task),
                Err(error) => return self.finish_opening(Err(error)),
            }
        }
        let Some(task) = &mut self.opening.task else { return };
        if !task.is_at_store() && self.user.is_gone() {
            // Nothing of it comes late: another user opens the store.
            return self.finish_opening(Err(IntegrityError::Gone));
        }
        match task.poll() {
            Poll::Ready(result) => self.finish_opening(result),
            Poll::Pending => {
                if let Some(mut request) = task.queued() {
                    request.tag = Some(Label::Opening.tag());
                    self.outbound.push(request);
                }
            }
        }
    }

    /// Ends the opening that this channel has done.
    fn finish_opening(&mut self, result: Result<(), IntegrityError>) {
        self.opening.task = None;
        self.opening.failed_at = result.is_err().then_some(self.now);
        self.user.end_opening(result.is_ok());
        match &result {
            Ok(()) => self.shared.findings.recover(),
            Err(error) => self.shared.findings.fail(format!(
                "all requests fail: the checksums cannot be opened again: {error}; a later \
                 request tries again"
            )),
        }
        self.end_opening(result.map_err(|_| BlockError::EIO));
    }

    /// Goes on with requests that have waited.
    fn end_opening(&mut self, result: Result<(), BlockError>) {
        self.opening.is_over = result.is_ok() && self.opening.has_use();
        if self.opening.is_over {
            self.user.begin();
        }
        let mut queued = std::mem::take(&mut self.opening.queued);
        for request in queued.drain(..) {
            match result {
                Ok(()) => self.accept(request),
                Err(_) => self.end(request, result),
            }
        }
        self.opening.queued = queued;
    }

    pub(super) fn opening_came_back(&mut self, request: Box<BlockRequest>) {
        if let Some(task) = &mut self.opening.task {
            task.came_back(request);
        }
    }
}
