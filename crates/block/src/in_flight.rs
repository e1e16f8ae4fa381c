//! The engine of block front ends: the requests of one queue between its ring and its store.
//!
//! A front end takes a command from its ring, gets a blank request ([`InFlight::blank`]), fills it,
//! and submits it with a context of its own ([`InFlight::submit`]). The engine gives the requests
//! to the store in batches ([`InFlight::exchange`]), adds the flush that a request needs, and hands
//! each one back with its context ([`InFlight::next_completed`]). It is generic over that context,
//! so a front end keeps what it needs to answer a command, of a type of its own, and nothing is
//! packed into tags.

mod idle;
mod log;
mod swap;

use std::marker::PhantomData;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_units::Nanos;

use crate::{Batch, BlockChannel, BlockRequest, Next, Operation, QueueStats, Readiness, Tag};

pub use log::QueueName;
use swap::Pause;
pub use swap::{Paused, SwapChannel};

/// Requests taken, submitted and completed together. Small enough that the guest prepares new ones
/// while the rest is served, large enough that the store can fetch ahead.
pub const BATCH: usize = 16;

/// Bytes of requests that a poll takes before the next queue has its turn, but for the last
/// request's.
const POLL_BYTES: u64 = 512 << 10;

/// How often the store is asked in one poll: for a write and for the flush behind it, or for the
/// halves of a fused pair.
const ROUNDS: u32 = 3;

/// The requests and bytes that a poll may still take.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    requests: usize,
    bytes: u64,
}

impl Budget {
    /// For one poll of a queue, which may take `requests`.
    #[must_use]
    #[inline]
    pub const fn new(requests: usize) -> Self {
        Self { requests, bytes: POLL_BYTES }
    }

    /// Accounts for one more request; false if none may be taken.
    #[inline]
    pub const fn take(&mut self) -> bool {
        if self.requests == 0 || self.bytes == 0 {
            return false;
        }
        self.requests = self.requests.saturating_sub(1);
        true
    }

    /// Lowers the bytes that may be taken to `bytes`.
    #[inline]
    pub const fn limit_bytes(&mut self, bytes: u64) {
        if bytes < self.bytes {
            self.bytes = bytes;
        }
    }

    /// Accounts for the bytes of a request.
    #[inline]
    pub const fn spend_bytes(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// The flush that a request needs to be durable, or to read what is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flush {
    /// None.
    #[default]
    Never,
    /// Behind the request, which completes with it; or the store writes through, if it can.
    After,
    /// In front of it.
    Before,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The store carries out the request itself, and it completes with that.
    #[default]
    Last,
    /// The store carries out the request itself. A flush follows.
    ThenFlush,
    /// The store flushes. That completes this operation.
    Flushing(Operation),
    /// The store flushes. This operation follows.
    FlushFirst(Operation),
}

/// A front end's data about a request in flight. It travels in the request itself: a table beside
/// the requests would cost another cache line for each.
pub trait Context: Sized {
    /// The context as two words.
    fn into_words(self) -> [u64; 2];

    /// The context that [`into_words`](Self::into_words) was called on.
    fn from_words(words: [u64; 2]) -> Self;
}

/// The requests of one queue between its ring and its store.
pub struct InFlight<C> {
    context: PhantomData<C>,
    /// `None` while there is no store.
    channel: Option<Box<dyn BlockChannel>>,
    /// See [`BlockChannel::takes_write_through`].
    takes_write_through: bool,
    /// Blank requests.
    pool: Batch,
    /// Submitted and not yet taken by the channel.
    queued: Batch,
    /// Handed back by the channel.
    completed: Batch,
    /// How many requests there are, blank or not.
    count: usize,
    /// Requests that are queued, in the channel or completed.
    in_flight: usize,
    /// Tags of other epochs are of abandoned requests.
    epoch: u32,
    /// How often [`next_completed`](Self::next_completed) may ask the store again in this poll.
    rounds: u32,
    /// A queued request continues one that the store has handed back in this poll.
    continues: bool,
    /// When the requests were taken that completed in the same poll, and their number. They end at
    /// the next poll's time, which saves a look at the clock.
    unmeasured: Option<(Nanos, u64)>,
    /// See [`is_due`](Self::is_due).
    is_called: bool,
    stats: Arc<QueueStats>,
    /// A channel beside the one in use, see [`SwapChannel`].
    spare: Option<Box<dyn BlockChannel>>,
    pause: Pause,
}

impl<C: Context> InFlight<C> {
    /// An engine without requests and without a store.
    #[must_use]
    pub fn new(stats: Arc<QueueStats>) -> Self {
        Self {
            context: PhantomData,
            channel: None,
            takes_write_through: false,
            pool: Batch::new(),
            queued: Batch::new(),
            completed: Batch::new(),
            count: 0,
            in_flight: 0,
            epoch: 0,
            rounds: 0,
            continues: false,
            unmeasured: None,
            is_called: false,
            stats,
            spare: None,
            pause: Pause::No,
        }
    }

