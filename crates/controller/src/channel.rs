//! The path of one queue's requests through the function's extent tree to the store.
//!
//! A request that lies in one extent is submitted whole: the channel replaces its offset, and
//! restores the offset on completion. A batch of such requests is translated in place and submitted
//! as it is. Any other request occupies a slot and is submitted in [parts](parts), one for each
//! extent, or waits for the hypervisor side and resumes where it stopped. Only that request waits
//! (thesis 5.3).
//!
//! The vLBA queue of thesis 6.3 is `queued`, the pLBA queue is `for_store`.

mod answers;
mod detour;
mod parts;
mod slot;
mod stores;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;

use sidecore_block::{
    Batch, BlockChannel, BlockError, BlockRequest, Mapped, Next, Operation, Readiness, Tag,
};
use sidecore_extent::{BlockRange, LastBytes, LastExtent, Mapping, Piece, TreeRoot};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{EventFd, WakeSet};
use sidecore_units::{Nanos, Plba, Vlba};

use crate::epochs::Quiescence;
use crate::function::{Function, Opening, Ports};
use crate::mail::{Line, Question, Slot};
use crate::multiplexer::Multiplexer;
use crate::shares::{Boards, Place, QueuedBy, TurnPlace, Turns, units};
use crate::stats::ChannelStats;
use slot::{Label, Parts, Slots};
use stores::StoreQueues;
pub(crate) use stores::Stores;

/// A queue of a virtual function.
pub(crate) struct FunctionChannel {
    function: Arc<Function>,
    /// The function's tree.
    root: Arc<TreeRoot>,
    multiplexer: Rc<RefCell<Multiplexer>>,
    place: Place,
    turn_place: TurnPlace,
    /// Show whether other functions share the store.
    boards: Arc<Boards>,
    turns: Rc<Turns>,
    /// The function has no rate limits.
    is_unlimited: bool,
    stores: Stores,
    /// See [`BlockChannel::takes_mapped`], of the physical store.
    takes_mapped: bool,
    last: LastExtent,
    /// `last` in bytes, as of the last translation outside of it.
    last_bytes: LastBytes,
    /// The last extent in bytes, and whether writes may go there without a miss.
    mapped: Mapped,
    quiescence: Quiescence,
    line: Line,
    /// Readable when the store or the hypervisor side has an event for this channel.
    wake: WakeSet,
    depth: usize,
    /// Requests not yet translated: reads, and all others, because each has its own limits.
    queued: [VecDeque<Box<BlockRequest>>; 2],
    /// When the limits next let the first request of each direction pass.
    not_before: [Nanos; 2],
    slots: Slots,
    /// Slots queued for a box from the pool of parts.
    for_parts: VecDeque<Slot>,
    /// The number of slots that wait for the hypervisor side.
    asked: usize,
    /// Wake signals received whose answers have not arrived yet.
    announced: u64,
    /// Requests translated and not yet submitted to the store.
    for_store: StoreQueues,
    /// Requests on a detour: queued for the store, or in flight there.
    detours: usize,
    /// Requests with tags of this channel: parts, flushes, and requests through the filesystem.
    tagged: usize,
    /// The sum of `detours` and `tagged` as last published to the shares.
    shown: usize,
    /// Every request in flight is on a detour, none is queued, and the function has no limits: the
    /// fast path needs no further checks.
    is_plain: bool,
    /// Why requests are queued although limits let them pass, as last published to the shares.
    queued_by: Option<QueuedBy>,
    /// The direction served first: the one that was refused last.
    first: usize,
    /// Completions of the store; kept for its capacity.
    returned: Batch,
    done: Batch,
    now: Nanos,
    stats: Arc<ChannelStats>,
    /// Closes the function when its last queue is gone. The last field, so that it is dropped last.
    _opening: Option<Arc<Opening>>,
}

const READS: usize = 0;
const WRITES: usize = 1;

