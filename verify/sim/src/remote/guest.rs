//! A guest: what it asks for, and what it may be answered.

use sidecore_block::{BlockError, Operation};
use sidecore_vrio::Request;
use sidecore_vrio::slices::Data;

use super::model::{Block, Fate};
use super::store::{Stamp, stamp_of, write_stamp};
use crate::Random;

/// Requests that the guest has unanswered at most.
pub(super) const DEPTH: usize = 16;
/// Blocks of its largest request.
const BLOCKS_MAX: u64 = 8;

/// The guest's memory: a buffer for each request.
#[derive(Debug, Default)]
pub(super) struct Memory(Vec<Vec<u8>>);

impl Memory {
    fn bytes(&mut self, tag: u64) -> &mut [u8] {
        &mut self.0[(tag % DEPTH as u64) as usize]
    }
}

/// A tag names the device of its request, too.
const DEVICE_SHIFT: u32 = 48;

/// The device of a request, by its number at its client.
pub(super) const fn device_of(tag: u64) -> usize {
    (tag >> DEVICE_SHIFT) as usize
}

/// The memory of all guests of a client.
pub(super) struct Memories<'a>(pub(super) &'a mut [Guest]);

impl Data for Memories<'_> {
    fn fill(&mut self, tag: u64, offset_bytes: u32, payload: &mut [u8]) {
        self.0[device_of(tag)].memory.fill(tag, offset_bytes, payload);
    }

    fn store(&mut self, tag: u64, offset_bytes: u32, payload: &[u8]) {
        self.0[device_of(tag)].memory.store(tag, offset_bytes, payload);
    }

    fn clear(&mut self, _tag: u64, _len_bytes: u32) {
        unreachable!("an IOhost's engine alone asks for it");
    }
}

impl Memory {
    fn fill(&mut self, tag: u64, offset_bytes: u32, payload: &mut [u8]) {
        let len = payload.len();
        payload.copy_from_slice(&self.bytes(tag)[offset_bytes as usize..][..len]);
    }

    fn store(&mut self, tag: u64, offset_bytes: u32, payload: &[u8]) {
        self.bytes(tag)[offset_bytes as usize..][..payload.len()].copy_from_slice(payload);
    }
}

/// A request that has not ended.
#[derive(Clone, Debug)]
struct Unanswered {
    tag: u64,
    request: Request,
    first: usize,
    /// For each block: the number of the write, or the first one that a read may return, or the
    /// newest answered one.
    numbers: Vec<usize>,
}

/// How far the guest is with reading a device of which it knows only what was flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Settling {
    Flush,
    Read(usize),
    Done,
}

/// The guest.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) memory: Memory,
    block_bytes: u64,
    blocks: Vec<Block>,
    unanswered: Vec<Option<Unanswered>>,
    next_stamp: Stamp,
    rounds: u64,
    settling: Settling,
    /// Requests may fail because the IOhost was away.
    may_time_out: bool,
    /// The number of its device at its client.
    device: usize,
    /// Its VMM was killed, and nothing reads what its requests return.
    is_gone: bool,
    pub(super) requests: u64,
    /// Flushes that were answered.
    pub(super) flushes: u64,
}

impl Guest {
    /// The guest of the device with this number. No two guests of a history write the same.
    pub(super) fn new(
        (block_bytes, blocks): (u64, usize),
        may_time_out: bool,
        (device, first_stamp): (usize, Stamp),
    ) -> Self {
        let bytes = (block_bytes * BLOCKS_MAX) as usize;
        Self {
            memory: Memory(vec![vec![0xcc; bytes]; DEPTH]),
            block_bytes,
            blocks: vec![Block::default(); blocks],
            unanswered: vec![None; DEPTH],
            next_stamp: first_stamp,
            rounds: 0,
            settling: Settling::Done,
            may_time_out,
            device,
            is_gone: false,
            requests: 0,
            flushes: 0,
        }
    }

    /// Its VMM is killed. Returns the same guest as another VMM starts it: it knows what was
    /// flushed.
    pub(super) fn kill(&mut self) -> Self {
        self.is_gone = true;
        let memory = Memory(vec![vec![0xcc; self.memory.0[0].len()]; DEPTH]);
        let (blocks, unanswered) = (self.blocks.clone(), vec![None; DEPTH]);
        let mut next = Self { memory, blocks, unanswered, is_gone: false, ..*self };
        next.die();
        next
    }

    pub(super) fn in_flight(&self) -> usize {
        self.unanswered.iter().flatten().count()
    }

    /// Whether the guest knows all of its device.
    pub(super) fn is_settled(&self) -> bool {
        self.settling == Settling::Done
    }

    /// Whether a block has several answered writes that no flush covers.
    pub(super) fn has_overlapping_unflushed(&self) -> bool {
        self.blocks.iter().any(|block| block.unflushed() > 1)
    }

    /// Whether a block has an answered write that no flush covers.
    pub(super) fn has_unflushed(&self) -> bool {
        self.blocks.iter().any(|block| block.unflushed() > 0)
    }

    /// The guest dies with its client. The next one knows what was flushed.
    pub(super) fn die(&mut self) {
        self.unanswered.fill(None);
        self.blocks.iter_mut().for_each(Block::client_died);
        self.settling = Settling::Flush;
    }

    /// The guest's next request, if it has one.
    pub(super) fn next(&mut self, random: &mut Random) -> Option<(u64, Request)> {
        let (operation, first, count) = match self.settling {
            Settling::Done => self.draw(random),
            _ if self.in_flight() > 0 || !random.once_in(8) => return None,
            Settling::Flush => (Operation::Flush, 0, 0),
            Settling::Read(first) => {
                (Operation::Read, first, (self.blocks.len() - first).min(BLOCKS_MAX as usize))
            }
        };
        let fua = operation == Operation::Write && random.once_in(16);
        self.submit(operation, first, count, fua)
    }

