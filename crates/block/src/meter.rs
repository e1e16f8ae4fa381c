//! The counts of stages that meter.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_telemetry::counters;

use crate::sums::Sums;
use crate::{BlockRequest, Operation};

counters! {
    /// The counters of a metered channel. Its sidecore alone writes them, any thread may read them.
    ///
    /// They lie on cache lines that no other sidecore writes to.
    #[repr(align(128))]
    pub struct MeterStats;

    /// The counters of a meter at one moment: the sum over all channels that it ever had.
    pub struct MeterCounts;

    /// Reads that succeeded.
    pub reads: Counter = "reads_total",
    /// Writes that succeeded.
    pub writes: Counter = "writes_total",
    /// Flushes that succeeded.
    pub flushes: Counter = "flushes_total",
    /// Discards that succeeded.
    pub discards: Counter = "discards_total",
    /// Writes of zeros that succeeded.
    pub write_zeroes: Counter = "write_zeroes_total",
    /// Bytes read.
    pub bytes_read: Counter = "read_bytes_total",
    /// Bytes written.
    pub bytes_written: Counter = "written_bytes_total",
    /// Bytes discarded.
    pub bytes_discarded: Counter = "discarded_bytes_total",
    /// Bytes that were written as zeros without data.
    pub bytes_zeroed: Counter = "zeroed_bytes_total",
    /// Requests that failed, of any kind. They count nowhere else.
    pub errors: Counter = "errors_total",
}

impl MeterStats {
    /// Counts requests that have ended. Only the channel's sidecore may call it.
    #[inline]
    pub fn count(&self, completed: &[Box<BlockRequest>]) {
        for request in completed {
            let (requests, bytes) = match request.operation {
                _ if request.result.is_err() => (&self.errors, None),
                Operation::Read => (&self.reads, Some(&self.bytes_read)),
                Operation::Write => (&self.writes, Some(&self.bytes_written)),
                Operation::Flush => (&self.flushes, None),
                Operation::Discard => (&self.discards, Some(&self.bytes_discarded)),
                Operation::WriteZeroes { .. } => (&self.write_zeroes, Some(&self.bytes_zeroed)),
            };
            requests.add(1);
            if let Some(bytes) = bytes {
                bytes.add(request.len_bytes);
            }
        }
    }
}

/// The counts of a stage that meters, for reports.
#[derive(Debug)]
pub struct Meter {
    name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    channels: Sums<MeterStats>,
    problem: Option<String>,
}

impl Meter {
    /// A meter that has counted nothing. Meters of one name are reported as their sum.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), state: Mutex::default() }
    }

    /// The name in reports.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The counters for one more channel. Their last owner but the meter is the channel.
    #[must_use]
    pub fn open_channel(&self) -> Arc<MeterStats> {
        self.lock().channels.open()
    }

    /// The counts of now.
    #[must_use]
    pub fn counts(&self) -> MeterCounts {
        self.lock().channels.counts()
    }

    /// Why the counts are not recorded as the meter was set up to, if they are not.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.lock().problem.clone()
    }

    /// Sets the [problem](Self::problem). Returns the one before.
    pub fn set_problem(&self, problem: Option<String>) -> Option<String> {
        std::mem::replace(&mut self.lock().problem, problem)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockError;

    fn request(
        operation: Operation,
        len_bytes: u64,
        result: Result<(), BlockError>,
    ) -> Box<BlockRequest> {
        let mut request = BlockRequest::blank(0);
        (request.operation, request.len_bytes, request.result) = (operation, len_bytes, result);
        request
    }

    #[test]
    fn each_kind_has_its_counters_and_failures_have_one() {
        let meter = Meter::new("disk");
        let channel = meter.open_channel();
        channel.count(&[
            request(Operation::Read, 1, Ok(())),
            request(Operation::Write, 2, Ok(())),
            request(Operation::Flush, 0, Ok(())),
            request(Operation::Discard, 3, Ok(())),
            request(Operation::WriteZeroes { may_unmap: true }, 4, Ok(())),
            request(Operation::WriteZeroes { may_unmap: false }, 8, Ok(())),
            request(Operation::Write, 64, Err(BlockError::EIO)),
        ]);
        let counted = MeterCounts {
            reads: 1,
            writes: 1,
            flushes: 1,
            discards: 1,
            write_zeroes: 2,
            bytes_read: 1,
            bytes_written: 2,
            bytes_discarded: 3,
            bytes_zeroed: 12,
            errors: 1,
        };
        assert_eq!(meter.counts(), counted);
    }

    #[test]
    fn channels_that_are_closed_are_counted_once_and_forgotten() {
        let meter = Meter::new("disk");
        let first = meter.open_channel();
        first.count(&[request(Operation::Read, 5, Ok(()))]);
        let second = meter.open_channel();
        second.count(&[request(Operation::Read, 7, Ok(()))]);
        assert_eq!(meter.counts().bytes_read, 12);
        drop(first);
        for _ in 0..2 {
            assert_eq!((meter.counts().reads, meter.counts().bytes_read), (2, 12));
        }
        assert_eq!(meter.lock().channels.open.len(), 1);
        second.count(&[request(Operation::Read, 1, Ok(()))]);
        drop(second);
        assert_eq!((meter.counts().reads, meter.counts().bytes_read), (3, 13));
        assert!(meter.lock().channels.open.is_empty());
    }
}