impl FunctionChannel {
    pub(crate) fn new(
        (function, opening): (Arc<Function>, Option<Arc<Opening>>),
        ports: &Ports,
        multiplexer: Rc<RefCell<Multiplexer>>,
        stores: Stores,
        depth: usize,
    ) -> io::Result<Self> {
        let wake_up = Arc::new(EventFd::new()?);
        let wake = WakeSet::new()?;
        wake.add(wake_up.as_fd())?;
        stores.watch(&wake)?;
        let (reply_sender, replies) = mpsc::channel();
        let line = Line {
            function: function.id,
            weight: function.weight,
            to_hypervisor: ports.to_hypervisor.clone(),
            replies,
            reply_sender,
            wake: wake_up,
        };
        let (id, weight) = (function.id.0, function.weight);
        let place = multiplexer.borrow_mut().shares.join(id, weight);
        let turns = Rc::clone(&multiplexer.borrow().turns);
        let turn_place = turns.join((ports.controller, id), weight);
        let stats = function.stats.open();
        Ok(Self {
            is_unlimited: function.is_unlimited(),
            root: Arc::clone(&function.root),
            function,
            _opening: opening,
            multiplexer,
            place,
            turn_place,
            boards: Arc::clone(&ports.boards),
            turns,
            takes_mapped: stores.physical.takes_mapped(),
            stores,
            last: LastExtent::default(),
            last_bytes: LastBytes::default(),
            mapped: Mapped::default(),
            quiescence: Quiescence::new(&ports.epochs),
            line,
            wake,
            depth,
            queued: [VecDeque::with_capacity(depth), VecDeque::with_capacity(depth)],
            not_before: [Nanos::ZERO; 2],
            slots: Slots::new(depth),
            for_parts: VecDeque::with_capacity(depth),
            asked: 0,
            announced: 0,
            for_store: StoreQueues::with_capacity(depth.saturating_add(Multiplexer::PARTS)),
            detours: 0,
            tagged: 0,
            shown: 0,
            is_plain: false,
            queued_by: None,
            first: READS,
            returned: Batch::with_capacity(depth.saturating_add(Multiplexer::PARTS)),
            done: Batch::with_capacity(depth),
            now: Nanos::ZERO,
            stats,
        })
    }

    /// The blocks of a byte range.
    #[inline]
    fn blocks(&self, offset_bytes: u64, len_bytes: u64) -> BlockRange {
        let shift = self.function.block_shift;
        let first = offset_bytes.checked_shr(shift).unwrap_or(0);
        let last = offset_bytes
            .saturating_add(len_bytes.saturating_sub(1))
            .checked_shr(shift)
            .unwrap_or(0);
        BlockRange { first: Vlba(first), count: last.saturating_sub(first).saturating_add(1) }
    }

    /// The physical byte of the function's byte `offset_bytes`, if the block `first` is at
    /// `physical`.
    #[inline]
    fn displace(&self, offset_bytes: u64, first: Vlba, physical: Plba) -> u64 {
        let shift = self.function.block_shift;
        let start = first.0.checked_shl(shift).unwrap_or(u64::MAX);
        physical
            .0
            .checked_shl(shift)
            .unwrap_or(u64::MAX)
            .saturating_add(offset_bytes.saturating_sub(start))
    }

    /// Whether weights may matter: this sidecore or this store serves other functions too.
    #[inline]
    fn is_shared(&self) -> bool {
        self.boards.is_shared() || self.turns.is_shared()
    }

    /// Starts the first `count` requests of `batch`, which limits and shares let pass.
    fn start_all(&mut self, batch: &mut Batch, count: usize) {
        let translated = self.translate_front(batch.get_mut(..count).unwrap_or_default());
        self.sent_on(translated);
        self.start_behind(batch, translated, count);
    }

    /// Starts the first `count` requests, of which the first `translated` are on detours already.
    fn start_behind(&mut self, batch: &mut Batch, translated: usize, count: usize) {
        self.for_store.extend(batch.drain(..translated));
        let others = count.saturating_sub(translated);
        if others > 0 {
            let multiplexer = Rc::clone(&self.multiplexer);
            let multiplexer = &mut *multiplexer.borrow_mut();
            for request in batch.drain(..others) {
                self.start(multiplexer, request);
            }
        }
    }