    fn draw(&mut self, random: &mut Random) -> (Operation, usize, usize) {
        let operation = match random.below(32) {
            0 => return (Operation::Flush, 0, 0),
            1..12 => Operation::Read,
            12 => Operation::Discard,
            13 => Operation::WriteZeroes { may_unmap: random.once_in(2) },
            _ => Operation::Write,
        };
        let first = random.below(self.blocks.len() as u64);
        let most = BLOCKS_MAX.min(self.blocks.len() as u64 - first);
        let most = if random.once_in(3) { most } else { most.min(2) };
        let count = 1 + random.below(most);
        (operation, first as usize, count as usize)
    }

    /// A read of all blocks from `first` on, as far as one request can.
    pub(super) fn read_all(&mut self, first: usize) -> Option<(u64, Request)> {
        let count =
            self.blocks.len().checked_sub(first).filter(|left| *left > 0)?.min(BLOCKS_MAX as usize);
        self.submit(Operation::Read, first, count, false)
    }

    /// A flush.
    pub(super) fn flush(&mut self) -> Option<(u64, Request)> {
        self.submit(Operation::Flush, 0, 0, false)
    }

    fn submit(
        &mut self,
        operation: Operation,
        first: usize,
        count: usize,
        fua: bool,
    ) -> Option<(u64, Request)> {
        let place = self.unanswered.iter().position(Option::is_none)?;
        self.rounds += 1;
        let device = (self.device as u64) << DEVICE_SHIFT;
        let tag = device | (self.rounds * DEPTH as u64 + place as u64);
        let bytes = self.block_bytes as usize;
        let mut numbers = Vec::new();
        let range =
            if operation == Operation::Flush { 0..self.blocks.len() } else { first..first + count };
        for (index, block) in self.blocks[range].iter_mut().enumerate() {
            numbers.push(match operation {
                Operation::Read => block.low(),
                Operation::Flush => block.answered(),
                Operation::Write => {
                    let stamp = self.next_stamp;
                    self.next_stamp += 1;
                    write_stamp(&mut self.memory.0[place][index * bytes..][..bytes], stamp);
                    block.write(stamp)
                }
                _ => block.write(0),
            });
        }
        if operation == Operation::Read {
            self.memory.0[place].fill(0xcc);
        }
        let (offset_bytes, len_bytes) =
            (first as u64 * self.block_bytes, count as u64 * self.block_bytes);
        let request = Request { operation, offset_bytes, len_bytes, fua };
        self.unanswered[place] = Some(Unanswered { tag, request, first, numbers });
        self.requests += 1;
        Some((tag, request))
    }

    /// A request ended.
    pub(super) fn complete(
        &mut self,
        tag: u64,
        result: Result<(), BlockError>,
    ) -> Result<(), String> {
        let place = (tag % DEPTH as u64) as usize;
        if self.is_gone {
            self.unanswered[place] = None;
            return Ok(());
        }
        let Some(ended) = self.unanswered[place].take().filter(|unanswered| unanswered.tag == tag)
        else {
            return Err(format!("request {tag} ended and was not unanswered"));
        };
        let request = ended.request;
        match result {
            Ok(()) => {}
            Err(BlockError::Io { errno: 110 }) if self.may_time_out => {}
            Err(error) => {
                return Err(format!("{request:?}: {error}, and the owner said no such thing"));
            }
        }
        match request.operation {
            Operation::Read if result.is_ok() => self.check_read(&ended)?,
            Operation::Read => {}
            // With the former client its log has died: what it had been answered may be gone.
            Operation::Flush if result.is_ok() && self.settling == Settling::Done => {
                self.flushes += 1;
                for (block, number) in self.blocks.iter_mut().zip(&ended.numbers) {
                    block.flushed(*number);
                }
            }
            Operation::Flush => {}
            _ => {
                let fate = if result.is_ok() { Fate::Answered } else { Fate::Failed };
                for (block, number) in self.blocks[ended.first..].iter_mut().zip(&ended.numbers) {
                    block.end(*number, fate, request.fua);
                }
                // The memory is used for other things now.
                self.memory.0[place].fill(0xbb);
            }
        }
        if result.is_ok() {
            self.settle_on(&ended);
        }
        Ok(())
    }

    fn settle_on(&mut self, ended: &Unanswered) {
        self.settling = match self.settling {
            Settling::Flush if ended.request.operation == Operation::Flush => Settling::Read(0),
            Settling::Read(first) if ended.first == first => {
                let next = first + ended.numbers.len();
                if next < self.blocks.len() { Settling::Read(next) } else { Settling::Done }
            }
            other => other,
        };
    }

    fn check_read(&mut self, read: &Unanswered) -> Result<(), String> {
        let bytes = self.block_bytes as usize;
        let place = (read.tag % DEPTH as u64) as usize;
        for (index, low) in read.numbers.iter().enumerate() {
            let number = read.first + index;
            let Some(stamp) = stamp_of(&self.memory.0[place][index * bytes..][..bytes]) else {
                return Err(format!("a read returned a torn block {number}"));
            };
            let block = &mut self.blocks[number];
            let is_settling = self.settling != Settling::Done;
            let may = block.show(if is_settling { 0 } else { *low });
            let is_allowed =
                if is_settling { block.settle(stamp) } else { block.allows(*low, stamp) };
            if !is_allowed {
                let after = if is_settling { "after the client's death " } else { "" };
                return Err(format!(
                    "{after}a read returned {stamp} from block {number}, which may hold {may}"
                ));
            }
        }
        Ok(())
    }
}
