//! Stores of the tests, and a stage that does as it is told.

#![allow(dead_code)]

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sidecore_block::{
    BlockChannel, BlockDevice, BlockRequest, FilterChannel, Geometry, RamStore, contain,
};
use sidecore_offload::offload;
use sidecore_reactor::CoreContext;

/// A hang, and no measure of speed.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn geometry() -> Geometry {
    Geometry::new(4 << 20, 512)
}

pub fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(geometry()).unwrap())
}

/// The calling thread, as the kernel numbers it.
pub fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}

/// Waits until `is_so`.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

/// The orders of the stage under test, and its notes.
#[derive(Default)]
pub struct Orders {
    /// The place where it waits until this is another one, as a stage that hangs; 0 is none.
    pub hangs_at: AtomicU64,
    /// The times that it has begun to wait.
    pub hanging: AtomicU32,
    /// The threads that its channels were opened on, in order.
    pub opened_on: Mutex<Vec<u32>>,
    /// The threads that requests were seen on, in order.
    pub seen_on: Mutex<Vec<u32>>,
}

/// The offset of requests that a stage hangs at.
pub const BAD: u64 = 1 << 20;
/// Stands for the opening of a channel.
pub const OPENING: u64 = u64::MAX;

impl Orders {
    pub fn hang_at(&self, place: u64) {
        self.hangs_at.store(place, Ordering::Release);
    }

    pub fn release(&self) {
        self.hang_at(0);
    }

    /// Hangs, if it is to at this place. A test that fails to release it finds a panic.
    fn wait_while_at(&self, place: u64) {
        let hangs = || self.hangs_at.load(Ordering::Acquire) == place;
        if hangs() {
            self.hanging.fetch_add(1, Ordering::Release);
            until("the stage is released", || !hangs());
        }
    }
}

struct Told {
    below: Arc<dyn BlockDevice>,
    orders: Arc<Orders>,
}

impl BlockDevice for Told {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.below.open_channel(core, depth)?;
        let orders = Arc::clone(&self.orders);
        orders.opened_on.lock().unwrap().push(this_thread());
        orders.wait_while_at(OPENING);
        Ok(Box::new(FilterChannel::new(inner, depth, move |request: &BlockRequest| {
            // No allocation for most requests: a test counts those.
            if request.offset_bytes == BAD {
                orders.seen_on.lock().unwrap().push(this_thread());
                orders.wait_while_at(BAD);
            }
            Ok(())
        })))
    }
}

/// The stage that does as it is told, on `threads` threads, or on sidecores.
pub fn told(threads: usize, below: Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, Arc<Orders>) {
    let orders = Arc::<Orders>::default();
    let of_stage = Arc::clone(&orders);
    let open = |below| {
        contain("told", "disk", below, |below| Ok(Arc::new(Told { below, orders: of_stage })))
    };
    let device = match threads {
        0 => open(below),
        threads => offload("told", threads, below, open),
    };
    (device.unwrap(), orders)
}
