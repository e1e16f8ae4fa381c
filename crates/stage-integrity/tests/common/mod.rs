//! Stores of the tests.

#![allow(dead_code)]

pub mod lies;

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_stage_integrity::{FormatOptions, IntegrityStore, Layout, OpenOptions, format};

pub fn ram(bytes: u64, geometry: impl Fn(Geometry) -> Geometry) -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(geometry(Geometry::new(bytes, 512))).unwrap())
}

pub fn formatted(below: &Arc<dyn BlockDevice>, block_bytes: u32, slots: Option<u32>) -> Layout {
    let options = FormatOptions { uuid: [9; 16], block_bytes, slots, force: false };
    format(&**below, &options).unwrap()
}

pub fn open(below: &Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let below = Arc::clone(below);
    Arc::new(IntegrityStore::open(below, "disk", &OpenOptions::default()).unwrap())
}

/// A new store with checksums.
pub fn made(below: &Arc<dyn BlockDevice>, block_bytes: u32) -> Arc<dyn BlockDevice> {
    formatted(below, block_bytes, None);
    open(below)
}
