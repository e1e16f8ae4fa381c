//! The common interface of the queues of both front ends, for programs that drive either.

use std::fmt::Debug;
use std::time::Duration;

use sidecore_units::Sector;

use crate::error::ClientError;
use crate::nvme::{NvmeCompletion, NvmeQueue};
use crate::options::Notify;
use crate::queue::{BlkQueue, Counters};
use crate::request::{Completion, Slot, Status};

/// A queue of either front end. Everything is resolved at compile time: both can run the same loop.
pub trait Queue {
    /// The result of a request.
    type Completion: Copy + Debug;
    /// The slot of a completion, and whether the request succeeded.
    fn outcome(completion: Self::Completion) -> (Slot, bool);
    /// Takes a free slot.
    fn take_slot(&mut self) -> Option<Slot>;
    /// Gives it back.
    fn release_slot(&mut self, slot: Slot);
    /// Prepares a read.
    ///
    /// # Errors
    /// The slot or the place is not one.
    fn submit_read(&mut self, slot: Slot, sector: Sector, bytes: u32) -> Result<(), ClientError>;
    /// Prepares a write.
    ///
    /// # Errors
    /// The slot or the place is not one.
    fn submit_write(&mut self, slot: Slot, sector: Sector, bytes: u32) -> Result<(), ClientError>;
    /// Prepares to make what was written durable.
    ///
    /// # Errors
    /// The slot is not one.
    fn submit_flush(&mut self, slot: Slot) -> Result<(), ClientError>;
    /// Shows the device what was prepared.
    ///
    /// # Errors
    /// It cannot be told.
    fn publish(&mut self) -> Result<(), ClientError>;
    /// Appends what has completed, and returns how much that was.
    ///
    /// # Errors
    /// The device completes what it was not given.
    fn poll_completions(
        &mut self,
        completions: &mut Vec<Self::Completion>,
    ) -> Result<usize, ClientError>;
    /// Waits for completions; false if there was none in time.
    ///
    /// # Errors
    /// It cannot wait.
    fn wait(&mut self, timeout: Duration) -> Result<bool, ClientError>;
    /// Copies into a slot's buffer.
    fn write_data(&mut self, slot: Slot, offset_bytes: u32, from: &[u8]) -> usize;
    /// Reads all of a slot's buffer.
    fn sum_data(&self, slot: Slot) -> u64;
    /// Takes the interrupts that no wait has taken.
    fn take_calls(&mut self) -> u64;
    /// The counts so far.
    fn counters(&self) -> Counters;
    /// Requests that are with the device.
    fn in_flight(&self) -> u16;
    /// How it learns of completions.
    fn notify(&self) -> Notify;
}

macro_rules! queue {
    ($queue:ty, $completion:ty, $is_ok:expr) => {
        impl Queue for $queue {
            type Completion = $completion;
            #[inline(always)]
            fn outcome(completion: $completion) -> (Slot, bool) {
                let is_ok: fn($completion) -> bool = $is_ok;
                (completion.slot, is_ok(completion))
            }
            #[inline(always)]
            fn take_slot(&mut self) -> Option<Slot> {
                <$queue>::take_slot(self)
            }
            #[inline(always)]
            fn release_slot(&mut self, slot: Slot) {
                <$queue>::release_slot(self, slot);
            }
            #[inline(always)]
            fn submit_read(
                &mut self,
                slot: Slot,
                sector: Sector,
                bytes: u32,
            ) -> Result<(), ClientError> {
                <$queue>::submit_read(self, slot, sector, bytes)
            }
            #[inline(always)]
            fn submit_write(
                &mut self,
                slot: Slot,
                sector: Sector,
                bytes: u32,
            ) -> Result<(), ClientError> {
                <$queue>::submit_write(self, slot, sector, bytes)
            }
            #[inline(always)]
            fn submit_flush(&mut self, slot: Slot) -> Result<(), ClientError> {
                <$queue>::submit_flush(self, slot)
            }
            #[inline(always)]
            fn publish(&mut self) -> Result<(), ClientError> {
                <$queue>::publish(self)
            }
            #[inline(always)]
            fn poll_completions(
                &mut self,
                completions: &mut Vec<$completion>,
            ) -> Result<usize, ClientError> {
                <$queue>::poll_completions(self, completions)
            }
            #[inline(always)]
            fn wait(&mut self, timeout: Duration) -> Result<bool, ClientError> {
                <$queue>::wait(self, timeout)
            }
            #[inline(always)]
            fn write_data(&mut self, slot: Slot, offset_bytes: u32, from: &[u8]) -> usize {
                <$queue>::write_data(self, slot, offset_bytes, from)
            }
            #[inline(always)]
            fn sum_data(&self, slot: Slot) -> u64 {
                <$queue>::sum_data(self, slot)
            }
            #[inline(always)]
            fn take_calls(&mut self) -> u64 {
                <$queue>::take_calls(self)
            }
            #[inline(always)]
            fn counters(&self) -> Counters {
                <$queue>::counters(self)
            }
            #[inline(always)]
            fn in_flight(&self) -> u16 {
                <$queue>::in_flight(self)
            }
            #[inline(always)]
            fn notify(&self) -> Notify {
                <$queue>::notify(self)
            }
        }
    };
}

queue!(BlkQueue, Completion, |completion| completion.status == Status::Ok);
queue!(NvmeQueue, NvmeCompletion, |completion| completion.status.is_ok());
