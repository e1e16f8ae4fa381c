//! A remote store keeps the contract of stores, whichever sidecore its queues are on.

mod vmhost;

use std::sync::Arc;

use sidecore_block::{BlockDevice, dropped_tags};
use sidecore_block_contract::{Options, check};
use sidecore_link::Faults;
use sidecore_vrio::wire::{DeviceEntry, device_flag};
use vmhost::{Pumped, RIG, Rig, entry};

fn open(entry: DeviceEntry, is_local: bool, faults: Faults) -> Arc<dyn BlockDevice> {
    // The former rig first: channels are gone by now.
    RIG.set(None);
    let mut rig = Rig::new(9, faults, &[entry]);
    let store = rig.open("disk1");
    RIG.set(Some(rig));
    Arc::new(Pumped { store, is_local })
}

fn check_all(make: &dyn Fn() -> DeviceEntry, is_local: bool, faults: Faults) {
    for depth in [1, 8, 64] {
        let options = Options { depth, ..Options::default() };
        check(&|| open(make(), is_local, faults), &options);
    }
    RIG.set(None);
    assert_eq!(dropped_tags(), 0);
}

fn disk() -> DeviceEntry {
    entry(0, "disk1")
}

#[test]
fn queues_of_the_sessions_sidecore_keep_the_contract() {
    check_all(&disk, true, Faults::default());
}

#[test]
fn queues_of_other_sidecores_keep_the_contract() {
    check_all(&disk, false, Faults::default());
}

#[test]
fn a_wire_that_loses_and_doubles_and_reorders_keeps_the_contract() {
    let faults = Faults { lost: 20_000, doubled: 20_000, overtaken: 50_000, ..Faults::default() };
    for is_local in [true, false] {
        check_all(&disk, is_local, faults);
    }
}

#[test]
fn a_device_of_large_blocks_and_a_read_only_one_keep_the_contract() {
    let large = || DeviceEntry { block_bytes: 4096, ..disk() };
    check_all(&large, true, Faults::default());
    let read_only = || DeviceEntry { flags: disk().flags | device_flag::READ_ONLY, ..disk() };
    check_all(&read_only, true, Faults::default());
    let plain = || DeviceEntry { flags: device_flag::PRESENT, ..disk() };
    check_all(&plain, false, Faults::default());
}
