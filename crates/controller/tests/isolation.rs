//! Guests on several sidecores write, zero, discard and read all over their volumes, while the
//! operator takes snapshots, clones, deletes, prunes and deduplicates: each guest reads exactly the
//! data that it wrote, a snapshot never changes, and in the end every block is accounted for.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::Operation;
use sidecore_controller::{Controller, DedupOptions, DedupState};
use sidecore_extent::BlockRange;
use sidecore_units::Vlba;

const SECTOR: u64 = 512;
const VOLUME_SECTORS: u64 = 2048;
const VOLUMES: u64 = 3;
const GUESTS: u64 = 2;
/// Sectors that one guest of a volume owns in a row: not a multiple of a block, so that guests
/// share blocks.
const STRETCH: u64 = 7;

/// An xorshift generator: small, and random enough.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }
}

/// A sector's contents: its volume, its number, and the round that wrote it.
fn stamp(volume: u64, sector: u64, sequence: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(SECTOR as usize);
    while bytes.len() < SECTOR as usize {
        for word in [0x51de_c0de, volume, sector, sequence] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    bytes
}

/// Parses a stamp; `None` for zeros.
fn read_stamp(bytes: &[u8]) -> Option<(u64, u64, u64)> {
    if bytes.iter().all(|byte| *byte == 0) {
        return None;
    }
    let word =
        |index: usize| u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().unwrap());
    assert_eq!(word(0), 0x51de_c0de, "not a stamp");
    for piece in bytes.chunks(32) {
        assert_eq!(piece, &bytes[..32], "a torn sector: only this guest writes here");
    }
    Some((word(1), word(2), word(3)))
}

/// One guest: it alone writes the stretches that it owns.
fn guest(controller: &Controller, volume: u64, guest: u64, seed: u64, rounds: u64) {
    let (mut harness, _device) = common::guest(controller, &format!("v{volume}"));
    let mut random = Random(seed);
    // The sequence number in each sector; 0 is zeros.
    let mut model = vec![0_u64; VOLUME_SECTORS as usize];
    for round in 1..=rounds {
        let stretches = VOLUME_SECTORS / STRETCH;
        let stretch = random.next(stretches / GUESTS) * GUESTS + guest;
        let skip = random.next(STRETCH);
        let count = 1 + random.next(STRETCH - skip);
        let first = stretch * STRETCH + skip;
        let range = first as usize..(first + count) as usize;
        match random.next(10) {
            0..=4 => {
                let bytes: Vec<u8> = (first..first + count)
                    .flat_map(|sector| stamp(volume, sector, round))
                    .collect();
                harness.store(first * SECTOR, &bytes);
                model[range].fill(round);
            }
            5 => {
                let may_unmap = random.next(2) == 0;
                let zero = Operation::WriteZeroes { may_unmap };
                let request = harness.range_request(zero, first * SECTOR, count * SECTOR);
                assert_eq!(harness.run_one(request), Ok(()));
                model[range].fill(0);
            }
            6 => {
                let request =
                    harness.range_request(Operation::Discard, first * SECTOR, count * SECTOR);
                assert_eq!(harness.run_one(request), Ok(()));
                // A discard may keep the sectors or zero them, but not change them otherwise.
                let bytes = harness.load(first * SECTOR, (count * SECTOR) as usize);
                for (index, sector) in bytes.chunks(SECTOR as usize).enumerate() {
                    let model = &mut model[first as usize + index];
                    match read_stamp(sector) {
                        None => *model = 0,
                        Some((_, _, sequence)) => {
                            assert_eq!(sequence, *model, "seed {seed}, round {round}")
                        }
                    }
                }
            }
            7 => {
                let flush = harness.request(Operation::Flush, 0, &[]);
                assert_eq!(harness.run_one(flush), Ok(()));
            }
            _ => {
                // Also the other guest's sectors, which must be of this volume and place.
                let first = first.saturating_sub(random.next(40));
                let count = (1 + random.next(100)).min(VOLUME_SECTORS - first);
                let bytes = harness.load(first * SECTOR, (count * SECTOR) as usize);
                for (index, bytes) in bytes.chunks(SECTOR as usize).enumerate() {
                    let sector = first + index as u64;
                    let mine = sector / STRETCH % GUESTS == guest && sector < stretches * STRETCH;
                    if !mine {
                        continue;
                    }
                    let expected = model[sector as usize];
                    let found = read_stamp(bytes);
                    let wanted = (expected != 0).then_some((volume, sector, expected));
                    assert_eq!(
                        found, wanted,
                        "seed {seed}, round {round}, volume {volume}, sector {sector}"
                    );
                }
            }
        }
    }
}

