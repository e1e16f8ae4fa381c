//! The store, as a stage on a thread of its own sees it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, Geometry, Meter, Next, Readiness, StageAccount,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_ring::{Consumer, Producer};
use sidecore_units::Nanos;

use crate::desk::{Boxed, Line, Message, Opened, Opening};

/// The store, whose channels stay on the sidecores.
pub(crate) struct BelowStore(pub(crate) Arc<dyn BlockDevice>);

impl BlockDevice for BelowStore {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let line = core.shared::<Opening>().0.borrow().clone();
        match line {
            Some(line) => Ok(Box::new(BelowChannel::open(line, depth)?)),
            // On the sidecore itself: the stage has failed, and its thread is not needed.
            None => self.0.open_channel(core, depth),
        }
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.0.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.0.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.0.loss()
    }

    fn user_gone(&self) {
        self.0.user_gone();
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.0.meters()
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        self.0.stages()
    }
}

/// The stage's end of a channel to the store.
pub(crate) struct BelowChannel {
    line: Rc<Line>,
    store: usize,
    requests: Producer<Boxed>,
    returns: Consumer<Boxed>,
    takes_write_through: bool,
    depth: usize,
    in_flight: usize,
    /// Requests on their way to the ring. Kept for its capacity.
    outbound: Batch,
}

impl BelowChannel {
    /// Has the sidecore open a channel to the store.
    pub(crate) fn open(line: Rc<Line>, depth: usize) -> io::Result<Self> {
        let opened = line.ask(|reply| Message::Open { depth, reply })?;
        Ok(Self::new(line, opened, depth))
    }

    pub(crate) fn new(line: Rc<Line>, opened: Opened, depth: usize) -> Self {
        let Opened { store, requests, returns, takes_write_through } = opened;
        Self {
            line,
            store,
            requests,
            returns,
            takes_write_through,
            depth,
            in_flight: 0,
            outbound: Batch::with_capacity(depth),
        }
    }

    fn count(&self, moved: usize) {
        self.line.moved.set(self.line.moved.get().wrapping_add(moved));
    }
}

impl BlockChannel for BelowChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let (store, memory) = (self.store, memory.clone());
        self.line.ask(|reply| Message::Attach { store, memory, reply })
    }

    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight).min(batch.len());
        if room == 0 {
            return;
        }
        self.outbound.extend(batch.drain(..room));
        // The ring has room for all that may be in flight.
        let sent = self.requests.send(&mut self.outbound);
        self.in_flight = self.in_flight.saturating_add(sent);
        self.count(sent);
        self.line.queue.ring();
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        let returned = self.returns.receive(completed);
        self.in_flight = self.in_flight.saturating_sub(returned);
        self.count(returned);
    }

    fn takes_write_through(&self) -> bool {
        self.takes_write_through
    }

    fn readiness(&self) -> Readiness {
        let next = if self.returns.is_empty() { Next::OnWake } else { Next::Now };
        Readiness { in_flight: self.in_flight, next }
    }

    /// The sidecore serves the store whether this thread has a CPU or not.
    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.line.stage.as_fd())
    }
}
