//! The stage of docs/writing-a-stage.md, and its tests.

mod write_quota;

use std::sync::Arc;

use sidecore_block::{BlockDevice, BlockError, Geometry, Operation, RamStore, Stage, open_stage};
use sidecore_block_contract::{Harness, allocates_nothing, check_at_each_depth};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_keys::{Value, Values};
use write_quota::WriteQuota;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// As the daemon opens it.
fn open(quota_mib: u64) -> Arc<dyn BlockDevice> {
    let values = Values([("quota_mib", Value::Number(quota_mib))].into_iter().collect());
    let stage = <WriteQuota as Stage>::from_values(&values);
    let ram = Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap());
    open_stage(&stage, "disk", ram).unwrap()
}

#[test]
fn the_stage_keeps_the_contract() {
    check_at_each_depth(&|| open(1 << 20));
}

#[test]
fn a_request_allocates_nothing() {
    allocates_nothing(&*open(1 << 40), allocations);
}

#[test]
fn writes_find_no_space_once_the_quota_is_used() {
    let mut harness = Harness::new(&open(1), 8);
    let mut write = || {
        let request = harness.request(Operation::Write, 0, &[(0x1_0000_0000, 1 << 19)]);
        harness.run(vec![request])[0]
    };
    assert_eq!([write(), write(), write()], [Ok(()), Ok(()), Err(BlockError::NoSpace)]);
    let flush = harness.range_request(Operation::Flush, 0, 0);
    assert_eq!(harness.run(vec![flush]), [Ok(())]);
}

#[test]
fn the_guide_shows_this_stage() {
    let guide = include_str!("../../../../docs/writing-a-stage.md");
    let stage = include_str!("write_quota.rs");
    let (_, shown) = guide.split_once("```rust\n").unwrap();
    let (shown, _) = shown.split_once("```\n").unwrap();
    assert!(stage == shown, "copy write_quota.rs into docs/writing-a-stage.md");
}
