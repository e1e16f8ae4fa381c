//! The queues of NVMe (NVMe base 2.0, 3.3), the controller's side; the host's is
//! [`crate::driver::nvme`].
//!
//! * [`SubmissionQueue`]: commands of 64 bytes, which the host writes and announces by moving the
//!   tail doorbell.
//! * [`CompletionQueue`]: entries of 16 bytes, which the controller writes and whose phase tag says
//!   that they are new; the host gives them back by moving the head doorbell.
//! * [`Doorbells`]: where hosts write their doorbells if the pages are mapped: memory of ours.
//! * [`ShadowDoorbells`]: where they write them if they are not: memory of the guest's.
//!
//! The host is trusted with nothing: each word of its is read once, a doorbell value that a queue
//! cannot have is a [`DoorbellError`] and changes nothing, and where a queue lies is checked
//! against the guest's memory when it is made and whenever that memory changes. A queue that a new
//! table has not got is *unbound*: it keeps its place and its position, holds no memory, and does
//! nothing until a later table has it.
//!
//! Nothing here allocates, except where a queue or a doorbell area is made.

mod completion;
mod doorbells;
mod place;
mod shadow;
mod submission;

#[cfg(test)]
mod tests;

pub use completion::{Completion, CompletionPosition, CompletionQueue};
pub use doorbells::{DoorbellStride, Doorbells};
pub use shadow::ShadowDoorbells;
pub use submission::SubmissionQueue;

/// A doorbell value that a queue cannot have: Invalid Doorbell Write Value (NVMe base 2.0, figure
/// 147). The queue is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DoorbellError {
    /// There is no such entry.
    #[error("doorbell value {value} is outside a queue of {entries} entries")]
    OutOfRange {
        /// The doorbell value written.
        value: u32,
        /// Entries of the queue.
        entries: u32,
    },
    /// It is past the other end of the queue: more commands than there is room for, or more
    /// completions taken than were posted.
    #[error(
        "doorbell value {value} moves by {moved} entries, {room} at most are there to be moved over"
    )]
    Overrun {
        /// The doorbell value written.
        value: u32,
        /// How far that is from the value before.
        moved: u32,
        /// How far it could have been.
        room: u32,
    },
}
