//! Guests of the mirror: queues with random requests, and the keeper's waits, in which they step.

use sidecore_block::{Batch, BlockChannel, BlockError, BlockRequest, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_mirror::Wait;
use sidecore_units::Nanos;

use super::Outcome;
use super::legs::Order;
use super::model::{Model, WriteId, fill, stamp_of};
use crate::Random;
use crate::volumes::disk::SECTOR_BYTES;

/// Requests of a guest at once.
pub(crate) const DEPTH: usize = 6;
/// The most sectors of a request with data: they may lie in three regions.
const MOST_SECTORS: u64 = 12;
const SLOT_BYTES: u64 = MOST_SECTORS * SECTOR_BYTES as u64;

/// The error of a block that is bad: `EILSEQ`.
const BAD_BLOCK: BlockError = BlockError::Io { errno: 84 };

struct InFlight {
    operation: Operation,
    sector: usize,
    count: usize,
    began: u64,
    id: WriteId,
}

/// A queue and the memory of its requests.
pub(crate) struct Guest {
    channel: Box<dyn BlockChannel>,
    pages: SharedPages,
    slots: Vec<Option<InFlight>>,
    queued: Batch,
}

impl Guest {
    pub(crate) fn new(channel: Box<dyn BlockChannel>) -> Self {
        let pages = SharedPages::new("guest", DEPTH * SLOT_BYTES as usize).expect("memory");
        let slots = (0..DEPTH).map(|_| None).collect();
        Self { channel, pages, slots, queued: Batch::new() }
    }

    fn put(&self, slot: usize, sector: usize, stamp: u64) {
        let at = slot as u64 * SLOT_BYTES + (sector * SECTOR_BYTES) as u64;
        let memory = self.pages.memory();
        let put = memory.write_slice(GuestAddress(at), &fill(stamp), &mut RegionHint::default());
        put.expect("a slot");
    }

    fn get(&self, slot: usize, sector: usize) -> Option<u64> {
        let at = slot as u64 * SLOT_BYTES + (sector * SECTOR_BYTES) as u64;
        let mut bytes = [0; SECTOR_BYTES];
        let memory = self.pages.memory();
        memory
            .read_slice(GuestAddress(at), &mut bytes, &mut RegionHint::default())
            .expect("a slot");
        stamp_of(&bytes)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}

/// All of a run but the keeper.
pub(crate) struct Inner {
    pub(crate) random: Random,
    pub(crate) order: Order,
    pub(crate) guests: Vec<Guest>,
    pub(crate) model: Model,
    pub(crate) sectors: u64,
    /// Sectors at the start that most requests go to.
    pub(crate) hot_sectors: u64,
    /// Sectors of a block: requests are whole blocks.
    pub(crate) block_sectors: u64,
    /// Requests that failed because a block was bad.
    pub(crate) bad_blocks: u64,
    pub(crate) next_stamp: u64,
    next_id: WriteId,
    time: u64,
    /// No further request begins.
    pub(crate) is_ending: bool,
    pub(crate) outcome: Outcome,
    pub(crate) trace: Vec<(usize, String)>,
    /// The first check that failed.
    pub(crate) wrong: Option<String>,
}

impl Inner {
    pub(crate) fn new(random: Random, order: Order, stamps: &[u64], next_stamp: u64) -> Self {
        Self {
            random,
            order,
            guests: Vec::new(),
            model: Model::new(stamps),
            sectors: stamps.len() as u64,
            hot_sectors: 16,
            block_sectors: 1,
            bad_blocks: 0,
            next_stamp,
            next_id: 1,
            time: 1,
            is_ending: false,
            outcome: Outcome::default(),
            trace: Vec::new(),
            wrong: None,
        }
    }

    pub(crate) fn note(&mut self, what: impl Into<String>) {
        let at = self.order.tick() as usize;
        self.trace.push((at, what.into()));
    }

    fn stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp
    }

    pub(crate) fn now(&mut self) -> Nanos {
        self.time += 1 + self.random.below(40_000);
        Nanos(self.time)
    }

    /// Lets so much time pass.
    pub(crate) fn pass(&mut self, time: std::time::Duration) {
        self.time += time.as_nanos() as u64;
    }

    /// A step of a random guest.
    pub(crate) fn step(&mut self) {
        if self.guests.is_empty() {
            return;
        }
        let guest = self.random.below(self.guests.len() as u64) as usize;
        match self.random.below(8) {
            0..3 if !self.is_ending => self.send(guest),
            3 => self.change(guest),
            _ => self.poll(guest),
        }
    }

    pub(crate) fn poll_all(&mut self) {
        for guest in 0..self.guests.len() {
            self.poll(guest);
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.guests.iter().map(Guest::in_flight).sum()
    }

    /// Begins a random request.
    fn send(&mut self, guest: usize) {
        let Some(slot) = self.guests[guest].slots.iter().position(Option::is_none) else { return };
        let operation = match self.random.below(16) {
            0..4 => Operation::Read,
            4..6 => Operation::Flush,
            6 => Operation::WriteZeroes { may_unmap: true },
            7 => Operation::Discard,
            _ => Operation::Write,
        };
        let is_flush = operation == Operation::Flush;
        let size = self.block_sectors;
        let count = if is_flush { 0 } else { (1 + self.random.below(MOST_SECTORS / size)) * size };
        let end = if self.random.once_in(4) { self.sectors } else { self.hot_sectors };
        let sector = self.random.below(end).min(self.sectors - count.max(1)) / size * size;
        let sector = sector as usize;
        let began = self.order.tick();
        let id = self.next_id;
        self.next_id += 1;
        for index in 0..count as usize {
            match operation {
                Operation::Write => {
                    let stamp = self.stamp();
                    self.guests[guest].put(slot, index, stamp);
                    self.model.begin(id, sector + index, &[stamp], began);
                }
                // No content that a store has.
                Operation::Read => self.guests[guest].put(slot, index, u64::MAX),
                Operation::Flush => {}
                _ => self.model.begin(id, sector + index, &[0], began),
            }
        }
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        let from = &mut self.guests[guest];
        let mut request = BlockRequest::blank(1);
        request.operation = operation;
        request.offset_bytes = (sector * SECTOR_BYTES) as u64;
        request.len_bytes = count * SECTOR_BYTES as u64;
        request.segments.bind(from.pages.memory());
        if has_data {
            let at = GuestAddress(slot as u64 * SLOT_BYTES);
            let len_bytes = request.len_bytes;
            request.segments.push(at, len_bytes, &mut RegionHint::default()).expect("a slot");
        }
        request.tag = Some(Tag::from_bits(slot as u64));
        from.slots[slot] = Some(InFlight { operation, sector, count: count as usize, began, id });
        from.queued.push(request);
        self.note(format!("queue {guest}: {operation:?} {id} of {count} sectors at {sector}"));
        self.poll(guest);
    }

    /// Changes the memory of a write in flight.
    fn change(&mut self, guest: usize) {
        let slot = self.random.below(DEPTH as u64) as usize;
        let Some(of) = &self.guests[guest].slots[slot] else { return };
        if of.operation != Operation::Write {
            return;
        }
        let (id, sector, count) = (of.id, of.sector, of.count);
        let index = self.random.below(count as u64) as usize;
        let stamp = self.stamp();
        self.model.change(id, sector + index, stamp);
        self.guests[guest].put(slot, index, stamp);
        self.note(format!("queue {guest}: sector {} of {id} becomes {stamp:x}", sector + index));
    }

    fn poll(&mut self, guest: usize) {
        let now = self.now();
        let mut completed = Batch::new();
        let from = &mut self.guests[guest];
        from.channel.exchange(now, &mut from.queued, &mut completed);
        for mut request in completed {
            let slot = request.tag.take().map(Tag::into_bits).expect("a tag") as usize;
            let of = self.guests[guest].slots[slot].take().expect("a request in flight");
            self.bad_blocks += u64::from(request.result == Err(BAD_BLOCK));
            self.end(guest, slot, &of, request.result.is_ok());
        }
    }

    fn end(&mut self, guest: usize, slot: usize, of: &InFlight, has_succeeded: bool) {
        let at = self.order.tick();
        let InFlight { operation, sector, count, began, id } = *of;
        self.trace.push((at as usize, format!("queue {guest}: {id} ended, {has_succeeded}")));
        self.outcome.requests += u64::from(has_succeeded);
        self.outcome.failures += u64::from(!has_succeeded);
        match operation {
            Operation::Flush if has_succeeded => self.model.flushed(began, at),
            Operation::Flush => {}
            Operation::Read if has_succeeded => {
                for index in 0..count {
                    let found = self.guests[guest].get(slot, index);
                    let checked = self.model.check_read(sector + index, found, (began, at));
                    if let Err(what) = checked {
                        self.wrong.get_or_insert(format!("a read: {what}"));
                    }
                }
            }
            Operation::Read => {}
            _ => self.model.end(id, has_succeeded, at),
        }
    }
}

/// The keeper waits: guests take steps.
impl Wait for Inner {
    fn now(&mut self) -> Nanos {
        Self::now(self)
    }

    fn for_leg(&mut self, _channel: &dyn BlockChannel) {
        if self.random.once_in(2) {
            self.step();
        }
    }

    fn for_queues(&mut self) {
        self.step();
        self.poll_all();
    }
}
