//! The controller's guarantees: which requests wait, the behaviour when space or memory or the disk
//! fails, and the accounting of every block.

mod common;

use std::sync::Arc;

use common::{function, guest, in_memory, over, until_commit};
use sidecore_block::{Batch, BlockDevice, BlockError, Geometry, Next, Operation, RamStore, Tag};
use sidecore_block_contract::{Harness, guest_memory, pattern, request};
use sidecore_controller::{
    Controller, ControllerError, ControllerOptions, FUNCTIONS_MAX, FunctionOptions, Limit, Limits,
    PhysicalDisk,
};
use sidecore_extent::BlockRange;
use sidecore_reactor::CoreContext;
use sidecore_stage_delay::DelayStore;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::{Nanos, Vlba};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn ram(size_bytes: u64) -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(size_bytes, 512)).unwrap())
}

fn flush(guest: &mut Harness) -> Result<(), BlockError> {
    let flush = guest.request(Operation::Flush, 0, &[]);
    guest.run_one(flush)
}

fn write(guest: &mut Harness, offset_bytes: u64, len_bytes: u64) -> Result<(), BlockError> {
    let write = guest.request(Operation::Write, offset_bytes, &[(0x1_0000_0000, len_bytes)]);
    guest.run_one(write)
}

/// A controller without threads, and a way to its store.
fn stepped(store: &Arc<dyn BlockDevice>) -> (Arc<Controller>, PhysicalDisk) {
    // A controller with threads made the store's volumes, and has ended.
    let mut disk = PhysicalDisk::open(store).unwrap();
    let options = ControllerOptions::default();
    (
        Controller::without_threads("stepped", Arc::clone(store), &options, None, &mut disk)
            .unwrap(),
        disk,
    )
}

/// A store with the volumes "a" and "b", a page of each mapped and durable.
fn two_volumes() -> Arc<dyn BlockDevice> {
    let store = ram(16 * MIB);
    let controller = over(&store, 1024);
    for name in ["a", "b"] {
        controller.create_volume(name, 4 * MIB, None).unwrap();
        let (mut guest, _device) = guest(&controller, name);
        guest.store(0, &pattern(1, PAGE as usize));
        flush(&mut guest).unwrap();
    }
    controller.shutdown();
    store
}

#[test]
fn only_the_request_that_misses_waits() {
    let (controller, mut disk) = stepped(&two_volumes());
    let (mut a, _a) = guest(&controller, "a");
    let (mut b, _b) = guest(&controller, "b");
    let mut completed = Batch::new();

    // Mappings have to be read first: no request has done so yet.
    let mut warm = |guest: &mut Harness| {
        let read = guest.request(Operation::Read, 0, &[(0x1_0000_0000, PAGE)]);
        guest.submit(&mut vec![read]);
        guest.channel.poll(Nanos(1), &mut completed);
        assert!(completed.is_empty());
        assert!(controller.step(&mut disk));
        guest.channel.poll(Nanos(2), &mut completed);
        guest.channel.poll(Nanos(3), &mut completed);
        assert_eq!(completed.len(), 1);
        for mut request in completed.drain(..) {
            request.tag.take().unwrap().into_bits();
        }
    };
    warm(&mut a);
    warm(&mut b);

    // The hypervisor side does not answer this request for now.
    let miss = a.request(Operation::Write, MIB, &[(0x1_0000_0000, PAGE)]);
    a.submit(&mut vec![miss]);
    a.channel.poll(Nanos(4), &mut completed);
    assert_eq!(a.in_flight(), 1);
    assert!(
        a.channel.waits_since().is_some() && b.channel.waits_since().is_none(),
        "it waits for another thread"
    );
    assert_eq!(controller.report().functions[0].stats.stalled, 1);
    assert_eq!(
        (controller.report().functions[0].miss_address, controller.report().functions[0].miss_size),
        (1024, 4)
    );

    // Other requests of the function, another function, and the physical function proceed.
    let pf: Arc<dyn BlockDevice> = controller.physical_function();
    let mut pf = Harness::new(&pf, 4);
    for guest in [&mut a, &mut b, &mut pf] {
        let mut batch = Batch::new();
        for operation in [Operation::Read, Operation::Write] {
            batch.push(guest.request(operation, 0, &[(0x1_0000_0000, PAGE)]));
        }
        // Outside of the metadata.
        let read_only_place = guest.geometry.capacity_bytes - PAGE;
        if guest.geometry.capacity_bytes > 4 * MIB {
            batch.iter_mut().for_each(|request| request.offset_bytes = read_only_place);
        }
        guest.submit(&mut batch);
        guest.channel.poll(Nanos(5), &mut completed);
        assert_eq!(completed.len(), 2);
        for mut request in completed.drain(..) {
            assert_eq!(request.result, Ok(()));
            request.tag.take().unwrap().into_bits();
        }
    }
    // Then the miss is served: blocks are allocated, written and mapped.
    while a.in_flight() > 0 {
        controller.step(&mut disk);
        a.channel.poll(Nanos(6), &mut completed);
    }
    assert!(completed.pop().map(|mut request| request.tag.take().unwrap().into_bits()).is_some());
    assert_eq!(a.channel.waits_since(), None);
    assert_eq!(controller.report().functions[0].stats.stalled, 0);
}

