//! The stage keeps the contract of the block seam, in front of quick and of slow stores.

mod common;

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore};
use sidecore_block_contract::{check_at_each_depth, passes_idle_polls};
use sidecore_luks::SectorSize;
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use common::{encrypted, ram, segment};

#[test]
fn each_size_of_sectors_keeps_the_contract() {
    for sector_bytes in [512, 4096] {
        let sector = SectorSize::new(sector_bytes).unwrap();
        check_at_each_depth(&|| encrypted(ram(), segment(sector)));
    }
}

#[test]
fn large_blocks_of_small_sectors_keep_the_contract() {
    let large = || Arc::new(RamStore::new(Geometry::new(4 << 20, 4096)).unwrap());
    check_at_each_depth(&|| encrypted(large(), segment(SectorSize::SMALLEST)));
}

#[test]
fn a_slow_store_keeps_the_contract() {
    let slow = || Arc::new(DelayStore::new(ram(), Nanos(700)));
    check_at_each_depth(&|| encrypted(slow(), segment(SectorSize::SMALLEST)));
}

#[test]
fn an_idle_channel_polls_its_store() {
    passes_idle_polls(ram(), |store| encrypted(store, segment(SectorSize::SMALLEST)));
}
