//! A queue's channel to a stage on threads of its own, on the queue's sidecore.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, Next, Readiness};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{Listener, WakeSet};
use sidecore_units::Nanos;

use crate::lane::Lane;
use crate::threads::Threads;

/// A queue's channel. Its requests are shared out among lanes, one to each thread.
pub(crate) struct OffloadChannel {
    lanes: Vec<Lane>,
    depth: usize,
    in_flight: usize,
    listener: Listener,
    /// Wakes the queue for the stage and for the store, if the store has descriptors.
    wakes: Option<WakeSet>,
    takes_write_through: bool,
    /// They end after their last channel.
    _threads: Arc<Threads>,
}

impl OffloadChannel {
    /// A channel of `lanes`, whose requests are `depth` at most. The bell of `listener` wakes it.
    pub(crate) fn new(
        lanes: Vec<Lane>,
        depth: usize,
        listener: Listener,
        threads: Arc<Threads>,
    ) -> io::Result<Self> {
        Ok(Self {
            wakes: wakes(&lanes, &listener)?,
            takes_write_through: lanes.iter().all(Lane::takes_write_through),
            lanes,
            depth,
            in_flight: 0,
            listener,
            _threads: threads,
        })
    }

    /// The time of the next poll, without a look at the queue's sleep.
    fn next(&self) -> Next {
        self.lanes.iter().map(Lane::next).min().unwrap_or(Next::OnWake)
    }
}

/// The descriptors of the stage and the store behind one; `None` if the store has none.
fn wakes(lanes: &[Lane], listener: &Listener) -> io::Result<Option<WakeSet>> {
    let stores = lanes.iter().flat_map(Lane::stores);
    let mut members: Vec<RawFd> = Vec::new();
    let set = WakeSet::new()?;
    for fd in stores.filter_map(|store| store.channel().wake_fd()) {
        // Channels of one sidecore may share a descriptor.
        if !members.contains(&fd.as_raw_fd()) {
            set.add(fd)?;
            members.push(fd.as_raw_fd());
        }
    }
    if members.is_empty() {
        return Ok(None);
    }
    set.add(listener.as_fd())?;
    Ok(Some(set))
}

impl BlockChannel for OffloadChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.lanes.iter_mut().try_for_each(|lane| lane.attach_memory(memory))
    }

    /// Each request goes to the thread that has the fewest, the first of them: a queue with few
    /// requests uses one thread, and lets the others sleep.
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight).min(batch.len());
        for request in batch.drain(..room) {
            // A queue has a lane at least.
            if let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.in_flight()) {
                lane.push(request);
            }
        }
        self.in_flight = self.in_flight.saturating_add(room);
        for lane in &mut self.lanes {
            lane.send(now);
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.listener.wake();
        let before = completed.len();
        for lane in &mut self.lanes {
            lane.poll(now, completed);
        }
        let returned = completed.len().saturating_sub(before);
        self.in_flight = self.in_flight.saturating_sub(returned);
    }

    fn takes_write_through(&self) -> bool {
        self.takes_write_through
    }

    /// Has the stage's threads wake the queue, which is about to sleep, and looks once more.
    fn readiness(&self) -> Readiness {
        let mut next = self.next();
        if next != Next::Now {
            self.listener.sleep();
            next = self.next();
        }
        Readiness { in_flight: self.in_flight, next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.lanes.iter().filter_map(Lane::waits_since).min()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wakes.as_ref().map_or_else(|| self.listener.as_fd(), WakeSet::as_fd))
    }
}
