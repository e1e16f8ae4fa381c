//! The errors of a store, in the log.

use super::{Context, InFlight};
use crate::{BlockError, BlockRequest};

/// The label of log lines about a store's errors.
#[derive(Clone, Copy, Debug)]
pub struct QueueName<'a> {
    /// The device's name.
    pub device: &'a str,
    /// The queue's number.
    pub queue: u16,
}

impl<C: Context> InFlight<C> {
    /// Counts a request that the store has failed, and writes it to the log each time that their
    /// number has doubled: a failing disk must not turn the sidecore into a log writer.
    #[cold]
    pub fn log_error(&self, name: QueueName<'_>, request: &BlockRequest, error: BlockError) {
        self.stats.errors.add(1);
        let errors = self.stats.errors.get();
        if errors.is_power_of_two() {
            let QueueName { device, queue } = name;
            tracing::warn!(
                device,
                queue,
                operation = ?request.operation,
                offset_bytes = request.offset_bytes,
                len_bytes = request.len_bytes,
                errors,
                "the store failed a request: {error}"
            );
        }
    }
}
