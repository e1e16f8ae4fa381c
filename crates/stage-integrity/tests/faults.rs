//! Faults of the store: each is found, by its kind, and no bad byte is read.

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, FindingsCounts, Geometry, Operation, RamStore,
    Stage as _,
};
use sidecore_block_contract::Harness;
use sidecore_reactor::CoreContext;
use sidecore_stage_integrity::{
    FormatOptions, IntegrityError, IntegrityStage, IntegrityStore, OpenOptions, format,
};

use common::lies::{BAD, BLOCK, Bench, Lie, SCRATCH, STORE_BYTES, bytes, flush, read};
use common::{formatted, open, ram};

#[test]
fn each_kind_of_lie_is_found_also_after_the_store_was_opened_again() {
    let lost = FindingsCounts { stale: 1, ..FindingsCounts::default() };
    let torn = FindingsCounts { checksum: 1, ..FindingsCounts::default() };
    let misdirected = FindingsCounts { stale: 1, misdirected: 1, ..FindingsCounts::default() };
    for reopens in [false, true] {
        for (lie, blocks, expected) in [
            (Lie::Lost, &[7][..], &lost),
            (Lie::Torn(1536), &[7], &torn),
            (Lie::Misdirected(2 * BLOCK), &[7, 9], &misdirected),
        ] {
            let mut bench = Bench::new();
            let mut guest = bench.guest();
            for block in 0..16 {
                guest.store(block * BLOCK, &bytes(block));
            }
            flush(&mut guest);
            bench.lie(7, lie);
            guest.store(7 * BLOCK, &bytes(100));
            flush(&mut guest);
            if reopens {
                drop(guest);
                bench.reopen();
                guest = bench.guest();
            }
            for block in 0..16 {
                let is_bad = blocks.contains(&block);
                assert_eq!(read(&mut guest, block), if is_bad { BAD } else { Ok(()) }, "{lie:?}");
                let seen = guest.peek(SCRATCH, BLOCK as usize);
                let good = if is_bad { vec![0; BLOCK as usize] } else { bytes(block) };
                assert!(seen == good, "no bad byte stays: {lie:?}");
            }
            assert_eq!(&bench.counts(), expected, "{lie:?}, again: {reopens}");
            assert!(bench.findings.problem().is_some());
            guest.store(7 * BLOCK, &bytes(101));
            assert!(guest.load(7 * BLOCK, BLOCK as usize) == bytes(101), "a write mends it");
            (0..16).for_each(|block| guest.store(block * BLOCK, &bytes(block)));
            assert_eq!(bench.findings.problem(), None, "the warning has ended");
        }
    }
}

#[test]
fn a_damaged_area_of_tags_fails_its_blocks_and_a_write_mends_them() {
    let mut bench = Bench::new();
    let mut guest = bench.guest();
    for block in 0..64 {
        guest.store(block * BLOCK, &bytes(block));
    }
    flush(&mut guest);
    drop(guest);
    let mut raw = Harness::new(&bench.below, 8);
    // The sectors of tags lie before the data; the first one that is no zeros has 31 blocks.
    let metadata = raw.load(8192, (bench.data_at - 8192) as usize);
    let sectors: Vec<u64> = (0..metadata.len() as u64 / 512)
        .filter(|sector| {
            let sector = &metadata[*sector as usize * 512..][..512];
            // Intents have zeros behind their number.
            sector[496..504] == [0; 8] && sector[488..496] != [0; 8]
        })
        .collect();
    let at = 8192 + sectors[0] * 512;
    let mut sector = raw.load(at, 512);
    sector[100] ^= 4;
    raw.store(at, &sector);
    bench.reopen();
    let mut guest = bench.guest();
    let bad = (0..64).filter(|block| read(&mut guest, *block) == BAD).count();
    assert_eq!(bad, 0, "their intents are still there");
    drop(guest);
    raw.store(at, &sector);
    raw.store(8192, &vec![0; (at - 8192) as usize]);
    bench.reopen();
    let mut guest = bench.guest();
    let bad = (0..64).filter(|block| read(&mut guest, *block) == BAD).count();
    assert_eq!((bad, bench.counts().unknown), (31, 31));
    for block in 0..64 {
        guest.store(block * BLOCK, &bytes(200 + block));
    }
    flush(&mut guest);
    drop(guest);
    bench.reopen();
    let mut guest = bench.guest();
    for block in 0..64 {
        assert!(guest.load(block * BLOCK, BLOCK as usize) == bytes(200 + block));
    }
}

