//! What channels and the hypervisor side say to each other.
//!
//! In the thesis these are registers and an interrupt (6.1): a channel that misses
//! sets MissAddress and MissSize and interrupts the hypervisor, which allocates,
//! updates the tree and writes RewalkTree. Here both are messages, so that one
//! function can have many misses at once.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use sidecore_block::BlockError;
use sidecore_extent::{BlockRange, Extent, FunctionId};
use sidecore_reactor::EventFd;

use crate::threads::Mail;

/// A request that waits in a channel, by its slot there.
pub(crate) type Slot = u32;

/// Where an answer goes.
#[derive(Clone)]
pub(crate) struct ReplyTo {
    pub(crate) sender: Sender<Reply>,
    pub(crate) wake: Arc<EventFd>,
    pub(crate) slot: Slot,
}

impl ReplyTo {
    /// Answers; false if the channel is gone. The signal comes first: one that came
    /// behind the last answer would keep an idle sidecore awake.
    pub(crate) fn reply(&self, answer: Answer) -> bool {
        self.wake.signal();
        self.sender.send(Reply { slot: self.slot, answer }).is_ok()
    }
}

/// What a channel asks of the hypervisor side.
pub(crate) struct Message {
    pub(crate) function: FunctionId,
    pub(crate) weight: u32,
    pub(crate) reply_to: ReplyTo,
    pub(crate) question: Question,
}

/// The question itself.
#[derive(Debug)]
pub(crate) enum Question {
    /// The mapping of `range` was pruned: regenerate some of it, from the start on.
    Regenerate {
        /// MissAddress and MissSize.
        range: BlockRange,
    },
    /// A write found no block of its own in `range`: a hole, or blocks that are
    /// shared. It covers all of it, except perhaps part of its first and last block.
    Allocate {
        /// MissAddress and MissSize.
        range: BlockRange,
        /// Whether it covers only a part of the first block.
        partial_head: bool,
        /// Whether it covers only a part of the last block.
        partial_tail: bool,
    },
    /// The data of a grant is where it belongs (or could not be written).
    Written {
        /// Which grant.
        grant: GrantId,
        /// Whether all of it was written.
        all: bool,
    },
    /// These blocks are not needed any more.
    Unmap {
        /// Which.
        range: BlockRange,
    },
    /// Make the mappings of all writes that have completed durable.
    Commit,
    /// Not a question: the store has failed a flush. There is no answer.
    FlushFailed,
    /// Nothing any more: let it try again. What a question becomes that found no space
    /// until the next commit.
    Retry,
}

/// Names a grant between its making and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct GrantId(pub(crate) u64);

/// An answer, and to whom.
pub(crate) struct Reply {
    pub(crate) slot: Slot,
    pub(crate) answer: Answer,
}

/// What the hypervisor side says.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Look again (RewalkTree): the tree knows more now, or there is space again.
    Rewalk,
    /// Write the first blocks of the miss here, then say so.
    Grant {
        /// Its name.
        grant: GrantId,
        /// The blocks it is for: the miss, or the first part of it.
        range: BlockRange,
        /// Where they lie, without gaps.
        extents: Vec<Extent>,
    },
    /// It is done.
    Done,
    /// It cannot be done.
    Failed(BlockError),
}

/// A channel's ends of both lines.
pub(crate) struct Line {
    pub(crate) function: FunctionId,
    pub(crate) weight: u32,
    pub(crate) to_hypervisor: Sender<Mail>,
    pub(crate) replies: Receiver<Reply>,
    pub(crate) reply_sender: Sender<Reply>,
    pub(crate) wake: Arc<EventFd>,
}

impl Line {
    /// Asks for `slot`; false if there is nobody to answer.
    pub(crate) fn ask(&self, slot: Slot, question: Question) -> bool {
        let reply_to = ReplyTo { sender: self.reply_sender.clone(), wake: Arc::clone(&self.wake), slot };
        let message = Message { function: self.function, weight: self.weight, reply_to, question };
        self.to_hypervisor.send(Mail::Message(message)).is_ok()
    }
}
