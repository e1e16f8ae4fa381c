//! Stages on threads of their own keep the contract of the block seam.

mod common;

use std::sync::Arc;

use sidecore_block::{BlockDevice, NullStore, Operation, RamStore, Stage, contain, open_stage};
use sidecore_block_contract::{Harness, Options, check, check_at_each_depth};
use sidecore_luks::{KEY_BYTES, SectorSize, Segment, Xts};
use sidecore_offload::offload;
use sidecore_recording::DataMode;
use sidecore_stage_delay::{DelayStage, DelayStore};
use sidecore_stage_encrypt::EncryptStore;
use sidecore_stage_fault::FaultPlan;
use sidecore_stage_meter::MeterStage;
use sidecore_stage_read_only::ReadOnlyStage;
use sidecore_stage_record::RecordStage;
use sidecore_units::Nanos;

use common::{geometry, ram};

fn stage<S: Stage>(stage: &S, threads: usize, below: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    offload(S::WORD, threads, below, |below| open_stage(stage, "disk", below)).unwrap()
}

fn encrypted(threads: usize, below: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let xts = Xts::new(&std::array::from_fn::<u8, KEY_BYTES, _>(|at| at as u8));
    let segment =
        Segment { offset_bytes: 0, len_bytes: None, sector: SectorSize::SMALLEST, first_unit: 0 };
    let open = |below| {
        contain("encrypt", "disk", below, |below| {
            Ok(Arc::new(EncryptStore::new(below, xts, segment, false).unwrap()))
        })
    };
    offload("encrypt", threads, below, open).unwrap()
}

#[test]
fn encrypt_keeps_the_contract() {
    for threads in [1, 2] {
        check_at_each_depth(&|| encrypted(threads, ram()));
    }
}

#[test]
fn encrypt_keeps_the_contract_in_front_of_a_slow_store() {
    check_at_each_depth(&|| encrypted(2, Arc::new(DelayStore::new(ram(), Nanos(700)))));
}

#[test]
fn delay_keeps_the_contract() {
    for threads in [1, 2] {
        for delay_us in [0, 50] {
            check_at_each_depth(&|| stage(&DelayStage { delay_us }, threads, ram()));
        }
    }
}

#[test]
fn fault_meter_and_read_only_keep_the_contract() {
    for threads in [1, 2] {
        check_at_each_depth(&|| stage(&FaultPlan::default(), threads, ram()));
        check_at_each_depth(&|| stage(&MeterStage::default(), threads, ram()));
        check_at_each_depth(&|| stage(&ReadOnlyStage, threads, ram()));
    }
}

#[test]
fn record_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    for threads in [1, 2] {
        check_at_each_depth(&|| {
            let place = tempfile::tempdir_in(directory.path()).unwrap().keep();
            let file = place.join("disk.recording");
            let record =
                RecordStage { file, data: DataMode::Full, max_bytes: None, buffer_mib: Some(1) };
            stage(&record, threads, ram())
        });
    }
}

/// Both with threads of their own, and with a stage on the sidecore on each side.
#[test]
fn stages_on_stages_keep_the_contract() {
    check_at_each_depth(&|| {
        let slow = stage(&DelayStage { delay_us: 1 }, 1, ram());
        let here = open_stage(&FaultPlan::default(), "disk", slow).unwrap();
        let there = encrypted(2, here);
        open_stage(&DelayStage { delay_us: 1 }, "disk", there).unwrap()
    });
}

#[test]
fn a_store_that_keeps_nothing_keeps_the_contract() {
    let options = Options { keeps_data: false, ..Options::default() };
    let null = || Arc::new(NullStore::new(geometry()));
    check(&|| stage(&FaultPlan::default(), 2, null()), &options);
}

/// More threads than requests, and requests of all sizes.
#[test]
fn as_many_threads_as_there_may_be_keep_the_contract() {
    let options = Options { depth: 8, ..Options::default() };
    check(&|| encrypted(16, ram()), &options);
}

#[test]
fn counts_of_all_threads_add_up() {
    let device = stage(&MeterStage::default(), 2, Arc::new(RamStore::new(geometry()).unwrap()));
    let mut harness = Harness::new(&device, 8);
    let requests = (0..64).map(|_| harness.range_request(Operation::Flush, 0, 0)).collect();
    assert!(harness.run(requests).iter().all(Result::is_ok));
    assert_eq!(device.meters()[0].counts().flushes, 64);
    let account = &device.stages()[0];
    assert_eq!(account.counts().requests, 64);
    assert_eq!(account.threads().unwrap().count(), 2);
}