/// Writes whose parts cannot all be submitted at once, because other requests have the boxes for
/// parts. One write fails where it was submitted: no state of it remains that a later write could
/// be mistaken for, or would wait for.
#[test]
fn a_write_that_fails_half_sent_leaves_nothing_behind() {
    const PIECES: u64 = 960;
    const BYTES: u64 = PIECES * 1024;
    // Each write has 15 parts, and there are 64 boxes: four parts of the fifth are sent with the
    // others.
    for failing in 60..=64 {
        let store = ram(64 * MIB);
        over(&store, 1024).create_volume("a", 32 * MIB, None).unwrap();
        let mut disk = PhysicalDisk::open(&store).unwrap();
        let rule = FaultRule {
            affected: Affected::Writes,
            when: When::EveryNth(failing),
            fault: Fault::Eio,
        };
        let faulty = FaultStore::new(Arc::clone(&store), FaultPlan { seed: 1, rules: vec![rule] });
        let options = ControllerOptions::default();
        let controller =
            Controller::without_threads("stepped", Arc::new(faulty), &options, None, &mut disk)
                .unwrap();
        let (mut guest, _device) = guest(&controller, "a");
        let mut now = 0;
        let mut answers = |guest: &mut Harness, pieces: &[(u64, u64)]| {
            let mut writes: Vec<_> =
                (0..5).map(|at| guest.request(Operation::Write, at * BYTES, pieces)).collect();
            guest.submit(&mut writes);
            let (mut completed, mut good, mut bad) = (Batch::new(), 0, 0);
            for _ in 0..1000 {
                now += 1;
                guest.channel.poll(Nanos(now), &mut completed);
                for mut request in completed.drain(..) {
                    request.tag.take().unwrap().into_bits();
                    if request.result.is_ok() {
                        good += 1;
                        continue;
                    }
                    bad += 1;
                    // The guest tries again, before the hypervisor side has received the failure.
                    let again = guest.request(
                        Operation::Write,
                        request.offset_bytes,
                        &[(0x1_0000_0000, 1024)],
                    );
                    guest.submit(&mut vec![again]);
                }
                while controller.step(&mut disk) {}
            }
            (good, bad)
        };
        // Pieces that are not adjacent, so that each is a piece of its own.
        let pieces: Vec<(u64, u64)> =
            (0..PIECES).map(|piece| (0x1_0000_0000 + piece % 8 * 2048, 1024)).collect();
        assert_eq!(answers(&mut guest, &pieces), (5, 1), "write {failing} fails");
        for _ in 0..2 {
            assert_eq!(
                answers(&mut guest, &[(0x1_0000_0000, 1024)]),
                (5, 0),
                "write {failing} failed"
            );
        }
    }
}

#[test]
fn a_hole_reads_as_zeros_and_takes_no_space() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    let volume = controller.create_volume("v", 1 << 40, None).unwrap();
    assert_eq!(volume.allocated_blocks, 0);
    let (mut guest, device) = guest(&controller, "v");
    assert_eq!(device.geometry().capacity_bytes, 1 << 40);
    assert_eq!(guest.load((1 << 40) - 65536, 65536), vec![0; 65536]);
    guest.store((1 << 40) - 512, &pattern(9, 512));
    assert_eq!(controller.volume("v").unwrap().allocated_blocks, 1);
    let mut last_block = vec![0; 512];
    last_block.extend(pattern(9, 512));
    assert_eq!(guest.load((1 << 40) - 1024, 1024), last_block);
}