#[test]
fn blocks_that_were_never_written_are_zeros_or_bad() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    assert!(guest.load(5 * BLOCK, BLOCK as usize) == [0; BLOCK as usize]);
    Harness::new(&bench.below, 8).store(bench.data_at + 5 * BLOCK, &[1; 512]);
    assert_eq!(read(&mut guest, 5), BAD);
    assert_eq!(bench.counts().checksum, 1);
    let zeroes = Operation::WriteZeroes { may_unmap: true };
    let zeroes = guest.range_request(zeroes, 5 * BLOCK, BLOCK);
    assert_eq!(guest.run_one(zeroes), Ok(()));
    assert_eq!(read(&mut guest, 5), Ok(()), "zeros are written, whatever the checksum says");
    assert!(guest.peek(SCRATCH, BLOCK as usize) == [0; BLOCK as usize]);
}

#[test]
fn a_block_that_is_bad_once_is_no_warning_when_it_was_read_well() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    let mut raw = Harness::new(&bench.below, 8);
    raw.store(bench.data_at + 5 * BLOCK, &[1; 512]);
    assert_eq!((read(&mut guest, 5), read(&mut guest, 6)), (BAD, Ok(())));
    assert!(bench.findings.problem().unwrap().contains("at byte 20480"));
    raw.store(bench.data_at + 5 * BLOCK, &[0; 512]);
    assert_eq!(read(&mut guest, 5), Ok(()));
    assert_eq!(bench.findings.problem(), None);
}

#[test]
fn the_right_place_of_bytes_is_looked_for_some_times_a_second() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    (0..64).for_each(|block| guest.store(block * BLOCK, &bytes(block)));
    flush(&mut guest);
    let mut raw = Harness::new(&bench.below, 8);
    (0..64).for_each(|block| raw.store(bench.data_at + block * BLOCK, &bytes((block + 1) % 64)));
    let started = Instant::now();
    for _ in 0..8 {
        (0..64).for_each(|block| assert_eq!(read(&mut guest, block), BAD));
    }
    // And once in each round for the block of the last search.
    let most = 9 + started.elapsed().as_millis() as u64 / 10;
    let FindingsCounts { checksum, misdirected, .. } = bench.counts();
    assert!((1..=most).contains(&misdirected), "{misdirected} of {most}");
    assert_eq!(checksum + misdirected, 8 * 64);
    // The same block again.
    let (block, before) = (40, bench.counts().misdirected);
    while bench.counts().misdirected == before {
        assert_eq!(read(&mut guest, block), BAD);
    }
    let before = bench.counts().misdirected;
    (0..100).for_each(|_| assert_eq!(read(&mut guest, block), BAD));
    assert_eq!(bench.counts().misdirected, before + 100);
}

#[test]
fn a_read_whose_repetition_fails_leaves_no_byte_of_the_first() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    let at = bench.data_at + 5 * BLOCK;
    Harness::new(&bench.below, 8).store(at, &[1; 512]);
    let reads = AtomicU64::new(0);
    bench.fail(move |request| {
        request.offset_bytes == at && reads.fetch_add(1, Ordering::Relaxed) > 0
    });
    assert_eq!(read(&mut guest, 5), Err(BlockError::EIO));
    assert!(guest.peek(SCRATCH, BLOCK as usize) == [0; BLOCK as usize]);
}

