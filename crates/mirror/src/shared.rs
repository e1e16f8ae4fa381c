//! The words that queues and the keeper share.
//!
//! Queues read a few words and never wait. The keeper closes a region, or pauses all requests, by a
//! store, and then looks until no queue has such a request: see [`Gauge`].

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::BlockDevice;
use sidecore_reactor::Bell;

use crate::layout::Layout;
use crate::legs::MAX_LEGS;
use crate::mail::Message;
use crate::plan::Plan;
use crate::rules::Neglected;
use crate::status::Status;
use crate::stripes::Stripes;

/// A bit for each region.
pub(crate) struct RegionBits(Box<[AtomicU64]>);

impl RegionBits {
    pub(crate) fn new(regions: usize) -> Self {
        Self((0..regions.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    #[inline]
    pub(crate) fn has(&self, region: usize) -> bool {
        let word = self.0.get(region / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (region % 64) != 0)
    }

    #[inline]
    pub(crate) fn set(&self, region: usize) {
        if let Some(word) = self.0.get(region / 64) {
            word.fetch_or(1 << (region % 64), Ordering::AcqRel);
        }
    }

    pub(crate) fn clear(&self, region: usize) {
        if let Some(word) = self.0.get(region / 64) {
            word.fetch_and(!(1 << (region % 64)), Ordering::AcqRel);
        }
    }

    pub(crate) fn clear_all(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }
}

/// A queue's requests at the legs, as the keeper sees them.
///
/// A queue *enters* before it looks at the plan and at regions, and *leaves* when it has counted
/// what it starts. Either it sees the keeper's store, or the keeper sees that it has entered.
pub(crate) struct Gauge {
    has_entered: AtomicUsize,
    /// Parts of writes, by the parity at their start.
    writes: [AtomicUsize; 2],
    /// Reads and flushes.
    others: AtomicUsize,
    /// Parts that a leg has failed and the keeper has not decided about.
    held: AtomicUsize,
    pub(crate) bell: Arc<Bell>,
}

/// Adds to a counter that only this thread writes.
#[inline]
fn bump(counter: &AtomicUsize, by: isize) {
    let value = counter.load(Ordering::Relaxed);
    counter.store(value.wrapping_add_signed(by), Ordering::Release);
}

impl Gauge {
    pub(crate) fn new(bell: Arc<Bell>) -> Self {
        Self {
            has_entered: AtomicUsize::new(0),
            writes: [AtomicUsize::new(0), AtomicUsize::new(0)],
            others: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            bell,
        }
    }

    /// Begins to start requests. Returns the plan, and the parity of writes.
    #[inline]
    pub(crate) fn enter(&self, shared: &Shared) -> (Plan, usize) {
        self.has_entered.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        (shared.plan(), shared.parity.load(Ordering::Acquire) as usize)
    }

    #[inline]
    pub(crate) fn leave(&self) {
        self.has_entered.store(0, Ordering::Release);
    }

    #[inline]
    pub(crate) fn wrote(&self, parity: usize, by: isize) {
        if let Some(counter) = self.writes.get(parity) {
            bump(counter, by);
        }
    }

    #[inline]
    pub(crate) fn did(&self, by: isize) {
        bump(&self.others, by);
    }

    #[inline]
    pub(crate) fn holds(&self, by: isize) {
        bump(&self.held, by);
    }

    /// Whether a part waits for the keeper's decision about a leg.
    pub(crate) fn has_held(&self) -> bool {
        self.held.load(Ordering::Acquire) > 0
    }

    fn is_outside(&self) -> bool {
        self.has_entered.load(Ordering::Acquire) == 0
    }

    /// Whether no part of a write of this parity is at a leg.
    pub(crate) fn has_no_writes(&self, parity: usize) -> bool {
        self.is_outside()
            && self.writes.get(parity).is_none_or(|count| count.load(Ordering::Acquire) == 0)
    }

    /// Whether nothing is at a leg.
    pub(crate) fn is_idle(&self) -> bool {
        self.has_no_writes(0) && self.has_no_writes(1) && self.others.load(Ordering::Acquire) == 0
    }
}

/// The store of a leg, and how often it was replaced.
pub(crate) type LegDevice = (u32, Option<Arc<dyn BlockDevice>>);

/// See the module.
pub(crate) struct Shared {
    pub(crate) layout: Layout,
    pub(crate) neglected: Neglected,
    plan: AtomicU64,
    /// Regions that are dirty on all legs in sync, so that writes may start.
    pub(crate) open: RegionBits,
    /// Regions that are equal on the leg that is copied to.
    pub(crate) equal: RegionBits,
    /// Regions that were written since the keeper looked last.
    pub(crate) touched: RegionBits,
    /// Grows when regions were opened.
    pub(crate) openings: AtomicU32,
    parity: AtomicU32,
    pub(crate) stripes: Stripes,
    gauges: Mutex<Vec<Arc<Gauge>>>,
    devices: Mutex<[LegDevice; MAX_LEGS]>,
    /// Reads that one leg has failed and another one answered.
    pub(crate) read_errors: AtomicU64,
    status: Mutex<Status>,
    /// The mirror is to end: the keeper's answers are not waited for.
    pub(crate) is_ending: AtomicBool,
    pub(crate) keeper: Sender<Message>,
}

impl Shared {
    pub(crate) fn new(layout: Layout, neglected: Neglected, keeper: Sender<Message>) -> Self {
        let bits = || RegionBits::new(layout.regions());
        Self {
            layout,
            neglected,
            plan: AtomicU64::new(Plan::CLOSED.to_word()),
            open: bits(),
            equal: bits(),
            touched: bits(),
            openings: AtomicU32::new(0),
            parity: AtomicU32::new(0),
            stripes: Stripes::new(),
            gauges: Mutex::default(),
            devices: Mutex::default(),
            read_errors: AtomicU64::new(0),
            status: Mutex::default(),
            is_ending: AtomicBool::new(false),
            keeper,
        }
    }

    #[inline]
    pub(crate) fn plan(&self) -> Plan {
        Plan::from_word(self.plan.load(Ordering::Acquire))
    }

    /// Publishes a plan, and wakes queues that wait for one.
    pub(crate) fn set_plan(&self, change: impl FnOnce(&mut Plan)) {
        let mut plan = self.plan();
        change(&mut plan);
        plan.version = plan.version.wrapping_add(1);
        self.plan.store(plan.to_word(), Ordering::Release);
        self.ring();
    }

    /// Has writes count anew; returns the parity of those before.
    pub(crate) fn turn_parity(&self) -> usize {
        // After the keeper's stores, and before it looks at gauges.
        fence(Ordering::SeqCst);
        let before = self.parity.load(Ordering::Relaxed);
        self.parity.store(before ^ 1, Ordering::Release);
        fence(Ordering::SeqCst);
        before as usize
    }

    pub(crate) fn ring(&self) {
        for gauge in self.gauges().iter() {
            gauge.bell.ring();
        }
    }

    /// The gauges of all queues that are open.
    pub(crate) fn gauges(&self) -> MutexGuard<'_, Vec<Arc<Gauge>>> {
        let mut gauges = self.gauges.lock().unwrap_or_else(PoisonError::into_inner);
        gauges.retain(|gauge| Arc::strong_count(gauge) > 1);
        gauges
    }

    pub(crate) fn devices(&self) -> MutexGuard<'_, [LegDevice; MAX_LEGS]> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the store of a leg, which no plan names.
    pub(crate) fn set_device(&self, leg: usize, device: Option<Arc<dyn BlockDevice>>) {
        if let Some((count, place)) = self.devices().get_mut(leg) {
            *count = count.wrapping_add(1);
            *place = device;
        }
    }

    pub(crate) fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
