//! The stage keeps the contract of the block seam, also among others.

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_block_contract::check_at_each_depth;
use sidecore_stage_delay::DelayStore;
use sidecore_stage_fault::{FaultPlan, FaultStore};
use sidecore_units::Nanos;

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

#[test]
fn fault_without_faults_keeps_the_contract() {
    check_at_each_depth(&|| Arc::new(FaultStore::new(ram(), FaultPlan::default())));
}

#[test]
fn stages_on_stages_keep_the_contract() {
    check_at_each_depth(&|| {
        let slow = Arc::new(DelayStore::new(ram(), Nanos(500)));
        let failing = Arc::new(FaultStore::new(slow, FaultPlan::default()));
        Arc::new(DelayStore::new(failing, Nanos(500)))
    });
}
