//! A queue's path to the store.
//!
//! A read goes to the store as it is, and is checked when it comes back. A write becomes parts of
//! up to 16 blocks: each is copied out of guest memory once, and waits for its intents. Flushes
//! wait for a checkpoint.

mod checkpoint;
mod opening;
mod read;
mod write;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockError, BlockRequest, FindingsStats, Next, Operation, Place,
    Readiness, SplitTable,
};
use sidecore_memory::{GuestMemory, Segments};
use sidecore_units::Nanos;

use crate::parts::{Label, Parts};
use crate::rules::Rule;
use crate::shared::Shared;
use crate::tag::Sums;
use crate::users::User;
use checkpoint::Checkpoint;
use opening::Opening;
use read::Search;
use write::OpenSlot;

/// The largest block.
const STEP_BYTES: usize = 4096;
/// Bytes that are checked in one poll, and copied: about 30 us of work each.
const POLL_BYTES: u64 = 256 << 10;
/// The fewest parts, so that a long request has several.
const MIN_PARTS: usize = 8;

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// A part has begun, or the request has ended.
    Begun,
    /// The request has to wait.
    Blocked,
}

/// See the module.
pub(crate) struct IntegrityChannel {
    shared: Arc<Shared>,
    stats: Arc<FindingsStats>,
    inner: Box<dyn BlockChannel>,
    /// Whether the store makes a write durable by itself.
    writes_through: bool,
    depth: usize,
    /// A block, in the first-level cache.
    step: Box<[u8; STEP_BYTES]>,
    /// A unit of metadata.
    unit: Box<[u8]>,
    table: SplitTable,
    parts: Parts,
    slot: OpenSlot,
    opening: Opening,
    checkpoint: Checkpoint,
    /// Flushes, each with the number of checkpoints that had begun before.
    flushes: Vec<(Place, u64)>,
    /// A write has found no free slot.
    wants_checkpoint: bool,
    /// Something waits for another channel, or for the next poll.
    is_blocked: bool,
    /// A write was accepted.
    has_written: bool,
    /// Bytes that this call may still work on.
    budget: u64,
    /// The time of this call.
    now: Nanos,
    last_search: Option<Search>,
    outbound: Batch,
    /// Requests that came back and are not done with; the next one is at the end.
    inbound: Batch,
    /// Kept for its capacity.
    arrived: Batch,
    ended: Batch,
    /// Dropped last: the next user finds all of this gone, and so does the next channel that opens
    /// the store.
    user: User,
}

/// The hash of a block of a list, or of a short list.
#[inline]
fn hash_of(segments: &Segments, skip_bytes: u64, step: &mut [u8]) -> Option<u64> {
    (segments.copy_to_slice(skip_bytes, step) == step.len()).then(|| Sums::hash(step))
}

impl IntegrityChannel {
    /// A channel in front of the one that `open` opens with the depth it is given.
    pub(crate) fn open(
        user: User,
        depth: usize,
        open: impl FnOnce(usize) -> io::Result<Box<dyn BlockChannel>>,
    ) -> io::Result<Self> {
        let shared = Arc::clone(user.shared());
        let parts = depth.max(MIN_PARTS);
        let count = depth.saturating_add(parts).saturating_add(checkpoint::MOST_REQUESTS);
        let inner = open(count)?;
        let unit_bytes = usize::try_from(shared.layout.unit_bytes).unwrap_or(STEP_BYTES);
        Ok(Self {
            stats: shared.findings.open_channel(),
            writes_through: inner.takes_write_through(),
            inner,
            depth,
            step: Box::new([0; STEP_BYTES]),
            unit: vec![0; unit_bytes].into(),
            table: SplitTable::new(depth),
            parts: Parts::new(parts)?,
            slot: OpenSlot::new(&shared.layout),
            opening: Opening::new(depth),
            checkpoint: Checkpoint::new(&shared.layout)?,
            flushes: Vec::with_capacity(depth),
            wants_checkpoint: false,
            is_blocked: false,
            has_written: false,
            budget: 0,
            now: Nanos::ZERO,
            last_search: None,
            outbound: Batch::with_capacity(count),
            inbound: Batch::with_capacity(count),
            arrived: Batch::with_capacity(count),
            ended: Batch::with_capacity(depth),
            shared,
            user,
        })
    }

    fn end(&mut self, mut request: Box<BlockRequest>, result: Result<(), BlockError>) {
        request.result = result;
        self.ended.push(request);
    }

