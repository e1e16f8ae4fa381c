//! The channel.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockError, BlockRequest, Next, Operation, Readiness, SplitTable,
};
use sidecore_luks::Tweaks;
use sidecore_memory::GuestMemory;
use sidecore_units::Nanos;

use crate::parts::{PART_BYTES, Parts};
use crate::store::Cipher;

/// Bytes that are encrypted at a time, in the first-level cache: the largest sector.
const STEP_BYTES: usize = 4096;
/// Bytes that are encrypted, and that are decrypted, in one poll: about 60 us of work.
const POLL_BYTES: u64 = 256 << 10;
/// The fewest parts at the store, so that a long request has several.
const MIN_PARTS: usize = 8;
/// The unit of sector numbers for the cipher.
const UNIT_BYTES: u64 = 512;

/// The copy and the cipher of a part's data.
struct Worker {
    cipher: Arc<Cipher>,
    step: Box<[u8; STEP_BYTES]>,
    tweaks: Tweaks,
}

impl Worker {
    fn each_step(
        &mut self,
        (offset_bytes, len_bytes): (u64, u64),
        carry_out: impl Fn(&Cipher, u64, u64, &mut [u8], &mut Tweaks) -> bool,
    ) -> Result<(), BlockError> {
        let mut done = 0_u64;
        while done < len_bytes {
            let count = len_bytes.saturating_sub(done).min(STEP_BYTES as u64);
            let data = usize::try_from(count).ok().and_then(|count| self.step.get_mut(..count));
            let data = data.ok_or(BlockError::EIO)?;
            let units = offset_bytes.saturating_add(done) / UNIT_BYTES;
            let unit = self.cipher.segment.first_unit.wrapping_add(units);
            if !carry_out(&self.cipher, unit, done, data, &mut self.tweaks) {
                return Err(BlockError::EIO);
            }
            done = done.saturating_add(count);
        }
        Ok(())
    }

    /// Encrypts the data of a request from `skip_bytes` on into the pages of a part.
    fn encrypt(
        &mut self,
        request: &BlockRequest,
        skip_bytes: u64,
        part: &BlockRequest,
    ) -> Result<(), BlockError> {
        let offset_bytes = request.offset_bytes.saturating_add(skip_bytes);
        self.each_step((offset_bytes, part.len_bytes), |cipher, unit, done, data, tweaks| {
            let from = skip_bytes.saturating_add(done);
            request.segments.copy_to_slice(from, data) == data.len()
                && cipher.xts.encrypt(unit, cipher.segment.sector, data, tweaks).is_ok()
                && part.segments.copy_from_slice(done, data) == data.len()
        })
    }

    /// Decrypts the pages of a part into a request from `skip_bytes` on.
    fn decrypt(
        &mut self,
        request: &BlockRequest,
        skip_bytes: u64,
        part: &BlockRequest,
    ) -> Result<(), BlockError> {
        let offset_bytes = request.offset_bytes.saturating_add(skip_bytes);
        self.each_step((offset_bytes, part.len_bytes), |cipher, unit, done, data, tweaks| {
            let to = skip_bytes.saturating_add(done);
            part.segments.copy_to_slice(done, data) == data.len()
                && cipher.xts.decrypt(unit, cipher.segment.sector, data, tweaks).is_ok()
                && request.segments.copy_from_slice(to, data) == data.len()
        })
    }
}

/// A queue's path through the cipher.
pub(crate) struct EncryptChannel {
    inner: Box<dyn BlockChannel>,
    worker: Worker,
    table: SplitTable,
    parts: Parts,
    depth: usize,
    /// Parts for which the store had no room yet.
    outbound: Batch,
    /// Parts that came back and are not decrypted yet; the next one is at the end.
    inbound: Batch,
    /// Kept for its capacity.
    arrived: Batch,
    ended: Batch,
}

