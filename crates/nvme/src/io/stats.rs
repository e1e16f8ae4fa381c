//! What a queue counts.

use sidecore_telemetry::{Counter, Histogram};

/// One completion queue's counters, with those of the submission queues that complete into it. Its sidecore alone
/// writes them; anybody may read.
///
/// They live as long as the function, over any number of drivers.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Doorbell writes that were messages (exits, on hardware).
    pub kicks: Counter,
    /// Interrupts raised.
    pub calls: Counter,
    /// Times the queue was polled.
    pub polls: Counter,
    /// Polls that found nothing.
    pub empty_polls: Counter,
    /// Batches of commands taken.
    pub batches: Counter,
    /// Commands completed, whatever their status.
    pub requests: Counter,
    /// Of those, reads,
    pub reads: Counter,
    /// writes,
    pub writes: Counter,
    /// flushes,
    pub flushes: Counter,
    /// Dataset Management,
    pub discards: Counter,
    /// Write Zeroes,
    pub write_zeroes: Counter,
    /// compares,
    pub compares: Counter,
    /// and Verify.
    pub verifies: Counter,
    /// Commands that the store failed.
    pub errors: Counter,
    /// Commands that were refused: what is wrong with them is in their status.
    pub rejected: Counter,
    /// Doorbell values that the queue cannot have.
    pub invalid_doorbells: Counter,
    /// Bytes read from the store, also those that the host did not get (Compare, Verify).
    pub bytes_read: Counter,
    /// Bytes written to the store.
    pub bytes_written: Counter,
    /// From taking a command to its completion being visible to the guest.
    pub latency: Histogram,
}
