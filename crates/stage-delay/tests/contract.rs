//! The stage keeps the contract of the block seam.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore};
use sidecore_block_contract::check_at_each_depth;
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

#[test]
fn delay_keeps_the_contract() {
    let ram = || Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap());
    // Short, and so long that only time the test makes up gets there.
    for delay in [Nanos(1), Nanos::from_micros(50), Nanos::from_millis(3_600_000)] {
        check_at_each_depth(&|| Arc::new(DelayStore::new(ram(), delay)));
    }
}
