//! The mirror keeps the contract of the block seam, with any number of legs, quick and slow.

mod common;

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_block_contract::{check, check_at_each_depth};
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use common::{mirror, ram};

#[test]
fn mirrors_of_one_two_and_three_legs_keep_the_contract() {
    for count in 1..=3 {
        check_at_each_depth(&|| {
            let legs: Vec<_> = (0..count).map(|_| ram()).collect();
            mirror(&legs)
        });
    }
}

#[test]
fn a_slow_leg_keeps_the_contract() {
    check_at_each_depth(&|| mirror(&[ram(), Arc::new(DelayStore::new(ram(), Nanos(700)))]));
}

#[test]
fn legs_of_different_blocks_and_sizes_keep_the_contract() {
    let large = || Arc::new(RamStore::new(Geometry::new(5 << 20, 4096)).unwrap());
    check(&|| mirror(&[ram(), large()]), &Default::default());
}

#[test]
fn a_mirror_of_files_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let count = std::cell::Cell::new(0);
    let open = || {
        let leg = || {
            count.set(count.get() + 1);
            let path = directory.path().join(count.get().to_string());
            std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
            Arc::new(FileStore::open(&FileOptions::new(path)).unwrap()) as Arc<dyn BlockDevice>
        };
        mirror(&[leg(), leg()]) as Arc<dyn BlockDevice>
    };
    check(&open, &Default::default());
}
