//! Messages to the keeper.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use sidecore_block::{BlockDevice, BlockError};

use crate::epoch::StoreId;
use crate::error::MirrorError;
use crate::legs::LegSet;

/// See the module.
pub(crate) enum Message {
    /// A write waits for these regions, from the first one to that behind the last.
    Open(usize, usize),
    /// A leg has failed a write or a flush.
    Failed(usize, BlockError),
    /// A write that failed may have reached the leg that is copied to: these regions are copied
    /// again.
    Differs(usize, usize),
    /// An operator's command, and the place of its answer.
    Command(Command, Sender<Result<(), MirrorError>>),
}

/// A change of the legs.
pub(crate) enum Command {
    /// A leg of the mirror is there again.
    Attach(Arc<dyn BlockDevice>),
    /// A store becomes a leg with this number, and is overwritten.
    Add((usize, StoreId), Arc<dyn BlockDevice>),
    /// A leg goes for good.
    Remove(usize),
    /// This leg is read while it is in sync.
    Prefer(usize),
    /// Half of the legs goes on without these.
    Permit(LegSet),
    /// Bytes of one leg are written to another.
    Repair { from: usize, to: usize, offset_bytes: u64, len_bytes: u64 },
    /// The last one: no queue is open any more.
    Close,
}