#[test]
fn a_failed_write_that_was_done_is_looked_at_until_it_can_be_read() {
    let bench = Bench::new();
    let mut guest = bench.guest();
    guest.store(3 * BLOCK, &bytes(3));
    let (at, honest) = (bench.data_at + 3 * BLOCK, Arc::clone(&bench.honest));
    let (is_done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    bench.fail(move |request| match request.operation {
        Operation::Write
            if request.offset_bytes == at && !is_done.swap(true, Ordering::Relaxed) =>
        {
            let (mut data, mut raw) = (vec![0; BLOCK as usize], Harness::new(&honest, 8));
            request.segments.copy_to_slice(0, &mut data);
            raw.store(at, &data);
            true
        }
        Operation::Read => request.offset_bytes == at && reads.fetch_add(1, Ordering::Relaxed) < 2,
        _ => false,
    });
    guest.poke(SCRATCH, &bytes(100));
    let write = guest.request(Operation::Write, 3 * BLOCK, &[(SCRATCH, BLOCK)]);
    assert_eq!(guest.run_one(write), Err(BlockError::EIO));
    assert!(guest.load(3 * BLOCK, BLOCK as usize) == bytes(100), "it was done");
}

#[test]
fn an_outage_in_which_writes_fail_and_cannot_be_looked_at_leaves_blocks_good() {
    let mut bench = Bench::new();
    let mut guest = bench.guest();
    guest.store(3 * BLOCK, &bytes(3));
    flush(&mut guest);
    bench.fail_range(bench.data_at, STORE_BYTES);
    guest.poke(SCRATCH, &bytes(100));
    let write = guest.request(Operation::Write, 3 * BLOCK, &[(SCRATCH, BLOCK)]);
    assert_eq!(guest.run_one(write), Err(BlockError::EIO));
    bench.fail_none();
    for reopens in [false, true] {
        if reopens {
            flush(&mut guest);
            bench.reopen();
            guest = bench.guest();
        }
        assert!(guest.load(3 * BLOCK, BLOCK as usize) == bytes(3), "again: {reopens}");
    }
    guest.store(3 * BLOCK, &bytes(101));
    assert!(guest.load(3 * BLOCK, BLOCK as usize) == bytes(101));
}

#[test]
fn a_store_that_is_unreadable_in_places_is_opened_and_shows_no_bad_byte() {
    let mut bench = Bench::new();
    let mut guest = bench.guest();
    (0..16).for_each(|block| guest.store(block * BLOCK, &bytes(block)));
    let bad = |bench: &mut Bench| {
        bench.reopen();
        bench.fail_none();
        let mut guest = bench.guest();
        let is_bad = |block: &u64| {
            let is_bad = read(&mut guest, *block) == BAD;
            let seen = guest.peek(SCRATCH, BLOCK as usize);
            assert!(seen == if is_bad { vec![0; BLOCK as usize] } else { bytes(*block) });
            is_bad
        };
        (0..16).filter(is_bad).count()
    };
    drop(guest);
    let at = bench.data_at + 3 * BLOCK;
    bench.fail_range(at, at + BLOCK);
    assert_eq!(bad(&mut bench), 0, "a block with an intent");
    bench.fail_range(0, 512);
    assert_eq!(bad(&mut bench), 0, "a copy of the header");
    bench.fail(|_| true);
    assert!(matches!(refused(&bench.below, None), IntegrityError::Io(_)));
    // The other copy can be read, but not the rest.
    let data_at = bench.data_at;
    bench.fail(move |request| {
        let (start, end) = (request.offset_bytes, request.offset_bytes + request.len_bytes);
        start < data_at && end > 8192
    });
    assert_eq!(bad(&mut bench), 16, "tags and intents");
}

#[test]
fn a_store_that_is_only_read_is_not_written_by_a_flush() {
    let mut bench = Bench::new();
    let mut guest = bench.guest();
    guest.store(3 * BLOCK, &bytes(3));
    drop(guest);
    bench.tricks.is_read_only.store(true, Ordering::Relaxed);
    let changes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&changes);
    bench.fail(move |request| {
        counted.fetch_add(u64::from(request.operation != Operation::Read), Ordering::Relaxed);
        false
    });
    bench.reopen();
    let mut guest = bench.guest();
    flush(&mut guest);
    assert!(guest.load(3 * BLOCK, BLOCK as usize) == bytes(3));
    assert_eq!(changes.load(Ordering::Relaxed), 0);
}