    /// The queue's counters.
    #[inline]
    pub fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Adds `count` blank requests to the pool, with room for `max_segments` pieces each.
    pub fn add_requests(&mut self, count: usize, max_segments: usize) {
        let requests: Batch = (0..count).map(|_| self.make_request(max_segments)).collect();
        self.pool.extend(requests);
    }

    /// Makes a request that is kept by the front end and not in the pool. Allocates. If it is in
    /// flight when everything is [abandoned](Self::abandon), it ends in the pool all the same.
    #[must_use]
    #[allow(clippy::unnecessary_box_returns)] // a request is always boxed
    pub fn make_request(&mut self, max_segments: usize) -> Box<BlockRequest> {
        self.count = self.count.saturating_add(1);
        for batch in [&mut self.queued, &mut self.completed, &mut self.pool] {
            batch.reserve(self.count.saturating_sub(batch.len()));
        }
        BlockRequest::blank(max_segments)
    }

    /// How many requests there are, blank or not: the depth that a channel needs.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.count
    }

    /// Replaces the store's channel and gives the old one back. Nothing may be in flight.
    pub fn set_channel(
        &mut self,
        channel: Option<Box<dyn BlockChannel>>,
    ) -> Option<Box<dyn BlockChannel>> {
        self.takes_write_through =
            channel.as_ref().is_some_and(|channel| channel.takes_write_through());
        std::mem::replace(&mut self.channel, channel)
    }

    /// The store's channel.
    #[must_use]
    pub fn channel(&self) -> Option<&dyn BlockChannel> {
        self.channel.as_deref()
    }

    /// Lets go of the guest memory that blank requests hold, and tells the store of the new one.
    /// Nothing may be in flight.
    ///
    /// # Errors
    /// The store's, which works without it.
    pub fn attach_memory(&mut self, memory: &GuestMemory) -> std::io::Result<()> {
        for request in &mut self.pool {
            request.segments.release();
        }
        let mut channels = self.channel.iter_mut().chain(&mut self.spare);
        channels.try_for_each(|channel| channel.attach_memory(memory))
    }

    /// Takes a blank request out of the pool; `None` if all are in flight.
    #[inline]
    pub fn blank(&mut self) -> Option<Box<BlockRequest>> {
        self.pool.pop()
    }

    /// Whether the pool has a blank request.
    #[must_use]
    #[inline]
    pub fn has_blank(&self) -> bool {
        !self.pool.is_empty()
    }

    /// Gives a request back to the pool.
    #[inline]
    pub fn recycle(&mut self, request: Box<BlockRequest>) {
        self.pool.push(request);
    }

    /// Queues a request for the store, with the flush that it needs.
    #[inline]
    pub fn submit(&mut self, mut request: Box<BlockRequest>, context: C, flush: Flush) {
        request.write_through = false;
        request.phase = match flush {
            Flush::Never => Phase::Last,
            Flush::After if request.operation.is_write() && self.takes_write_through => {
                request.write_through = true;
                Phase::Last
            }
            Flush::After => Phase::ThenFlush,
            Flush::Before => {
                let operation = std::mem::replace(&mut request.operation, Operation::Flush);
                Phase::FlushFirst(operation)
            }
        };
        request.context = context.into_words();
        self.in_flight = self.in_flight.wrapping_add(1);
        self.queue(request);
    }

    #[inline]
    fn queue(&mut self, mut request: Box<BlockRequest>) {
        request.tag = Some(Tag::from_bits(self.epoch.into()));
        self.queued.push(request);
    }

    /// Has the queued requests given to the store in this poll: they continue a command that the
    /// store is in the middle of.
    #[inline]
    pub fn continue_now(&mut self) {
        self.continues = true;
    }

    /// Requests between [`submit`](Self::submit) and [`next_completed`](Self::next_completed).
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether a request waits for room in the channel.
    #[must_use]
    #[inline]
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Gives the queued requests to the store and takes back what is done. Returns the number of
    /// requests that came back; [`next_completed`](Self::next_completed) hands them out.
    #[inline]
    pub fn exchange(&mut self, now: Nanos) -> usize {
        self.rounds = ROUNDS;
        self.ask_store(now)
    }

