//! The layer between a contained stage and the store below it.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::StageAccount;
use super::stopwatch::Stopwatch;
use crate::{Batch, BlockChannel, BlockDevice, Geometry, Mapped, Meter, Readiness};

/// The store, as a contained stage sees it.
pub(super) struct Floor {
    pub(super) below: Arc<dyn BlockDevice>,
    pub(super) account: Arc<StageAccount>,
    /// The stage is being opened. A channel of that time is for metadata, and is dropped before the
    /// stage is open.
    pub(super) is_opening: AtomicBool,
}

impl BlockDevice for Floor {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        if self.is_opening.load(Ordering::Acquire) {
            return self.below.open_channel(core, depth);
        }
        // A channel that is opened at another time could not be found when the stage has failed.
        let Some(lower) = core.shared::<Opened>().last_of(&self.account) else {
            return Err(io::Error::other(
                "a stage opens the channels to its store when its own channel is opened",
            ));
        };
        let inner = Some(self.below.open_channel(core, depth)?);
        Ok(Box::new(FloorChannel { inner, lower }))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.below.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.below.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.below.loss()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.below.meters()
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        self.below.stages()
    }
}

/// The state that the layers around a stage share, of one channel.
#[derive(Default)]
pub(super) struct Lower {
    /// A call of the store has begun and not returned.
    inside: Cell<bool>,
    /// The channels to the store whose stage has been dropped.
    left: RefCell<Vec<Box<dyn BlockChannel>>>,
    /// Runs while the stage does.
    pub(super) watch: Stopwatch,
}

impl Lower {
    /// Whether the store runs, or has unwound.
    pub(super) fn is_inside(&self) -> bool {
        self.inside.get()
    }

    /// Takes the channels to the store. Their stage has been dropped.
    pub(super) fn take_left(&self) -> Vec<Box<dyn BlockChannel>> {
        self.left.take()
    }

    /// Calls the store.
    #[inline]
    fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        self.inside.set(true);
        let runs = self.watch.stop();
        let result = call();
        if runs {
            self.watch.start();
        }
        self.inside.set(false);
        result
    }
}

/// The channels of stages that are being opened on this sidecore, the innermost last.
#[derive(Default)]
pub(super) struct Opened(RefCell<Vec<(Arc<StageAccount>, Rc<Lower>)>>);

impl Opened {
    pub(super) fn begin(&self, account: &Arc<StageAccount>, core: &CoreContext) -> Rc<Lower> {
        let watch = Stopwatch::new(core.clock());
        let lower = Rc::new(Lower { watch, ..Lower::default() });
        self.0.borrow_mut().push((Arc::clone(account), Rc::clone(&lower)));
        lower
    }

    /// Ends what [`begin`](Self::begin) began, and all that has begun since and has unwound.
    pub(super) fn end(&self, lower: &Rc<Lower>) {
        let mut opened = self.0.borrow_mut();
        if let Some(index) = opened.iter().position(|(_, other)| Rc::ptr_eq(other, lower)) {
            opened.truncate(index);
        }
    }

    fn last_of(&self, account: &Arc<StageAccount>) -> Option<Rc<Lower>> {
        let opened = self.0.borrow();
        let (last, lower) = opened.last()?;
        Arc::ptr_eq(last, account).then(|| Rc::clone(lower))
    }
}

/// A channel to the store, as a contained stage sees it. It outlives the stage, in [`Lower`].
struct FloorChannel {
    /// Always there, until the drop.
    inner: Option<Box<dyn BlockChannel>>,
    lower: Rc<Lower>,
}

impl Drop for FloorChannel {
    fn drop(&mut self) {
        self.lower.left.borrow_mut().extend(self.inner.take());
    }
}

impl BlockChannel for FloorChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let Some(inner) = &mut self.inner else { return Ok(()) };
        self.lower.enter(|| inner.attach_memory(memory))
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let Some(inner) = &mut self.inner else { return };
        self.lower.enter(|| inner.submit(now, batch));
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let Some(inner) = &mut self.inner else { return };
        self.lower.enter(|| inner.poll(now, completed));
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        let Some(inner) = &mut self.inner else { return };
        self.lower.enter(|| inner.exchange(now, batch, completed));
    }

    fn exchange_mapped(&mut self, mapped: &Mapped, batch: &mut Batch, completed: &mut Batch) {
        let Some(inner) = &mut self.inner else { return };
        self.lower.enter(|| inner.exchange_mapped(mapped, batch, completed));
    }

    fn takes_mapped(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| self.lower.enter(|| inner.takes_mapped()))
    }

    fn takes_write_through(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| self.lower.enter(|| inner.takes_write_through()))
    }

    fn readiness(&self) -> Readiness {
        let none = Readiness::polled(0);
        self.inner.as_ref().map_or(none, |inner| self.lower.enter(|| inner.readiness()))
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.lower.enter(|| self.inner.as_ref()?.waits_since())
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.lower.enter(|| self.inner.as_ref()?.wake_fd())
    }
}