    /// Starts a request that limits and shares let pass.
    fn start(&mut self, multiplexer: &mut Multiplexer, mut request: Box<BlockRequest>) {
        if self.translate_front(std::slice::from_mut(&mut request)) == 1 {
            self.sent_on(1);
            return self.for_store.push(request, false);
        }
        if matches!(request.operation, Operation::Read | Operation::Write) {
            let range = self.blocks(request.offset_bytes, request.len_bytes);
            if let Some(physical) = self.translate_whole(multiplexer, range, request.operation) {
                let offset_bytes = self.displace(request.offset_bytes, range.first, physical);
                self.send_whole(request, offset_bytes, false);
                return;
            }
        }
        self.start_slowly(multiplexer, request);
    }

    /// The physical place of `range`, if one extent covers it and permits the operation without a
    /// miss.
    fn translate_whole(
        &mut self,
        multiplexer: &mut Multiplexer,
        range: BlockRange,
        operation: Operation,
    ) -> Option<Plba> {
        if self.function.goes_through() || self.function.geometry.read_only && operation.is_write()
        {
            return None;
        }
        let mut whole = None;
        let visit = &mut |piece: Piece| {
            if let Mapping::Mapped { physical, shared } = piece.mapping
                && piece.range == range
                && !(shared && operation == Operation::Write)
            {
                whole = Some(physical);
            }
            ControlFlow::Break(())
        };
        multiplexer.unit.translate(
            self.function.id,
            &self.function.root,
            &mut self.last,
            range,
            visit,
        );
        if whole.is_some() {
            self.stats.translations.add(1);
            self.last_bytes = self.last.in_bytes(self.function.block_shift);
            self.mapped = Mapped {
                extent: self.last_bytes.extent(),
                takes_writes: !self.last_bytes.is_shared() && !self.function.geometry.read_only,
            };
        }
        whole
    }

    /// Queues a request for a store, unchanged but for its offset.
    fn send_whole(&mut self, mut request: Box<BlockRequest>, offset_bytes: u64, through: bool) {
        let moves_data = matches!(request.operation, Operation::Read | Operation::Write);
        if moves_data && !through && request.send_on(offset_bytes, self.mark()) {
            self.sent_on(1);
        } else if self.slots.send_whole(&mut request, offset_bytes, self.quiescence.parity()) {
            self.tagged = self.tagged.saturating_add(1);
            self.quiescence.began(1);
        } else {
            return self.finish(request, Err(BlockError::EIO));
        }
        self.for_store.push(request, through);
    }

    fn finish(&mut self, mut request: Box<BlockRequest>, result: Result<(), BlockError>) {
        request.result = result;
        self.done.push(request);
    }

    /// Starts any request but a read or write in the last extent.
    fn start_slowly(&mut self, multiplexer: &mut Multiplexer, request: Box<BlockRequest>) {
        if self.function.geometry.read_only && request.operation.is_write() {
            return self.finish(request, Err(BlockError::ReadOnly));
        }
        if request.operation == Operation::Flush {
            return self.start_flush(request);
        }
        let capacity_blocks = self.function.root.blocks();
        let end_bytes = request.offset_bytes.checked_add(request.len_bytes);
        let end_blocks = end_bytes.map(|end| self.blocks(0, end).count);
        if request.len_bytes == 0 || end_blocks.is_none_or(|end| end > capacity_blocks) {
            let empty = request.len_bytes == 0;
            return self.finish(request, if empty { Ok(()) } else { Err(BlockError::OutOfBounds) });
        }
        match self.slots.insert_parts(Parts::new(request)) {
            Ok(slot) => self.resume(multiplexer, slot),
            Err(parts) => self.finish(parts.request, Err(BlockError::EIO)),
        }
    }

    /// A flush also covers the mappings of the writes that it covers: if some of the volume's
    /// mappings are not durable yet, the hypervisor side commits them, which flushes the store too.
    fn start_flush(&mut self, request: Box<BlockRequest>) {
        if !self.function.volume.is_uncommitted() {
            let through = self.function.flushes_through();
            return self.send_whole(request, 0, through);
        }
        match self.slots.insert_parts(Parts::new(request)) {
            Ok(slot) => self.ask(slot, Question::Commit),
            Err(parts) => self.finish(parts.request, Err(BlockError::EIO)),
        }
    }