    /// Takes a request, for which there is room.
    #[inline]
    fn accept(&mut self, request: Box<BlockRequest>) {
        let verdict = self.shared.check(&request);
        let is_flush = request.operation == Operation::Flush;
        if verdict.is_err() || (request.len_bytes == 0 && !is_flush) {
            return self.end(request, verdict);
        }
        if request.operation == Operation::Read {
            return self.accept_read(request);
        }
        if self.shared.journal.has_failed() {
            return self.end(request, Err(BlockError::EIO));
        }
        if !is_flush && !std::mem::replace(&mut self.has_written, true) {
            self.user.begin_writing();
        }
        // A store that is only read is not flushed, and what was decided stays in memory.
        let is_read_only = self.shared.geometry.read_only;
        if is_flush && (is_read_only || !self.shared.neglected.keeps(Rule::Flush)) {
            return self.end(request, Ok(()));
        }
        let kept = if is_flush { self.table.keep(request) } else { self.table.queue(request) };
        match kept {
            Ok(place) if is_flush => self.flushes.push((place, self.shared.journal.begun())),
            Ok(_) => {}
            Err(request) => self.end(request, Err(BlockError::EIO)),
        }
    }

    /// Begins what can begin.
    fn start(&mut self, now: Nanos) {
        self.is_blocked = false;
        self.wants_checkpoint = false;
        if !self.opening.is_over {
            self.advance_opening();
        }
        self.answer_flushes();
        let mut has_progress = true;
        while std::mem::take(&mut has_progress) {
            for _ in 0..self.table.queued() {
                let Some(place) = self.table.take_queued() else { break };
                has_progress |= self.start_next(place) == Progress::Begun;
                // A part may have ended its request at once.
                self.table.put_back(place);
            }
        }
        self.send_slot();
        self.advance_checkpoint();
        if !self.outbound.is_empty() {
            self.inner.submit(now, &mut self.outbound);
        }
    }

    fn start_next(&mut self, place: Place) -> Progress {
        if self.budget == 0 {
            self.is_blocked = true;
            return Progress::Blocked;
        }
        match self.table.request(place).map(|request| request.operation) {
            Some(Operation::Read) => self.start_read(place),
            Some(_) => self.start_write(place),
            None => Progress::Blocked,
        }
    }

    /// Goes on with requests that the store has handed back.
    fn pull(&mut self) {
        while let Some(request) = self.inbound.pop() {
            match Label::of(&request) {
                Some(Label::Read(place)) => {
                    if let Some(rest) = self.read_came_back(place, request) {
                        // The next poll goes on with it.
                        return self.inbound.push(rest);
                    }
                }
                Some(Label::Data(number)) => self.data_came_back(number, request),
                Some(Label::Intents(number)) => self.intents_came_back(number, request),
                Some(Label::IntentsFlush(number)) => self.intents_flushed(number, request),
                Some(Label::Unit(number)) => self.unit_came_back(number, request),
                Some(Label::Flush) => self.checkpoint_flushed(request),
                Some(Label::Opening) => self.opening_came_back(request),
                None => debug_assert!(false, "a request without a tag"),
            }
        }
    }

    /// Requests that the channel has, without those that have ended.
    fn unfinished(&self) -> usize {
        self.table.len().saturating_add(self.opening.queued.len())
    }

    /// Requests that have ended and have to stay: a channel with requests of its own at the store
    /// must not seem idle.
    fn kept(&self) -> usize {
        usize::from(self.checkpoint.is_active() && self.table.is_empty())
    }
}

impl BlockChannel for IntegrityChannel {
    /// Reads go to guest memory as they are. Other requests use pages of their own, which work
    /// without being attached.
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        (self.budget, self.now) = (POLL_BYTES, now);
        let room = self.depth.saturating_sub(self.ended.len().saturating_add(self.unfinished()));
        let taken = batch.drain(..room.min(batch.len()));
        if self.opening.is_over {
            taken.for_each(|request| self.accept(request));
        } else {
            self.opening.queued.extend(taken);
        }
        self.start(now);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        (self.budget, self.now) = (POLL_BYTES, now);
        if self.inbound.is_empty() {
            // Also without requests: the store may have a change to take over, or a signal to take.
            self.inner.poll(now, &mut self.arrived);
            // The last one is taken first.
            self.inbound.extend(self.arrived.drain(..).rev());
        }
        if self.unfinished() > 0 || self.checkpoint.is_active() {
            self.pull();
            self.start(now);
        }
        let kept = self.kept().min(self.ended.len());
        completed.extend(self.ended.drain(kept..));
    }

    fn readiness(&self) -> Readiness {
        let has_work = self.ended.len() > self.kept()
            || !self.inbound.is_empty()
            || !self.outbound.is_empty()
            || self.is_blocked;
        let next = if has_work { Next::Now } else { self.inner.readiness().next };
        Readiness { in_flight: self.unfinished().saturating_add(self.ended.len()), next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

impl Drop for IntegrityChannel {
    /// A channel that is dropped in the middle of a write, because its stage has panicked, leaves
    /// blocks held and an era in use: the other channels must not wait for it.
    fn drop(&mut self) {
        if self.parts.has_used() {
            self.shared.journal.fail();
        }
        self.abandon_checkpoint();
    }
}