#[test]
fn what_was_flushed_is_there_without_an_orderly_end() {
    let store = ram(16 * MIB);
    let controller = over(&store, 4096);
    controller.create_volume("v", 8 * MIB, None).unwrap();
    let (mut guest_before, _device) = guest(&controller, "v");
    let data = pattern(3, 3 * PAGE as usize + 512);
    guest_before.store(MIB + 512, &data);
    flush(&mut guest_before).unwrap();
    guest_before.store(2 * MIB, &data);
    // As after a power cut: the first controller still runs, without notice of the second.
    let again = over(&store, 4096);
    let (mut guest_after, _device) = guest(&again, "v");
    assert_eq!(guest_after.load(MIB + 512, data.len()), data);
    assert!(again.check().unwrap().is_clean());
}

#[test]
fn a_full_store_fails_the_write_tells_the_operator_and_recovers() {
    let (controller, _store) = in_memory(4 * MIB, 1024);
    controller.create_volume("big", 16 * MIB, None).unwrap();
    controller.create_volume("other", MIB, None).unwrap();
    let (mut other, _other) = guest(&controller, "other");
    other.store(0, &pattern(5, PAGE as usize));
    let (mut big, _big) = guest(&controller, "big");
    let mut written = 0;
    let error = loop {
        match write(&mut big, written * 65536, 65536) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, BlockError::NoSpace);
    assert!(written > 40, "{written} of 64 KiB in 4 MiB");
    let events = controller.report().events;
    assert!(events.iter().any(|event| event.what.contains("volume \"big\"")), "{events:?}");
    // Writes to mapped blocks succeed, for both volumes.
    assert_eq!(write(&mut other, 0, PAGE), Ok(()));
    assert_eq!(write(&mut big, 0, 65536), Ok(()));
    assert_eq!(flush(&mut big), Ok(()));
    // A discard frees space, for every volume.
    let discard = big.range_request(Operation::Discard, 0, MIB);
    assert_eq!(big.run_one(discard), Ok(()));
    for at in 0..8 {
        assert_eq!(write(&mut other, PAGE * (at + 1), PAGE), Ok(()));
    }
    assert!(controller.check().unwrap().is_clean());
}

#[test]
fn a_quota_holds_and_is_not_charged_for_what_is_discarded() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("v", 8 * MIB, Some(MIB)).unwrap();
    let (mut guest, _device) = guest(&controller, "v");
    for at in 0..16 {
        assert_eq!(write(&mut guest, at * 65536, 65536), Ok(()));
    }
    assert_eq!(write(&mut guest, MIB, 1024), Err(BlockError::NoSpace));
    assert_eq!(write(&mut guest, 0, 1024), Ok(()));
    let discard = guest.range_request(Operation::Discard, 0, 65536);
    assert_eq!(guest.run_one(discard), Ok(()));
    assert_eq!(write(&mut guest, MIB, 65536), Ok(()));
    controller.set_quota("v", None).unwrap();
    assert_eq!(write(&mut guest, 2 * MIB, 65536), Ok(()));
}

#[test]
fn a_thousand_functions_come_and_go_and_every_block_is_accounted_for() {
    let store = ram(64 * MIB);
    let controller = over(&store, 1024);
    let before = controller.check().unwrap();
    let mut functions = Vec::new();
    for index in 0..FUNCTIONS_MAX {
        let name = format!("v{index}");
        controller.create_volume(&name, MIB, None).unwrap();
        let device: Arc<dyn BlockDevice> = function(&controller, &name);
        let mut guest = Harness::new(&device, 2);
        guest.store(PAGE * 3, &pattern(index as u64, 2048));
        functions.push((guest, device));
    }
    let one_more = controller.open_function(&FunctionOptions::new("v0"));
    assert!(matches!(one_more, Err(ControllerError::NoFunction)));
    for index in 0..FUNCTIONS_MAX {
        controller.snapshot_volume(&format!("v{index}"), &format!("s{index}")).unwrap();
    }
    for (index, (guest, _)) in functions.iter_mut().enumerate() {
        guest.store(PAGE * 3, &pattern(!(index as u64), 1024));
        let mut expected = pattern(!(index as u64), 1024);
        expected.extend(&pattern(index as u64, 2048)[1024..]);
        assert_eq!(guest.load(PAGE * 3, 2048), expected, "v{index}");
    }
    let report = controller.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    assert_eq!(report.data_blocks, 3 * FUNCTIONS_MAX as u64);
    drop(functions);
    for index in 0..FUNCTIONS_MAX {
        controller.delete_volume(&format!("v{index}")).unwrap();
        controller.delete_volume(&format!("s{index}")).unwrap();
    }
    // The last freed blocks become reusable after the last epoch.
    let patience = std::time::Instant::now();
    while controller.report().space.pending > 0 && patience.elapsed().as_secs() < 10 {
        std::thread::yield_now();
    }
    let after = controller.check().unwrap();
    assert!(after.is_clean(), "{:?}", after.problems);
    assert_eq!((after.data_blocks, after.pending_blocks, after.volumes), (0, 0, 0));
    assert_eq!(after.free_blocks, before.free_blocks);
}

