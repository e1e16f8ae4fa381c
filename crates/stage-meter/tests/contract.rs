//! The stage keeps the contract of the block seam, and counts what has ended.

use std::sync::Arc;

use sidecore_block::{
    BlockDevice, Geometry, Meter, MeterCounts, Operation, RamStore, Stage as _, observe,
};
use sidecore_block_contract::{Harness, check_at_each_depth, pattern};
use sidecore_stage_meter::{MeterObserver, MeterStage};

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

#[test]
fn meter_keeps_the_contract() {
    check_at_each_depth(&|| MeterStage::default().open("disk", ram()).unwrap());
}

#[test]
fn requests_of_all_channels_are_counted_when_they_have_ended() {
    let meter = Arc::new(Meter::new("disk"));
    let observer = Arc::new(MeterObserver::new(Arc::clone(&meter)));
    let device = observe("meter", "disk", ram(), || Ok(observer)).unwrap();
    let mut one = Harness::new(&device, 8);
    one.store(0, &pattern(1, 8192));
    let mut two = Harness::new(&device, 1);
    assert_eq!(two.load(0, 8192), pattern(1, 8192));
    let before = meter.counts();
    assert_eq!((before.bytes_written, before.bytes_read), (8192, 8192));
    let requests = vec![
        two.range_request(Operation::Flush, 0, 0),
        two.range_request(Operation::Discard, 0, 4096),
        two.range_request(Operation::WriteZeroes { may_unmap: true }, 0, 512),
        two.range_request(Operation::Discard, 8 << 20, 4096),
    ];
    let results = two.run(requests);
    assert!(results[..3].iter().all(Result::is_ok) && results[3].is_err(), "{results:?}");
    drop((one, two));
    let counted = MeterCounts {
        flushes: before.flushes + 1,
        discards: 1,
        write_zeroes: 1,
        bytes_discarded: 4096,
        bytes_zeroed: 512,
        errors: 1,
        ..before
    };
    assert_eq!(meter.counts(), counted);
}

#[test]
fn a_device_names_its_own_meter_and_those_below() {
    let named = |name: &str| MeterStage { name: Some(name.to_owned()), ..MeterStage::default() };
    let inner = named("inner").open("disk", ram()).unwrap();
    let outer = MeterStage::default().open("disk", inner).unwrap();
    let names: Vec<String> = outer.meters().iter().map(|meter| meter.name().to_owned()).collect();
    assert_eq!(names, ["inner", "disk"]);
}
