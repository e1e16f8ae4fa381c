//! The part of a queue: from a request that has ended to the ring.

use std::sync::Arc;

use sidecore_block::{BlockRequest, Operation, RecordingStats};
use sidecore_recording::{Checksum, DataMode, Request};
use sidecore_spool::Producer;
use sidecore_units::Nanos;

use crate::entry::{Entry, WORDS, kind, outcome};
use crate::writer::Shared;

/// Bytes that are copied out of a guest's memory at a time: a multiple of eight.
const STEP_BYTES: usize = 4096;

/// Records the requests of a queue. Allocates nothing after its construction.
pub(crate) struct Recorder {
    /// `None` if there was no memory for the queue: its requests are missing in the file.
    ring: Option<Producer<WORDS>>,
    shared: Arc<Shared>,
    stats: Arc<RecordingStats>,
    data: DataMode,
    /// The sidecore's time at the recording's time 0.
    base: Nanos,
    /// Requests that were lost since the last one that was not.
    lost: u64,
    step: Box<[u8; STEP_BYTES]>,
}

impl Recorder {
    /// The part of one more queue.
    pub(crate) fn new(
        shared: Arc<Shared>,
        stats: Arc<RecordingStats>,
        data: DataMode,
        base: Nanos,
    ) -> Self {
        let ring = shared.open_queue();
        Self { ring, shared, stats, data, base, lost: 0, step: Box::new([0; STEP_BYTES]) }
    }

    /// Whether requests are recorded: the file takes more.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        !self.shared.has_ended()
    }

    /// Records a request that has ended at `now`.
    pub(crate) fn record(&mut self, request: &BlockRequest, now: Nanos) {
        let len_bytes = request.segments.len_bytes();
        let is_whole = len_bytes == request.len_bytes;
        let is_write = request.operation == Operation::Write && is_whole;
        let has_data = is_write && self.data == DataMode::Full;
        let has_checksum = match self.data {
            DataMode::None => false,
            _ if request.operation == Operation::Read => is_whole && request.result.is_ok(),
            DataMode::Checksum => is_write,
            // The writer computes it.
            DataMode::Full => false,
        };
        let data_bytes = if has_data { usize::try_from(len_bytes).ok() } else { Some(0) };
        let begun = self.ring.as_mut().zip(data_bytes).and_then(|(ring, bytes)| ring.begin(bytes));
        let Some(mut record) = begun else {
            self.lost = self.lost.saturating_add(1);
            self.stats.dropped.add(1);
            return;
        };
        let mut checksum = has_checksum.then(Checksum::new);
        let mut done = 0_u64;
        // Each byte of the guest's memory is read once: it may change at any time.
        while (has_data || has_checksum) && done < len_bytes {
            let count = len_bytes.saturating_sub(done).min(STEP_BYTES as u64);
            let part = usize::try_from(count).ok().and_then(|count| self.step.get_mut(..count));
            let Some(part) = part else { break };
            request.segments.copy_to_slice(done, part);
            if let Some(checksum) = &mut checksum {
                checksum.add(part);
            }
            if has_data {
                record.write(part);
            }
            done = done.saturating_add(count);
        }
        let taken_at = if request.taken_at == Nanos::ZERO { now } else { request.taken_at };
        let (outcome, errno) = outcome(request);
        let entry = Entry {
            request: Request {
                kind: kind(request),
                queue: 0,
                write_through: request.write_through,
                outcome,
                errno,
                checksum: checksum.map(|checksum| checksum.finish()),
                arrival_ns: taken_at.since(self.base).0,
                latency_ns: now.since(taken_at).0,
                offset_bytes: request.offset_bytes,
                len_bytes: request.len_bytes,
            },
            lost: std::mem::take(&mut self.lost),
        };
        record.commit(entry.encode());
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // In front of the ring, whose closing the writer sees.
        if self.ring.is_some() {
            self.shared.left();
        }
    }
}
