//! A queue pair without a socket, for a controller in the same process: measurements of the queues
//! alone.

use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_ring::driver::nvme::DoorbellWords;
use sidecore_units::SECTOR_BYTES;

use super::doorbells::QueueDoorbells;
use super::identify::NvmeNamespaceInfo;
use super::options::NvmeOptions;
use super::plan::{PAGE, Plan};
use super::queue::NvmeQueue;
use super::registers::NvmeCapabilities;
use crate::arena::Arena;
use crate::error::ClientError;

/// Most entries of a queue, counted from 0 (CAP.MQES): more than any plan asks for.
const CAPABILITIES: NvmeCapabilities = NvmeCapabilities(0xffff);

/// Both ends of one queue pair, whose number is 1.
#[derive(Debug)]
pub struct NvmeLoopback {
    /// The host's end.
    pub queue: NvmeQueue,
    /// The memory that the queues and all buffers are in.
    pub memory: GuestMemory,
    /// Where the submission queue begins, and its entries.
    pub commands: (GuestAddress, u32),
    /// Where the completion queue begins, and its entries.
    pub completions: (GuestAddress, u32),
    /// The submission queue's tail doorbell, at offset 0.
    pub tail: DoorbellWords,
}

impl NvmeLoopback {
    /// A fresh queue pair, and a namespace of 512-byte blocks without an end. The number of queues
    /// is always one.
    ///
    /// # Errors
    /// There is not enough memory, or the options contradict themselves.
    pub fn new(options: &NvmeOptions) -> Result<Self, ClientError> {
        let options = NvmeOptions { queues: 1, ..options.clone() };
        let plan = Plan::new(&options, CAPABILITIES)?;
        let mut arena =
            Arena::new(plan.arena_bytes(&options) + 2 * PAGE as u64, options.huge_pages)?;
        let missing = || ClientError::Options("no queue".to_owned());
        let parts = plan.lay_out(&mut arena, &options)?.queues.pop().ok_or_else(missing)?;
        let (tail, head) = (arena.give(PAGE)?, arena.give(PAGE)?);
        let doorbells = || -> Result<QueueDoorbells, ClientError> {
            let (tail, head) = (
                DoorbellWords::new(tail.window.clone())?,
                DoorbellWords::new(head.window.clone())?,
            );
            Ok(QueueDoorbells::in_memory(tail, head))
        };
        let mut queue = NvmeQueue::new(1, parts, &plan, &options, doorbells()?, None)?;
        let namespace = NvmeNamespaceInfo {
            id: 1,
            blocks: u64::MAX / SECTOR_BYTES,
            capacity_blocks: u64::MAX / SECTOR_BYTES,
            used_blocks: 0,
            block_bytes: 512,
            metadata_bytes: 0,
            nguid: [0; 16],
            eui64: [0; 8],
        };
        queue.restart(doorbells()?, &namespace);
        let at = queue.addresses();
        Ok(Self {
            queue,
            memory: arena.memory().clone(),
            commands: (GuestAddress(at.commands), at.command_entries),
            completions: (GuestAddress(at.completions), at.completion_entries),
            tail: DoorbellWords::new(tail.window)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use sidecore_ring::nvme::{Completion, CompletionQueue, SubmissionQueue};
    use sidecore_units::Sector;

    use super::*;

    #[test]
    fn a_controller_in_the_same_process_answers() {
        let options = NvmeOptions { slots: 4, huge_pages: false, ..NvmeOptions::default() };
        let NvmeLoopback { mut queue, memory, commands, completions, tail } =
            NvmeLoopback::new(&options).unwrap();
        let mut taken = SubmissionQueue::new(&memory, commands.0, commands.1, 0).unwrap();
        let mut answers = CompletionQueue::new(&memory, completions.0, completions.1).unwrap();
        let slot = queue.take_slot().unwrap();
        queue.submit_read(slot, Sector(8), 4096).unwrap();
        assert_eq!(tail.load(0), 0, "not shown yet");
        queue.publish().unwrap();
        assert_eq!((tail.load(0), queue.counters().kicks), (1, 0));
        taken.set_tail(tail.load(0)).unwrap();
        let command = taken.pop().unwrap();
        let command_id = u16::from_le_bytes([command[2], command[3]]);
        let sq_head = taken.head();
        assert!(answers.push(Completion {
            sq_head,
            sq_id: 1,
            command_id,
            ..Completion::default()
        }));
        let mut completed = Vec::new();
        assert_eq!(queue.poll_completions(&mut completed).unwrap(), 1);
        assert!(completed[0].slot == slot && completed[0].status.is_ok());
    }
}
