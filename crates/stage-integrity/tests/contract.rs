//! The stage keeps the contract of the block seam, in front of quick and of slow stores.

mod common;

use std::sync::Arc;

use sidecore_block::{Geometry, open_stage};
use sidecore_block_contract::{check_at_each_depth, passes_idle_polls};
use sidecore_stage_delay::DelayStore;
use sidecore_stage_integrity::IntegrityStage;
use sidecore_units::Nanos;

use common::{formatted, made, open, ram};

const STORE_BYTES: u64 = 5 << 20;

#[test]
fn each_size_of_blocks_keeps_the_contract() {
    for block_bytes in [512, 4096] {
        check_at_each_depth(&|| made(&ram(STORE_BYTES, |it| it), block_bytes));
    }
}

#[test]
fn the_stage_as_the_daemon_opens_it_keeps_the_contract() {
    check_at_each_depth(&|| {
        let below = ram(STORE_BYTES, |it| it);
        formatted(&below, 4096, None);
        open_stage(&IntegrityStage { uuid: None }, "disk", below).unwrap()
    });
}

#[test]
fn a_volatile_store_of_large_units_keeps_the_contract() {
    let below = |it| Geometry { volatile_cache: true, physical_block_bytes: 4096, ..it };
    check_at_each_depth(&|| made(&ram(STORE_BYTES, below), 4096));
}

#[test]
fn a_store_without_zeroes_keeps_the_contract() {
    let below = |it| Geometry { write_zeroes: false, discard: false, ..it };
    check_at_each_depth(&|| made(&ram(STORE_BYTES, below), 1024));
}

#[test]
fn a_short_journal_keeps_the_contract() {
    check_at_each_depth(&|| {
        let below = ram(STORE_BYTES, |it| it);
        formatted(&below, 512, Some(2));
        open(&below)
    });
}

#[test]
fn a_slow_store_keeps_the_contract() {
    check_at_each_depth(&|| {
        let below = ram(STORE_BYTES, |it| it);
        formatted(&below, 4096, None);
        open(&(Arc::new(DelayStore::new(below, Nanos(700))) as _))
    });
}

#[test]
fn an_idle_channel_polls_its_store() {
    passes_idle_polls(ram(STORE_BYTES, |it| it), |store| made(&store, 4096));
}