#[test]
fn trees_that_outgrow_their_memory_are_pruned_and_come_back() {
    let store = ram(64 * MIB);
    // The least memory, and volumes whose extents of 24 bytes need more.
    let options = ControllerOptions {
        tree_memory_bytes: MIB,
        format: Some(common::format(512)),
        ..ControllerOptions::default()
    };
    let controller = Controller::open("small", store, &options, None).unwrap();
    const EXTENTS: u64 = 14_000;
    let names = ["a", "b", "c", "d"];
    for name in names {
        controller.create_volume(name, 64 * MIB, None).unwrap();
    }
    let mut guests: Vec<_> = names.iter().map(|name| guest(&controller, name)).collect();
    // Every other block, so that no two form one extent.
    for (index, (guest, _)) in guests.iter_mut().enumerate() {
        let mut first = 0;
        while first < EXTENTS {
            let requests = (first..first + 16).map(|extent| {
                let at = 0x1_0000_0000 + (extent - first) * 512;
                guest.poke(at, &pattern(extent << 8 | index as u64, 512));
                guest.request(Operation::Write, extent * 1024, &[(at, 512)])
            });
            let requests: Vec<_> = requests.collect();
            let results = guest.run(requests);
            assert!(
                results.iter().all(Result::is_ok),
                "{results:?}, {:?}",
                controller.report().events
            );
            first += 16;
        }
    }
    let report = controller.report();
    assert!(report.counts.pruned_nodes > 0, "{report:?}");
    assert!(report.tree_bytes <= MIB);
    for (index, (guest, _)) in guests.iter_mut().enumerate() {
        for extent in (0..EXTENTS).step_by(97) {
            let expected = pattern(extent << 8 | index as u64, 512);
            assert_eq!(guest.load(extent * 1024, 512), expected, "extent {extent}");
        }
    }
}

#[test]
fn equal_blocks_can_be_shared_under_live_guests_and_part_again() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    for name in ["a", "b"] {
        controller.create_volume(name, 4 * MIB, None).unwrap();
    }
    let (mut a, _a) = guest(&controller, "a");
    let (mut b, _b) = guest(&controller, "b");
    let data = pattern(1, 64 << 10);
    a.store(MIB, &data);
    b.store(2 * MIB, &data);
    let from = BlockRange { first: Vlba(1024), count: 64 };
    controller.share_blocks(("a", from), ("b", Vlba(2048))).unwrap();
    let report = controller.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    assert_eq!((report.data_blocks, report.shared_data_blocks), (64, 64));
    b.store(2 * MIB + 1024, &pattern(2, 512));
    assert_eq!(a.load(MIB, data.len()), data);
    let mut other = data.clone();
    other[1024..1536].copy_from_slice(&pattern(2, 512));
    assert_eq!(b.load(2 * MIB, data.len()), other);
    assert!(matches!(
        controller.share_blocks(("a", from), ("b", Vlba(2048))),
        Err(ControllerError::NotEqual)
    ));
    let hole = BlockRange { first: Vlba(0), count: 4 };
    assert!(matches!(
        controller.share_blocks(("a", hole), ("b", Vlba(0))),
        Err(ControllerError::NotEqual)
    ));
    assert!(controller.share_blocks(("a", from), ("missing", Vlba(0))).is_err());
}

