//! Users that go while the store fails, and those that come after them.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use sidecore_block::{Batch, BlockError, FindingsCounts, Next, Operation};
use sidecore_block_contract::Harness;
use sidecore_stage_integrity::{FormatOptions, format};
use sidecore_units::Nanos;

use common::lies::{BAD, BLOCK, Bench, SCRATCH, bytes, flush, read};

/// Begins a write of a block.
fn begin_write(guest: &mut Harness, block: u64) {
    guest.poke(SCRATCH, &bytes(block));
    let write = guest.request(Operation::Write, block * BLOCK, &[(SCRATCH, BLOCK)]);
    guest.submit(&mut vec![write]);
}

fn begin_flush(guest: &mut Harness) {
    let request = guest.range_request(Operation::Flush, 0, 0);
    guest.submit(&mut vec![request]);
}

/// The result of the request in flight. The store is idle between polls, so that a poll without an
/// end must ask for the next one.
fn ended(guest: &mut Harness) -> Result<(), BlockError> {
    loop {
        let (mut completed, now) = (Batch::new(), guest.now());
        guest.channel.poll(now, &mut completed);
        if let Some(mut request) = completed.pop() {
            request.tag.take().unwrap().into_bits();
            return request.result;
        }
        assert_eq!(guest.channel.readiness().next, Next::Now, "the request would hang");
    }
}

#[test]
fn a_failed_flush_of_one_queue_fails_the_flush_of_another() {
    for drains in [false, true] {
        let bench = Bench::new();
        let (mut one, mut other) = (bench.guest(), bench.guest());
        other.store(7 * BLOCK, &bytes(7));
        if drains {
            // The flush waits for the write.
            begin_write(&mut one, 1);
            begin_flush(&mut other);
        } else {
            // The data of the flush is flushed when the write begins.
            begin_flush(&mut other);
            begin_write(&mut one, 1);
        }
        bench.fail(|request| request.operation == Operation::Flush);
        assert_eq!(ended(&mut one), Err(BlockError::EIO), "drains: {drains}");
        bench.fail_none();
        assert_eq!(ended(&mut other), Err(BlockError::EIO), "drains: {drains}");
    }
}

/// A guest whose flush fails, with a write in flight, and which is killed for that.
fn killed_in_a_flush(bench: &Bench) {
    let mut guest = bench.guest();
    (0..16).for_each(|block| guest.store(block * BLOCK, &bytes(block)));
    flush(&mut guest);
    guest.store(7 * BLOCK, &bytes(7));
    bench.fail(|request| request.operation != Operation::Read);
    begin_flush(&mut guest);
    assert_eq!(ended(&mut guest), Err(BlockError::EIO));
    begin_write(&mut guest, 7);
    assert_eq!(ended(&mut guest), Err(BlockError::EIO), "nothing is written any more");
    assert!(bench.findings.problem().unwrap().contains("start it"));
    drop(guest);
    bench.device.user_gone();
}

/// The kernel has dropped a page in a flush that failed, and the guest is paused, or resets its
/// disk.
#[test]
fn a_guest_that_lives_on_is_not_told_that_its_writes_are_durable() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    guest.store(7 * BLOCK, &bytes(7));
    flush(&mut guest);
    guest.store(7 * BLOCK, &bytes(100));
    bench.fail(|request| request.operation == Operation::Flush);
    begin_flush(&mut guest);
    assert_eq!(ended(&mut guest), Err(BlockError::EIO));
    drop(guest);
    bench.fail_none();
    Harness::new(&bench.honest, 8).store(bench.data_at + 7 * BLOCK, &bytes(7));
    for _ in 0..2 {
        let mut guest = bench.guest();
        assert_eq!(read(&mut guest, 7), BAD, "it has lost a write");
        for operation in [Operation::Flush, Operation::Write] {
            let request = match operation {
                Operation::Flush => guest.range_request(operation, 0, 0),
                _ => guest.request(operation, 8 * BLOCK, &[(SCRATCH, BLOCK)]),
            };
            assert_eq!(guest.run_one(request), Err(BlockError::EIO), "{operation:?}");
        }
    }
    assert_eq!(bench.device.loss(), None);
    bench.device.user_gone();
    assert!(bench.device.loss().is_some(), "its VMM may connect again");
    let mut guest = bench.guest();
    assert!(guest.load(7 * BLOCK, BLOCK as usize) == bytes(7), "another guest begins");
    flush(&mut guest);
    assert!(bench.device.loss().is_some(), "it may be a device that is only read");
    guest.store(7 * BLOCK, &bytes(101));
    assert_eq!(bench.device.loss(), None);
}

/// The VMM is killed while its disk is opened again.
#[test]
fn nothing_of_a_user_that_is_gone_is_written_when_the_store_was_opened() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    bench.fail_none();
    let mut guest = bench.guest();
    begin_write(&mut guest, 100);
    bench.device.user_gone();
    assert_eq!(ended(&mut guest), Err(BlockError::EIO));
    drop(guest);
    let mut guest = bench.guest();
    assert!(guest.load(100 * BLOCK, BLOCK as usize) == [0; BLOCK as usize]);
}