fn refused(below: &Arc<dyn BlockDevice>, uuid: Option<&str>) -> IntegrityError {
    let options = OpenOptions::with_uuid(uuid.map(str::to_owned));
    let opened = IntegrityStore::open(Arc::clone(below), "disk", &options);
    opened.err().expect("the store is refused")
}

/// A store of another size.
struct Resized(Arc<dyn BlockDevice>, AtomicU64);

impl BlockDevice for Resized {
    fn geometry(&self) -> Geometry {
        let capacity_bytes = self.1.load(Ordering::Relaxed);
        Geometry { capacity_bytes, ..self.0.geometry() }
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.0.open_channel(core, depth)
    }
}

#[test]
fn stores_that_do_not_fit_are_refused_and_not_changed() {
    let plain = ram(STORE_BYTES, |it| it);
    assert_eq!(refused(&plain, None), IntegrityError::NoHeader);
    let below = ram(STORE_BYTES, |it| it);
    let layout = formatted(&below, BLOCK as u32, None);
    let whole = |device: &Arc<dyn BlockDevice>| {
        let mut raw = Harness::new(device, 8);
        let halves = [0, STORE_BYTES / 8 * 4].map(|at| raw.load(at, 1 << 20));
        halves.concat()
    };
    let before = whole(&below);
    let resized = Arc::new(Resized(Arc::clone(&below), AtomicU64::new(layout.store_bytes())));
    let device = Arc::clone(&resized) as Arc<dyn BlockDevice>;
    assert_eq!(open(&device).geometry().capacity_bytes, layout.capacity_bytes());
    resized.1.store(layout.store_bytes() - 512, Ordering::Relaxed);
    assert!(matches!(refused(&device, None), IntegrityError::Shrunk { .. }));
    resized.1.store(4096, Ordering::Relaxed);
    assert_eq!(refused(&device, None), IntegrityError::NoHeader);
    let uuid = "09090909-0909-0909-0909-090909090909";
    let other = refused(&below, Some("00000000-0000-0000-0000-000000000000"));
    assert!(other.to_string().contains(uuid), "{other}");
    let stage = IntegrityStage { uuid: Some(uuid.to_owned()) };
    assert!(stage.open("disk", Arc::clone(&below)).is_ok());
    let options = FormatOptions { uuid: [1; 16], block_bytes: 4096, slots: None, force: false };
    assert_eq!(format(&*below, &options), Err(IntegrityError::HasHeader));
    for at in [512, STORE_BYTES - 512] {
        let foreign = ram(STORE_BYTES, |it| it);
        Harness::new(&foreign, 8).store(at, &[1; 512]);
        assert_eq!(format(&*foreign, &options), Err(IntegrityError::NotBlank));
        assert!(Harness::new(&foreign, 8).load(at, 512) == [1; 512]);
        assert!(format(&*foreign, &FormatOptions { force: true, ..options }).is_ok());
    }
    let bench = Bench::new();
    bench.fail_range(0, 8192);
    let error = format(&*bench.below, &options);
    assert!(matches!(error, Err(IntegrityError::Io(_))), "{error:?}");
    assert!(whole(&below) == before, "nothing was changed");
    let mut raw = Harness::new(&below, 8);
    let mut copy = raw.load(0, 4096);
    copy[40] ^= 1;
    raw.store(0, &copy);
    assert!(stage.open("disk", Arc::clone(&below)).is_ok(), "one copy suffices");
    raw.store(4096, &copy);
    assert_eq!(refused(&below, None), IntegrityError::Damaged);
    assert!(format(&*below, &FormatOptions { force: true, ..options }).is_ok());
    let large = Arc::new(RamStore::new(Geometry::new(STORE_BYTES, 4096)).unwrap());
    let options = FormatOptions { block_bytes: 512, ..options };
    assert!(matches!(format(&*large, &options), Err(IntegrityError::NoRoom { .. })));
}
