use std::os::fd::OwnedFd;

use super::*;
use crate::{Part, Segments};

fn memfd(len_bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len_bytes).unwrap();
    fd
}

fn spec(guest: u64, user: u64, len_bytes: u64) -> RegionSpec {
    RegionSpec {
        guest_address: GuestAddress(guest),
        user_address: UserAddress(user),
        len_bytes,
        file: memfd(len_bytes),
        file_offset_bytes: 0,
    }
}

#[test]
fn the_smallest_pages_are_told() {
    assert_eq!(GuestMemory::empty().page_bytes(), sidecore_units::PAGE_BYTES);
    let memory = GuestMemory::map(vec![spec(0, 0, 1 << 20)]).unwrap();
    assert_eq!(memory.page_bytes(), sidecore_units::PAGE_BYTES);
}

#[test]
fn rings_of_the_kernel_begin_at_address_zero() {
    // A file that the kernel maps, as it does the socket that has rings.
    let file = memfd(8192);
    let memory = GuestMemory::map_kernel_rings(file.as_fd(), 0, 8192).unwrap();
    // More than a cache line, which is copied in another way than a few bytes.
    let bytes: Vec<u8> = (0..200).collect();
    memory.write_slice(GuestAddress(4000), &bytes, &mut RegionHint::default()).unwrap();
    let mut seen = [0; 200];
    rustix::io::pread(&file, &mut seen, 4000).unwrap();
    assert_eq!((seen.as_slice(), memory.len_bytes()), (bytes.as_slice(), 8192));
    let second = GuestMemory::map_kernel_rings(file.as_fd(), 4096, 4096).unwrap();
    assert_eq!(second.read_array(GuestAddress(0), &mut RegionHint::default()).unwrap(), [96, 97]);
    assert!(GuestMemory::map_kernel_rings(file.as_fd(), 0, 0).is_err());
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(
        GuestMemory::map_kernel_rings(pipe.as_fd(), 0, 4096),
        Err(MemoryError::Map(_))
    ));
}

#[test]
fn words_are_inside_of_memory_and_aligned() {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    use crate::Words;

    let memory = GuestMemory::map(vec![spec(0, 0, 0x1000)]).unwrap();
    let words = Words::<AtomicU32>::new(&memory, UserAddress(0xffc), 1, 4).unwrap();
    words.words()[0].store(0x0403_0201_u32.to_le(), Ordering::Relaxed);
    assert!(words.get(1).is_none());
    assert_eq!(
        memory.read_array(GuestAddress(0xffc), &mut RegionHint::default()).unwrap(),
        [1, 2, 3, 4]
    );
    assert!(Words::<AtomicU64>::new(&memory, UserAddress(0xffc), 1, 4).is_err(), "not aligned");
    assert!(Words::<AtomicU64>::new(&memory, UserAddress(0xff8), 2, 8).is_err(), "past the end");
}

#[test]
fn bytes_cross_from_one_region_into_the_next() {
    let memory = GuestMemory::map(vec![
        spec(0x3000, 0x9000_0000, 0x1000),
        spec(0x2000, 0x7000_0000, 0x1000),
    ])
    .unwrap();
    let mut hint = RegionHint::default();
    let at = GuestAddress(0x2ffe);
    memory.write_slice(at, &[1, 2, 3, 4], &mut hint).unwrap();
    assert_eq!(memory.read_array(at, &mut hint).unwrap(), [1, 2, 3, 4]);

    let mut segments = Segments::with_capacity(2);
    segments.bind(&memory);
    segments.push(at, 4, &mut hint).unwrap();
    assert_eq!(segments.pieces().len(), 2);
    let mut read = [0; 4];
    assert_eq!(segments.copy_to_slice(0, &mut read), 4);
    assert_eq!(read, [1, 2, 3, 4]);
    assert_eq!(segments.copy_to_slice(3, &mut read), 1);
}

#[test]
fn a_part_of_a_list_is_cut_and_bounded_and_keeps_the_memory() {
    let memory = GuestMemory::map(vec![spec(0x1000, 0x1000, 0x1000)]).unwrap();
    let mut hint = RegionHint::default();
    memory.write_slice(GuestAddress(0x1000), b"abcdefghij", &mut hint).unwrap();
    let mut whole = Segments::with_capacity(3);
    whole.bind(&memory);
    for (address, len_bytes) in [(0x1000, 4), (0x1006, 4), (0x1004, 2)] {
        whole.push(GuestAddress(address), len_bytes, &mut hint).unwrap();
    }
    let text = |part: &Segments| {
        let mut bytes = vec![0; part.len_bytes() as usize];
        assert_eq!(part.copy_to_slice(0, &mut bytes), bytes.len());
        String::from_utf8(bytes).unwrap()
    };
    let mut part = Segments::with_capacity(2);
    assert_eq!((part.bind_part(&whole, 2, 5), text(&part)), (5, "cdghi".to_owned()));
    // Three pieces, and room for two; then past the end.
    assert_eq!((part.bind_part(&whole, 3, 7), text(&part)), (5, "dghij".to_owned()));
    assert_eq!((part.bind_part(&whole, 9, 7), text(&part)), (1, "f".to_owned()));
    assert_eq!(part.bind_part(&whole, 10, 7), 0);
    assert_eq!(part.bind_part(&whole, 1, 3), 3);
    drop((whole, memory));
    assert_eq!(text(&part), "bcd");
    part.release();
    assert_eq!((part.len_bytes(), part.pieces().len()), (0, 0));
}