#[test]
fn waits_for_the_store_are_counted_where_others_fill_it() {
    let store: Arc<dyn BlockDevice> =
        Arc::new(DelayStore::new(two_volumes(), Nanos::from_millis(20)));
    let (controller, mut disk) = stepped(&store);
    let memory = guest_memory();
    let reads = |count: u64| -> Batch {
        let read = |tag| {
            let mut read = request(&memory, Operation::Read, 0, &[(0x1_0000_0000, PAGE)]);
            read.tag = Some(Tag::from_bits(tag));
            read
        };
        (0..count).map(read).collect()
    };
    let waits = || {
        let functions = controller.report().functions;
        functions
            .iter()
            .map(|function| (function.volume.clone(), function.stats.store_waits))
            .collect::<Vec<_>>()
    };
    let (core, mut completed) = (CoreContext::default(), Batch::new());
    let at = |micros: u64| Nanos::from_micros(1_000_000 + micros);

    // Mappings have to be read by the hypervisor side first, which works only when it is stepped.
    let (device_a, device_b) = (function(&controller, "a"), function(&controller, "b"));
    for device in [&device_a, &device_b] {
        let mut channel = device.open_channel(&CoreContext::default(), 4).unwrap();
        channel.attach_memory(&memory).unwrap();
        channel.submit(Nanos(1), &mut reads(1));
        channel.poll(Nanos(1), &mut completed);
        assert!(controller.step(&mut disk));
        for now in [Nanos(2), at(0)] {
            channel.poll(now, &mut completed);
        }
        assert!(
            completed.pop().map(|mut request| request.tag.take().unwrap().into_bits()).is_some()
        );
    }

    // Alone, a function may have any number of requests in the store.
    let mut a = device_a.open_channel(&core, 512).unwrap();
    a.attach_memory(&memory).unwrap();
    a.submit(at(0), &mut reads(300));
    a.poll(at(0), &mut completed);
    assert_eq!(waits(), [("a".to_owned(), 0), ("b".to_owned(), 0)]);

    // More than the first window of two functions: the other function waits, once for all of its
    // requests.
    let mut b = device_b.open_channel(&core, 512).unwrap();
    b.attach_memory(&memory).unwrap();
    b.submit(at(1_000), &mut reads(8));
    a.poll(at(1_000), &mut completed);
    b.poll(at(2_000), &mut completed);
    assert_eq!(waits(), [("a".to_owned(), 0), ("b".to_owned(), 0)]);
    b.submit(at(2_010), &mut reads(8));
    b.poll(at(2_020), &mut completed);
    assert_eq!(waits(), [("a".to_owned(), 0), ("b".to_owned(), 1)]);
    assert!(completed.is_empty());

    for round in 1..=10 {
        a.poll(at(round * 100_000), &mut completed);
        b.poll(at(round * 100_000), &mut completed);
    }
    assert_eq!(completed.len(), 316);
    for mut request in completed.drain(..) {
        assert_eq!(request.result, Ok(()));
        request.tag.take().unwrap().into_bits();
    }
}

#[test]
fn reads_and_writes_are_limited_apart() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let limits = Limits { write_iops: Some(Limit { per_s: 100, burst: 4 }), ..Limits::default() };
    let options = FunctionOptions { limits, ..FunctionOptions::new("v") };
    let device: Arc<dyn BlockDevice> = controller.open_function(&options).unwrap();
    {
        let (mut guest, _device) = guest(&controller, "v");
        guest.store(0, &pattern(1, PAGE as usize));
    }
    let mut guest = Harness::new(&device, 16);
    assert_eq!(guest.load(0, PAGE as usize), pattern(1, PAGE as usize));
    let start = guest.now().after(Nanos::from_millis(1000));
    let mut batch = Batch::new();
    for index in 0..16 {
        let operation = if index % 2 == 0 { Operation::Write } else { Operation::Read };
        let mut request = guest.request(operation, 0, &[(0x1_0000_0000, PAGE)]);
        request.taken_at = start;
        batch.push(request);
    }
    let mut completed = Batch::new();
    let mut done = |guest: &mut Harness, at: Nanos| {
        guest.channel.poll(at, &mut completed);
        guest.channel.poll(at, &mut completed);
        let count =
            |operation| completed.iter().filter(|request| request.operation == operation).count();
        let counts = (count(Operation::Read), count(Operation::Write));
        for mut request in completed.drain(..) {
            request.tag.take().unwrap().into_bits();
        }
        counts
    };
    guest.channel.submit(start, &mut batch);
    assert_eq!(done(&mut guest, start), (8, 4));
    let next = guest.channel.readiness().next.deadline().unwrap();
    assert_eq!(next, start.after(Nanos::from_millis(10)));
    assert_eq!(done(&mut guest, next), (0, 1));
    assert_eq!(done(&mut guest, start.after(Nanos::from_millis(40))), (0, 3));
    assert!(controller.report().functions.iter().any(|function| function.stats.throttled > 0));
}

