//! The store.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Meter, Next, Readiness,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

/// Gives each request to the device below `delay` after its submission.
///
/// A request is submitted at [`BlockRequest::taken_at`] or at the last poll before, whichever is
/// later: `submit` has no clock of its own. Requests stay in order, and keep all of their effects
/// until the delay is over, so that a flush still covers what was completed before it.
pub struct DelayStore {
    inner: Arc<dyn BlockDevice>,
    delay: Nanos,
}

impl DelayStore {
    /// `inner`, slower by `delay`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, delay: Nanos) -> Self {
        Self { inner, delay }
    }
}

impl BlockDevice for DelayStore {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(DelayChannel {
            inner: self.inner.open_channel(core, depth)?,
            delay: self.delay,
            depth,
            in_flight: 0,
            waiting: VecDeque::with_capacity(depth),
            due: Batch::with_capacity(depth),
        }))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }
}

struct DelayChannel {
    inner: Box<dyn BlockChannel>,
    delay: Nanos,
    depth: usize,
    /// Submitted and not handed back.
    in_flight: usize,
    /// In the order of submission, and so of their times.
    waiting: VecDeque<(Nanos, Box<BlockRequest>)>,
    /// Expired requests for which the device below had no room.
    due: Batch,
}

impl BlockChannel for DelayChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight).min(batch.len());
        self.in_flight = self.in_flight.saturating_add(room);
        for request in batch.drain(..room) {
            let due = request.taken_at.max(now).after(self.delay);
            self.waiting.push_back((due, request));
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let count = self.waiting.iter().take_while(|(due, _)| *due <= now).count();
        self.due.extend(self.waiting.drain(..count).map(|(_, request)| request));
        if !self.due.is_empty() {
            self.inner.submit(now, &mut self.due);
        }
        let before = completed.len();
        self.inner.poll(now, completed);
        let returned = completed.len().saturating_sub(before);
        self.in_flight = self.in_flight.saturating_sub(returned);
    }

    fn takes_write_through(&self) -> bool {
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        let next = self.waiting.front().map_or(Next::OnWake, |(due, _)| Next::At(*due));
        self.inner.readiness().behind(self.waiting.len().saturating_add(self.due.len()), next)
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecore_block::{NullStore, Operation, Tag};

    fn request(taken_at: Nanos) -> Box<BlockRequest> {
        let mut request = BlockRequest::blank(0);
        request.operation = Operation::Flush;
        request.taken_at = taken_at;
        request.tag = Some(Tag::from_bits(taken_at.0));
        request
    }

    fn tags(batch: &mut Batch) -> Vec<u64> {
        batch.drain(..).filter_map(|mut request| request.tag.take()).map(Tag::into_bits).collect()
    }

    fn channel(depth: usize) -> Box<dyn BlockChannel> {
        let null = Arc::new(NullStore::new(Geometry::new(1 << 20, 512)));
        DelayStore::new(null, Nanos(100)).open_channel(&CoreContext::default(), depth).unwrap()
    }

    #[test]
    fn a_request_comes_back_at_its_time_and_not_before() {
        let mut channel = channel(4);
        let mut completed = Batch::new();
        assert_eq!(channel.readiness().next, Next::OnWake);
        channel.submit(Nanos::ZERO, &mut vec![request(Nanos(1_000)), request(Nanos(1_050))]);
        assert_eq!(channel.readiness().next, Next::At(Nanos(1_100)));
        channel.poll(Nanos(1_099), &mut completed);
        assert!(completed.is_empty());
        channel.poll(Nanos(1_100), &mut completed);
        assert_eq!(tags(&mut completed), [1_000]);
        assert_eq!(channel.readiness().next, Next::At(Nanos(1_150)));
        assert_eq!(channel.readiness().in_flight, 1);
        channel.poll(Nanos(9_000), &mut completed);
        assert_eq!(tags(&mut completed), [1_050]);
        assert_eq!(channel.readiness().next, Next::OnWake);
    }

    #[test]
    fn without_a_time_of_its_own_a_request_counts_from_its_submission() {
        let mut channel = channel(4);
        let mut completed = Batch::new();
        channel.submit(Nanos(5_000), &mut vec![request(Nanos::ZERO)]);
        assert_eq!(channel.readiness().next, Next::At(Nanos(5_100)));
        channel.poll(Nanos(5_100), &mut completed);
        assert_eq!(tags(&mut completed), [0]);
    }

    #[test]
    fn waiting_requests_count_against_the_depth() {
        let mut channel = channel(2);
        let mut batch = vec![request(Nanos(1)), request(Nanos(2)), request(Nanos(3))];
        channel.submit(Nanos::ZERO, &mut batch);
        assert_eq!((channel.readiness().in_flight, tags(&mut batch)), (2, vec![3]));
        let mut completed = Batch::new();
        channel.poll(Nanos::MAX, &mut completed);
        assert_eq!(tags(&mut completed), [1, 2]);
    }
}
