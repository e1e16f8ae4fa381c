//! The state that all I/O queues of a controller share with each other and with the control path.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::MemfdFlags;
use sidecore_block::BlockDevice;
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_reactor::{IdleMode, MakeSignal};
use sidecore_ring::nvme::Doorbells;

use super::QueueStats;
use super::fence::Fence;
use super::steps::{STEP_BYTES, STEP_COUNT};
use crate::{ErrorLog, QueueEvent};

/// How a controller's I/O queues are served.
pub struct IoOptions {
    /// The function's name, for messages.
    pub name: String,
    /// How many I/O queue pairs there can be; they are numbered from 1.
    pub queue_pairs: u16,
    /// How many interrupt vectors there are.
    pub vectors: u16,
    /// The highest namespace identifier that is valid (NN), whether or not it is attached.
    pub namespaces: u32,
    /// How a queue spends its idle time: it can sleep only if doorbell writes are messages.
    pub idle: IdleMode,
    /// The doorbells to begin with: mapped, or written by the service thread.
    pub doorbells: Arc<Doorbells>,
    /// Flushes a store and waits for it, on a thread of its own.
    pub flush: fn(&dyn BlockDevice) -> io::Result<()>,
    /// Makes what raises an interrupt: on sidecores, where it must not wait for the client.
    pub signal: MakeSignal,
}

/// The callback for events of queues. It must not wait: a sidecore calls it.
pub(super) type Report = Box<dyn Fn(QueueEvent) + Send + Sync>;

pub(super) struct Shared {
    pub(super) options: IoOptions,
    /// By completion queue, from number 1.
    stats: Box<[Arc<QueueStats>]>,
    /// Interrupts that are held back because their vector is masked.
    pending: Box<[AtomicBool]>,
    pub(super) fence: Arc<Fence>,
    /// Memory of our own, an area of [`STEP_COUNT`] buffers for each queue. None of it is touched
    /// before it is used.
    private: GuestMemory,
    /// The driver has turned the volatile write cache off.
    write_through: AtomicBool,
    pub(super) errors: Arc<ErrorLog>,
    pub(super) report: Report,
}

impl Shared {
    /// # Errors
    /// The kernel has no memory for the buffers.
    pub(super) fn new(options: IoOptions, report: Report) -> io::Result<Arc<Self>> {
        let queues = usize::from(options.queue_pairs);
        Ok(Arc::new(Self {
            stats: (0..queues).map(|_| Arc::default()).collect(),
            pending: (0..options.vectors).map(|_| AtomicBool::new(false)).collect(),
            fence: Fence::new(queues),
            private: private_memory(area_bytes().saturating_mul(u64::from(options.queue_pairs)))?,
            write_through: AtomicBool::new(false),
            errors: ErrorLog::new(),
            report,
            options,
        }))
    }

    /// The counters of a completion queue.
    #[inline]
    pub(super) fn stats(&self, queue: u16) -> Option<&Arc<QueueStats>> {
        self.stats.get(usize::from(queue).checked_sub(1)?)
    }

    /// The buffers of a queue: the memory that they are in, and where.
    pub(super) fn buffers(&self, queue: u16) -> (&GuestMemory, GuestAddress) {
        let area = u64::from(queue).saturating_sub(1);
        (&self.private, GuestAddress(area.saturating_mul(area_bytes())))
    }

    /// Takes note of whether an interrupt is held back.
    pub(super) fn set_pending(&self, vector: u16, pending: bool) {
        if let Some(flag) = self.pending.get(usize::from(vector)) {
            flag.store(pending, Ordering::Relaxed);
        }
    }

    pub(super) fn is_pending(&self, vector: u16) -> bool {
        self.pending.get(usize::from(vector)).is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    /// The flush of a shutdown has failed, or could not be begun.
    pub(super) fn report_failed_flush(&self, error: &io::Error) {
        let device = &self.options.name;
        tracing::error!(device, "the flush of a shutdown failed, writes may be lost: {error}");
        (self.report)(QueueEvent::FlushFailed);
    }

    #[inline]
    pub(super) fn is_write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed)
    }

    pub(super) fn set_write_through(&self, enabled: bool) {
        self.write_through.store(enabled, Ordering::Relaxed);
    }
}

const fn area_bytes() -> u64 {
    STEP_BYTES.saturating_mul(STEP_COUNT as u64)
}

/// Memory shared with no other process, as a table, because requests name their memory by a table.
fn private_memory(len_bytes: u64) -> io::Result<GuestMemory> {
    let file = rustix::fs::memfd_create("sidecore-nvme-steps", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, len_bytes)?;
    let region = RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes,
        file,
        file_offset_bytes: 0,
    };
    GuestMemory::map(vec![region]).map_err(io::Error::other)
}