    #[inline]
    fn ask_store(&mut self, now: Nanos) -> usize {
        (self.continues, self.is_called) = (false, false);
        let Some(channel) = &mut self.channel else { return 0 };
        channel.exchange(now, &mut self.queued, &mut self.completed);
        // They are taken from the end: in the order in which the store completed them.
        self.completed.reverse();
        self.completed.len()
    }

    /// The next request that is over, with its context; `None` when all of them were handed out.
    /// Asks the store again for what continues a request of this poll. The caller gives the request
    /// back with [`recycle`](Self::recycle), after [`account`](Self::account).
    #[inline]
    pub fn next_completed(&mut self, now: Nanos) -> Option<(C, Box<BlockRequest>)> {
        loop {
            let Some(mut request) = self.completed.pop() else {
                self.rounds = self.rounds.saturating_sub(1);
                if !self.continues || self.rounds == 0 {
                    return None;
                }
                self.ask_store(now);
                continue;
            };
            let epoch = request.tag.take().map(Tag::into_bits);
            if epoch != Some(u64::from(self.epoch)) {
                self.in_flight = self.in_flight.wrapping_sub(1);
                self.pool.push(request);
                continue;
            }
            if request.phase != Phase::Last && carry_on(&mut request) {
                self.continues = true;
                self.queue(request);
                continue;
            }
            self.in_flight = self.in_flight.wrapping_sub(1);
            return Some((C::from_words(request.context), request));
        }
    }

    /// Counts a request that is over, and records its latency.
    #[inline]
    pub fn account(&mut self, now: Nanos, request: &BlockRequest) {
        self.stats.count(request);
        self.measure(now, request.taken_at);
    }

    /// Records the latency of a command that was taken at `taken_at` and is over.
    #[inline]
    pub fn measure(&mut self, now: Nanos, taken_at: Nanos) {
        if taken_at == now {
            let (_, count) = self.unmeasured.unwrap_or((now, 0));
            self.unmeasured = Some((now, count.wrapping_add(1)));
        } else {
            self.stats.latency.record(now.since(taken_at), 1);
        }
    }

    /// Begins a poll: records the latencies of what completed within the last one.
    #[inline]
    pub fn begin_poll(&mut self, now: Nanos) {
        if let Some((taken_at, count)) = self.unmeasured.take() {
            self.stats.latency.record(now.since(taken_at), count);
        }
    }

    /// Counts a poll that did so much `work`. The queue has paused if it is to and nothing is in
    /// flight.
    #[inline]
    pub fn end_poll(&mut self, work: usize) {
        if self.in_flight == 0 {
            self.pause.complete();
        }
        self.stats.polls.add(1);
        if work == 0 {
            self.stats.empty_polls.add(1);
            self.look_if_idle();
        }
    }

    /// Abandons everything in flight: queued requests return to the pool now, the others when the
    /// channel hands them back, and none of them is handed out.
    pub fn abandon(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        for mut request in self.queued.drain(..).chain(self.completed.drain(..)) {
            request.tag.take().map(Tag::into_bits);
            self.in_flight = self.in_flight.wrapping_sub(1);
            self.pool.push(request);
        }
    }

    /// The requests in flight and the time of the next poll. A queued request needs it at once.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let next = if self.queued.is_empty() { Next::OnWake } else { Next::Now };
        let idle = Readiness { in_flight: 0, next: Next::OnWake };
        self.channel
            .as_ref()
            .map_or(idle, |channel| channel.readiness())
            .behind(self.queued.len(), next)
    }
}

