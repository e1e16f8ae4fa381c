//! A queue's way to its stage on one thread, at the sidecore's end.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use sidecore_block::{Batch, BlockDevice, Next};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{Bell, CoreContext, Listener};
use sidecore_ring::{Consumer, Producer, spsc};
use sidecore_sidecore::{Handle, NotStarted};
use sidecore_units::Nanos;

use crate::desk::{Boxed, Line, Message, Opened, Opening};
use crate::store_end::StoreEnd;
use crate::threads::{PATIENCE, Thread};
use crate::unit::{Ends, Shared, StageUnit};

/// The sidecore's end of the rings between a queue and a channel of its stage.
pub(crate) struct Lane {
    requests: Producer<Boxed>,
    returns: Consumer<Boxed>,
    /// Requests on their way to the stage. Kept for its capacity.
    queued: Batch,
    in_flight: usize,
    shared: Arc<Shared>,
    /// Wakes the stage's thread.
    bell: Arc<Bell>,
    /// The stage's channel; `None` until it is open.
    unit: Option<(Arc<Thread>, Handle<StageUnit>)>,
    /// The stage's channels to the store.
    stores: Vec<StoreEnd>,
    /// Since when the stage's thread has had requests and sent none.
    waits_since: Option<Nanos>,
}

/// A lane is closed when its queue is.
impl Drop for Lane {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl Lane {
    /// Makes a lane for up to `depth` requests, and what the stage's unit needs for it.
    pub(crate) fn new(depth: usize) -> io::Result<(Self, Ends)> {
        let listener = Listener::new()?;
        let (requests, to_stage) = spsc(depth);
        let (from_stage, returns) = spsc(depth);
        let shared = Arc::new(Shared::default());
        let lane = Self {
            requests,
            returns,
            queued: Batch::with_capacity(depth),
            in_flight: 0,
            shared: Arc::clone(&shared),
            bell: listener.bell(),
            unit: None,
            stores: Vec::new(),
            waits_since: None,
        };
        Ok((lane, Ends { requests: to_stage, returns: from_stage, listener, shared }))
    }

    /// Opens a channel of a stage on `thread`, with the channels to the store below that it needs
    /// on this sidecore. The stage wakes the queue by the bell of `queue`.
    pub(crate) fn open(
        (stage, below): (&Arc<dyn BlockDevice>, &dyn BlockDevice),
        thread: &Arc<Thread>,
        (core, depth): (&CoreContext, usize),
        queue: &Listener,
    ) -> io::Result<Self> {
        thread.begin_wait()?;
        let (mut lane, ends) = Self::new(depth)?;
        let (desk, messages) = channel();
        let (stage, asks) = (Arc::clone(stage), desk.clone());
        let (queue, bell) = (queue.bell(), Arc::clone(&lane.bell));
        let make = move |core: &Rc<CoreContext>| -> io::Result<StageUnit> {
            let line = Rc::new(Line::new(queue, bell));
            let opening = core.shared::<Opening>();
            opening.0.replace(Some(Rc::clone(&line)));
            let channel = line.served(&asks, || stage.open_channel(core, depth));
            opening.0.replace(None);
            Ok(StageUnit::new(channel?, ends, line, depth))
        };
        let started = move |started: Result<Handle<StageUnit>, NotStarted<io::Error>>| {
            let started = started.map_err(|error| match error {
                NotStarted::Unit(error) | NotStarted::Watch(error) => error,
                NotStarted::Gone => ended(),
            });
            let _ = desk.send(Message::Started(started));
        };
        thread.sidecore.start_then(make, started);
        match lane.wait(&messages, thread, Some((below, core)))? {
            Message::Started(unit) => lane.unit = Some((Arc::clone(thread), unit?)),
            _ => return Err(ended()),
        }
        Ok(lane)
    }

    /// Attaches memory to the stage's channel.
    pub(crate) fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let Some((thread, unit)) = self.unit.clone() else { return Ok(()) };
        thread.begin_wait()?;
        let (desk, messages) = channel();
        let memory = memory.clone();
        unit.tell(move |unit| unit.attach(&memory, &desk));
        match self.wait(&messages, &thread, None)? {
            Message::Attached(attached) => attached,
            _ => Err(ended()),
        }
    }

