//! A queue's path to the legs.
//!
//! A write becomes parts of at most 64 KiB. Each is copied out of guest memory once, and goes to
//! all legs from the copy; it ends when each leg in sync has it. A read goes to one leg as it is.

mod start;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_block::{
    Batch, BlockChannel, BlockError, BlockRequest, Next, Operation, Readiness, Tag,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{CoreContext, Listener, WakeSet};
use sidecore_units::Nanos;

use crate::legs::{LegSet, MAX_LEGS};
use crate::mail::Message;
use crate::mirror::Life;
use crate::parts::{Label, Number, Parts};
use crate::plan::Plan;
use crate::rules::Rule;
use crate::shared::{Gauge, Shared};
use crate::table::{Place, Table};

/// The fewest parts, so that a long request has several.
const MIN_PARTS: usize = 8;

/// A queue's channel to one leg.
struct Line {
    channel: Box<dyn BlockChannel>,
    /// The store, by the number of its replacements.
    device: u32,
    /// Requests for it.
    outbound: Batch,
}

/// Why queued requests have not started.
#[derive(Clone, Copy, Debug, Default)]
struct Blocked {
    /// By the keeper: a region is closed, or there is no plan to go on.
    by_keeper: bool,
    /// By nothing that would wake this queue: another queue's write, or this poll's budget.
    by_others: bool,
}

/// See the module.
pub(crate) struct MirrorChannel {
    shared: Arc<Shared>,
    gauge: Arc<Gauge>,
    listener: Listener,
    wake: WakeSet,
    lines: [Option<Line>; MAX_LEGS],
    depth: usize,
    plan: Plan,
    table: Table,
    parts: Parts,
    blocked: Blocked,
    /// Kept for its capacity.
    returned: Batch,
    ended: Batch,
    /// The last field, so that it is dropped last.
    _life: Arc<Life>,
}

impl MirrorChannel {
    pub(crate) fn open(
        shared: &Arc<Shared>,
        life: &Arc<Life>,
        core: &CoreContext,
        depth: usize,
    ) -> io::Result<Self> {
        let listener = Listener::new()?;
        let gauge = Arc::new(Gauge::new(listener.bell()));
        let wake = WakeSet::new()?;
        wake.add(listener.as_fd())?;
        let count = depth.max(MIN_PARTS);
        // Counted before a plan is read: the keeper waits for this queue from then on.
        shared.gauges().push(Arc::clone(&gauge));
        let mut channel = Self {
            shared: Arc::clone(shared),
            gauge,
            listener,
            wake,
            lines: Default::default(),
            depth,
            plan: Plan::CLOSED,
            table: Table::new(depth),
            parts: Parts::new(count)?,
            blocked: Blocked::default(),
            returned: Batch::with_capacity(count.saturating_add(depth)),
            ended: Batch::with_capacity(depth),
            _life: Arc::clone(life),
        };
        for leg in 0..MAX_LEGS {
            channel.connect(core, leg)?;
        }
        Ok(channel)
    }

    /// Opens a channel to the store that a leg has now, if it is another one.
    fn connect(&mut self, core: &CoreContext, leg: usize) -> io::Result<()> {
        let (number, device) = self.shared.devices().get(leg).cloned().unwrap_or_default();
        let Some(place) = self.lines.get_mut(leg) else { return Ok(()) };
        if place.as_ref().is_some_and(|line| line.device == number) {
            return Ok(());
        }
        if let Some(line) = place.take()
            && let Some(fd) = line.channel.wake_fd()
        {
            self.wake.remove(fd);
        }
        let Some(device) = device else { return Ok(()) };
        let count = self.depth.max(MIN_PARTS).saturating_add(self.depth);
        let mut channel = device.open_channel(core, count)?;
        channel.attach_memory(self.parts.memory())?;
        if let Some(fd) = channel.wake_fd() {
            self.wake.add(fd)?;
        }
        *place = Some(Line { channel, device: number, outbound: Batch::with_capacity(count) });
        self.parts.add_leg(leg);
        Ok(())
    }