    /// Handles the store's completions of every kind; requests submitted whole go to `completed`.
    fn take_back(&mut self, now: Nanos, completed: &mut Batch) {
        let multiplexer = Rc::clone(&self.multiplexer);
        let multiplexer = &mut *multiplexer.borrow_mut();
        let mut returned = std::mem::take(&mut self.returned);
        self.stores.poll(now, &mut returned);
        for mut request in returned.drain(..) {
            if request.is_on_detour() {
                self.end_detours(0, std::slice::from_mut(&mut request));
                completed.push(request);
            } else {
                self.take_tagged_back(multiplexer, request, completed);
            }
        }
        self.returned = returned;
    }

    /// Handles the completion of a request with a tag of this channel.
    fn take_tagged_back(
        &mut self,
        multiplexer: &mut Multiplexer,
        mut request: Box<BlockRequest>,
        completed: &mut Batch,
    ) {
        let Some(bits) = request.tag.take().map(Tag::into_bits) else { return };
        let label = Label::from_bits(bits);
        self.tagged = self.tagged.saturating_sub(1);
        self.quiescence.ended(label.parity, 1);
        if label.part {
            return self.take_back_part(multiplexer, label.slot, request);
        }
        self.slots.take_whole_back(label.slot, &mut request);
        if request.result.is_err() && request.operation == Operation::Flush {
            self.line.ask(label.slot, Question::FlushFailed);
        }
        completed.push(request);
    }

    /// Starts queued requests, as far as limits and shares allow.
    fn start_queued(&mut self, multiplexer: &mut Multiplexer) {
        let mut queued_by = None;
        // Units of service that may still be started, and units that were.
        let (mut left, mut used) = (0_i64, 0_i64);
        for direction in [self.first, WRITES.saturating_sub(self.first)] {
            while let Some(request) = self.queued.get(direction).and_then(VecDeque::front) {
                let (len_bytes, operation) = (request.len_bytes, request.operation);
                if self.not_before.get(direction).is_none_or(|at| *at > self.now) {
                    break;
                }
                if left <= 0 {
                    self.charge(multiplexer, std::mem::take(&mut used));
                    match self.allowance(multiplexer) {
                        Ok(units) => left = units,
                        Err(why) => {
                            queued_by = Some(why);
                            self.first = direction;
                            break;
                        }
                    }
                }
                if !self.pass_limits(direction, operation, len_bytes) {
                    break;
                }
                let Some(request) = self.queued.get_mut(direction).and_then(VecDeque::pop_front)
                else {
                    break;
                };
                left = left.saturating_sub(units(len_bytes));
                used = used.saturating_add(units(len_bytes));
                self.start(multiplexer, request);
            }
            if queued_by.is_some() {
                break;
            }
        }
        self.charge(multiplexer, used);
        // The next queue of this sidecore must see the requests that this one has started.
        self.show(multiplexer);
        if queued_by != self.queued_by {
            self.queued_by = queued_by;
            self.stats.store_waits.add(u64::from(queued_by == Some(QueuedBy::Store)));
            multiplexer.shares.set_waiting(
                self.place,
                queued_by.is_some(),
                queued_by == Some(QueuedBy::Store),
            );
        }
    }

    /// The number of units that this queue may start, more than zero.
    fn allowance(&mut self, multiplexer: &mut Multiplexer) -> Result<i64, QueuedBy> {
        if !self.is_shared() {
            return Ok(i64::MAX);
        }
        self.show(multiplexer);
        let of_turn = multiplexer.turns.allowance(self.turn_place, self.now)?;
        Ok(of_turn.min(multiplexer.shares.allowance(self.place)?))
    }

    fn charge(&self, multiplexer: &mut Multiplexer, units: i64) {
        if units > 0 && self.is_shared() {
            multiplexer.turns.charge(self.turn_place, units);
            multiplexer.shares.charge(self.place, units);
        }
    }

