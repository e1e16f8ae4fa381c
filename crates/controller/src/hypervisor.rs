//! The hypervisor side of a controller: the root filesystem and the trees made from it (thesis 5.2,
//! 5.3).
//!
//! Sidecores never execute this code. They send [questions](crate::mail::Question), and the
//! [`threads`](crate::threads) answer them with this module. One lock protects all state; it is
//! held for work in memory and for reading metadata that is not cached. Guest data is copied, and
//! transactions are written, without the lock.

mod commit;
mod grants;
mod miss;
mod reclaim;
mod withheld;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::BlockError;
use sidecore_extent::{BlockRange, ExtentTree, FunctionId, NodeMemory};
use sidecore_volume::{Disk, VolumeError, VolumeId, Volumes};

pub(crate) use commit::{CommitQueue, NextCommit};
use grants::Grants;
pub(crate) use reclaim::Limbo;

use crate::epochs::{Epoch, Epochs};
use crate::events::Events;
use crate::function::{Function, VolumeState};
use crate::mail::{Answer, Message, Question};
use crate::options::Ownership;
use crate::stats::HypervisorStats;

/// The hypervisor side of one controller.
pub(crate) struct Hypervisor {
    pub(crate) name: String,
    pub(crate) memory: Arc<NodeMemory>,
    pub(crate) epochs: Arc<Epochs>,
    pub(crate) events: Events,
    pub(crate) commits: CommitQueue,
    /// The last durable transaction.
    pub(crate) durable: Arc<AtomicU64>,
    pub(crate) stats: HypervisorStats,
    /// Changes are answered only when they are durable: there is no log to keep them if the process
    /// dies.
    answers_when_durable: bool,
    /// The store had no space for the last commit.
    is_full: AtomicBool,
    /// The used share of the store, in percent, from which on it is nearly full, and whether it is.
    warn_used_percent: u8,
    is_nearly_full: AtomicBool,
    /// Of a store that several hosts reach.
    ownership: Option<Ownership>,
    state: Mutex<State>,
}

/// The state that the lock protects.
pub(crate) struct State {
    pub(crate) volumes: Volumes,
    /// Ordered, so that a simulation is deterministic.
    pub(crate) open: BTreeMap<VolumeId, OpenVolume>,
    pub(crate) functions: BTreeMap<u32, (VolumeId, Arc<Function>)>,
    pub(crate) limbo: Limbo,
    /// The open transaction, which records new changes.
    pub(crate) transaction: u64,
    /// Misses queued until freed blocks can be reused, and misses queued until an epoch has passed:
    /// for tree nodes, or for the end of writes.
    pub(crate) for_space: Vec<Message>,
    pub(crate) for_epoch: Vec<Message>,
    /// Volumes whose new size is not durable yet: the generation that makes it durable, and the
    /// size until then.
    pub(crate) sizes: BTreeMap<VolumeId, (u64, u64)>,
    /// Changes that are published and answered when they are durable.
    pub(crate) withheld: Vec<withheld::Withheld>,
}

/// A volume with open functions, which share its tree (thesis 5.2).
pub(crate) struct OpenVolume {
    pub(crate) tree: ExtentTree,
    pub(crate) state: Arc<VolumeState>,
    pub(crate) functions: Vec<FunctionId>,
    pub(crate) grants: Grants,
    /// The epoch in which blocks of the volume were last shared: until it has passed, earlier
    /// writes to them may be in flight.
    pub(crate) shared_at: Epoch,
    /// Questions about blocks that a grant or an operation has locked.
    pub(crate) blocked: Vec<Message>,
}

