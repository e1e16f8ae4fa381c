//! The counters of a request queue, whatever front end it belongs to.

use sidecore_telemetry::counters;

use crate::{BlockRequest, Operation};

counters! {
    /// The counters of a queue. Its sidecore alone writes them, any thread may read them.
    ///
    /// They live as long as the device, over any number of stops and starts.
    pub struct QueueStats;

    /// The counters of a queue at one moment, or the sum over several queues.
    pub struct QueueCounts;

    /// Requests completed, failed ones included.
    pub requests: Counter = "requests_total",
    /// Reads completed.
    pub reads: Counter = "reads_total",
    /// Writes completed.
    pub writes: Counter = "writes_total",
    /// Flushes completed.
    pub flushes: Counter = "flushes_total",
    /// Discards completed.
    pub discards: Counter = "discards_total",
    /// Writes of zeros completed.
    pub write_zeroes: Counter = "write_zeroes_total",
    /// Bytes that the guest read.
    pub bytes_read: Counter = "read_bytes_total",
    /// Bytes that the guest wrote.
    pub bytes_written: Counter = "written_bytes_total",
    /// Requests that the store failed.
    pub errors: Counter = "errors_total",
    /// Requests refused before the store: malformed, out of bounds, misaligned, unsupported.
    pub rejected: Counter = "rejected_total",
    /// Kicks by the guest that arrived: exits, on hardware.
    pub kicks: Counter = "kicks_total",
    /// Interrupts sent to the guest.
    pub interrupts: Counter = "interrupts_total",
    /// Batches given to the store: requests per batch is how well it overlaps.
    pub batches: Counter = "batches_total",
    /// Polls of the ring.
    pub polls: Counter = "polls_total",
    /// Polls of the ring that found nothing.
    pub empty_polls: Counter = "empty_polls_total",
    /// System calls that exchange requests and completions with this host's kernel, of devices with
    /// `front_end = "ublk"`.
    pub enters: Counter = "enters_total",
    histogram {
        /// From taking a request off the ring to completing it.
        pub latency as latency_ns = "latency",
    }
}

impl QueueStats {
    /// Counts a request that the store has answered, by its kind.
    #[inline]
    pub fn count(&self, request: &BlockRequest) {
        match request.operation {
            Operation::Read => {
                self.reads.add(1);
                self.bytes_read.add(request.len_bytes);
            }
            Operation::Write => {
                self.writes.add(1);
                self.bytes_written.add(request.len_bytes);
            }
            Operation::Flush => self.flushes.add(1),
            Operation::Discard => self.discards.add(1),
            Operation::WriteZeroes { .. } => self.write_zeroes.add(1),
        }
    }
}