    /// Publishes the number of requests in the store to the shares; a function alone publishes
    /// none.
    #[inline]
    fn show(&mut self, multiplexer: &mut Multiplexer) {
        let now = if self.is_shared() { self.translated() } else { 0 };
        if now != self.shown {
            multiplexer.shares.moved(self.place, self.shown, now);
            self.shown = now;
        }
    }

    /// Whether the function's limits let a request pass.
    fn pass_limits(&mut self, direction: usize, operation: Operation, len_bytes: u64) -> bool {
        let Some(not_before) = self.not_before.get_mut(direction) else { return false };
        *not_before = Nanos::ZERO;
        let gate = if direction == READS { &self.function.reads } else { &self.function.writes };
        // A flush moves no data and protects other functions' data: limits never delay it.
        if operation == Operation::Flush || gate.is_open() {
            return true;
        }
        // Unmapping and zeroing move no bytes either.
        let bytes = if operation == Operation::Write || operation == Operation::Read {
            len_bytes
        } else {
            0
        };
        match gate.pass(self.now, bytes) {
            Ok(()) => true,
            Err(at) => {
                self.stats.throttled.add(1);
                *not_before = at;
                false
            }
        }
    }

    /// When the limits let the next request pass, if only limits keep requests queued.
    fn throttled_until(&self) -> Option<Nanos> {
        let mut until = None;
        for (queue, not_before) in self.queued.iter().zip(self.not_before) {
            if queue.is_empty() {
                continue;
            }
            if not_before == Nanos::ZERO {
                return None;
            }
            until = Some(until.map_or(not_before, |earlier: Nanos| earlier.min(not_before)));
        }
        until
    }

    /// The number of translated requests: queued for the store, or in flight there.
    #[inline]
    fn translated(&self) -> usize {
        self.detours.saturating_add(self.tagged)
    }

    /// Whether a poll may have more to do than to collect completions.
    #[inline]
    fn has_more_to_start(&self) -> bool {
        self.asked > 0
            || !self.for_parts.is_empty()
            || !self.for_store.is_empty()
            || self.queued.iter().any(|queue| !queue.is_empty())
    }

    /// Accepts requests of a function that has limits, or shares its sidecore or store.
    #[inline(never)]
    fn submit_shared(&mut self, batch: &mut Batch, count: usize, at_once: bool) {
        let multiplexer = Rc::clone(&self.multiplexer);
        let mut multiplexer = multiplexer.borrow_mut();
        let mut left = if at_once { self.allowance(&mut multiplexer).unwrap_or(0) } else { 0 };
        let wanted = batch
            .iter()
            .take(count)
            .map(|request| units(request.len_bytes))
            .fold(0, i64::saturating_add);
        if wanted <= left {
            self.charge(&mut multiplexer, wanted);
            drop(multiplexer);
            return self.start_all(batch, count);
        }
        let multiplexer = &mut *multiplexer;
        let mut used = 0_i64;
        for request in batch.drain(..count) {
            if left > 0 {
                let units = units(request.len_bytes);
                left = left.saturating_sub(units);
                used = used.saturating_add(units);
                self.start(multiplexer, request);
                continue;
            }
            let direction = if request.operation == Operation::Read { READS } else { WRITES };
            if let Some(queue) = self.queued.get_mut(direction) {
                queue.push_back(request);
            }
        }
        self.charge(multiplexer, used);
        if self.queued.iter().any(|queue| !queue.is_empty()) {
            self.start_queued(multiplexer);
        }
    }

    /// Publishes the number of `completed` requests to the shares, and starts queued requests.
    ///
    /// Requests that a store answers at once are taken back: until the next poll they would count
    /// as in the store for all queues of this sidecore, which would then wait for an empty store.
    #[inline(never)]
    fn resume_with_others(&mut self, count: usize, completed: &mut Batch) {
        let multiplexer = Rc::clone(&self.multiplexer);
        {
            let multiplexer = &mut *multiplexer.borrow_mut();
            if self.is_shared() || self.shown > 0 {
                self.publish(multiplexer, count);
            }
            if !self.has_more_to_start() {
                return;
            }
            self.quiescence.enter();
            self.read_answers(multiplexer);
            self.resume_for_parts(multiplexer);
            self.start_queued(multiplexer);
            self.submit_translated();
        }
        let before = self.translated();
        if before > 0 && self.stores.next() == Next::Now {
            self.take_back(self.now, completed);
            let multiplexer = &mut *multiplexer.borrow_mut();
            self.show(multiplexer);
            multiplexer.shares.completed(before.saturating_sub(self.translated()));
        }
    }

