//! A device with a number of slots, in front of memory.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Next, Readiness};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

/// The time that a request occupies its slot.
const SERVICE: Nanos = Nanos::from_millis(1);

/// Requests of all channels take the first free slot, in the order of submission. Channels that
/// were opened before [`begin`](Self::begin), and all channels if there are no slots, access the
/// memory at once.
pub(super) struct SlotStore {
    inner: Arc<dyn BlockDevice>,
    /// The time at which each slot becomes free.
    slots: Arc<Mutex<BinaryHeap<Reverse<u64>>>>,
    begun: AtomicBool,
}

impl SlotStore {
    pub(super) fn new(inner: Arc<dyn BlockDevice>, slots: usize) -> Self {
        let slots = Arc::new(Mutex::new((0..slots).map(|_| Reverse(0)).collect()));
        Self { inner, slots, begun: AtomicBool::new(false) }
    }

    pub(super) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }
}

impl BlockDevice for SlotStore {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.inner.open_channel(core, depth)?;
        if !self.begun.load(Ordering::Relaxed)
            || self.slots.lock().is_ok_and(|slots| slots.is_empty())
        {
            return Ok(inner);
        }
        let slots = Arc::clone(&self.slots);
        Ok(Box::new(SlotChannel { inner, slots, depth, in_slots: VecDeque::new() }))
    }
}

struct SlotChannel {
    inner: Box<dyn BlockChannel>,
    slots: Arc<Mutex<BinaryHeap<Reverse<u64>>>>,
    depth: usize,
    /// Each with its end, in the order of their ends, because slots are given in the command of
    /// submission.
    in_slots: VecDeque<(Nanos, Box<BlockRequest>)>,
}

impl BlockChannel for SlotChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let room = self.depth.saturating_sub(self.in_slots.len()).min(batch.len());
        for request in batch.drain(..room) {
            let Reverse(free_at) = slots.pop().expect("there are slots");
            let end = free_at.max(now.0) + SERVICE.0;
            slots.push(Reverse(end));
            self.in_slots.push_back((Nanos(end), request));
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let count = self.in_slots.iter().take_while(|(end, _)| *end <= now).count();
        let mut ended: Batch = self.in_slots.drain(..count).map(|(_, request)| request).collect();
        self.inner.submit(now, &mut ended);
        self.inner.poll(now, completed);
    }

    fn readiness(&self) -> Readiness {
        let next = self.in_slots.front().map_or(Next::OnWake, |(end, _)| Next::At(*end));
        Readiness { in_flight: self.in_slots.len(), next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