#[test]
fn a_disk_that_cannot_flush_makes_the_controller_read_only_and_says_so() {
    let rules = vec![FaultRule {
        affected: Affected::Flushes,
        when: When::EveryNth(40),
        fault: Fault::Eio,
    }];
    let store: Arc<dyn BlockDevice> =
        Arc::new(FaultStore::new(ram(16 * MIB), FaultPlan { seed: 1, rules }));
    let controller = over(&store, 1024);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let (mut guest, _device) = guest(&controller, "v");
    let mut flushed = 0;
    let error = loop {
        guest.store(flushed * PAGE, &pattern(flushed, PAGE as usize));
        match flush(&mut guest) {
            Ok(()) => flushed += 1,
            Err(error) => break error,
        }
        assert!(flushed < 100, "the fault never came");
    };
    assert_eq!(error, BlockError::EIO);
    assert_eq!(write(&mut guest, 2 * MIB, PAGE), Err(BlockError::ReadOnly));
    assert_eq!(flush(&mut guest), Err(BlockError::EIO), "it is still not durable");
    assert!(controller.report().read_only.is_some());
    assert!(matches!(controller.create_volume("w", MIB, None), Err(ControllerError::Volume(_))));
    for at in 0..flushed {
        assert_eq!(guest.load(at * PAGE, PAGE as usize), pattern(at, PAGE as usize));
    }
}

