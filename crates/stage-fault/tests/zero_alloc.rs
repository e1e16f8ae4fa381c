//! Requests that fail or pass allocate nothing.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn fault() {
    let rules = vec![
        FaultRule { affected: Affected::Reads, when: When::EveryNth(5), fault: Fault::Short },
        FaultRule { affected: Affected::All, when: When::PerMillion(50_000), fault: Fault::Eio },
        FaultRule { affected: Affected::Writes, when: When::Touching(0..1), fault: Fault::NoSpace },
    ];
    let ram = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    allocates_nothing(&FaultStore::new(ram, FaultPlan { seed: 3, rules }), allocations);
}
