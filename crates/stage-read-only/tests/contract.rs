//! The stage keeps the contract of the block seam, and what is below it stays as it is.

use std::sync::Arc;

use sidecore_block::{BlockDevice, BlockError, Geometry, Operation, RamStore, Stage};
use sidecore_block_contract::{Harness, check_at_each_depth, pattern};
use sidecore_stage_read_only::ReadOnlyStage;

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

#[test]
fn read_only_keeps_the_contract() {
    check_at_each_depth(&|| ReadOnlyStage.open("disk", ram()).unwrap());
}

#[test]
fn nothing_that_writes_gets_through() {
    let store = ram();
    let written = pattern(3, 8192);
    Harness::new(&store, 8).store(0, &written);
    let stage = ReadOnlyStage.open("disk", Arc::clone(&store)).unwrap();
    assert!(stage.geometry().read_only && !store.geometry().read_only);
    let mut harness = Harness::new(&stage, 8);
    harness.poke(0x1_0000_0000, &pattern(4, 4096));
    let mut requests = vec![
        harness.request(Operation::Write, 0, &[(0x1_0000_0000, 4096)]),
        harness.range_request(Operation::Discard, 0, 4096),
        harness.range_request(Operation::WriteZeroes { may_unmap: true }, 0, 4096),
        harness.range_request(Operation::WriteZeroes { may_unmap: false }, 0, 4096),
    ];
    requests.push(harness.range_request(Operation::Flush, 0, 0));
    let refused = Err(BlockError::ReadOnly);
    assert_eq!(harness.run(requests), [refused, refused, refused, refused, Ok(())]);
    assert!(stage.allocate(0, 4096).is_err());
    assert_eq!(harness.load(0, written.len()), written);
    // Another user of the store writes, and the stage shows it.
    let rewritten = pattern(5, 8192);
    Harness::new(&store, 8).store(0, &rewritten);
    assert_eq!(harness.load(0, written.len()), rewritten);
}
