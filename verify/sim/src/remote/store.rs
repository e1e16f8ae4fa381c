//! The IOhost's store: it executes requests in any order, and its cache is lost with the power.

use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::slices::Data;
use sidecore_vrio::{Execute, Request};

use crate::Random;

/// A block's contents: each word of a block is its stamp; 0 is a block that was never written, or
/// zeroed. The store does not touch memory for those, as a null store does not.
pub type Stamp = u64;

/// More slots than a client has.
const SLOTS_MAX: u64 = 64;
/// Largest data of a request.
const BUFFER_BYTES: usize = 64 << 10;

/// The buffers of an IOhost's slots, by their places.
#[derive(Debug, Default)]
pub struct Buffers(Vec<Vec<u8>>);

impl Buffers {
    pub(super) fn bytes(&mut self, place: u64) -> &mut [u8] {
        // The client's place, and the slot, of which a client has a few.
        let place = ((place >> 16) * SLOTS_MAX + place % SLOTS_MAX) as usize;
        if self.0.len() <= place {
            self.0.resize(place + 1, Vec::new());
        }
        let bytes = &mut self.0[place];
        if bytes.is_empty() {
            // The memory of a buffer pool has held other things.
            bytes.resize(BUFFER_BYTES, 0xdd);
        }
        bytes
    }
}

impl Data for Buffers {
    fn fill(&mut self, place: u64, offset_bytes: u32, payload: &mut [u8]) {
        let len = payload.len();
        payload.copy_from_slice(&self.bytes(place)[offset_bytes as usize..][..len]);
    }

    fn store(&mut self, place: u64, offset_bytes: u32, payload: &[u8]) {
        self.bytes(place)[offset_bytes as usize..][..payload.len()].copy_from_slice(payload);
    }

    fn clear(&mut self, place: u64, len_bytes: u32) {
        self.bytes(place)[..len_bytes as usize].fill(0);
    }
}

/// The stamp of a block's bytes; `None` if they are of two.
#[must_use]
pub fn stamp_of(block: &[u8]) -> Option<Stamp> {
    let (words, _) = block.as_chunks::<8>();
    let first = *words.first()?;
    words.iter().all(|word| *word == first).then(|| u64::from_le_bytes(first))
}

/// Fills a block's bytes.
pub fn write_stamp(block: &mut [u8], stamp: Stamp) {
    let (words, _) = block.as_chunks_mut::<8>();
    words.fill(stamp.to_le_bytes());
}

/// A block: what survives a power cut, and what was written since.
#[derive(Clone, Debug, Default)]
struct Block {
    safe: Stamp,
    since: Vec<Stamp>,
}

impl Block {
    fn newest(&self) -> Stamp {
        self.since.last().copied().unwrap_or(self.safe)
    }

    fn flush(&mut self) {
        self.safe = self.newest();
        self.since.clear();
    }
}

/// The store.
#[derive(Debug)]
pub struct Store {
    random: Random,
    block_bytes: u64,
    blocks: Vec<Block>,
    /// Requests that it has, and when each ends.
    executing: Vec<(Nanos, Execute)>,
    /// One request in so many takes long; 0 for none.
    slow: u64,
    /// Writes are durable at once.
    is_write_through: bool,
}

impl Store {
    /// A store without contents.
    #[must_use]
    pub fn new(
        random: Random,
        (block_bytes, blocks): (u64, usize),
        slow: u64,
        is_write_through: bool,
    ) -> Self {
        let blocks = vec![Block::default(); blocks];
        Self { random, block_bytes, blocks, executing: Vec::new(), slow, is_write_through }
    }

    /// Takes a request.
    pub fn submit(&mut self, now: Nanos, execute: Execute) {
        let end = self.end_of(now);
        self.executing.push((end, execute));
    }

    /// When a request ends that it is given now.
    pub fn end_of(&mut self, now: Nanos) -> Nanos {
        let mut after = 2_000 + self.random.below(60_000);
        if self.slow > 0 && self.random.once_in(self.slow) {
            after = 1_000_000 + self.random.below(150_000_000);
        }
        now.after(Nanos(after))
    }

