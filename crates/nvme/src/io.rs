//! I/O queues on sidecores.
//!
//! An [`IoQueue`] is one completion queue with the submission queues that complete into it (many to
//! one is legal, NVMe base 2.0, 3.3.1), and with a channel to the namespace's store. To follow a
//! command:
//!
//! 1. `queue.rs`, `take.rs`: a poll looks at the doorbells and takes commands, no more than there
//!    is room for completions;
//! 2. `command.rs`: the rules make a command a block request, or say what is wrong with it;
//! 3. `pointer.rs`: PRPs and SGLs become the request's memory;
//! 4. `steps.rs` and the files that it names: what one block request cannot do (Compare, Verify,
//!    Dataset Management, a read with bit buckets) in steps, with memory of our own that was set
//!    aside when the queue was started;
//! 5. `fused.rs`, `fence.rs`: Compare and Write as one, while no other queue of the controller is
//!    at the store;
//! 6. `finish.rs`, `completions.rs`: the completion queue's entry, and an interrupt if one is due;
//!    `errors.rs`: what is left in the error log.
//!
//! `control.rs` has what comes by mail. [`QueueSet`] sends it: it is a
//! [`QueueHost`](crate::QueueHost) over whatever runs the queues.

mod command;
mod compare;
mod completions;
mod control;
mod dataset;
mod doorbells;
mod errors;
mod fence;
mod finish;
mod fused;
mod origin;
mod outcome;
mod queue;
mod read_around;
mod set;
mod shared;
mod slow_path;
mod stats;
mod steps;
mod submission;
mod take;
mod verify;

pub use fused::COMPARE_AND_WRITE_BYTES;
pub use queue::IoQueue;
pub use set::{MakeQueue, QueueRunner, QueueSet, SendTask, Task};
pub use shared::IoOptions;
pub use stats::QueueStats;
