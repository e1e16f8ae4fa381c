//! The channel of stages that refuse some requests and pass the others on.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_memory::GuestMemory;
use sidecore_units::Nanos;

use crate::{Batch, BlockChannel, BlockError, BlockRequest, Next, Readiness};

/// A channel in front of another one. `judge` sees each request when it is submitted; a request for
/// which it returns an error fails at the next poll, and never reaches the channel below.
pub struct FilterChannel<J> {
    inner: Box<dyn BlockChannel>,
    judge: J,
    depth: usize,
    /// Submitted and not handed back. The channel below is not asked: a question for its readiness
    /// says that its queue may sleep.
    in_flight: usize,
    /// On their way to the channel below.
    passed: Batch,
    refused: Batch,
}

impl<J: FnMut(&BlockRequest) -> Result<(), BlockError>> FilterChannel<J> {
    /// A filter in front of `inner`, whose depth is `depth`.
    #[must_use]
    pub fn new(inner: Box<dyn BlockChannel>, depth: usize, judge: J) -> Self {
        Self {
            inner,
            judge,
            depth,
            in_flight: 0,
            passed: Batch::with_capacity(depth),
            refused: Batch::with_capacity(depth),
        }
    }

    fn pass_on(&mut self, now: Nanos) {
        if !self.passed.is_empty() {
            self.inner.submit(now, &mut self.passed);
        }
    }
}

impl<J: FnMut(&BlockRequest) -> Result<(), BlockError>> BlockChannel for FilterChannel<J> {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight).min(batch.len());
        self.in_flight = self.in_flight.saturating_add(room);
        for mut request in batch.drain(..room) {
            match (self.judge)(&request) {
                Ok(()) => self.passed.push(request),
                Err(error) => {
                    request.result = Err(error);
                    self.refused.push(request);
                }
            }
        }
        self.pass_on(now);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let before = completed.len();
        completed.append(&mut self.refused);
        self.inner.poll(now, completed);
        let returned = completed.len().saturating_sub(before);
        self.in_flight = self.in_flight.saturating_sub(returned);
        self.pass_on(now);
    }

    fn takes_write_through(&self) -> bool {
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        // A refusal needs no event to be handed back.
        let next = if self.refused.is_empty() { Next::OnWake } else { Next::Now };
        self.inner.readiness().behind(self.refused.len().saturating_add(self.passed.len()), next)
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
