//! The traits of the block seam.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::{Batch, BoundsError, Findings, Mapped, Meter, StageAccount};

/// The size and the alignment rules of a store. They do not change while the store is open.
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
    /// Whether [`Operation::WriteZeroes`](crate::Operation::WriteZeroes) is supported.
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
            return Err(BoundsError::Misaligned {
                offset_bytes,
                len_bytes,
                block_bytes: self.block_bytes,
            });
        }
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.capacity_bytes => Ok(()),
            _ => Err(BoundsError::PastEnd {
                offset_bytes,
                len_bytes,
                capacity_bytes: self.capacity_bytes,
            }),
        }
    }
}

/// A store, or a stage in front of one. Shared by all sidecores.
pub trait BlockDevice: Send + Sync {
    /// The store's size and alignment rules.
    fn geometry(&self) -> Geometry;

    /// Opens a path to it for one queue, with at most `depth` requests in flight. Called on the
    /// thread of the sidecore that serves the queue; `core` is what that sidecore's units share.
    ///
    /// # Errors
    /// The kernel refuses what the channel needs.
    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>>;

    /// Makes sure that writes to these bytes find space, without changing what they hold: a file
    /// with holes gets blocks there. The call waits for the kernel. The default has nothing to do.
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

    /// The reason why writes may be missing that an earlier process has completed, if there is one:
    /// a user that relies on them must not continue as if nothing had happened. A stage reports the
    /// loss of the store behind it.
    fn loss(&self) -> Option<String> {
        None
    }

    /// Its user is gone for good and reads no answer: a VMM has closed its connection, or ended. A
    /// guest may be started elsewhere now, so a store that other hosts write to as well makes
    /// sure that nothing of this user comes late. Requests in flight may fail, and so do further
    /// writes, until the next channel is opened. Never waits. [`contain`](crate::contain()) tells
    /// both a stage and the store behind it, so a stage does not pass it on.
    fn user_gone(&self) {}

    /// The meters on the way of its requests. A stage adds its own to those of the store behind it.
    fn meters(&self) -> Vec<Arc<Meter>> {
        Vec::new()
    }

    /// The bad blocks that this stage has found, if it checks blocks. Those of stages behind it are
    /// in their [accounts](Self::stages).
    fn findings(&self) -> Option<Arc<Findings>> {
        None
    }

    /// The accounts of the stages on the way of its requests, in that order.
    /// [`contain`](crate::contain()) answers for each stage, which so needs not.
    fn stages(&self) -> Vec<Arc<StageAccount>> {
        Vec::new()
    }
}

/// One queue's path to a store. Belongs to one sidecore.
pub trait BlockChannel {
    /// Says that the requests to come lie in `memory`, and that none of those
    /// before is in flight any more. A store that can register memory with the
    /// kernel does it here; the default has nothing to do.
    ///
    /// # Errors
    /// None that would keep the channel from working: a store that cannot register goes on without.
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let _ = memory;
        Ok(())
    }

    /// Takes requests from the front of `batch`, in order, as many as it has room for at `now`; the
    /// rest did not fit, and is offered again after the next `poll`. A channel always takes as many
    /// as its depth allows.
    fn submit(&mut self, now: Nanos, batch: &mut Batch);

    /// Appends what has completed by `now`.
    fn poll(&mut self, now: Nanos, completed: &mut Batch);

    /// [`submit`](Self::submit), unless `batch` is empty, and [`poll`](Self::poll) in one call, as
    /// each turn of a queue needs them. A store that carries requests out at once completes them
    /// here without a list of its own.
    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        if !batch.is_empty() {
            self.submit(now, batch);
        }
        self.poll(now, completed);
    }

    /// Carries out the requests at the front of `batch` that have a [place](Mapped::place) in
    /// `mapped`, there and at once, and appends them to `completed`; their offsets stay those of
    /// the virtual disk. Stops at the first request that has no place or takes longer. Called while
    /// nothing is in flight, and only if the channel [`takes_mapped`](Self::takes_mapped).
    ///
    /// With this a virtual function on a store in memory keeps no state of its requests.
    fn exchange_mapped(&mut self, mapped: &Mapped, batch: &mut Batch, completed: &mut Batch) {
        let _ = (mapped, batch, completed);
    }

    /// Whether the channel carries out requests in [`exchange_mapped`](Self::exchange_mapped). The
    /// answer stays the same for the channel's life.
    fn takes_mapped(&self) -> bool {
        false
    }

    /// Whether the channel makes a write durable by itself that asks for it
    /// ([`BlockRequest::write_through`](crate::BlockRequest::write_through)), which is cheaper than
    /// a flush behind the write. The answer stays the same for the channel's life. By default no
    /// such write is submitted.
    fn takes_write_through(&self) -> bool {
        false
    }

    /// The requests in flight and the time of the next poll. Asked when a turn found nothing, so it
    /// takes constant time.
    ///
    /// A channel may say [`Next::Now`] with nothing in flight, to take a change over: it is polled
    /// once then, and so is one whose descriptor is readable.
    fn readiness(&self) -> Readiness;

    /// When the oldest request was taken that waits for another thread, which needs a CPU: a worker
    /// of the kernel, or of the daemon. `None` if no request does. Asked about once a millisecond,
    /// so it may look through all requests.
    fn waits_since(&self) -> Option<Nanos>;

    /// A file descriptor that is readable (level-triggered) when `poll` has something to hand back.
    /// `None` if only submission, time and units of the same sidecore complete requests here. It
    /// stays the same for the channel's life.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;
}

/// When a channel makes progress again. The order is that of urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Next {
    /// In each poll: nothing wakes its queue.
    Now,
    /// At this time, or when its descriptor wakes the queue.
    At(Nanos),
    /// When its descriptor wakes the queue, or a unit of the queue's sidecore does by a port, or
    /// more is submitted.
    OnWake,
}

impl Next {
    /// The time until which the queue may sleep; `None` if a descriptor wakes it.
    #[must_use]
    pub fn deadline(self) -> Option<Nanos> {
        match self {
            Self::Now => Some(Nanos::ZERO),
            Self::At(at) => Some(at),
            Self::OnWake => None,
        }
    }
}

/// A channel's answer to [`BlockChannel::readiness`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Requests that were submitted and not yet handed back.
    pub in_flight: usize,
    /// When to poll next. [`Next::OnWake`] with requests in flight promises a descriptor, or a
    /// [port](sidecore_reactor::Port) of the queue's sidecore.
    pub next: Next,
}

impl Readiness {
    /// Of a channel that needs to be polled for each of its `in_flight` requests.
    #[must_use]
    pub fn polled(in_flight: usize) -> Self {
        Self { in_flight, next: if in_flight > 0 { Next::Now } else { Next::OnWake } }
    }

    /// Of this channel and of a stage before it, which holds `in_flight` more requests until
    /// `next`.
    #[must_use]
    pub fn behind(self, in_flight: usize, next: Next) -> Self {
        Self { in_flight: self.in_flight.saturating_add(in_flight), next: self.next.min(next) }
    }
}