#[test]
fn a_write_that_waits_for_a_commit_fails_with_it() {
    let store = ram(4 * MIB);
    over(&store, 1024).create_volume("a", 8 * MIB, None).unwrap();
    let (controller, mut disk) = stepped(&store);
    let (mut guest, _device) = guest(&controller, "a");
    let write = |guest: &mut Harness, at: u64| {
        guest.request(Operation::Write, at * 65536, &[(0x1_0000_0000, 65536)])
    };
    let mut written = 0;
    let full = loop {
        let mut next = Some(write(&mut guest, written));
        let result = loop {
            match until_commit(&mut guest, &controller, &mut disk, next.take()) {
                Some(result) => break result,
                None => controller.commit_on(&mut disk).unwrap(),
            }
        };
        match result {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, BlockError::NoSpace);
    controller.commit_on(&mut disk).unwrap();
    // Freed blocks can be reused once that is durable.
    let discard = guest.range_request(Operation::Discard, 0, MIB);
    assert_eq!(until_commit(&mut guest, &controller, &mut disk, Some(discard)), Some(Ok(())));
    let waiting = write(&mut guest, written);
    assert_eq!(until_commit(&mut guest, &controller, &mut disk, Some(waiting)), None);
    assert!(controller.wants_commit());
    let rule =
        FaultRule { affected: Affected::Flushes, when: When::EveryNth(1), fault: Fault::Eio };
    let faulty: Arc<dyn BlockDevice> =
        Arc::new(FaultStore::new(store, FaultPlan { seed: 1, rules: vec![rule] }));
    controller.commit_on(&mut PhysicalDisk::open(&faulty).unwrap()).unwrap_err();
    assert_eq!(
        until_commit(&mut guest, &controller, &mut disk, None),
        Some(Err(BlockError::ReadOnly))
    );
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let store = ram(8 * MIB);
    let blank = Controller::open("c", Arc::clone(&store), &ControllerOptions::default(), None);
    let Err(error) = blank else { panic!("a blank store was opened") };
    assert!(error.to_string().contains("not formatted"), "{error}");

    let controller = over(&store, 1024);
    controller.create_volume("v", MIB, None).unwrap();
    for name in ["", "a/b", "..", "-v", "v", &"x".repeat(65), "ü", "a b"] {
        let Err(error) = controller.create_volume(name, MIB, None) else {
            panic!("{name:?} was made")
        };
        assert!(!error.to_string().is_empty());
    }
    for size_bytes in [0, 1, 1023, 1025, 1 << 60, u64::MAX] {
        assert!(controller.create_volume("w", size_bytes, None).is_err(), "{size_bytes}");
    }
    assert!(controller.snapshot_volume("missing", "s").is_err());
    assert!(controller.rename_volume("v", "a/b").is_err());
    assert!(controller.rename_volume("missing", "w").is_err());
    assert!(controller.resize_volume("v", 0).is_err());
    assert!(controller.delete_volume("missing").is_err());
    for weight in [0, 1001] {
        let options = FunctionOptions { weight, ..FunctionOptions::new("v") };
        assert!(matches!(controller.open_function(&options), Err(ControllerError::BadWeight(_))));
    }
    let limits = Limits { read_iops: Some(Limit { per_s: 0, burst: 1 }), ..Limits::default() };
    let options = FunctionOptions { limits, ..FunctionOptions::new("v") };
    assert!(matches!(controller.open_function(&options), Err(ControllerError::BadLimit)));
    assert!(controller.open_function(&FunctionOptions::new("missing")).is_err());

    let function = function(&controller, "v");
    assert!(matches!(controller.delete_volume("v"), Err(ControllerError::InUse { .. })));
    assert!(matches!(controller.resize_volume("v", MIB / 2), Err(ControllerError::InUse { .. })));
    assert_eq!(controller.resize_volume("v", 2 * MIB).unwrap().blocks, 2048);
    assert_eq!(function.geometry().capacity_bytes, 2 * MIB);
    drop(function);
    assert_eq!(controller.resize_volume("v", MIB / 2).unwrap().blocks, 512);
    controller.delete_volume("v").unwrap();
    assert!(controller.snapshot_volume("v", "s").is_err(), "a snapshot of a deleted volume");
    assert!(controller.volumes().is_empty());
    controller.shutdown();
    assert!(controller.create_volume("v", MIB, None).is_err());
    controller.shutdown();
}

#[test]
fn a_read_only_function_writes_nothing_even_where_it_has_just_read() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let (mut writer, _writer) = guest(&controller, "v");
    writer.store(0, &pattern(1, PAGE as usize));
    let options = FunctionOptions { read_only: true, ..FunctionOptions::new("v") };
    let device: Arc<dyn BlockDevice> = controller.open_function(&options).unwrap();
    let mut reader = Harness::new(&device, 4);
    for _ in 0..2 {
        assert_eq!(reader.load(0, PAGE as usize), pattern(1, PAGE as usize));
        assert_eq!(write(&mut reader, 0, PAGE), Err(BlockError::ReadOnly));
    }
    for operation in [Operation::Discard, Operation::WriteZeroes { may_unmap: true }] {
        let request = reader.range_request(operation, 0, PAGE);
        assert_eq!(reader.run_one(request), Err(BlockError::ReadOnly));
    }
    assert_eq!(writer.load(0, PAGE as usize), pattern(1, PAGE as usize));
}

#[test]
fn nothing_keeps_a_sidecore_awake_once_all_is_answered() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("v", 8 * MIB, None).unwrap();
    let (mut guest, _device) = guest(&controller, "v");
    for round in 0..200 {
        let requests = (0..8).map(|index| {
            guest.request(
                Operation::Write,
                (round * 8 + index) * PAGE,
                &[(0x1_0000_0000 + index * PAGE, PAGE)],
            )
        });
        let requests: Vec<_> = requests.collect();
        assert!(guest.run(requests).iter().all(Result::is_ok));
        assert_eq!(guest.channel.readiness().next, Next::OnWake);
        assert!(
            !guest.wait(std::time::Duration::ZERO),
            "round {round}: there is nothing to wake up for"
        );
    }
}

#[test]
fn functions_of_one_volume_share_its_tree() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let (mut one, _one) = guest(&controller, "v");
    let (mut two, _two) = guest(&controller, "v");
    one.store(0, &pattern(1, PAGE as usize));
    assert_eq!(two.load(0, PAGE as usize), pattern(1, PAGE as usize));
    two.store(512, &pattern(2, 512));
    assert_eq!(one.load(512, 512), pattern(2, 512));
    let nodes = controller.report().tree_bytes;
    assert!(nodes <= 64 << 10, "{nodes}");
}