    /// Publishes the requests in the store and the number of `completed` ones to the shares, and
    /// reads what other sidecores have published.
    fn publish(&mut self, multiplexer: &mut Multiplexer, completed: usize) {
        self.show(multiplexer);
        multiplexer.shares.completed(completed);
        multiplexer.shares.look(self.now);
    }

    /// Requests accepted and not yet completed.
    fn in_flight(&self) -> usize {
        let queued = self.queued.iter().map(VecDeque::len).fold(0, usize::saturating_add);
        queued
            .saturating_add(self.slots.len())
            .saturating_add(self.detours)
            .saturating_add(self.done.len())
    }

    /// When to poll next: at once for completions and requests queued for the store or for parts,
    /// at its time for a request behind a limit, else when the stores or the hypervisor side wake
    /// us.
    fn next(&self) -> Next {
        if !self.done.is_empty()
            || !self.for_store.is_empty()
            || !self.for_parts.is_empty()
            || self.announced > 0
        {
            return Next::Now;
        }
        let stores = self.stores.next();
        if self.queued.iter().all(VecDeque::is_empty) {
            return stores;
        }
        self.throttled_until().map_or(Next::Now, |until| stores.min(Next::At(until)))
    }

    fn submit_translated(&mut self) {
        self.stores.submit(self.now, &mut self.for_store);
    }
}

impl BlockChannel for FunctionChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.stores.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.now = self.now.max(now);
        let count = self.depth.saturating_sub(self.in_flight()).min(batch.len());
        if count == 0 {
            return;
        }
        self.quiescence.enter();
        let at_once = self.is_unlimited && self.queued.iter().all(VecDeque::is_empty);
        if at_once && !self.is_shared() {
            self.start_all(batch, count);
        } else {
            self.submit_shared(batch, count, at_once);
        }
        self.submit_translated();
        self.quiescence.leave();
        self.is_plain = false;
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.now = self.now.max(now);
        let before = self.translated();
        if before > 0 && self.tagged == 0 {
            let already = completed.len();
            self.stores.physical.poll(now, completed);
            self.end_detours(0, completed.get_mut(already..).unwrap_or_default());
        } else {
            // Also without requests: a store may have a change to take over, or a signal to take.
            self.take_back(now, completed);
        }
        if self.is_shared() || self.shown > 0 || self.has_more_to_start() {
            self.resume_with_others(before.saturating_sub(self.translated()), completed);
        }
        self.quiescence.leave();
        completed.append(&mut self.done);
        self.is_plain = self.is_unlimited && self.tagged == 0 && !self.has_more_to_start();
    }

    /// The fast paths where they apply, else [`submit`](Self::submit) and [`poll`](Self::poll).
    #[inline]
    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        if self.takes_mapped
            && self.is_plain
            && self.detours == 0
            && self.shown == 0
            && !self.is_shared()
        {
            self.exchange_mapped_extent(batch, completed);
            if batch.is_empty() {
                return;
            }
        }
        self.exchange_detours(now, batch, completed);
    }

    fn readiness(&self) -> Readiness {
        Readiness { in_flight: self.in_flight(), next: self.next() }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn waits_since(&self) -> Option<Nanos> {
        let asked = if self.asked > 0 { self.slots.oldest_in_parts() } else { None };
        self.stores.waits_since().into_iter().chain(asked).min()
    }
}

impl Drop for FunctionChannel {
    fn drop(&mut self) {
        let mut multiplexer = self.multiplexer.borrow_mut();
        multiplexer.shares.leave(self.place, self.shown);
        multiplexer.turns.leave(self.turn_place);
        self.function.stats.close(&self.stats);
    }
}