/// The kernel says once that tags were lost, and shows them until it drops its page.
#[test]
fn tags_whose_flush_has_failed_are_written_again_by_the_next_user() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    guest.store(7 * BLOCK, &bytes(7));
    let flushes = AtomicU64::new(0);
    // The first flush is that of the data.
    bench.fail(move |request| {
        request.operation == Operation::Flush && flushes.fetch_add(1, Ordering::Relaxed) > 0
    });
    begin_flush(&mut guest);
    assert_eq!(ended(&mut guest), Err(BlockError::EIO));
    drop(guest);
    bench.device.user_gone();
    let (tags, data_at) = (Arc::new(AtomicU64::new(0)), bench.data_at);
    let written = Arc::clone(&tags);
    bench.fail(move |request| {
        let is_of_tags = request.operation == Operation::Write && request.offset_bytes < data_at;
        written.fetch_add(is_of_tags.into(), Ordering::Relaxed);
        false
    });
    let mut guest = bench.guest();
    assert_eq!(read(&mut guest, 7), Ok(()));
    assert_eq!(tags.load(Ordering::Relaxed), 1);
}

#[test]
fn a_flush_outside_of_any_queue_does_not_open_the_store_again() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    let requests = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&requests);
    bench.fail(move |_| counted.fetch_add(1, Ordering::Relaxed) == u64::MAX);
    for _ in 0..2 {
        let mut guest = bench.guest();
        let request = guest.range_request(Operation::Flush, 0, 0);
        assert_eq!(guest.run_one(request), Err(BlockError::EIO));
    }
    assert_eq!(requests.load(Ordering::Relaxed), 0, "the guest may run on another host");
    let mut guest = bench.guest();
    assert_eq!(read(&mut guest, 7), Ok(()));
    flush(&mut guest);
}

#[test]
fn an_opening_that_fails_is_not_tried_for_each_request() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    let requests = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&requests);
    bench.fail(move |_| counted.fetch_add(1, Ordering::Relaxed) < u64::MAX);
    let mut guest = bench.guest();
    let started = Instant::now();
    (0..1000).for_each(|_| assert_eq!(read(&mut guest, 7), Err(BlockError::EIO)));
    // Each tries both copies of the header.
    let most = 2 * (1 + started.elapsed().as_millis() as u64 / 10);
    assert!(requests.load(Ordering::Relaxed) <= most);
}

#[test]
fn a_store_that_has_failed_is_opened_again_for_the_next_guest() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    // The next one has two queues, and the store is away for its first request.
    let (mut one, mut other) = (bench.guest(), bench.guest());
    bench.fail(|_| true);
    assert_eq!(read(&mut one, 7), Err(BlockError::EIO));
    assert!(bench.findings.problem().unwrap().contains("cannot be opened again"));
    bench.fail_none();
    // The error is kept for a while.
    let until = one.now().after(Nanos::from_millis(10));
    while one.now() < until {}
    // Both begin, and one of them opens the store.
    begin_write(&mut one, 100);
    begin_flush(&mut other);
    let mut completed = Batch::new();
    while completed.len() < 2 {
        for guest in [&mut other, &mut one] {
            let now = guest.now();
            guest.channel.poll(now, &mut completed);
        }
    }
    for mut request in completed {
        request.tag.take().unwrap().into_bits();
        assert_eq!(request.result, Ok(()));
    }
    assert_eq!(bench.findings.problem(), None);
    for block in (0..16).chain([100]) {
        for guest in [&mut one, &mut other] {
            assert!(guest.load(block * BLOCK, BLOCK as usize) == bytes(block), "block {block}");
        }
    }
    flush(&mut one);
    assert_eq!(bench.counts(), FindingsCounts::default());
}

#[test]
fn a_block_that_is_torn_while_a_guest_is_killed_is_bad_for_the_next_one() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    bench.fail_none();
    for block in [7, 8] {
        Harness::new(&bench.below, 8).store(bench.data_at + block * BLOCK, &[1; 512]);
    }
    let mut guest = bench.guest();
    for block in 0..16 {
        let expected = if [7, 8].contains(&block) { BAD } else { Ok(()) };
        assert_eq!(read(&mut guest, block), expected, "block {block}");
    }
}

#[test]
fn a_store_that_was_replaced_is_not_opened_again() {
    let bench = Bench::new();
    killed_in_a_flush(&bench);
    bench.fail_none();
    let options = FormatOptions { uuid: [1; 16], block_bytes: 4096, slots: None, force: true };
    format(&*bench.below, &options).unwrap();
    let mut guest = bench.guest();
    assert_eq!(read(&mut guest, 7), Err(BlockError::EIO));
    assert!(bench.findings.problem().unwrap().contains("01010101-0101"));
}