    /// Waits for the stage's thread, and answers the stage's questions meanwhile. Without a store
    /// to open channels to, the stage has opened its channels before.
    fn wait(
        &mut self,
        messages: &Receiver<Message>,
        thread: &Thread,
        below: Option<(&dyn BlockDevice, &CoreContext)>,
    ) -> io::Result<Message> {
        let begun = Instant::now();
        loop {
            match messages.recv_timeout(PATIENCE.saturating_sub(begun.elapsed())) {
                Ok(Message::Open { depth, reply }) => {
                    let _ = reply.send(self.open_store(below, depth));
                }
                Ok(Message::Attach { store, memory, reply }) => {
                    let store = self.stores.get_mut(store);
                    let _ = reply.send(store.map_or(Ok(()), |store| store.attach_memory(&memory)));
                }
                Ok(done) => return Ok(done),
                Err(RecvTimeoutError::Timeout) => return Err(thread.timed_out()),
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            }
        }
    }

    fn open_store(
        &mut self,
        below: Option<(&dyn BlockDevice, &CoreContext)>,
        depth: usize,
    ) -> io::Result<Opened> {
        let Some((below, core)) = below else {
            return Err(io::Error::other(
                "a stage opens the channels to its store when its own channel is opened",
            ));
        };
        let (store, opened) = StoreEnd::open(below, core, (self.stores.len(), depth))?;
        self.stores.push(store);
        Ok(opened)
    }

    /// Requests that the stage has.
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(crate) fn takes_write_through(&self) -> bool {
        self.shared.takes_write_through.load(Ordering::Acquire)
    }

    pub(crate) fn stores(&self) -> &[StoreEnd] {
        &self.stores
    }

    /// Queues a request for the stage, until [`send`](Self::send).
    #[inline]
    pub(crate) fn push(&mut self, request: Boxed) {
        self.queued.push(request);
        self.in_flight = self.in_flight.saturating_add(1);
    }

    /// Sends the queued requests to the stage.
    #[inline]
    pub(crate) fn send(&mut self, now: Nanos) {
        if self.queued.is_empty() {
            return;
        }
        // The ring has room for all that may be in flight.
        self.requests.send(&mut self.queued);
        self.waits_since.get_or_insert(now);
        self.bell.ring();
    }

    /// Serves the stage's channels to the store, and appends the requests that have ended.
    #[inline]
    pub(crate) fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let (mut from_stage, mut to_stage) = (0_usize, 0_usize);
        for store in &mut self.stores {
            let (taken, returned) = store.serve(now);
            from_stage = from_stage.saturating_add(taken);
            to_stage = to_stage.saturating_add(returned);
        }
        if to_stage > 0 {
            self.bell.ring();
        }
        let returned = self.returns.receive(completed);
        self.in_flight = self.in_flight.saturating_sub(returned);
        if self.in_flight == 0 {
            self.waits_since = None;
        } else if from_stage.saturating_add(returned) > 0 {
            self.waits_since = Some(now);
        }
    }

    /// The time of the next poll.
    #[inline]
    pub(crate) fn next(&self) -> Next {
        if !self.returns.is_empty() {
            return Next::Now;
        }
        self.stores.iter().map(StoreEnd::next).min().unwrap_or(Next::OnWake)
    }

    /// See [`waits_since`](sidecore_block::BlockChannel::waits_since).
    pub(crate) fn waits_since(&self) -> Option<Nanos> {
        let stores = self.stores.iter().filter_map(|store| store.channel().waits_since());
        stores.chain(self.waits_since).min()
    }
}

fn ended() -> io::Error {
    io::Error::other("the stage's thread has ended, the log says why; restart the daemon")
}

#[cfg(test)]
impl Lane {
    /// Opens a channel to `below` for a stage that is on the same thread.
    pub(crate) fn open_here(&mut self, below: &dyn BlockDevice, depth: usize) -> Opened {
        self.open_store(Some((below, &CoreContext::default())), depth).unwrap()
    }
}
