//! What a queue counts.

use sidecore_telemetry::{Counter, Histogram};

/// One queue's counters. Its sidecore alone writes them; anybody may read.
///
/// They live as long as the device, over any number of stops and starts.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Kicks received from the guest (exits, on hardware).
    pub kicks: Counter,
    /// Calls raised to the guest (interrupts, on hardware).
    pub calls: Counter,
    /// Times the queue was polled.
    pub polls: Counter,
    /// Polls that found nothing.
    pub empty_polls: Counter,
    /// Batches of requests taken.
    pub batches: Counter,
    /// Requests completed, whatever their status.
    pub requests: Counter,
    /// Of those, reads,
    pub reads: Counter,
    /// writes,
    pub writes: Counter,
    /// flushes,
    pub flushes: Counter,
    /// discards,
    pub discards: Counter,
    /// and write-zeroes requests.
    pub write_zeroes: Counter,
    /// Requests that the store failed.
    pub errors: Counter,
    /// Requests that the front end refused: unsupported, or malformed in a way
    /// that the specification answers with a status.
    pub rejected: Counter,
    /// Bytes read from the store.
    pub bytes_read: Counter,
    /// Bytes written to the store.
    pub bytes_written: Counter,
    /// From taking a request to its completion being visible to the guest.
    pub latency: Histogram,
}
