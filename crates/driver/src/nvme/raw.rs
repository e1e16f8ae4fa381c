//! A queue by hand, for tests that play a hostile host.

use sidecore_ring::nvme::Completion;

use super::queue::NvmeQueue;
use crate::error::ClientError;

impl NvmeQueue {
    /// Puts any 64 bytes into the submission queue; the controller sees them at the next
    /// [`NvmeQueue::publish`] or [`NvmeQueue::ring_tail`]. Their completion is to be taken with
    /// [`NvmeQueue::pop_raw`].
    ///
    /// # Errors
    /// The queue is full.
    pub fn post(&mut self, entry: &[u8; 64]) -> Result<(), ClientError> {
        if self.commands.push(entry) {
            return Ok(());
        }
        Err(ClientError::Request("the submission queue is full".to_owned()))
    }

    /// Writes any entry of the submission queue, also one that the controller owns.
    pub fn write_entry(&mut self, index: u32, entry: &[u8; 64]) {
        self.commands.write(index, entry);
    }

    /// Takes the next entry of the completion queue, whatever it completes.
    ///
    /// # Errors
    /// The controller's head is outside of what it was given.
    pub fn pop_raw(&mut self) -> Result<Option<Completion>, ClientError> {
        let Some(entry) = self.completions.pop() else { return Ok(None) };
        self.commands.set_head(entry.sq_head)?;
        Ok(Some(entry))
    }

    /// The tail and the head that the doorbells ought to have.
    #[must_use]
    pub fn positions(&self) -> (u32, u32) {
        (self.commands.tail(), self.completions.head())
    }

    /// Writes the submission queue's doorbell, with any value.
    ///
    /// # Errors
    /// The doorbell is a message, and the socket fails.
    pub fn ring_tail(&mut self, value: u32) -> Result<(), ClientError> {
        self.counters.kicks += u64::from(self.doorbells.ring_tail(value)?);
        Ok(())
    }

    /// Writes the completion queue's doorbell, with any value.
    ///
    /// # Errors
    /// As [`NvmeQueue::ring_tail`].
    pub fn ring_head(&mut self, value: u32) -> Result<(), ClientError> {
        self.counters.kicks += u64::from(self.doorbells.ring_head(value)?);
        Ok(())
    }
}