    /// When the next request ends.
    #[must_use]
    pub fn next(&self) -> Nanos {
        self.executing.iter().map(|(at, _)| *at).min().unwrap_or(Nanos::MAX)
    }

    /// How many requests it has.
    #[must_use]
    pub fn executing(&self) -> usize {
        self.executing.len()
    }

    /// Carries a request out that ends by `now`.
    ///
    /// # Errors
    /// The request is not what a client can have asked for.
    pub fn finish(&mut self, now: Nanos, buffers: &mut Buffers) -> Result<Option<Execute>, String> {
        let Some(index) = self.executing.iter().position(|(at, _)| *at <= now) else {
            return Ok(None);
        };
        let (_, execute) = self.executing.swap_remove(index);
        self.carry_out(&execute.request, buffers.bytes(execute.place))?;
        Ok(Some(execute))
    }

    /// Carries a request out, whose data are at the beginning of `data`.
    ///
    /// # Errors
    /// As for [`finish`](Self::finish).
    pub fn carry_out(&mut self, request: &Request, data: &mut [u8]) -> Result<(), String> {
        let blocks = self.range(request)?;
        let bytes = self.block_bytes as usize;
        match request.operation {
            Operation::Read => {
                for (at, block) in data.chunks_exact_mut(bytes).zip(&self.blocks[blocks]) {
                    if block.newest() != 0 {
                        write_stamp(at, block.newest());
                    }
                }
            }
            Operation::Flush => self.blocks.iter_mut().for_each(Block::flush),
            _ => {
                for (index, stamp) in self.stamps(request, data)?.into_iter().enumerate() {
                    let block = &mut self.blocks[blocks.start + index];
                    block.since.push(stamp);
                    if request.fua || self.is_write_through {
                        block.flush();
                    }
                }
            }
        }
        Ok(())
    }

    fn range(&self, request: &Request) -> Result<std::ops::Range<usize>, String> {
        let first = (request.offset_bytes / self.block_bytes) as usize;
        let range = first..first + (request.len_bytes / self.block_bytes) as usize;
        if range.end <= self.blocks.len() {
            Ok(range)
        } else {
            Err(format!("the store was given {request:?}"))
        }
    }

    /// The contents that a write gives its blocks.
    fn stamps(&self, request: &Request, data: &[u8]) -> Result<Vec<Stamp>, String> {
        let count = self.range(request)?.len();
        if request.operation != Operation::Write {
            return Ok(vec![0; count]);
        }
        let blocks = data.chunks_exact(self.block_bytes as usize).take(count);
        let torn = || format!("the store was given a torn block: {request:?}");
        blocks.map(|block| stamp_of(block).ok_or_else(torn)).collect()
    }

    /// The process that has given it these requests dies.
    pub fn kill(&mut self, buffers: &mut Buffers) {
        for (_, execute) in std::mem::take(&mut self.executing) {
            self.abandon(&execute.request, buffers.bytes(execute.place));
        }
    }

    /// The process that has given it this request has died: it is carried out, or not, in parts.
    pub fn abandon(&mut self, request: &Request, data: &[u8]) {
        if !request.operation.is_write() || self.random.once_in(2) {
            return;
        }
        let Ok(stamps) = self.stamps(request, data) else { return };
        let first = (request.offset_bytes / self.block_bytes) as usize;
        for (index, stamp) in stamps.into_iter().enumerate() {
            if !self.random.once_in(3) {
                self.blocks[first + index].since.push(stamp);
            }
        }
    }

    /// The power is cut: of what was written to a block since it was flushed, anything may be left.
    pub fn cut_power(&mut self, buffers: &mut Buffers) {
        self.kill(buffers);
        for block in &mut self.blocks {
            let kept = match self.random.below(3) {
                0 => 0,
                1 => block.since.len(),
                _ => self.random.below(block.since.len() as u64 + 1) as usize,
            };
            block.since.truncate(kept);
            block.flush();
        }
    }
}
