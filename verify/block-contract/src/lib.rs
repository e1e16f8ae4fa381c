//! The contract that every store and stage keeps, as tests that each of them runs:
//!
//! ```
//! use std::sync::Arc;
//! use sidecore_block::{Geometry, RamStore};
//! use sidecore_block_contract as contract;
//!
//! let open = || Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap()) as _;
//! contract::check(&open, &contract::Options::default());
//! ```
//!
//! Each test opens the device anew and says in its panic what was broken. The
//! guest's memory is real: memfds, mapped like a VM's.
//!
//! Time is the test's: it runs with the real clock and jumps to a channel's
//! deadline, so that a slow device does not make a slow test.

#![forbid(unsafe_code)]

mod asking;
mod guest;
mod harness;
mod runs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_memory::GuestMemory;
use sidecore_units::{ByteExtent, Nanos};

use sidecore_block::{
    Batch, BlockDevice, BlockError, BlockRequest, Geometry, Mapped, Next, Operation, Readiness, Tag,
};

pub use asking::{Asking, passes_idle_polls};
pub use guest::{guest_memory, request};
pub use harness::Harness;
pub use runs::{allocates_nothing, check_at_each_depth};

use harness::PATIENCE;

/// The expectations of a device.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether what was written can be read again. A null store keeps nothing, and checks nothing.
    pub keeps_data: bool,
    /// The depth of the channels that are tried.
    pub depth: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { keeps_data: true, depth: 8 }
    }
}

/// How to get the device under test, blank or not, of at least 1 MiB.
pub type Open<'a> = &'a dyn Fn() -> Arc<dyn BlockDevice>;

/// Runs every test that applies.
///
/// # Panics
/// The device breaks the contract.
pub fn check(open: Open<'_>, options: &Options) {
    geometry_is_sound(open);
    wakes_when_something_is_done(open, options);
    comes_back_exactly_once(open, options);
    leaves_what_does_not_fit(open, options);
    drains(open, options);
    keeps_channels_apart(open, options);
    works_whatever_memory_is_attached(open, options);
    if !options.keeps_data {
        return;
    }
    refuses_what_is_out_of_bounds(open, options);
    if open().geometry().read_only {
        refuses_to_write(open, options);
        return;
    }
    reads_back_what_was_written(open, options);
    reads_back_whatever_the_layout(open, options);
    applies_overlapping_writes_in_order_of_completion(open, options);
    mixes_overlapping_writes_in_flight_but_invents_nothing(open, options);
    shows_flushed_data_to_others(open, options);
    writes_through_where_it_says_so(open, options);
    carries_out_mapped_requests_in_their_extent(open, options);
    zeroes_exactly_the_range(open, options);
    discards_nothing_beside_the_range(open, options);
    discards_to_zeroes_where_it_says_so(open, options);
}

/// Page-aligned memory for whole transfers: the third region.
const SCRATCH: u64 = 0x1_0000_0000;

