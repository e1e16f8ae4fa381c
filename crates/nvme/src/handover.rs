//! What a function leaves to another process, which goes on with it: its host notices nothing but a
//! pause.
//!
//! A function is handed over when nothing of its commands is in flight: each that was taken is
//! completed, and none is taken any more. What is left then is small: registers, what the host has
//! set, and where each queue has come to. The queues themselves, the host's data and the doorbells
//! are in memory that the next process maps as well.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use sidecore_memory::MemoryError;

use crate::admin::changed::ChangedNamespaces;
use crate::admin::errors::Log;
use crate::admin::events::Events;
use crate::admin::features::Features;
use crate::registers::Registers;
use crate::{Activity, Interrupts, Namespace, StartError};

/// A function as it was left.
#[derive(Debug)]
pub struct HandedOver {
    /// What it is doing.
    pub state: FunctionState,
    /// What its vectors signal.
    pub events: Vec<(u16, OwnedFd)>,
    /// The file of its doorbells, which the client may have mapped.
    pub doorbells: OwnedFd,
}

/// Called once with what a function leaves; `None` if it cannot be handed over.
pub type HandOver = Box<dyn FnOnce(Option<HandedOver>) + Send>;

/// All of a function but descriptors and memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct FunctionState {
    pub(crate) shape: Shape,
    pub(crate) config: Vec<u8>,
    pub(crate) msix: MsixState,
    /// How far apart the doorbells are in their memory, as CAP.DSTRD says it. The first version of
    /// this state has none: its doorbells have half a page each, and the admin queue's are not
    /// among them.
    pub(crate) doorbell_stride: Option<u8>,
    pub(crate) controller: ControllerState,
}

/// What its client knows of it from the beginning, and relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub queue_pairs: u16,
    pub doorbells_are_mapped: bool,
    pub interrupts: Interrupts,
}

/// The MSI-X table.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MsixState {
    /// By vector: its entry, and whether vector control was ever written.
    pub vectors: Vec<(Vec<u8>, bool)>,
}

/// A controller.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ControllerState {
    pub registers: Registers,
    pub rest: RestState,
    /// There while it is ready.
    pub admin: Option<AdminQueueState>,
    pub queues: QueuesState,
    pub features: Features,
    pub events: Events,
    pub errors: Log,
    pub changed: ChangedNamespaces,
    pub activity: Activity,
    pub namespace: Option<NamespaceState>,
}

/// How it rests, if it does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum RestState {
    /// It does not.
    Ready,
    Disabled,
    ShutDown {
        durable: bool,
    },
    Failed,
}

/// Which namespace was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamespaceState {
    pub id: u32,
    pub nguid: [u8; 16],
    /// What its host was told: nothing by the first version of this state.
    pub uuid: Option<[u8; 16]>,
    pub block_bytes: u32,
    pub capacity_bytes: u64,
}

impl NamespaceState {
    pub(crate) fn of(namespace: &Namespace) -> Self {
        let Namespace { id, block_bytes, nguid, uuid, .. } = *namespace;
        Self { id, nguid, uuid: Some(uuid), block_bytes, capacity_bytes: namespace.store.geometry().capacity_bytes }
    }

    /// Whether a host may go on with the other one in its place: the same blocks, however many
    /// there are by now.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let uuid = self.uuid.and(other.uuid);
        Self { capacity_bytes: other.capacity_bytes, uuid, ..self.clone() } == Self { uuid, ..other.clone() }
    }
}

/// The admin queues; where they are is in the registers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AdminQueueState {
    pub submission_head: u16,
    pub submission_tail: u32,
    pub completion: PositionState,
    pub backlog: Vec<EntryState>,
}

/// All I/O queues of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuesState {
    /// The driver's shadow doorbells and their EventIdx.
    pub shadow_doorbells: Option<(u64, u64)>,
    /// Each with the submission queues that complete into it.
    pub completion_queues: Vec<CompletionQueueState>,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionQueueState {
    /// Its number, from 1.
    pub id: u16,
    /// Where it is in the guest's memory.
    pub address: u64,
    /// How many entries it has.
    pub entries: u32,
    /// The interrupt vector that it signals, if it is not polled.
    pub vector: Option<u16>,
    /// Where it has come to.
    pub position: PositionState,
    /// What there was no room for.
    pub backlog: Vec<EntryState>,
    /// The submission queues that complete into it.
    pub submission_queues: Vec<SubmissionQueueState>,
}

/// A submission queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmissionQueueState {
    /// Its number, from 1.
    pub id: u16,
    /// Where it is in the guest's memory.
    pub address: u64,
    /// How many entries it has.
    pub entries: u32,
    /// The next entry to take.
    pub head: u16,
    /// A command that was taken from it, and not looked at.
    pub ahead: Option<Vec<u8>>,
}

/// Where a completion queue has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionState {
    /// Up to where the host has taken entries.
    pub head: u32,
    /// The next entry to write.
    pub tail: u32,
    /// The phase tag of this round's entries.
    pub phase: bool,
}

/// A completion queue's entry that is still to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryState {
    /// Dword 0.
    pub result: u32,
    /// The submission queue and where its head was.
    pub submission_queue: (u16, u16),
    /// The command.
    pub command_id: u16,
    /// The status field, as it is in dword 3.
    pub status: u16,
}

/// Why a function that another process has left cannot be gone on with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeOverError {
    /// It has been configured in another way since.
    #[error("its {what} is not what it was")]
    Changed {
        /// What of it.
        what: &'static str,
    },
    /// Another namespace is served in the place of the one that was.
    #[error("it serves something else than before")]
    OtherNamespace,
    /// What it was left with is not of a function's.
    #[error("its state is damaged: {what}")]
    Damaged {
        /// What of it.
        what: &'static str,
    },
    /// An admin queue is not in the guest's memory.
    #[error("its admin queue: {0}")]
    Memory(#[from] MemoryError),
    /// An I/O queue cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The function cannot be handed over at all.
    #[error("a function of this kind cannot be handed over")]
    NotOffered,
}

mod convert {
    //! From what the queues have, and to it.

    use sidecore_ring::nvme::{Completion, CompletionPosition};

    use super::{EntryState, PositionState};

    impl From<CompletionPosition> for PositionState {
        fn from(position: CompletionPosition) -> Self {
            let CompletionPosition { head, tail, phase } = position;
            Self { head, tail, phase }
        }
    }

    impl From<PositionState> for CompletionPosition {
        fn from(state: PositionState) -> Self {
            let PositionState { head, tail, phase } = state;
            Self { head, tail, phase }
        }
    }

    impl From<&Completion> for EntryState {
        fn from(entry: &Completion) -> Self {
            let Completion { result, sq_head, sq_id, command_id, status, .. } = *entry;
            Self { result, submission_queue: (sq_id, sq_head), command_id, status }
        }
    }

    impl From<EntryState> for Completion {
        fn from(state: EntryState) -> Self {
            let EntryState { result, submission_queue: (sq_id, sq_head), command_id, status } = state;
            Self { result, reserved_or_result_high: 0, sq_head, sq_id, command_id, status }
        }
    }
}
