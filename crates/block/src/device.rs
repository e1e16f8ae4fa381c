//! The traits of the block seam.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::{Batch, BoundsError};

/// What a store looks like from outside. It does not change while the store is
/// open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `block_bytes`.
    pub capacity_bytes: u64,
    /// The unit of reads and writes in bytes: a power of two, 512 or more.
    pub block_bytes: u32,
    /// The unit that the medium writes without reading first, in bytes: a
    /// power-of-two multiple of `block_bytes`.
    pub physical_block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether a completed write may be lost in a power cut until a flush.
    pub volatile_cache: bool,
    /// Whether [`Operation::Discard`](crate::Operation::Discard) does anything.
    pub discard: bool,
    /// Whether physical blocks that a discard covered whole read as zeros.
    pub discard_zeroes: bool,
    /// Whether [`Operation::WriteZeroes`](crate::Operation::WriteZeroes) is
    /// supported.
    pub write_zeroes: bool,
}

impl Geometry {
    /// A writable store without a cache that supports everything.
    #[must_use]
    pub const fn new(capacity_bytes: u64, block_bytes: u32) -> Self {
        Self {
            capacity_bytes,
            block_bytes,
            physical_block_bytes: block_bytes,
            read_only: false,
            volatile_cache: false,
            discard: true,
            discard_zeroes: true,
            write_zeroes: true,
        }
    }

    /// Whether a range may be read or written.
    ///
    /// # Errors
    /// It ends past the capacity or is not aligned to blocks.
    #[inline]
    pub fn check(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), BoundsError> {
        let mask = u64::from(self.block_bytes).wrapping_sub(1);
        if (offset_bytes | len_bytes) & mask != 0 {
            return Err(BoundsError::Misaligned { offset_bytes, len_bytes, block_bytes: self.block_bytes });
        }
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.capacity_bytes => Ok(()),
            _ => Err(BoundsError::PastEnd { offset_bytes, len_bytes, capacity_bytes: self.capacity_bytes }),
        }
    }
}

/// A store, or a stage in front of one. Shared by all sidecores.
pub trait BlockDevice: Send + Sync {
    /// What it looks like.
    fn geometry(&self) -> Geometry;

    /// Opens a path to it for one queue, with at most `depth` requests in flight. Called on the
    /// thread of the sidecore that serves the queue; `core` is what that sidecore's units share.
    ///
    /// # Errors
    /// The kernel refuses what the channel needs.
    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>>;

    /// Makes sure that writes to these bytes find space, without changing what they hold:
    /// a file with holes gets blocks there. The call waits for the kernel. The default
    /// has nothing to do.
    ///
    /// # Errors
    /// There is no space, or the store fails.
    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let _ = (offset_bytes, len_bytes);
        Ok(())
    }

    /// Why it serves its requests another way than it was set up to, if it does: for reports. Never
    /// waits. A stage in front of another store answers for that store.
    fn fallback(&self) -> Option<String> {
        None
    }

    /// Why writes may be missing that an earlier process has answered, if so: whoever relies on
    /// them must not go on as if nothing had happened. A stage answers for the store behind it.
    fn loss(&self) -> Option<String> {
        None
    }
}

/// One queue's path to a store. Belongs to one sidecore.
pub trait BlockChannel {
    /// Says that the requests to come lie in `memory`, and that none of those
    /// before is in flight any more. A store that can register memory with the
    /// kernel does it here; the default has nothing to do.
    ///
    /// # Errors
    /// None that would keep the channel from working: a store that cannot
    /// register goes on without.
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let _ = memory;
        Ok(())
    }

    /// Takes requests from the front of `batch`, in order, as many as it has
    /// room for; what is left there did not fit, and is offered again after
    /// the next `poll`. A channel always takes as many as its depth allows.
    fn submit(&mut self, batch: &mut Batch);

    /// Appends what has completed by `now`.
    fn poll(&mut self, now: Nanos, completed: &mut Batch);

    /// [`submit`](Self::submit), unless `batch` is empty, and [`poll`](Self::poll) in one call, as each turn of a queue
    /// needs them. A store that carries requests out at once completes them here without a list of its own.
    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        if !batch.is_empty() {
            self.submit(batch);
        }
        self.poll(now, completed);
    }

    /// How many requests were submitted and not yet handed back.
    fn in_flight(&self) -> usize;

    /// A file descriptor that is readable (level-triggered) when `poll` has
    /// something to hand back; `None` if only submission and time complete
    /// requests here.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When `poll` should be called next though nothing wakes it.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// When the oldest request was taken that waits for others who need a CPU: the
    /// kernel's workers, or another thread. `None` if there is none. Asked about once
    /// a millisecond: it may look through all of them.
    fn waits_since(&self) -> Option<Nanos> {
        None
    }
}