/// Bytes that depend on `seed` and look like no others.
#[must_use]
pub fn pattern(seed: u64, len_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len_bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// The geometry makes sense.
pub fn geometry_is_sound(open: Open<'_>) {
    let geometry = open().geometry();
    let block = u64::from(geometry.block_bytes);
    assert!(block.is_power_of_two() && block >= 512, "{geometry:?}");
    assert!(geometry.physical_block_bytes.is_power_of_two(), "{geometry:?}");
    assert!(geometry.physical_block_bytes >= geometry.block_bytes, "{geometry:?}");
    assert_eq!(geometry.capacity_bytes % block, 0, "{geometry:?}");
    assert!(geometry.capacity_bytes >= 1 << 20, "the contract needs 1 MiB: {geometry:?}");
}

/// Reads return the data written, at the first and the last block and across many.
pub fn reads_back_what_was_written(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let (block, capacity) = (harness.block(), harness.geometry.capacity_bytes);
    let whole = 128 << 10;
    for (offset, len) in [
        (0, block),
        (block, block),
        (capacity - block, block),
        (2 * block, whole),
        (capacity - whole, whole),
    ] {
        let bytes = pattern(offset, usize::try_from(len).unwrap());
        harness.store(offset, &bytes);
        assert!(harness.load(offset, bytes.len()) == bytes, "{len} bytes at {offset} differ");
    }
}

/// However the guest lays its memory out: aligned or not, in one piece or in many, across regions.
pub fn reads_back_whatever_the_layout(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    let layouts: [&dyn Fn(u64) -> Vec<(u64, u64)>; 6] = [
        // Odd addresses, in one piece.
        &|len| vec![(0x10_0001, len)],
        // Across the two regions that touch, at an odd place.
        &|len| vec![(0x20_0000 - 7, len)],
        // Odd sizes.
        &|len| vec![(0x10_0000, 1), (0x12_0000, 510), (0x1_0000_0000, len - 511)],
        // Backwards.
        &|len| vec![(0x18_0000, len / 2), (0x10_0000, len - len / 2)],
        // Words only.
        &|len| (0..len / 8).map(|word| (0x10_0000 + word * 24, 8)).collect(),
        // Sectors, none next to another: what a guest's page cache sends.
        &|len| (0..len / 512).map(|sector| (0x1_0000_0000 + sector * 4096, 512)).collect(),
    ];
    for (index, layout) in layouts.iter().enumerate() {
        for blocks in [1, 3, 16, 64] {
            let len = blocks * block;
            let pieces = layout(len);
            let seed = index as u64 * 100 + blocks;
            let bytes = pattern(seed, usize::try_from(len).unwrap());
            scatter(&harness, &pieces, &bytes);
            let write = harness.request(Operation::Write, block, &pieces);
            assert_eq!(harness.run_one(write), Ok(()), "write of layout {index}, {blocks} blocks");
            assert!(
                harness.load(block, bytes.len()) == bytes,
                "layout {index}, {blocks} blocks, as written"
            );
            scatter(&harness, &pieces, &vec![0; bytes.len()]);
            let read = harness.request(Operation::Read, block, &pieces);
            assert_eq!(harness.run_one(read), Ok(()), "read of layout {index}, {blocks} blocks");
            assert!(gather(&harness, &pieces) == bytes, "layout {index}, {blocks} blocks, as read");
        }
    }
}

fn scatter(harness: &Harness, pieces: &[(u64, u64)], bytes: &[u8]) {
    let mut rest = bytes;
    for &(address, len) in pieces {
        let (piece, later) = rest.split_at(usize::try_from(len).unwrap());
        harness.poke(address, piece);
        rest = later;
    }
    assert!(rest.is_empty());
}

fn gather(harness: &Harness, pieces: &[(u64, u64)]) -> Vec<u8> {
    pieces
        .iter()
        .flat_map(|&(address, len)| harness.peek(address, usize::try_from(len).unwrap()))
        .collect()
}

/// Of two overlapping writes the one that was submitted after the other had completed wins.
pub fn applies_overlapping_writes_in_order_of_completion(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = usize::try_from(harness.block()).unwrap();
    let (first, second) = (pattern(1, 4 * block), pattern(2, 2 * block));
    for _ in 0..20 {
        harness.store(0, &first);
        harness.store(block as u64, &second);
        let expected = [&first[..block], &second, &first[3 * block..]].concat();
        assert!(harness.load(0, 4 * block) == expected, "the later write did not win");
    }
}

/// Of overlapping writes in flight together any may win, but each byte comes
/// from one of them, and their neighbours stay as they are.
pub fn mixes_overlapping_writes_in_flight_but_invents_nothing(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let (block, writers) = (harness.block(), options.depth.min(8) as u64);
    let len = usize::try_from(block * 4).unwrap();
    let neighbour = pattern(99, len);
    harness.store(0, &neighbour);
    harness.store(8 * block, &neighbour);
    let patterns: Vec<_> = (0..writers).map(|writer| pattern(writer, len)).collect();
    let mut requests = Vec::new();
    for (writer, bytes) in (0_u64..).zip(&patterns) {
        let address = SCRATCH + writer * len as u64;
        harness.poke(address, bytes);
        requests.push(harness.request(Operation::Write, 4 * block, &[(address, len as u64)]));
    }
    assert!(harness.run(requests).iter().all(Result::is_ok));
    let written = harness.load(4 * block, len);
    for (index, byte) in written.iter().enumerate() {
        assert!(
            patterns.iter().any(|pattern| pattern[index] == *byte),
            "byte {index} is of no pattern"
        );
    }
    assert!(harness.load(0, len) == neighbour, "the blocks before were touched");
    assert!(harness.load(8 * block, len) == neighbour, "the blocks behind were touched");
}

/// A flush succeeds, with and without writes before it, and what it covered is
/// seen through a channel opened later.
pub fn shows_flushed_data_to_others(open: Open<'_>, options: &Options) {
    let device = open();
    let mut harness = Harness::new(&device, options.depth);
    let bytes = pattern(7, usize::try_from(harness.block()).unwrap());
    for _ in 0..2 {
        let flush = harness.range_request(Operation::Flush, 0, 0);
        assert_eq!(harness.run_one(flush), Ok(()), "flush");
        harness.store(0, &bytes);
    }
    let flush = harness.range_request(Operation::Flush, 0, 0);
    assert_eq!(harness.run_one(flush), Ok(()), "flush");
    let mut other = Harness::new(&device, options.depth);
    assert!(other.load(0, bytes.len()) == bytes, "another channel does not see flushed data");
}

/// Where the channel says so, a request that lies in an extent is carried out there at once and
/// keeps its offset; a request that has no place, and all behind it, stay in the batch untouched.
pub fn carries_out_mapped_requests_in_their_extent(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    if !harness.channel.takes_mapped() {
        return;
    }
    let block = harness.block();
    let len = usize::try_from(block).unwrap();
    let mut store = pattern(1, 16 * len);
    harness.store(0, &store);
    // The disk's blocks 2 to 5 are the store's blocks 8 to 11.
    let extent = ByteExtent::new(2 * block, 4 * block, 8 * block).unwrap();
    let (read, write, discard) = (Operation::Read, Operation::Write, Operation::Discard);
    for takes_writes in [true, false] {
        for (operation, first, count, has_place) in [
            (read, 2, 4, true),
            (read, 1, 2, false),
            (read, 5, 2, false),
            (read, 6, 1, false),
            (write, 5, 1, takes_writes),
            (write, 1, 1, false),
            (write, 4, 3, false),
            (discard, 2, 1, false),
            (Operation::Flush, 0, 0, false),
        ] {
            let bytes = pattern(first, usize::try_from(count).unwrap() * len);
            harness.poke(SCRATCH, &bytes);
            let mut request =
                harness.request(operation, first * block, &[(SCRATCH, count * block)]);
            request.len_bytes = count * block;
            let follower = harness.request(read, 3 * block, &[(0x10_0000, block)]);
            let (mut batch, mut completed) = (vec![request, follower], Batch::new());
            let mapped = Mapped { extent, takes_writes };
            harness.channel.exchange_mapped(&mapped, &mut batch, &mut completed);
            let case = format!("{operation:?} of {count} blocks at {first}");
            let left = if has_place { 0 } else { 2 };
            assert_eq!((batch.len(), completed.len()), (left, 2 - left), "{case}");
            let both = batch.into_iter().chain(completed);
            for (mut request, at) in both.zip([first * block, 3 * block]) {
                assert_eq!((request.offset_bytes, request.result), (at, Ok(())), "{case}");
                assert!(request.tag.take().map(Tag::into_bits).is_some(), "{case}");
            }
            let place = usize::try_from(first + 6).unwrap() * len;
            if has_place && operation == write {
                store[place..place + bytes.len()].copy_from_slice(&bytes);
            } else if has_place {
                assert_eq!(harness.peek(SCRATCH, bytes.len()), store[place..place + bytes.len()]);
            }
            assert_eq!(harness.in_flight(), 0, "{case}");
            assert!(harness.load(0, store.len()) == store, "the store, after {case}");
        }
    }
}

/// Where the channel says so, a write that is to be durable completes, comes back as it was, and is
/// seen by others. That it is durable takes a power cut to see.
pub fn writes_through_where_it_says_so(open: Open<'_>, options: &Options) {
    let device = open();
    let mut harness = Harness::new(&device, options.depth);
    if !harness.channel.takes_write_through() {
        return;
    }
    let block = harness.block();
    let bytes = pattern(11, usize::try_from(3 * block).unwrap());
    harness.poke(SCRATCH, &bytes);
    let mut writes: Batch = (0..3)
        .map(|index| {
            harness.request(Operation::Write, index * block, &[(SCRATCH + index * block, block)])
        })
        .collect();
    for write in &mut writes {
        write.write_through = true;
    }
    assert!(harness.run(writes).iter().all(Result::is_ok));
    let mut other = Harness::new(&device, options.depth);
    assert!(other.load(0, bytes.len()) == bytes, "another channel does not see what was written");
}

/// Write-zeroes makes the range read as zeros and nothing beside it, whether
/// space may be given back or not.
pub fn zeroes_exactly_the_range(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    for may_unmap in [false, true] {
        let operation = Operation::WriteZeroes { may_unmap };
        if !harness.geometry.write_zeroes {
            let request = harness.range_request(operation, 0, block);
            assert_eq!(harness.run_one(request), Err(BlockError::Unsupported));
            continue;
        }
        // Single blocks, and ranges that start and end inside of pages.
        for (first, blocks) in [(1, 1), (7, 1), (1, 30), (16, 32), (9, 100)] {
            let before =
                pattern(first + blocks, usize::try_from((first + blocks + 9) * block).unwrap());
            harness.store(0, &before);
            let request = harness.range_request(operation, first * block, blocks * block);
            assert_eq!(
                harness.run_one(request),
                Ok(()),
                "{operation:?} of {blocks} blocks at {first}"
            );
            let mut expected = before;
            let range = usize::try_from(first * block).unwrap()
                ..usize::try_from((first + blocks) * block).unwrap();
            expected[range].fill(0);
            assert!(
                harness.load(0, expected.len()) == expected,
                "{operation:?} of {blocks} blocks at {first}"
            );
        }
    }
}

/// A discard leaves everything beside its range alone; inside it may leave the old bytes or zeros.
pub fn discards_nothing_beside_the_range(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    if !harness.geometry.discard {
        return;
    }
    for (first, blocks) in [(1, 1), (1, 30), (16, 32)] {
        let before = pattern(first, usize::try_from((first + blocks + 9) * block).unwrap());
        harness.store(0, &before);
        let request = harness.range_request(Operation::Discard, first * block, blocks * block);
        assert_eq!(harness.run_one(request), Ok(()), "discard of {blocks} blocks at {first}");
        let after = harness.load(0, before.len());
        let range = usize::try_from(first * block).unwrap()
            ..usize::try_from((first + blocks) * block).unwrap();
        for (index, (was, is)) in before.iter().zip(&after).enumerate() {
            let allowed = was == is || (range.contains(&index) && *is == 0);
            assert!(allowed, "discard of {blocks} blocks at {first} changed byte {index}");
        }
    }
}

/// Where the store says so, physical blocks that a discard covers whole read as zeros.
pub fn discards_to_zeroes_where_it_says_so(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let Geometry { discard, discard_zeroes, physical_block_bytes, .. } = harness.geometry;
    if !discard || !discard_zeroes {
        return;
    }
    let block = u64::from(physical_block_bytes);
    for (first, blocks) in [(1, 1), (2, 5)] {
        let len_bytes = usize::try_from((first + blocks + 1) * block).unwrap();
        harness.store(0, &pattern(first, len_bytes));
        let request = harness.range_request(Operation::Discard, first * block, blocks * block);
        assert_eq!(harness.run_one(request), Ok(()));
        let after = harness.load(first * block, usize::try_from(blocks * block).unwrap());
        assert!(
            after.iter().all(|byte| *byte == 0),
            "{blocks} blocks at {first} are no zeros after a discard"
        );
    }
}

/// Outside of the store there is only an error.
pub fn refuses_what_is_out_of_bounds(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let (block, capacity) = (harness.block(), harness.geometry.capacity_bytes);
    for offset in [capacity, capacity + block, u64::MAX - (block - 1), capacity - block] {
        let read = harness.request(Operation::Read, offset, &[(SCRATCH, 2 * block)]);
        assert_eq!(harness.run_one(read), Err(BlockError::OutOfBounds), "read at {offset}");
        if harness.geometry.read_only {
            continue;
        }
        let write = harness.request(Operation::Write, offset, &[(SCRATCH, 2 * block)]);
        assert_eq!(harness.run_one(write), Err(BlockError::OutOfBounds), "write at {offset}");
        let ranges = [
            (Operation::Discard, harness.geometry.discard),
            (Operation::WriteZeroes { may_unmap: true }, harness.geometry.write_zeroes),
            (Operation::WriteZeroes { may_unmap: false }, harness.geometry.write_zeroes),
        ];
        for (operation, supported) in ranges {
            if supported {
                for len in [2 * block, !(block - 1)] {
                    let request = harness.range_request(operation, offset, len);
                    assert_eq!(
                        harness.run_one(request),
                        Err(BlockError::OutOfBounds),
                        "{operation:?} at {offset}"
                    );
                }
            }
        }
    }
}

/// A read-only store reads, flushes, and changes nothing.
pub fn refuses_to_write(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    let before = harness.load(0, usize::try_from(block).unwrap());
    harness.poke(SCRATCH, &pattern(5, before.len()));
    let write = harness.request(Operation::Write, 0, &[(SCRATCH, block)]);
    assert_eq!(harness.run_one(write), Err(BlockError::ReadOnly));
    for operation in [Operation::Discard, Operation::WriteZeroes { may_unmap: true }] {
        let request = harness.range_request(operation, 0, block);
        assert_eq!(harness.run_one(request), Err(BlockError::ReadOnly));
    }
    let flush = harness.range_request(Operation::Flush, 0, 0);
    assert_eq!(harness.run_one(flush), Ok(()));
    assert!(harness.load(0, before.len()) == before, "a read-only store has changed");
}

/// Every request comes back once, as it was apart from its result; `poll` and
/// `exchange` append, and an empty batch is nothing.
pub fn comes_back_exactly_once(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    harness.submit(&mut Batch::new());
    let mut completed = vec![BlockRequest::blank(0)];
    let now = harness.now();
    harness.channel.poll(now, &mut completed);
    assert_eq!((completed.len(), harness.in_flight()), (1, 0), "nothing was submitted");

    let mut request =
        harness.request(Operation::Read, block, &[(SCRATCH, block), (SCRATCH + 2 * block, block)]);
    let (taken_at, pieces) = (request.taken_at, request.segments.pieces().len());
    request.result = Err(BlockError::NoSpace);
    harness.submit(&mut vec![request]);
    let start = Instant::now();
    while completed.len() < 2 {
        assert!(start.elapsed() < PATIENCE, "the request never came back");
        harness.wait(Duration::from_millis(1));
        let now = harness.now();
        harness.channel.poll(now, &mut completed);
    }
    assert!(completed[0].tag.is_none(), "poll must append to what the caller has");
    let untouched = |request: &mut BlockRequest| {
        assert!(request.tag.take().map(Tag::into_bits).is_some(), "the tag is gone");
        assert_eq!(request.result, Ok(()), "the result of a read");
        assert_eq!(
            (request.operation, request.offset_bytes, request.len_bytes, request.taken_at),
            (Operation::Read, block, 2 * block, taken_at),
            "the request was changed"
        );
        assert_eq!(request.segments.pieces().len(), pieces, "the segments were changed");
    };
    untouched(&mut completed[1]);

    // The same request on a detour of a stage above: what that stage put there is left alone.
    let mut request = completed.pop().unwrap();
    request.offset_bytes = 0;
    request.tag = Some(Tag::from_bits(1));
    assert!(request.send_on(block, 7));
    let mut batch = vec![request];
    while completed.len() < 2 {
        assert!(start.elapsed() < PATIENCE, "the request never came back");
        let now = harness.now();
        harness.channel.exchange(now, &mut batch, &mut completed);
        harness.wait(Duration::from_millis(1));
    }
    assert!(completed[0].tag.is_none(), "exchange must append to what the caller has");
    untouched(&mut completed[1]);
    assert_eq!(
        (completed[1].come_back(), completed[1].offset_bytes),
        (7, 0),
        "a detour of another stage"
    );

    // Many more than the depth, of every kind that harms nothing.
    let requests = (0..20 * options.depth as u64).map(|index| {
        let address = SCRATCH + index % 64 * block;
        if index % 7 == 3 {
            harness.range_request(Operation::Flush, 0, 0)
        } else {
            harness.request(Operation::Read, index % 100 * block, &[(address, block)])
        }
    });
    let requests = requests.collect();
    assert!(harness.run(requests).iter().all(Result::is_ok));
}

/// A channel takes as many as its depth, in order, and leaves the rest.
pub fn leaves_what_does_not_fit(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    let surplus = 5;
    let requests = (0..options.depth + surplus)
        .map(|_| harness.request(Operation::Read, 0, &[(SCRATCH, block)]));
    let mut batch: Batch = requests.collect();
    let addresses = |batch: &Batch| -> Vec<_> {
        batch.iter().map(|request| std::ptr::from_ref(&**request)).collect()
    };
    let offered = addresses(&batch);
    harness.submit(&mut batch);
    assert_eq!(
        addresses(&batch),
        offered[options.depth..],
        "a channel takes exactly its depth, from the front"
    );
    assert_eq!(harness.in_flight(), options.depth);
    harness.submit(&mut batch);
    assert_eq!(batch.len(), surplus, "a full channel takes nothing");
    // Completed requests make room again.
    let mut completed = Batch::new();
    let start = Instant::now();
    while completed.len() < options.depth + surplus {
        assert!(start.elapsed() < PATIENCE, "requests never came back");
        harness.wait(Duration::from_millis(1));
        let now = harness.now();
        harness.channel.poll(now, &mut completed);
        harness.submit(&mut batch);
    }
    assert!(batch.is_empty());
    retire(completed);
}

/// In-flight requests can be waited for, and then nothing comes any more.
pub fn drains(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    let requests = (0..options.depth as u64)
        .map(|index| harness.request(Operation::Read, index * block, &[(SCRATCH, block)]));
    let mut batch: Batch = requests.collect();
    harness.submit(&mut batch);
    let mut completed = Batch::new();
    let start = Instant::now();
    while harness.in_flight() > 0 {
        assert!(start.elapsed() < PATIENCE, "the channel does not drain");
        harness.wait(Duration::from_millis(1));
        let now = harness.now();
        harness.channel.poll(now, &mut completed);
    }
    assert_eq!(completed.len(), options.depth, "drained, yet not all came back");
    harness.channel.poll(Nanos::MAX, &mut completed);
    assert_eq!(completed.len(), options.depth, "a request came back twice");
    let idle = Readiness { in_flight: 0, next: Next::OnWake };
    assert_eq!(harness.channel.readiness(), idle, "nothing is in flight");
    retire(completed);
}

/// Two channels of one device do not mix their requests up.
pub fn keeps_channels_apart(open: Open<'_>, options: &Options) {
    let device = open();
    let mut one = Harness::new(&device, options.depth);
    let mut other = Harness::new(&device, options.depth);
    let block = one.block();
    let request = one.request(Operation::Read, 0, &[(SCRATCH, block)]);
    one.submit(&mut vec![request]);
    let flush = other.range_request(Operation::Flush, 0, 0);
    assert_eq!(other.run_one(flush), Ok(()));
    assert_eq!((one.in_flight(), other.in_flight()), (1, 0));
    let mut completed = Batch::new();
    let start = Instant::now();
    while completed.is_empty() {
        assert!(start.elapsed() < PATIENCE, "the request never came back");
        one.wait(Duration::from_millis(1));
        let now = one.now();
        one.channel.poll(now, &mut completed);
    }
    retire(completed);
}

/// When something is to be handed back, the wake descriptor is readable, or
/// the deadline has come, or there was nothing to wait for.
pub fn wakes_when_something_is_done(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    for round in 0..20 {
        let request = match round % 2 {
            0 => harness.request(Operation::Read, 0, &[(SCRATCH, block)]),
            _ => harness.range_request(Operation::Flush, 0, 0),
        };
        harness.submit(&mut vec![request]);
        let mut completed = Batch::new();
        let start = Instant::now();
        while completed.is_empty() {
            // No polling in between: only what wakes a sleeping sidecore.
            let woken = harness.wait(PATIENCE);
            // A descriptor readable only when asked again counts as late: a sidecore asks once.
            assert!(
                woken && start.elapsed() < PATIENCE,
                "nothing wakes a sidecore that waits for this channel"
            );
            let now = harness.now();
            harness.channel.poll(now, &mut completed);
        }
        retire(completed);
    }
}

/// Attaching memory is a hint: requests work with any memory, before and after it is exchanged.
pub fn works_whatever_memory_is_attached(open: Open<'_>, options: &Options) {
    let mut harness = Harness::new(&open(), options.depth);
    let block = harness.block();
    let other = guest_memory();
    for attached in
        [GuestMemory::empty(), other.clone(), harness.memory.clone(), harness.memory.clone()]
    {
        harness.channel.attach_memory(&attached).unwrap();
        for memory in [other.clone(), harness.memory.clone()] {
            let mut read = request(&memory, Operation::Read, 0, &[(SCRATCH, block)]);
            read.tag = Some(Tag::from_bits(harness.next_tag));
            harness.next_tag += 1;
            assert_eq!(harness.run_one(read), Ok(()));
        }
    }
}

/// Ends the life of completed requests.
fn retire(completed: Batch) {
    for mut request in completed {
        assert_eq!(request.result, Ok(()));
        request.tag.take().expect("a request came back without its tag").into_bits();
    }
}