#[test]
fn a_copy_between_lists_follows_the_pieces_of_both_and_ends_with_the_shorter() {
    let from = GuestMemory::map(vec![spec(0x1000, 0x1000, 0x1000)]).unwrap();
    let to = GuestMemory::map(vec![spec(0x8000, 0x1000, 0x8000)]).unwrap();
    let mut hint = RegionHint::default();
    from.write_slice(GuestAddress(0x1000), b"abcdefghij", &mut hint).unwrap();
    let list = |memory: &GuestMemory, pieces: &[(u64, u64)]| {
        let mut list = Segments::with_capacity(4);
        list.bind(memory);
        for (address, len_bytes) in pieces {
            list.push(GuestAddress(*address), *len_bytes, &mut RegionHint::default()).unwrap();
        }
        list
    };
    let source = list(&from, &[(0x1000, 4), (0x1006, 4), (0x1004, 2)]);
    let target = list(&to, &[(0x8000, 3), (0x8010, 1), (0x8020, 4)]);
    let part = |skip_bytes, len_bytes| Part { skip_bytes, len_bytes };
    let mut seen = [0; 8];
    for (from, to_bytes, copied, expected) in [
        (part(1, 5), 2, 5, b"\0\0bcdgh\0"),
        (part(0, 10), 1, 7, b"\0abcdghi"),
        (part(8, 10), 0, 2, b"efbcdghi"),
        (part(10, 1), 0, 0, b"efbcdghi"),
        (part(0, 1), 8, 0, b"efbcdghi"),
        (part(0, 0), 0, 0, b"efbcdghi"),
    ] {
        if expected == b"\0abcdghi" {
            target.zero(0, 8);
        }
        assert_eq!(source.copy_to(from, &target, to_bytes), copied, "{from:?}");
        assert_eq!(target.copy_to_slice(0, &mut seen), 8);
        assert_eq!(&seen, expected, "{from:?}");
    }
    assert_eq!(
        to.read_array(GuestAddress(0x8003), &mut hint).unwrap(),
        [0; 4],
        "between two pieces"
    );
}

#[test]
fn zeroing_stays_inside_the_list() {
    let memory = GuestMemory::map(vec![spec(0x1000, 0x1000, 0x1000)]).unwrap();
    let mut hint = RegionHint::default();
    memory.write_slice(GuestAddress(0x1000), &[7; 16], &mut hint).unwrap();
    let mut segments = Segments::with_capacity(2);
    segments.bind(&memory);
    segments.push(GuestAddress(0x1001), 3, &mut hint).unwrap();
    segments.push(GuestAddress(0x1008), 4, &mut hint).unwrap();
    segments.zero(2, 3);
    let bytes: [u8; 16] = memory.read_array(GuestAddress(0x1000), &mut hint).unwrap();
    assert_eq!(bytes, [7, 7, 7, 0, 7, 7, 7, 7, 0, 0, 7, 7, 7, 7, 7, 7]);
    segments.zero(6, u64::MAX);
    let bytes: [u8; 16] = memory.read_array(GuestAddress(0x1000), &mut hint).unwrap();
    assert_eq!(bytes, [7, 7, 7, 0, 7, 7, 7, 7, 0, 0, 7, 0, 7, 7, 7, 7]);
}

#[test]
fn the_last_byte_is_in_and_the_next_is_out() {
    let memory = GuestMemory::map(vec![spec(0x1000, 0x1000, 0x1000)]).unwrap();
    let mut hint = RegionHint::default();
    let read = |address: u64, hint: &mut RegionHint| {
        memory.read_array::<1>(GuestAddress(address), hint).is_ok()
    };
    assert!(read(0x1fff, &mut hint));
    assert!(!read(0x2000, &mut hint));
    assert!(!read(0xfff, &mut hint));
    assert!(memory.read_array::<2>(GuestAddress(0x1fff), &mut hint).is_err());
    assert!(memory.read_array::<16>(GuestAddress(u64::MAX), &mut hint).is_err());
    let mut segments = Segments::with_capacity(1);
    segments.bind(&memory);
    assert!(segments.push(GuestAddress(u64::MAX - 1), 16, &mut hint).is_err());
    assert!(segments.push(GuestAddress(0x1800), u64::MAX, &mut hint).is_err());
}