impl Hypervisor {
    pub(crate) fn new(
        name: &str,
        volumes: Volumes,
        memory: NodeMemory,
        answers_when_durable: bool,
        warn_used_percent: u8,
        ownership: Option<Ownership>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            memory: Arc::new(memory),
            epochs: Arc::new(Epochs::new()),
            events: Events::default(),
            commits: CommitQueue::default(),
            durable: Arc::new(AtomicU64::new(0)),
            stats: HypervisorStats::default(),
            is_full: AtomicBool::new(false),
            warn_used_percent,
            ownership,
            is_nearly_full: AtomicBool::new(false),
            answers_when_durable,
            state: Mutex::new(State {
                volumes,
                open: BTreeMap::new(),
                functions: BTreeMap::new(),
                limbo: Limbo::default(),
                transaction: 1,
                for_space: Vec::new(),
                for_epoch: Vec::new(),
                sizes: BTreeMap::new(),
                withheld: Vec::new(),
            }),
        }
    }

    /// The locked state. After a panic in the middle of a change the state may be unsound, and must
    /// not be written to the disk.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The requests of all open functions until now, about.
    pub(crate) fn requests(&self) -> u64 {
        let total = |function: &Function| {
            let (stats, _) = function.stats.total();
            stats.last_hits.saturating_add(stats.translations)
        };
        let state = self.state();
        state.functions.values().map(|(_, function)| total(function)).fold(0, u64::saturating_add)
    }

    /// Answers one question, and the questions that its changes unblock.
    pub(crate) fn serve(&self, message: Message, disk: &mut dyn Disk) {
        let mut to_do = vec![message];
        while let Some(message) = to_do.pop() {
            match message.question {
                Question::Regenerate { range } => self.regenerate(message, range, disk),
                Question::Allocate { range, partial_head, partial_tail } => {
                    self.allocate(message, range, (partial_head, partial_tail), disk, &mut to_do);
                }
                Question::Written { grant, all } => {
                    self.link(message, grant, all, disk, &mut to_do);
                }
                Question::Unmap { range } => self.unmap(message, range, disk),
                Question::Commit => self.commits.ask(message.reply_to),
                Question::FlushFailed => {
                    self.flush_failed(&std::io::Error::other("a guest's flush failed"))
                }
                Question::Retry => {
                    message.reply_to.reply(Answer::Rewalk);
                }
            }
        }
        self.reclaim();
    }

    /// Adds an event for errors that an operator has to act on, and maps the error to the guest's.
    fn refuse(&self, volume: &str, error: &VolumeError) -> Answer {
        match error {
            VolumeError::NoSpace { .. }
            | VolumeError::QuotaExceeded { .. }
            | VolumeError::DiskFull(_) => {
                self.events
                    .note(&self.name, format!("a write to volume \"{volume}\" failed: {error}"));
                Answer::Failed(BlockError::NoSpace)
            }
            VolumeError::VolumeReadOnly(_) | VolumeError::StoreReadOnly(_) => {
                self.events
                    .note(&self.name, format!("a write to volume \"{volume}\" failed: {error}"));
                Answer::Failed(BlockError::ReadOnly)
            }
            VolumeError::OutOfRange { .. } => Answer::Failed(BlockError::OutOfBounds),
            _ => {
                self.events
                    .note(&self.name, format!("a request to volume \"{volume}\" failed: {error}"));
                Answer::Failed(BlockError::EIO)
            }
        }
    }
}

impl State {
    /// The number and state of the volume of a function.
    pub(crate) fn volume_of(
        &mut self,
        function: FunctionId,
    ) -> Option<(VolumeId, &mut OpenVolume, &mut Volumes)> {
        let (id, _) = self.functions.get(&function.0)?;
        Some((*id, self.open.get_mut(id)?, &mut self.volumes))
    }

    /// The size that a volume is served with, in blocks. A new size that is not durable yet is not
    /// served: the log has no entries for blocks beyond the old size.
    pub(crate) fn served_blocks(&self, id: VolumeId) -> u64 {
        let blocks = self.volumes.get(id).map_or(0, |info| info.blocks);
        self.sizes.get(&id).map_or(blocks, |(_, before)| blocks.min(*before))
    }

    /// A volume's name, for messages.
    pub(crate) fn name_of(&self, id: VolumeId) -> String {
        self.volumes.get(id).map_or_else(|| id.to_string(), |info| info.name.clone())
    }
}

impl OpenVolume {
    /// Marks the volume's mappings as changed in `transaction`. Call before the guest's request
    /// completes.
    pub(crate) fn changed(&self, transaction: u64) {
        self.state.changed.store(transaction, Ordering::Release);
    }

    /// Whether a grant or an operation has locked blocks of `range`.
    pub(crate) fn is_busy(&self, range: BlockRange) -> bool {
        self.grants.conflict(range).is_some()
    }
}
