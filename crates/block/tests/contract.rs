//! The simple stores keep the contract.

use std::sync::Arc;

use sidecore_block::{
    BlockDevice, DelayStore, FaultPlan, FaultStore, Geometry, NullStore, RamStore, contract, dropped_tags,
};
use sidecore_units::Nanos;

const GEOMETRY: Geometry = Geometry::new(4 << 20, 512);

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(GEOMETRY).unwrap())
}

fn check(open: contract::Open<'_>) {
    for depth in [1, 8, 64] {
        contract::check(open, &contract::Options { depth, ..contract::Options::default() });
    }
    assert_eq!(dropped_tags(), 0);
}

#[test]
fn ram_keeps_the_contract() {
    check(&ram);
}

#[test]
fn ram_in_large_blocks_keeps_the_contract() {
    check(&|| Arc::new(RamStore::new(Geometry::new(4 << 20, 4096)).unwrap()));
}

#[test]
fn read_only_ram_keeps_the_contract() {
    check(&|| Arc::new(RamStore::new(Geometry { read_only: true, ..GEOMETRY }).unwrap()));
}

#[test]
fn null_keeps_what_applies_to_it() {
    let open = || Arc::new(NullStore::new(GEOMETRY)) as Arc<dyn BlockDevice>;
    contract::check(&open, &contract::Options { keeps_data: false, ..contract::Options::default() });
}

#[test]
fn delay_keeps_the_contract() {
    // Short, and so long that only time the test makes up gets there.
    for delay in [Nanos(1), Nanos::from_micros(50), Nanos::from_millis(3_600_000)] {
        check(&|| Arc::new(DelayStore::new(ram(), delay)));
    }
}

#[test]
fn fault_without_faults_keeps_the_contract() {
    check(&|| Arc::new(FaultStore::new(ram(), FaultPlan::default())));
}

#[test]
fn stages_on_stages_keep_the_contract() {
    check(&|| {
        let slow = Arc::new(DelayStore::new(ram(), Nanos(500)));
        let failing = Arc::new(FaultStore::new(slow, FaultPlan::default()));
        Arc::new(DelayStore::new(failing, Nanos(500)))
    });
}