#[test]
fn bad_tables_are_refused() {
    let overlapping = vec![spec(0x1000, 0x1000, 0x1000), spec(0x1800, 0x8000, 0x1000)];
    assert!(matches!(
        GuestMemory::map(overlapping),
        Err(MemoryError::RegionOverlap { start: 0x1800 })
    ));
    let same_user = vec![spec(0x1000, 0x1000, 0x1000), spec(0x8000, 0x1800, 0x1000)];
    assert!(matches!(
        GuestMemory::map(same_user),
        Err(MemoryError::RegionOverlap { start: 0x1800 })
    ));
    let mut short = spec(0x1000, 0x1000, 0x1000);
    short.len_bytes = 0x2000;
    assert!(matches!(GuestMemory::map(vec![short]), Err(MemoryError::FileTooSmall { .. })));
    let mut wraps = spec(0x1000, 0x1000, 0x1000);
    wraps.guest_address = GuestAddress(u64::MAX - 10);
    assert!(matches!(GuestMemory::map(vec![wraps]), Err(MemoryError::RegionOverflow { .. })));
}

#[test]
fn only_files_in_memory_are_mapped() {
    let on = |path: &str| OwnedFd::from(std::fs::File::open(path).unwrap());
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    for file in [
        on(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")),
        on("/proc/self/exe"),
        on("/dev/zero"),
        pipe,
    ] {
        let error = GuestMemory::map(vec![RegionSpec {
            len_bytes: 16,
            file,
            ..spec(0x1000, 0x1000, 0x1000)
        }])
        .unwrap_err();
        assert!(matches!(error, MemoryError::NotMemoryFile), "{error}");
        assert!(error.to_string().contains("memory-backend-memfd"), "it says what to do");
    }
    // Sealed or not, and a file with a name.
    let sealable = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let sealed = rustix::fs::memfd_create("sealed", sealable).unwrap();
    rustix::fs::ftruncate(&sealed, 0x1000).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::SHRINK).unwrap();
    let (path, options) = (
        "/dev/shm",
        rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
    );
    let named = rustix::fs::open(path, options, rustix::fs::Mode::RWXU).unwrap();
    rustix::fs::ftruncate(&named, 0x1000).unwrap();
    for file in [sealed, named] {
        GuestMemory::map(vec![RegionSpec { file, ..spec(0x1000, 0x1000, 0x1000) }]).unwrap();
    }
}

#[test]
fn regions_come_and_go_while_a_request_holds_on() {
    let before = GuestMemory::map(vec![spec(0x1000, 0x1000, 0x1000)]).unwrap();
    let both = before.with_region(spec(0x4000, 0x4000, 0x1000)).unwrap();
    let mut hint = RegionHint::default();
    let mut segments = Segments::with_capacity(1);
    segments.bind(&both);
    segments.push(GuestAddress(0x4000), 8, &mut hint).unwrap();
    let after = both.without_region(GuestAddress(0x4000), UserAddress(0x4000), 0x1000).unwrap();
    drop(both);
    assert_eq!(after.region_count(), 1);
    assert_eq!(segments.copy_from_slice(0, &[9; 8]), 8, "still mapped");
    assert!(matches!(
        after.without_region(GuestAddress(0x4000), UserAddress(0x4000), 0x1000),
        Err(MemoryError::NoSuchRegion { .. })
    ));
}

#[test]
fn a_ring_window_must_be_aligned_and_inside_one_region() {
    let memory = GuestMemory::map(vec![spec(0, 0x10_0000, 0x2000)]).unwrap();
    assert!(memory.window(UserAddress(0x10_0010), 0x100, 16).is_ok());
    assert!(memory.window(UserAddress(0x10_0001), 0x100, 2).is_err());
    assert!(memory.window(UserAddress(0x10_1fff), 2, 1).is_err());
    assert!(memory.window(UserAddress(0x10), 2, 1).is_err());
    assert!(memory.window(UserAddress(u64::MAX), usize::MAX, 1).is_err());
}

#[test]
fn a_truncated_file_reads_as_zeros_and_is_reported() {
    let file = memfd(0x2000);
    let memory = GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0x1000),
        len_bytes: 0x2000,
        file: file.try_clone().unwrap(),
        file_offset_bytes: 0,
    }])
    .unwrap();
    let mut hint = RegionHint::default();
    memory.write_slice(GuestAddress(0x1000), &[7], &mut hint).unwrap();
    assert!(!memory.is_lost());
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(memory.read_array(GuestAddress(0x1000), &mut hint).unwrap(), [0]);
    assert!(memory.is_lost());
}

#[test]
fn a_truncated_file_is_told_from_others_that_come_and_go() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let other = GuestMemory::map(
                        (1..9).map(|at| spec(at << 20, at << 20, 0x1000 * at)).collect(),
                    )
                    .unwrap();
                    other
                        .write_slice(GuestAddress(1 << 20), &[7], &mut RegionHint::default())
                        .unwrap();
                    assert!(!other.is_lost());
                }
            });
        }
        for _ in 0..200 {
            let file = memfd(0x3000);
            let region = RegionSpec { file: file.try_clone().unwrap(), ..spec(0, 0x1000, 0x3000) };
            let memory = GuestMemory::map(vec![region]).unwrap();
            rustix::fs::ftruncate(&file, 0).unwrap();
            assert_eq!(
                memory.read_array(GuestAddress(0x2fff), &mut RegionHint::default()).unwrap(),
                [0]
            );
            assert!(memory.is_lost());
        }
        over.store(true, Ordering::Relaxed);
    });
}
