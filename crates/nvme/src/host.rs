//! The seam between a controller and the sidecores that poll its queues.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_ring::nvme::Doorbells;

use crate::{Done, ErrorLog, Namespace, QueuesState};

/// An I/O completion queue, as the driver created it.
#[derive(Debug)]
pub struct CompletionQueueSetup {
    /// Queue identifier, from 1.
    pub id: u16,
    /// The guest's memory as of now.
    pub memory: GuestMemory,
    /// Guest address of the queue: contiguous, aligned to a page.
    pub address: GuestAddress,
    /// Number of entries, 2 to 65536.
    pub entries: u32,
    /// The interrupt vector; `None` for a polled queue (IEN = 0).
    pub vector: Option<u16>,
}

/// An I/O submission queue, as the driver created it.
#[derive(Debug)]
pub struct SubmissionQueueSetup {
    /// Queue identifier, from 1.
    pub id: u16,
    /// The existing completion queue that its commands complete into.
    pub completion_queue: u16,
    /// The guest's memory as of now.
    pub memory: GuestMemory,
    /// Guest address of the queue: contiguous, aligned to a page.
    pub address: GuestAddress,
    /// Number of entries, 2 to 65536.
    pub entries: u32,
}

/// Why a queue cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The queue's address is not in guest memory.
    #[error("queue {id}: {error}")]
    Memory {
        /// Queue identifier.
        id: u16,
        /// The failed translation.
        error: MemoryError,
    },
    /// The store cannot be opened for the queue.
    #[error("queue {id}: {error}")]
    Io {
        /// Queue identifier.
        id: u16,
        /// The error of the system call.
        error: std::io::Error,
    },
    /// The sidecore that serves the function is gone.
    #[error("the sidecore that serves this function has stopped")]
    SidecoreGone,
}

/// The runner of a controller's I/O queues. No method waits for requests in flight: such a wait
/// ends with the method's [`Done`]. The controller keeps the order: a completion queue is started
/// before, and stopped after, the submission queues that complete into it.
pub trait QueueHost: Send + Sync {
    /// Starts a completion queue, empty. Takes a turn of its sidecore at most.
    ///
    /// # Errors
    /// See [`StartError`]; nothing was started.
    fn start_completion_queue(&self, setup: CompletionQueueSetup) -> Result<(), StartError>;

    /// Starts a submission queue, empty.
    ///
    /// # Errors
    /// See [`StartError`]; nothing was started.
    fn start_submission_queue(&self, setup: SubmissionQueueSetup) -> Result<(), StartError>;

    /// Stops taking commands from the queue; done when all taken commands are completed.
    fn stop_submission_queue(&self, id: u16, done: Done);

    /// Stops a completion queue that no submission queue uses.
    fn stop_completion_queue(&self, id: u16, done: Done);

    /// A controller's reset: takes and posts nothing more; done when nothing is in flight and all
    /// queues are gone.
    fn stop_all(&self, done: Done);

    /// Exports all queues to another process: stops taking commands, and once all taken commands
    /// are completed and no guest memory is held, replies with the state of each queue. `None` if
    /// the state is unknown, which is the default.
    fn hand_over(&self, reply: Box<dyn FnOnce(Option<QueuesState>) + Send>) {
        let done = Done::new(move || reply(None));
        self.stop_all(done);
    }

    /// Resumes the queues of another process: they are in `memory`, and the doorbell memory holds
    /// the values that the driver has written. Takes at most a turn of each sidecore.
    ///
    /// # Errors
    /// See [`StartError`]; some of the queues may run then.
    fn take_over(&self, memory: &GuestMemory, queues: &QueuesState) -> Result<(), StartError> {
        let _ = memory;
        let unknown = |id| StartError::Io { id, error: std::io::ErrorKind::Unsupported.into() };
        queues.completion_queues.first().map_or(Ok(()), |queue| Err(unknown(queue.id)))
    }

    /// The guest's memory has changed; done when nothing uses the table from before. A queue that
    /// is not in the new table waits until a later table has it.
    fn set_memory(&self, memory: &GuestMemory, done: Done);

    /// Sets the event of a vector; `None` while the vector is masked. A pending interrupt is
    /// signalled.
    fn set_vector(&self, vector: u16, event: Option<OwnedFd>);

    /// Whether an interrupt is pending for a masked vector (the MSI-X pending bit).
    fn is_pending(&self, vector: u16) -> bool;

    /// Sets the namespace for new commands; done when no command uses the old one.
    fn set_namespace(&self, namespace: Option<Arc<Namespace>>, done: Done);

    /// The log of failed commands, which the controller writes and shows too. By default the log
    /// belongs to the controller alone. Called once.
    fn error_log(&self) -> Arc<ErrorLog> {
        ErrorLog::new()
    }

    /// Makes durable what commands have written, when nothing runs (a normal shutdown, 3.6.1). It
    /// takes as long as the store takes, and nothing but another namespace waits for it. If it
    /// fails, [`QueueEvent::FlushFailed`](crate::QueueEvent) is reported before it is done. By
    /// default there is nothing that would not be durable.
    fn flush(&self, done: Done) {
        done.call();
    }

    /// Sets interrupt coalescing (NVMe base 2.0, 5.27.1.6): `threshold` completions or `time_us`,
    /// whichever comes first; 0 for none. Vectors that `set_vector_coalescing` has exempted are not
    /// affected.
    fn set_coalescing(&self, threshold: u16, time_us: u32);

    /// Whether coalescing applies to a vector (5.27.1.7).
    fn set_vector_coalescing(&self, vector: u16, enabled: bool);

    /// Turns the volatile write cache on or off (feature 06h). Without a cache, every new write is
    /// durable before it completes. Returns whether the setting took effect: by default the cache
    /// cannot be turned off.
    fn set_write_cache(&self, enabled: bool) -> bool {
        enabled
    }

    /// Aborts a command of a submission queue if that is still possible (5.1), and replies whether
    /// it was aborted. By default no command is.
    fn abort(&self, queue: u16, command: u16, reply: Box<dyn FnOnce(bool) + Send>) {
        let _ = (queue, command);
        reply(false);
    }

    /// Sets the doorbell memory for queues started from now on. Called while there are no queues.
    fn set_doorbells(&self, doorbells: Arc<Doorbells>);

    /// Called after the driver wrote a doorbell that is not mapped; the doorbell memory has the
    /// value already.
    fn kick(&self, queue: u16);

    /// The driver's shadow doorbells and their EventIdx, two pages of its memory (5.8); `None`
    /// turns them off.
    fn set_shadow_doorbells(&self, pages: Option<(GuestAddress, GuestAddress)>);
}