/// Turns a request of several phases into its next one. False if it is over.
fn carry_on(request: &mut BlockRequest) -> bool {
    match std::mem::take(&mut request.phase) {
        Phase::ThenFlush if request.result.is_ok() => {
            let operation = std::mem::replace(&mut request.operation, Operation::Flush);
            request.phase = Phase::Flushing(operation);
            true
        }
        Phase::FlushFirst(operation) => {
            request.operation = operation;
            request.result.is_ok()
        }
        Phase::Flushing(operation) => {
            request.operation = operation;
            false
        }
        Phase::ThenFlush | Phase::Last => false,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::fd::BorrowedFd;
    use std::rc::Rc;

    use super::*;
    use crate::BlockError;

    /// The operations that a scripted store was given, and the requests that it holds.
    #[derive(Default)]
    struct Script {
        asked: Vec<Operation>,
        /// Those of `asked` that are durable when they complete.
        write_through: Vec<Operation>,
        takes_write_through: bool,
        held: Batch,
        /// Holds requests until [`Store::release`].
        holds: bool,
        error: Option<BlockError>,
    }

    #[derive(Clone, Default)]
    struct Store(Rc<RefCell<Script>>);

    impl Store {
        fn asked(&self) -> Vec<Operation> {
            std::mem::take(&mut self.0.borrow_mut().asked)
        }
    }

    impl BlockChannel for Store {
        fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
            let mut script = self.0.borrow_mut();
            script.asked.extend(batch.iter().map(|request| request.operation));
            let write_through = batch.iter().filter(|request| request.write_through);
            script.write_through.extend(write_through.map(|request| request.operation));
            script.held.append(batch);
        }

        fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
            let mut script = self.0.borrow_mut();
            if script.holds {
                return;
            }
            let error = script.error;
            for mut request in script.held.drain(..) {
                request.result = error.map_or(Ok(()), Err);
                completed.push(request);
            }
        }

        fn takes_write_through(&self) -> bool {
            self.0.borrow().takes_write_through
        }

        fn readiness(&self) -> Readiness {
            Readiness::polled(self.0.borrow().held.len())
        }

        fn waits_since(&self) -> Option<Nanos> {
            None
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    impl Context for u32 {
        fn into_words(self) -> [u64; 2] {
            [self.into(), 0]
        }

        fn from_words([context, _]: [u64; 2]) -> Self {
            Self::try_from(context).unwrap()
        }
    }

    fn engine(count: usize) -> (InFlight<u32>, Store) {
        let (mut engine, store) = (InFlight::new(Arc::default()), Store::default());
        engine.add_requests(count, 0);
        engine.set_channel(Some(Box::new(store.clone())));
        (engine, store)
    }

    fn submit(engine: &mut InFlight<u32>, context: u32, operation: Operation, flush: Flush) {
        let mut request = engine.blank().unwrap();
        request.operation = operation;
        engine.submit(request, context, flush);
    }

    /// Polls once: the contexts of what is over, with the operations and results.
    fn poll(engine: &mut InFlight<u32>) -> Vec<(u32, Operation, Result<(), BlockError>)> {
        engine.exchange(Nanos(1));
        let mut over = Vec::new();
        while let Some((context, request)) = engine.next_completed(Nanos(1)) {
            over.push((context, request.operation, request.result));
            engine.account(Nanos(1), &request);
            engine.recycle(request);
        }
        over
    }

    #[test]
    fn a_spare_channel_takes_over_when_nothing_is_in_flight() {
        let (mut engine, before) = engine(2);
        let (after, paused) = (Store::default(), Arc::new(()));
        let memory = GuestMemory::empty();
        engine.set_spare(Some(Box::new(after.clone())), &memory).unwrap();
        before.0.borrow_mut().holds = true;
        submit(&mut engine, 1, Operation::Read, Flush::Never);
        assert!(poll(&mut engine).is_empty());
        let reply = Arc::clone(&paused);
        engine.pause(Box::new(move || drop(reply)));
        engine.end_poll(0);
        assert!(engine.is_paused() && Arc::strong_count(&paused) == 2, "one is in flight");
        engine.resume(true);
        assert!(!engine.is_paused() && Arc::strong_count(&paused) == 1, "not swapped");
        before.0.borrow_mut().holds = false;
        assert_eq!(poll(&mut engine).len(), 1);
        let reply = Arc::clone(&paused);
        engine.pause(Box::new(move || drop(reply)));
        engine.end_poll(1);
        assert_eq!(Arc::strong_count(&paused), 1);
        engine.resume(true);
        submit(&mut engine, 2, Operation::Write, Flush::Never);
        assert_eq!(poll(&mut engine).len(), 1);
        assert_eq!(
            (before.asked(), after.asked()),
            (vec![Operation::Read], vec![Operation::Write])
        );
        assert!(engine.set_spare(None, &memory).unwrap().is_some(), "the former channel");
    }

    #[test]
    fn requests_come_back_in_order_with_their_contexts() {
        let (mut engine, store) = engine(3);
        for context in [7, 8, 9] {
            submit(&mut engine, context, Operation::Read, Flush::Never);
        }
        assert!(!engine.has_blank() && engine.has_queued());
        assert_eq!((engine.in_flight(), engine.readiness().next), (3, Next::Now));
        let over: Vec<u32> = poll(&mut engine).into_iter().map(|(context, ..)| context).collect();
        assert_eq!(over, [7, 8, 9]);
        assert_eq!((engine.in_flight(), engine.readiness()), (0, Readiness::polled(0)));
        assert_eq!(store.asked(), [Operation::Read; 3]);
        assert_eq!(engine.stats().reads.get(), 3);
    }

    #[test]
    fn a_write_and_its_flush_are_one_request() {
        let (mut engine, store) = engine(2);
        submit(&mut engine, 1, Operation::Write, Flush::After);
        assert_eq!(poll(&mut engine), [(1, Operation::Write, Ok(()))]);
        assert_eq!(store.asked(), [Operation::Write, Operation::Flush]);
        submit(&mut engine, 2, Operation::Read, Flush::Before);
        assert_eq!(poll(&mut engine), [(2, Operation::Read, Ok(()))]);
        assert_eq!(store.asked(), [Operation::Flush, Operation::Read]);
        let stats = engine.stats();
        assert_eq!((stats.writes.get(), stats.reads.get(), stats.flushes.get()), (1, 1, 0));
    }

    #[test]
    fn a_store_that_writes_through_is_asked_for_no_flush_behind_a_write() {
        let (mut engine, store) = engine(2);
        submit(&mut engine, 1, Operation::Write, Flush::After);
        poll(&mut engine);
        assert_eq!(store.asked(), [Operation::Write, Operation::Flush]);
        assert_eq!(store.0.borrow().write_through, []);
        store.0.borrow_mut().takes_write_through = true;
        engine.set_channel(Some(Box::new(store.clone())));
        for (flush, operation) in [
            (Flush::After, Operation::Write),
            (Flush::Never, Operation::Write),
            (Flush::After, Operation::Discard),
            (Flush::Before, Operation::Read),
        ] {
            submit(&mut engine, 2, operation, flush);
            assert_eq!(poll(&mut engine), [(2, operation, Ok(()))]);
        }
        let (write, discard) = (Operation::Write, Operation::Discard);
        assert_eq!(store.asked(), [write, write, discard, Operation::Flush, Operation::Read]);
        assert_eq!(store.0.borrow().write_through, [write, discard]);
    }

    #[test]
    fn what_fails_is_not_continued() {
        let (mut engine, store) = engine(2);
        store.0.borrow_mut().error = Some(BlockError::EIO);
        submit(&mut engine, 1, Operation::Write, Flush::After);
        submit(&mut engine, 2, Operation::Read, Flush::Before);
        let failed = Err(BlockError::EIO);
        assert_eq!(
            poll(&mut engine),
            [(1, Operation::Write, failed), (2, Operation::Read, failed)]
        );
        assert_eq!(store.asked(), [Operation::Write, Operation::Flush]);
    }

    #[test]
    fn abandoned_requests_come_back_to_the_pool_alone() {
        let (mut engine, store) = engine(2);
        store.0.borrow_mut().holds = true;
        submit(&mut engine, 1, Operation::Write, Flush::After);
        assert_eq!(poll(&mut engine), []);
        submit(&mut engine, 2, Operation::Read, Flush::Never);
        engine.abandon();
        assert_eq!(engine.in_flight(), 1, "the store has one");
        // The next owner's request beside the late one.
        submit(&mut engine, 3, Operation::Read, Flush::Never);
        store.0.borrow_mut().holds = false;
        assert_eq!(poll(&mut engine), [(3, Operation::Read, Ok(()))]);
        assert_eq!(engine.in_flight(), 0);
        assert_eq!(
            store.asked(),
            [Operation::Write, Operation::Read],
            "no flush behind the abandoned write"
        );
        let blanks: Vec<_> = std::iter::from_fn(|| engine.blank()).collect();
        assert_eq!(blanks.len(), 2, "both are blank again");
    }

    #[test]
    fn a_budget_ends_with_its_requests_or_its_bytes() {
        let mut budget = Budget::new(2);
        assert!(budget.take() && budget.take() && !budget.take());
        let mut budget = Budget::new(5);
        assert!(budget.take());
        budget.spend_bytes(POLL_BYTES - 1);
        assert!(budget.take(), "the last request may be larger than what is left");
        budget.spend_bytes(4096);
        assert!(!budget.take());
    }

    #[test]
    fn without_a_store_a_request_stays_queued() {
        let (mut engine, _store) = engine(1);
        assert!(engine.set_channel(None).is_some());
        submit(&mut engine, 1, Operation::Read, Flush::Never);
        assert_eq!(poll(&mut engine), []);
        assert_eq!(engine.in_flight(), 1);
        engine.abandon();
    }
}
