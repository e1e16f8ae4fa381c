//! The state that a process exports and its successor imports: the host notices nothing but a
//! pause.
//!
//! A function is handed over while none of its commands is in flight: each taken command is
//! completed, and no more are taken. The remaining state is small: registers, the settings of the
//! host, and the position of each queue. The queues themselves, the host's data and the doorbells
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

/// A function as it was exported.
#[derive(Debug)]
pub struct HandedOver {
    /// The registers, settings and queue positions.
    pub state: FunctionState,
    /// The eventfd of each vector.
    pub events: Vec<(u16, OwnedFd)>,
    /// The file of its doorbells, which the client may have mapped.
    pub doorbells: OwnedFd,
}

/// Called once with the exported function; `None` if it cannot be handed over.
pub type HandOver = Box<dyn FnOnce(Option<HandedOver>) + Send>;

/// The state of a function without descriptors and memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct FunctionState {
    pub(crate) shape: Shape,
    pub(crate) config: Vec<u8>,
    pub(crate) msix: MsixState,
    /// The doorbell stride of the doorbell memory, as CAP.DSTRD. Absent in the first version of
    /// this state: there each doorbell has half a page, and the admin queue's are not in the
    /// memory.
    pub(crate) doorbell_stride: Option<u8>,
    pub(crate) controller: ControllerState,
}

/// The properties that the client has seen at first, and relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub queue_pairs: u16,
    pub doorbells_are_mapped: bool,
    pub interrupts: Interrupts,
}

/// The MSI-X table.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MsixState {
    /// By vector: the table entry, and whether vector control was ever written.
    pub vectors: Vec<(Vec<u8>, bool)>,
}

/// A controller.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ControllerState {
    pub registers: Registers,
    pub rest: RestState,
    /// Present while the controller is ready.
    pub admin: Option<AdminQueueState>,
    pub queues: QueuesState,
    pub features: Features,
    pub events: Events,
    pub errors: Log,
    pub changed: ChangedNamespaces,
    pub activity: Activity,
    pub namespace: Option<NamespaceState>,
}

/// The rest state, if the controller is at rest.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum RestState {
    /// Not at rest.
    Ready,
    Disabled,
    ShutDown {
        durable: bool,
    },
    Failed,
}

/// The namespace that was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamespaceState {
    pub id: u32,
    pub nguid: [u8; 16],
    /// The UUID that the host was shown; absent in the first version of this state.
    pub uuid: Option<[u8; 16]>,
    pub block_bytes: u32,
    pub capacity_bytes: u64,
}

impl NamespaceState {
    pub(crate) fn of(namespace: &Namespace) -> Self {
        let Namespace { id, block_bytes, nguid, uuid, .. } = *namespace;
        Self {
            id,
            nguid,
            uuid: Some(uuid),
            block_bytes,
            capacity_bytes: namespace.store.geometry().capacity_bytes,
        }
    }

    /// Whether a host may use `other` in place of this namespace: the same blocks, whatever their
    /// number is now.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let uuid = self.uuid.and(other.uuid);
        Self { capacity_bytes: other.capacity_bytes, uuid, ..self.clone() }
            == Self { uuid, ..other.clone() }
    }
}

/// The admin queues; the registers have their addresses.
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
    /// The addresses of the driver's shadow doorbells and of their EventIdx.
    pub shadow_doorbells: Option<(u64, u64)>,
    /// Each with its submission queues.
    pub completion_queues: Vec<CompletionQueueState>,
}

/// A completion queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionQueueState {
    /// Queue identifier, from 1.
    pub id: u16,
    /// Guest address of the first entry.
    pub address: u64,
    /// Number of entries.
    pub entries: u32,
    /// The interrupt vector; `None` for a polled queue.
    pub vector: Option<u16>,
    /// The ring's position.
    pub position: PositionState,
    /// Completions that found the queue full.
    pub backlog: Vec<EntryState>,
    /// The submission queues that complete into this queue.
    pub submission_queues: Vec<SubmissionQueueState>,
}

/// A submission queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmissionQueueState {
    /// Queue identifier, from 1.
    pub id: u16,
    /// Guest address of the first entry.
    pub address: u64,
    /// Number of entries.
    pub entries: u32,
    /// Index of the next entry to take.
    pub head: u16,
    /// A command taken from the ring, but not yet parsed.
    pub ahead: Option<Vec<u8>>,
}

/// The position of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionState {
    /// The host has consumed the entries before this index.
    pub head: u32,
    /// Index of the next entry to write.
    pub tail: u32,
    /// The phase tag of the current round.
    pub phase: bool,
}

/// A completion that is still to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryState {
    /// Dword 0.
    pub result: u32,
    /// The submission queue and its head.
    pub submission_queue: (u16, u16),
    /// Command identifier.
    pub command_id: u16,
    /// The status field of dword 3.
    pub status: u16,
}

/// The reason why an exported function cannot be resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeOverError {
    /// The configuration has changed since the export.
    #[error("its {what} is not what it was")]
    Changed {
        /// The property that differs.
        what: &'static str,
    },
    /// Another namespace is served now.
    #[error("it serves something else than before")]
    OtherNamespace,
    /// The exported state is not that of a function.
    #[error("its state is damaged: {what}")]
    Damaged {
        /// The invalid field.
        what: &'static str,
    },
    /// An admin queue is not in the guest's memory.
    #[error("its admin queue: {0}")]
    Memory(#[from] MemoryError),
    /// An I/O queue cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The function does not support hand-over.
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
            let EntryState { result, submission_queue: (sq_id, sq_head), command_id, status } =
                state;
            Self { result, reserved_or_result_high: 0, sq_head, sq_id, command_id, status }
        }
    }
}
