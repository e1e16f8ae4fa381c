//! The seam between a controller and the sidecores that poll its queues.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_ring::nvme::Doorbells;

use crate::{Done, ErrorLog, Namespace, QueuesState};

/// An I/O completion queue, as the driver created it.
#[derive(Debug)]
pub struct CompletionQueueSetup {
    /// Its number, from 1.
    pub id: u16,
    /// The guest's memory as of now.
    pub memory: GuestMemory,
    /// Where it is: contiguous, aligned to a page.
    pub address: GuestAddress,
    /// How many entries it has, 2 to 65536.
    pub entries: u32,
    /// The interrupt vector that it signals; `None` for one that is polled (IEN = 0).
    pub vector: Option<u16>,
}

/// An I/O submission queue, as the driver created it.
#[derive(Debug)]
pub struct SubmissionQueueSetup {
    /// Its number, from 1.
    pub id: u16,
    /// The completion queue that its commands complete into, which exists.
    pub completion_queue: u16,
    /// The guest's memory as of now.
    pub memory: GuestMemory,
    /// Where it is: contiguous, aligned to a page.
    pub address: GuestAddress,
    /// How many entries it has, 2 to 65536.
    pub entries: u32,
}

/// Why a queue cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It is not where it is said to be.
    #[error("queue {id}: {error}")]
    Memory {
        /// Which queue.
        id: u16,
        /// What is wrong.
        error: MemoryError,
    },
    /// The store cannot be opened for the queue.
    #[error("queue {id}: {error}")]
    Io {
        /// Which queue.
        id: u16,
        /// What the kernel says.
        error: std::io::Error,
    },
    /// The sidecore that serves the function is gone.
    #[error("the sidecore that serves this function has stopped")]
    SidecoreGone,
}

/// Who runs a controller's I/O queues. Nothing here waits for requests in flight: what does is
/// answered by its [`Done`]. The controller makes sure of the order: a completion queue exists
/// before, and longer than, the submission queues that complete into it.
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

    /// Takes nothing more from it; done when all that was taken is completed.
    fn stop_submission_queue(&self, id: u16, done: Done);

    /// Ends a completion queue that no submission queue uses.
    fn stop_completion_queue(&self, id: u16, done: Done);

    /// A controller's reset: takes and posts nothing more; done when nothing is in flight and all
    /// queues are gone.
    fn stop_all(&self, done: Done);

    /// Ends all queues for another process to go on with: takes nothing more, and when all that was
    /// taken is completed, and nothing of the guest's memory is held any more, says where each of
    /// them is. `None` if that is not known. By default it never is.
    fn hand_over(&self, reply: Box<dyn FnOnce(Option<QueuesState>) + Send>) {
        let done = Done::new(move || reply(None));
        self.stop_all(done);
    }

    /// Goes on with the queues of another process: they are in `memory`, and what the driver has
    /// written to their doorbells is there. Takes a turn of each sidecore at most.
    ///
    /// # Errors
    /// See [`StartError`]; some of them may run then.
    fn take_over(&self, memory: &GuestMemory, queues: &QueuesState) -> Result<(), StartError> {
        let _ = memory;
        let unknown = |id| StartError::Io { id, error: std::io::ErrorKind::Unsupported.into() };
        queues.completion_queues.first().map_or(Ok(()), |queue| Err(unknown(queue.id)))
    }

    /// The guest's memory has changed; done when nothing uses the table from before. A queue that
    /// is not in the new table waits until a later table has it.
    fn set_memory(&self, memory: &GuestMemory, done: Done);

    /// What a vector signals from now on; `None` while it is masked. What was pending is signalled.
    fn set_vector(&self, vector: u16, event: Option<OwnedFd>);

    /// Whether something is pending for a masked vector (the MSI-X pending bit).
    fn is_pending(&self, vector: u16) -> bool;

    /// What the commands to come are served from; done when none uses the one from before.
    fn set_namespace(&self, namespace: Option<Arc<Namespace>>, done: Done);

    /// The log that failed commands of the queues are in, and that the controller writes and shows.
    /// By default it is the controller's alone. It is asked for once.
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

    /// Interrupt coalescing (NVMe base 2.0, 5.27.1.6): `threshold` completions or `time_us`,
    /// whichever comes first; 0 for none. Vectors that `set_vector_coalescing` has exempted are
    /// left alone.
    fn set_coalescing(&self, threshold: u16, time_us: u32);

    /// Whether coalescing applies to a vector (5.27.1.7).
    fn set_vector_coalescing(&self, vector: u16, enabled: bool);

    /// Whether completed writes may sit in a volatile cache (feature 06h). If not, every write from
    /// now on is durable before it completes. Returns whether it is as asked: by default a cache
    /// cannot be turned off.
    fn set_write_cache(&self, enabled: bool) -> bool {
        enabled
    }

    /// Aborts a command of a submission queue if that can still be done (5.1), and says whether it
    /// was. By default none is.
    fn abort(&self, queue: u16, command: u16, reply: Box<dyn FnOnce(bool) + Send>) {
        let _ = (queue, command);
        reply(false);
    }

    /// The doorbell memory that queues look at which are started from now on. It is said while
    /// there are none.
    fn set_doorbells(&self, doorbells: Arc<Doorbells>);

    /// The driver wrote a doorbell that is not mapped: its value is in the doorbell memory already.
    fn kick(&self, queue: u16);

    /// The driver's shadow doorbells and their EventIdx, two pages of its memory (5.8); `None`
    /// turns them off.
    fn set_shadow_doorbells(&self, pages: Option<(GuestAddress, GuestAddress)>);
}
