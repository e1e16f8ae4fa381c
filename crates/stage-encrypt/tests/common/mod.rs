//! Stores of the tests.

#![allow(dead_code)]

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_luks::{KEY_BYTES, SectorSize, Segment, Xts};
use sidecore_stage_encrypt::EncryptStore;

pub fn xts() -> Xts {
    Xts::new(&std::array::from_fn::<u8, KEY_BYTES, _>(|at| at as u8))
}

pub fn segment(sector: SectorSize) -> Segment {
    Segment { offset_bytes: 0, len_bytes: None, sector, first_unit: 0 }
}

pub fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

pub fn encrypted(below: Arc<dyn BlockDevice>, segment: Segment) -> Arc<dyn BlockDevice> {
    Arc::new(EncryptStore::new(below, xts(), segment, false).unwrap())
}
