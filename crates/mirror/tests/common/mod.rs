//! Mirrors over memory.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, FilterChannel, Geometry, Operation, RamStore,
};
use sidecore_block_contract::Harness;
use sidecore_mirror::{
    Claim, CreateOptions, LegSet, LegState, Mirror, OpenOptions, Operator, Sleep, Status, Waits,
    Witness, create,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

pub const UUID: [u8; 16] = *b"mirror of a test";
pub const REGION_BYTES: u64 = 64 << 10;

/// A store that fails all requests when it is told to.
pub struct Breakable {
    below: Arc<dyn BlockDevice>,
    is_broken: Arc<AtomicBool>,
}

pub fn breakable() -> (Arc<dyn BlockDevice>, Arc<AtomicBool>) {
    breakable_of(ram())
}

/// A store that fails all requests when it is told to, and has its bytes in this one.
pub fn breakable_of(below: Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, Arc<AtomicBool>) {
    let is_broken = Arc::new(AtomicBool::new(false));
    let store = Breakable { below, is_broken: Arc::clone(&is_broken) };
    (Arc::new(store), is_broken)
}

impl BlockDevice for Breakable {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let is_broken = Arc::clone(&self.is_broken);
        let below = self.below.open_channel(core, depth)?;
        Ok(Box::new(FilterChannel::new(below, depth, move |_| {
            if is_broken.load(Ordering::SeqCst) { Err(BlockError::EIO) } else { Ok(()) }
        })))
    }
}

/// A witness that grants everything.
pub struct Yes;

impl Witness for Yes {
    fn may_go_on_alone(&self, _: &Claim) -> Result<(), String> {
        Ok(())
    }
}

pub fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

pub fn creation() -> CreateOptions {
    CreateOptions { uuid: UUID, region_bytes: Some(REGION_BYTES), are_equal: true, force: false }
}

pub fn options() -> OpenOptions {
    with(Arc::new(Operator))
}

pub fn with(witness: Arc<dyn Witness>) -> OpenOptions {
    OpenOptions {
        clear_after: Nanos::from_millis(1),
        copy_bytes_per_s: 1 << 40,
        ..OpenOptions::new(witness)
    }
}

/// A mirror of these stores, which are blank.
pub fn mirror(legs: &[Arc<dyn BlockDevice>]) -> Arc<Mirror> {
    create(legs, &creation(), &mut Sleep::default()).unwrap();
    Arc::new(Mirror::open(legs, options()).unwrap())
}

/// Waits until the mirror's state is so.
pub fn until(mirror: &Mirror, what: &str, mut is_so: impl FnMut(&Status) -> bool) -> Status {
    let begin = Instant::now();
    loop {
        let status = mirror.status();
        if is_so(&status) {
            return status;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "never {what}: {status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until these legs are in sync.
pub fn until_in_sync(mirror: &Mirror, legs: &[usize]) -> Status {
    until(mirror, "in sync", |status| legs.iter().all(|leg| status.legs[*leg] == LegState::InSync))
}

/// The legs without which a mirror asks to go on.
pub fn missing(mirror: &Mirror) -> LegSet {
    match mirror.status().waits {
        Some(Waits::Permission { missing, .. }) => missing,
        _ => LegSet::EMPTY,
    }
}

/// Where the bytes of writes lie in the memory of a guest.
pub const SCRATCH: u64 = 0x1_0000_0000;

/// Sends a write of the first sector.
pub fn send_write(guest: &mut Harness) {
    let write = guest.request(Operation::Write, 0, &[(SCRATCH, 512)]);
    guest.submit(&mut vec![write]);
}

/// Whether requests have ended: then they are in `completed`.
pub fn poll(guest: &mut Harness, completed: &mut Batch) -> bool {
    let now = guest.now();
    guest.channel.poll(now, completed);
    !completed.is_empty()
}