impl EncryptChannel {
    /// A channel in front of the one that `open` opens with the depth it is given.
    pub(crate) fn open(
        cipher: Arc<Cipher>,
        depth: usize,
        open: impl FnOnce(usize) -> io::Result<Box<dyn BlockChannel>>,
    ) -> io::Result<Self> {
        let count = depth.max(MIN_PARTS);
        let parts = Parts::new(count)?;
        let mut inner = open(count)?;
        inner.attach_memory(parts.memory())?;
        Ok(Self {
            inner,
            worker: Worker { cipher, step: Box::new([0; STEP_BYTES]), tweaks: Tweaks::default() },
            table: SplitTable::new(depth),
            parts,
            depth,
            outbound: Batch::with_capacity(count),
            inbound: Batch::with_capacity(count),
            arrived: Batch::with_capacity(count),
            ended: Batch::with_capacity(depth),
        })
    }

    /// Starts parts of queued requests, as many as there are pages and time for.
    fn push(&mut self, now: Nanos) {
        let mut encrypted_bytes = 0_u64;
        while self.parts.has_free() && encrypted_bytes < POLL_BYTES {
            let Some((place, skip_bytes, len_bytes)) = self.table.next_part(PART_BYTES) else {
                break;
            };
            let Some(request) = self.table.request(place) else { continue };
            let has_data = matches!(request.operation, Operation::Read | Operation::Write);
            let page_bytes = if has_data { len_bytes } else { 0 };
            let Some(mut part) = self.parts.take(place, skip_bytes, page_bytes) else { break };
            let data_bytes = self.worker.cipher.segment.offset_bytes;
            part.operation = request.operation;
            part.offset_bytes = match request.operation {
                Operation::Flush => 0,
                _ => request.offset_bytes.saturating_add(skip_bytes).saturating_add(data_bytes),
            };
            part.len_bytes = len_bytes;
            part.write_through = request.write_through;
            part.taken_at = request.taken_at;
            if request.operation == Operation::Write {
                encrypted_bytes = encrypted_bytes.saturating_add(len_bytes);
                if let Err(error) = self.worker.encrypt(request, skip_bytes, &part) {
                    self.parts.give_back(part);
                    self.ended.extend(self.table.part_ended(place, Err(error)));
                    continue;
                }
            }
            self.outbound.push(part);
        }
        if !self.outbound.is_empty() {
            self.inner.submit(now, &mut self.outbound);
        }
    }

    /// Ends parts that the store has handed back.
    fn pull(&mut self) {
        let mut decrypted_bytes = 0_u64;
        while decrypted_bytes < POLL_BYTES
            && let Some(part) = self.inbound.pop()
        {
            let Some((place, skip_bytes)) = self.parts.origin(&part) else { continue };
            let mut result = part.result;
            if result.is_ok()
                && part.operation == Operation::Read
                && let Some(request) = self.table.request(place)
            {
                decrypted_bytes = decrypted_bytes.saturating_add(part.len_bytes);
                result = self.worker.decrypt(request, skip_bytes, &part);
            }
            self.parts.give_back(part);
            self.ended.extend(self.table.part_ended(place, result));
        }
    }
}

impl BlockChannel for EncryptChannel {
    /// The store only sees the pages of parts, which were attached when the channel was opened.
    fn attach_memory(&mut self, _memory: &GuestMemory) -> io::Result<()> {
        Ok(())
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.ended.len().saturating_add(self.table.len()));
        let room = room.min(self.table.room()).min(batch.len());
        for mut request in batch.drain(..room) {
            let verdict = self.worker.cipher.check(&request);
            if verdict.is_err() || (request.len_bytes == 0 && request.operation != Operation::Flush)
            {
                request.result = verdict;
                self.ended.push(request);
            } else if let Err(mut request) = self.table.queue(request) {
                request.result = Err(BlockError::EIO);
                self.ended.push(request);
            }
        }
        self.push(now);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        if self.inbound.is_empty() {
            // Also without requests: the store may have a change to take over, or a signal to take.
            self.inner.poll(now, &mut self.arrived);
            // The last one is decrypted first.
            self.inbound.extend(self.arrived.drain(..).rev());
        }
        if !self.table.is_empty() {
            self.pull();
            self.push(now);
        }
        completed.append(&mut self.ended);
    }

    fn takes_write_through(&self) -> bool {
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        let has_work = !self.ended.is_empty()
            || !self.inbound.is_empty()
            || (self.table.queued() > 0 && self.parts.has_free());
        let next = if has_work { Next::Now } else { self.inner.readiness().next };
        Readiness { in_flight: self.table.len().saturating_add(self.ended.len()), next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