    /// Goes on by another plan: held parts end, or go on waiting.
    fn adopt(&mut self, plan: Plan) {
        self.plan = plan;
        if plan.is_paused {
            return;
        }
        let used = plan.required.with(plan.copied);
        // Also those whose stores have gone, so that a leg that was removed can be closed.
        let is_open = |leg: &usize| self.lines.get(*leg).is_some_and(Option::is_some);
        let open = (0..MAX_LEGS).filter(is_open).map(LegSet::of).fold(used, LegSet::with);
        for leg in open.numbers() {
            // The queue's own context is known when it opens only; any other one will do.
            if let Err(error) = self.connect(&CoreContext::default(), leg) {
                tracing::error!(leg, "a queue cannot open a channel to a leg: {error}");
                let _ = self.shared.keeper.send(Message::Failed(leg, BlockError::EIO));
            }
        }
        // From the end on: a part that stays is put behind those that are left.
        for index in (0..self.parts.held.len()).rev() {
            let number = self.parts.held.swap_remove(index);
            self.conclude(number);
            self.gauge.holds(-1);
        }
    }

    /// Takes back what a leg has ended.
    fn take_back(&mut self, now: Nanos) {
        for leg in 0..MAX_LEGS {
            let Some(line) = self.lines.get_mut(leg).and_then(Option::as_mut) else { continue };
            line.channel.poll(now, &mut self.returned);
            let mut returned = std::mem::take(&mut self.returned);
            for mut request in returned.drain(..) {
                let Some(bits) = request.tag.take().map(Tag::into_bits) else { continue };
                match Label::from_bits(bits) {
                    Label::Part(number, leg) => self.take_part_back(number, leg, request),
                    Label::Read(place, leg) => self.take_read_back(place, leg, request),
                }
            }
            self.returned = returned;
        }
    }

    fn take_read_back(&mut self, place: Place, leg: usize, mut request: Box<BlockRequest>) {
        self.gauge.did(-1);
        if request.result.is_err()
            && let Some(entry) = self.table.get_mut(place)
        {
            entry.tried = entry.tried.with(LegSet::of(leg));
            if !self.plan.required.is_within(entry.tried) {
                self.shared.read_errors.fetch_add(1, Ordering::Relaxed);
                request.offset_bytes = entry.offset_bytes;
                request.tag = entry.tag.map(Tag::from_bits);
                return self.table.again(place, request);
            }
        }
        let request = self.table.read_ended(place, request);
        self.ended.push(request);
    }

    fn take_part_back(&mut self, number: Number, leg: usize, request: Box<BlockRequest>) {
        let Some(part) = self.parts.came_back(number, leg, request) else { return };
        let rule = if part.is_flush { Rule::FlushAll } else { Rule::AllLegs };
        let is_early = !self.shared.neglected.keeps(rule) && !part.done.is_empty();
        if is_early && !part.is_answered {
            part.is_answered = true;
            let of = part.of;
            self.ended.extend(self.table.part_ended(of, Ok(())));
        }
        let Some(part) = self.parts.get_mut(number) else { return };
        let (is_flush, parity) = (part.is_flush, part.parity);
        if part.pending.is_empty() {
            // The keeper is told of a failure before it may see that nothing is in flight.
            self.conclude(number);
            count(&self.gauge, is_flush, parity, -1);
        }
    }

    /// Ends a part that no leg has any more, or holds it until the keeper has decided about a leg
    /// that failed it.
    fn conclude(&mut self, number: Number) {
        let (required, copied) = (self.plan.required, self.plan.copied);
        let Some(part) = self.parts.get_mut(number) else { return };
        let missed = required.without(part.done);
        let wanted = part.failed.and(required.with(copied));
        let error = part.error.unwrap_or(BlockError::EIO);
        // The last leg's error is the guest's.
        let is_last = required.len() <= 1 && !missed.is_empty();
        if is_last && !copied.is_empty() && !part.is_flush {
            let (offset_bytes, len_bytes) = (part.offset_bytes, part.len_bytes);
            let (first, end) = self.shared.layout.regions_of(offset_bytes, len_bytes);
            let _ = self.shared.keeper.send(Message::Differs(first, end));
        }
        for leg in wanted.numbers().filter(|leg| !is_last || copied.has(*leg)) {
            let _ = self.shared.keeper.send(Message::Failed(leg, error));
        }
        let goes_on = !self.shared.neglected.keeps(Rule::OutFirst) && !part.done.is_empty();
        let result = match error {
            _ if missed.is_empty() || goes_on => Ok(()),
            error if is_last => Err(error),
            _ => {
                self.parts.held.push(number);
                return self.gauge.holds(1);
            }
        };
        let (of, is_answered) = (part.of, part.is_answered);
        if !part.is_flush {
            self.shared.stripes.release(part.offset_bytes, part.len_bytes);
        }
        self.parts.give_back(number);
        if !is_answered {
            self.ended.extend(self.table.part_ended(of, result));
        }
    }

