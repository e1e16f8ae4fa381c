//! Messages between channels and the hypervisor side.
//!
//! In the thesis these are registers and an interrupt (6.1): a channel that misses sets MissAddress
//! and MissSize and interrupts the hypervisor, which allocates, updates the tree and writes
//! RewalkTree. Here both are messages, so that one function can have many misses at once.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use sidecore_block::BlockError;
use sidecore_extent::{BlockRange, Extent, FunctionId};
use sidecore_reactor::EventFd;

use crate::threads::Mail;

/// The number of a channel's slot, in which a request waits.
pub(crate) type Slot = u32;

/// The destination of an answer.
#[derive(Clone)]
pub(crate) struct ReplyTo {
    pub(crate) sender: Sender<Reply>,
    pub(crate) wake: Arc<EventFd>,
    pub(crate) slot: Slot,
}

impl ReplyTo {
    /// Sends the answer; false if the channel is gone. The signal comes first: a signal after the
    /// last answer would keep an idle sidecore awake.
    pub(crate) fn reply(&self, answer: Answer) -> bool {
        self.wake.signal();
        self.sender.send(Reply { slot: self.slot, answer }).is_ok()
    }
}

/// A channel's message to the hypervisor side.
pub(crate) struct Message {
    pub(crate) function: FunctionId,
    pub(crate) weight: u32,
    pub(crate) reply_to: ReplyTo,
    pub(crate) question: Question,
}

/// The request for the hypervisor side.
#[derive(Debug)]
pub(crate) enum Question {
    /// The mapping of `range` was pruned: regenerate some of it, from its start.
    Regenerate {
        /// MissAddress and MissSize.
        range: BlockRange,
    },
    /// A write found no block of its own in `range`: a hole, or shared blocks. The write covers all
    /// of it, except perhaps part of its first and last block.
    Allocate {
        /// MissAddress and MissSize.
        range: BlockRange,
        /// Whether the write covers only a part of the first block.
        partial_head: bool,
        /// Whether the write covers only a part of the last block.
        partial_tail: bool,
    },
    /// The writes to a grant's blocks have ended.
    Written {
        grant: GrantId,
        /// Whether all of them succeeded.
        all: bool,
    },
    /// Free the blocks of `range`: a guest has discarded them.
    Unmap { range: BlockRange },
    /// Make the mappings of all writes that have completed durable.
    Commit,
    /// A message without an answer: the store has failed a flush.
    FlushFailed,
    /// Retry after the next commit: replaces a request that found no space.
    Retry,
}

/// Identifies a grant until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct GrantId(pub(crate) u64);

/// An answer, and the slot that it is for.
pub(crate) struct Reply {
    pub(crate) slot: Slot,
    pub(crate) answer: Answer,
}

/// The answer of the hypervisor side.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Translate again (RewalkTree): the tree has new mappings, or there is space again.
    Rewalk,
    /// Write the first blocks of the miss to these extents, then send [`Question::Written`].
    Grant {
        grant: GrantId,
        /// The blocks that the grant is for: the miss, or its first part.
        range: BlockRange,
        /// Their physical places, without gaps.
        extents: Vec<Extent>,
    },
    /// The operation is done.
    Done,
    /// The operation failed.
    Failed(BlockError),
}

/// A channel's ends of the queues to and from the hypervisor side.
pub(crate) struct Line {
    pub(crate) function: FunctionId,
    pub(crate) weight: u32,
    pub(crate) to_hypervisor: Sender<Mail>,
    pub(crate) replies: Receiver<Reply>,
    pub(crate) reply_sender: Sender<Reply>,
    pub(crate) wake: Arc<EventFd>,
}

impl Line {
    /// Sends a question for `slot`; false if the hypervisor side is gone.
    pub(crate) fn ask(&self, slot: Slot, question: Question) -> bool {
        let reply_to =
            ReplyTo { sender: self.reply_sender.clone(), wake: Arc::clone(&self.wake), slot };
        let message = Message { function: self.function, weight: self.weight, reply_to, question };
        self.to_hypervisor.send(Mail::Message(message)).is_ok()
    }
}
