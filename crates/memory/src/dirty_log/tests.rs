use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::{RegionHint, Segments};

fn file(len_bytes: u64) -> OwnedFd {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len_bytes).unwrap();
    file
}

/// A log and its file, in which it begins at `offset_bytes`.
fn log(offset_bytes: u64, len_bytes: u64) -> (DirtyLog, OwnedFd) {
    let file = file(offset_bytes + len_bytes + 4096);
    (DirtyLog::map(file.try_clone().unwrap(), offset_bytes, len_bytes).unwrap(), file)
}

/// The marked pages, by the whole file: nothing outside of the log is written.
fn marked(file: &OwnedFd, offset_bytes: u64) -> Vec<i64> {
    let len = rustix::fs::fstat(file).unwrap().st_size as usize;
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(file, &mut bytes, 0).unwrap(), len);
    let bit = |page: usize| bytes[page / 8] >> (page % 8) & 1 == 1;
    (0..len * 8)
        .filter(|page| bit(*page))
        .map(|page| page as i64 - offset_bytes as i64 * 8)
        .collect()
}

fn memory(regions: &[(u64, u64)]) -> GuestMemory {
    let specs = regions.iter().map(|(guest, len_bytes)| RegionSpec {
        guest_address: GuestAddress(*guest),
        user_address: UserAddress(*guest),
        len_bytes: *len_bytes,
        file: file(*len_bytes),
        file_offset_bytes: 0,
    });
    GuestMemory::map(specs.collect()).unwrap()
}

/// The next number of a sequence that looks random (xorshift).
fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn exactly_the_pages_that_a_range_touches_are_marked() {
    let seed = &mut 0x5eed;
    for round in 0..2000 {
        let offset_bytes = if round % 2 == 0 { 0 } else { next(seed) % 9000 };
        let start = next(seed) % (70 * 4096);
        let len_bytes = next(seed) % [3, 5000, 80 * 4096][round % 3];
        let (log, file) = log(offset_bytes, 8);
        log.mark(GuestAddress(start), len_bytes);
        let expected: Vec<i64> = (0..64)
            .filter(|page| start < (page + 1) * 4096 && page * 4096 < start + len_bytes)
            .filter(|_| len_bytes > 0)
            .map(|page| page as i64)
            .collect();
        assert_eq!(marked(&file, offset_bytes), expected, "{start} {len_bytes} {offset_bytes}");
    }
}

#[test]
fn pages_outside_of_the_log_are_not_marked() {
    let (log, file) = log(0, 2);
    assert_eq!(log.page_count(), 16);
    for (start, len_bytes) in
        [(16 * 4096, 1), (u64::MAX, u64::MAX), (1 << 63, 1 << 40), (0, 0), (u64::MAX, 1)]
    {
        log.mark(GuestAddress(start), len_bytes);
    }
    assert!(marked(&file, 0).is_empty());
    log.mark(GuestAddress(14 * 4096 + 4095), u64::MAX);
    assert_eq!(marked(&file, 0), [14, 15]);
}

#[test]
fn a_log_covers_memory_up_to_its_last_page() {
    let (log, _file) = log(0, 1);
    for (regions, covered) in [
        (&[][..], true),
        (&[(0, 8 * 4096)], true),
        (&[(0, 4096), (7 * 4096, 4096)], true),
        (&[(0, 4096), (8 * 4096, 4096)], false),
        (&[(4096, 8 * 4096)], false),
    ] {
        assert_eq!(log.covers(&memory(regions)), covered, "{regions:?}");
    }
}

#[test]
fn a_request_is_marked_at_the_guests_addresses() {
    // Two regions with a hole between, and the first of them second in the process.
    let memory = memory(&[(0, 8192), (20 * 4096, 8192)]);
    let (log, file) = log(0, 8);
    let mut request = Segments::with_capacity(4);
    request.mark(&log);
    request.bind(&memory);
    let hint = &mut RegionHint::default();
    request.push(GuestAddress(21 * 4096 + 4095), 1, hint).unwrap();
    request.push(GuestAddress(100), 5000, hint).unwrap();
    request.mark(&log);
    assert_eq!(marked(&file, 0), [0, 1, 21]);
}

#[test]
fn a_log_that_is_no_memory_or_not_there_is_refused() {
    assert!(matches!(DirtyLog::map(file(4096), 0, 0), Err(MemoryError::EmptyRegion)));
    for (offset_bytes, len_bytes) in [(0, 4097), (4096, 1), (1, 4096)] {
        let refused = DirtyLog::map(file(4096), offset_bytes, len_bytes);
        assert!(matches!(refused, Err(MemoryError::FileTooSmall { .. })), "{refused:?}");
    }
    let past = DirtyLog::map(file(4096), u64::MAX, 4096);
    assert!(matches!(past, Err(MemoryError::RegionOverflow { .. })));
    let disk = std::fs::File::open("/proc/self/status").unwrap();
    let on_disk = DirtyLog::map(disk.into(), 0, 4096);
    assert!(matches!(on_disk, Err(MemoryError::NotMemoryFile)), "{on_disk:?}");
}

#[test]
fn a_truncated_log_is_lost_and_ends_nothing_else() {
    let (log, file) = log(0, 64 << 10);
    log.mark(GuestAddress(0), 1);
    assert!(!log.is_lost());
    ftruncate(&file, 0).unwrap();
    log.mark(GuestAddress(0), u64::MAX);
    assert!(log.is_lost());
}