    /// Whether a request can be carried out.
    #[inline]
    fn check(&self, request: &BlockRequest) -> Result<(), BlockError> {
        let layout = &self.shared.layout;
        let (offset_bytes, len_bytes) = (request.offset_bytes, request.len_bytes);
        let mask = u64::from(layout.block_bytes).wrapping_sub(1);
        let end_bytes = offset_bytes.checked_add(len_bytes);
        match request.operation {
            Operation::Flush => return Ok(()),
            Operation::Read | Operation::Write if request.segments.len_bytes() != len_bytes => {
                return Err(BlockError::OutOfBounds);
            }
            _ => {}
        }
        if (offset_bytes | len_bytes) & mask != 0
            || end_bytes.is_none_or(|end| end > layout.capacity_bytes)
        {
            return Err(BlockError::OutOfBounds);
        }
        Ok(())
    }

    /// Whether the keeper has said something that this queue has not seen.
    fn has_mail(&self) -> bool {
        self.shared.plan().version != self.plan.version
            || self.table.queued.iter().any(|place| {
                let asked = self.table.get(*place).and_then(|entry| entry.asked);
                asked.is_some_and(|asked| asked != self.shared.openings.load(Ordering::Acquire))
            })
    }
}

/// Counts a part at the legs.
#[inline]
fn count(gauge: &Gauge, is_flush: bool, parity: usize, by: isize) {
    if is_flush { gauge.did(by) } else { gauge.wrote(parity, by) }
}

impl BlockChannel for MirrorChannel {
    /// Writes come from the pages of parts, which were attached when the channel was opened.
    fn attach_memory(&mut self, _memory: &GuestMemory) -> io::Result<()> {
        Ok(())
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.ended.len().saturating_add(self.table.len()));
        let room = room.min(self.table.room()).min(batch.len());
        for mut request in batch.drain(..room) {
            let verdict = self.check(&request);
            if verdict.is_err() || (request.len_bytes == 0 && request.operation != Operation::Flush)
            {
                request.result = verdict;
                self.ended.push(request);
            } else if let Err(mut request) = self.table.insert(request) {
                request.result = Err(BlockError::EIO);
                self.ended.push(request);
            }
        }
        self.start(now);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.listener.wake();
        // Also without requests: a leg may have a signal to take that came late.
        self.take_back(now);
        self.start(now);
        completed.append(&mut self.ended);
    }

    fn readiness(&self) -> Readiness {
        let in_flight = self.table.len().saturating_add(self.ended.len());
        let is_outbound = self.lines.iter().flatten().any(|line| !line.outbound.is_empty());
        let has_queued = !self.table.queued.is_empty();
        if !self.ended.is_empty() || is_outbound || (has_queued && self.blocked.by_others) {
            return Readiness { in_flight, next: Next::Now };
        }
        // An idle queue takes a plan over, too: it closes its channel to a leg that was removed.
        self.listener.sleep();
        if self.has_mail() {
            return Readiness { in_flight, next: Next::Now };
        }
        let lines = self.lines.iter().flatten();
        let next = lines.map(|line| line.channel.readiness().next).min().unwrap_or(Next::OnWake);
        Readiness { in_flight, next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        let lines = self.lines.iter().flatten().filter_map(|line| line.channel.waits_since());
        let waiting = self.table.waiting().map(|request| request.taken_at);
        lines.chain(waiting.filter(|_| self.blocked.by_keeper)).min()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }
}
