//! A store that has to be polled though it has no request.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, Next, Readiness};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{CoreContext, EventFd};
use sidecore_units::Nanos;

use super::Harness;

/// See the module. It has one channel at a time.
pub struct Asking {
    below: Arc<dyn BlockDevice>,
    state: Arc<State>,
}

struct State {
    asks: AtomicBool,
    event: EventFd,
}

impl Asking {
    /// In front of `below`.
    ///
    /// # Panics
    /// The process has no descriptor left.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>) -> Arc<Self> {
        let state = State { asks: AtomicBool::new(false), event: EventFd::new().unwrap() };
        Arc::new(Self { below, state: Arc::new(state) })
    }

    /// Has the channel want to be polled.
    pub fn ask(&self) {
        self.state.asks.store(true, Ordering::SeqCst);
    }

    /// Whether the channel wants to be polled.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.state.asks.load(Ordering::SeqCst)
    }

    /// Makes the channel's descriptor readable, until the channel is polled.
    pub fn signal(&self) {
        self.state.event.signal();
    }

    /// Whether no signal was left: takes it.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.state.event.drain() == 0
    }
}

/// Polls an idle device that `make` puts in front of a store, which asks for that and whose
/// descriptor is readable. The store has the bytes of `below`.
///
/// # Panics
/// The store was not polled.
pub fn passes_idle_polls(
    below: Arc<dyn BlockDevice>,
    make: impl FnOnce(Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice>,
) {
    let asking = Asking::new(below);
    let device = make(Arc::clone(&asking) as Arc<dyn BlockDevice>);
    let mut guest = Harness::new(&device, 8);
    guest.store(0, &[7; 4096]);
    assert!(guest.load(0, 4096) == [7; 4096]);
    asking.ask();
    asking.signal();
    assert_eq!(guest.channel.readiness().next, Next::Now, "it does not ask");
    let mut completed = Batch::new();
    let now = guest.now();
    guest.channel.exchange(now, &mut Batch::new(), &mut completed);
    assert!(!asking.asks() && asking.is_quiet() && completed.is_empty(), "it was not polled");
}

impl BlockDevice for Asking {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let below = self.below.open_channel(core, depth)?;
        Ok(Box::new(AskingChannel { below, state: Arc::clone(&self.state) }))
    }
}

struct AskingChannel {
    below: Box<dyn BlockChannel>,
    state: Arc<State>,
}

impl BlockChannel for AskingChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.below.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.below.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.state.asks.store(false, Ordering::SeqCst);
        self.state.event.drain();
        self.below.poll(now, completed);
    }

    fn readiness(&self) -> Readiness {
        let asks = self.state.asks.load(Ordering::SeqCst);
        self.below.readiness().behind(0, if asks { Next::Now } else { Next::OnWake })
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.state.event.as_fd())
    }
}