/// A volume's contents, each sector checked to be of this volume and place.
fn contents(controller: &Controller, name: &str, volume: u64) -> Vec<u8> {
    let (mut harness, _device) = common::guest(controller, name);
    let mut all = Vec::new();
    for at in (0..VOLUME_SECTORS).step_by(256) {
        all.extend(harness.load(at * SECTOR, (256 * SECTOR) as usize));
    }
    for (sector, bytes) in all.chunks(SECTOR as usize).enumerate() {
        if let Some((owner, place, _)) = read_stamp(bytes) {
            assert_eq!((owner, place), (volume, sector as u64), "{name} shows another's sector");
        }
    }
    all
}

/// A deduplication to its end: of zeros, because no guest writes what another one does.
fn deduplicate(controller: &Controller) {
    let options = DedupOptions { across: true, bytes_per_s: 1 << 40, ..DedupOptions::default() };
    controller.start_dedup(&options).unwrap();
    while controller.dedup().unwrap().state == DedupState::Running {
        std::thread::yield_now();
    }
    assert_eq!(controller.dedup().unwrap().state, DedupState::Done);
}

/// The operator's operations, while guests run.
fn operate(controller: &Controller, stop: &AtomicBool, seed: u64) {
    let mut random = Random(seed);
    let mut snapshots: Vec<(String, u64, Vec<u8>)> = Vec::new();
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let volume = random.next(VOLUMES);
        let name = format!("v{volume}");
        match random.next(8) {
            0 | 1 if snapshots.len() < 4 => {
                next += 1;
                let snapshot = format!("s{next}");
                if random.next(2) == 0 {
                    controller.snapshot_volume(&name, &snapshot).unwrap();
                } else {
                    controller.clone_volume(&name, &snapshot).unwrap();
                }
                let bytes = contents(controller, &snapshot, volume);
                snapshots.push((snapshot, volume, bytes));
            }
            2 if !snapshots.is_empty() => {
                let index = random.next(snapshots.len() as u64) as usize;
                let (name, volume, bytes) = snapshots.swap_remove(index);
                assert!(
                    contents(controller, &name, volume) == bytes,
                    "seed {seed}: {name} has changed"
                );
                controller.delete_volume(&name).unwrap();
            }
            3 => controller.prune(Some(&name)).unwrap(),
            4 => controller.flush_btlb(),
            5 => {
                let (count, shift) = (1 + random.next(64), random.next(512));
                let range = BlockRange { first: Vlba(shift), count };
                // Mostly the blocks differ, which is an error that changes nothing.
                let _ = controller.share_blocks(
                    (&name, range),
                    (&format!("v{}", random.next(VOLUMES)), Vlba(shift)),
                );
            }
            6 => deduplicate(controller),
            _ => {
                let report = controller.check().unwrap();
                assert!(report.is_clean(), "seed {seed}: {:?}", report.problems);
            }
        }
    }
    for (name, volume, bytes) in snapshots {
        assert!(contents(controller, &name, volume) == bytes, "seed {seed}: {name} has changed");
        controller.delete_volume(&name).unwrap();
    }
}

fn run(block_bytes: u32, seed: u64, rounds: u64) {
    println!("seed {seed}, blocks of {block_bytes} bytes");
    let (controller, _store) = common::in_memory(16 << 20, block_bytes);
    for volume in 0..VOLUMES {
        controller.create_volume(&format!("v{volume}"), VOLUME_SECTORS * SECTOR, None).unwrap();
    }
    let empty = controller.report().space;
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let operator = scope.spawn(|| operate(&controller, &stop, seed));
        let guests: Vec<_> = (0..VOLUMES * GUESTS)
            .map(|index| {
                let controller = &controller;
                scope.spawn(move || {
                    guest(
                        controller,
                        index / GUESTS,
                        index % GUESTS,
                        seed.wrapping_mul(31) + index,
                        rounds,
                    )
                })
            })
            .collect();
        let results: Vec<_> = guests.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::Relaxed);
        operator.join().unwrap();
        for result in results {
            result.unwrap();
        }
    });
    let report = controller.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    for volume in 0..VOLUMES {
        controller.delete_volume(&format!("v{volume}")).unwrap();
    }
    let report = controller.check().unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    assert_eq!((report.data_blocks, report.granted_blocks), (0, 0));
    let left = controller.report().space;
    assert_eq!(left.data, 0, "{left:?}, at first {empty:?}");
}

#[test]
fn guests_see_only_their_own_data_at_512() {
    run(512, 0x5eed_0001, 1_500);
}

#[test]
fn guests_see_only_their_own_data_at_1024() {
    run(1024, 0x5eed_0002, 1_500);
}

#[test]
fn guests_see_only_their_own_data_at_4096() {
    run(4096, 0x5eed_0003, 1_500);
}
