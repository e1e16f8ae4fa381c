//! Mirrors over memory.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_mirror::{
    CreateOptions, LegState, Mirror, OpenOptions, Operator, Sleep, Status, Witness, create,
};
use sidecore_units::Nanos;

pub const UUID: [u8; 16] = *b"mirror of a test";
pub const REGION_BYTES: u64 = 64 << 10;

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
