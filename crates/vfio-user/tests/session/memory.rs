//! Maps of guest memory, also against a model.

use proptest::prelude::*;
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_vfio_user::{Body, Command, DmaMap, DmaUnmap, vfio};

use crate::common::*;
use crate::fixture::*;

#[test]
fn the_functions_memory_is_the_mapped_memory() {
    let mut fixture = Fixture::new();
    let file = memfd(4 * PAGE);
    rustix::io::pwrite(&file, b"hello", PAGE).unwrap();
    let second = DmaMap { offset_bytes: PAGE, ..map(1 << 32, 2 * PAGE) };
    fixture.succeeds(dma_map(second), vec![file]);
    fixture.map(0, 16 * PAGE);
    let memory = fixture.function.memory();
    assert_eq!((memory.region_count(), memory.len_bytes()), (2, 18 * PAGE));
    let bytes: [u8; 5] =
        memory.read_array(GuestAddress(1 << 32), &mut RegionHint::default()).unwrap();
    assert_eq!(&bytes, b"hello");
    let unmap = unmap(1 << 32, 2 * PAGE);
    assert_eq!(
        fixture.succeeds(dma_unmap(unmap), Vec::new()),
        Body::DmaUnmap(unmap),
        "the original entry"
    );
    assert_eq!(fixture.function.memory().len_bytes(), 16 * PAGE);
    let all = DmaUnmap { argsz: 24, flags: vfio::DMA_UNMAP_FLAG_ALL, address: 0, len_bytes: 0 };
    assert_eq!(fixture.succeeds(dma_unmap(all), Vec::new()), Body::DmaUnmap(all));
    assert_eq!(fixture.function.memory().region_count(), 0);
    fixture.map(0, PAGE);
}

#[test]
fn an_overlapping_map_is_refused() {
    let mut fixture = Fixture::new();
    fixture.map(8 * PAGE, 4 * PAGE);
    fixture.succeeds(dma_map(map(16 * PAGE, PAGE)), Vec::new());
    for (address, len) in [(8, 4), (7, 2), (11, 1), (0, 32), (9, 1), (16, 1), (12, 5)] {
        let ask = dma_map(map(address * PAGE, len * PAGE));
        assert_eq!(fixture.fails(ask, vec![memfd(32 * PAGE)]), EEXIST, "{address} {len}");
        assert_eq!(fixture.fails(dma_map(map(address * PAGE, len * PAGE)), Vec::new()), EEXIST);
    }
    fixture.map(7 * PAGE, PAGE);
    fixture.map(12 * PAGE, 4 * PAGE);
    assert_eq!(fixture.function.memory().region_count(), 3);
}

#[test]
fn invalid_maps_are_refused() {
    let mut fixture = Fixture::new();
    let good = map(0, PAGE);
    for bad in [
        DmaMap { argsz: 31, ..good },
        DmaMap { flags: 0, ..good },
        DmaMap { flags: 8 | 3, ..good },
        DmaMap { flags: 1 << 31 | 3, ..good },
        DmaMap { len_bytes: 0, ..good },
        DmaMap { len_bytes: PAGE - 1, ..good },
        DmaMap { address: 1, ..good },
        DmaMap { address: PAGE.wrapping_neg(), ..good },
        DmaMap { address: PAGE, len_bytes: PAGE.wrapping_neg(), ..good },
        DmaMap { offset_bytes: PAGE, ..good },
        DmaMap { offset_bytes: u64::MAX, ..good },
        DmaMap { len_bytes: 2 * PAGE, ..good },
    ] {
        assert_eq!(fixture.fails(dma_map(bad), vec![memfd(PAGE)]), EINVAL, "{bad:?}");
    }
    assert_eq!(
        fixture.fails(dma_map(DmaMap { flags: 4 | 3, ..good }), Vec::new()),
        EINVAL,
        "a file is needed"
    );
    assert_eq!(fixture.fails((Command::DmaMap, Body::Malformed(31)), vec![memfd(PAGE)]), EINVAL);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_ne!(fixture.fails(dma_map(good), vec![reader]), 0);
    let file = memfd(PAGE);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let read_only = std::fs::File::open(path).unwrap();
    assert_eq!(fixture.fails(dma_map(good), vec![read_only.into()]), 13, "EACCES");
    // The program that serves the filesystem of a file could block the thread, which serves others
    // too.
    for path in [concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "/dev/zero"] {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        assert_eq!(fixture.fails(dma_map(good), vec![file.into()]), EINVAL, "not in memory");
    }
    assert!(fixture.function.events().is_empty());
}

#[test]
fn a_map_that_is_not_memory_is_recorded_and_can_be_unmapped() {
    let mut fixture = Fixture::new();
    let read_only = DmaMap { flags: vfio::DMA_MAP_FLAG_READ, ..map(0, PAGE) };
    let write_only = DmaMap { flags: vfio::DMA_MAP_FLAG_WRITE, ..map(4 * PAGE, PAGE) };
    fixture.succeeds(dma_map(read_only), vec![memfd(PAGE)]);
    fixture.succeeds(dma_map(write_only), vec![memfd(PAGE)]);
    fixture.succeeds(dma_map(map(8 * PAGE, PAGE)), Vec::new());
    for address in [0, 4 * PAGE, 8 * PAGE] {
        fixture.succeeds(dma_unmap(unmap(address, PAGE)), Vec::new());
        assert_eq!(fixture.fails(dma_unmap(unmap(address, PAGE)), Vec::new()), ENOENT);
    }
    assert_eq!(fixture.function.events(), [], "the function has not seen these maps");
}

#[test]
fn an_unmap_has_to_match_a_map_exactly() {
    let mut fixture = Fixture::new();
    fixture.map(0, 4 * PAGE);
    for bad in [
        unmap(0, PAGE),
        unmap(PAGE, PAGE),
        unmap(0, 8 * PAGE),
        unmap(0, 0),
        unmap(u64::MAX, u64::MAX),
    ] {
        assert_eq!(fixture.fails(dma_unmap(bad), Vec::new()), ENOENT, "{bad:?}");
    }
    let good = unmap(0, 4 * PAGE);
    for bad in [
        DmaUnmap { argsz: 23, ..good },
        DmaUnmap { flags: 1, ..good },
        DmaUnmap { flags: 4, ..good },
        DmaUnmap { flags: vfio::DMA_UNMAP_FLAG_ALL, ..good },
    ] {
        assert_eq!(fixture.fails(dma_unmap(bad), Vec::new()), EINVAL, "{bad:?}");
    }
    fixture.succeeds(dma_unmap(good), Vec::new());
}

#[test]
fn the_number_of_maps_is_limited_as_announced() {
    let mut fixture = Fixture::new();
    for number in 0..509 {
        fixture.succeeds(
            dma_map(map(number * PAGE, PAGE)),
            if number % 2 == 0 { vec![memfd(PAGE)] } else { vec![] },
        );
    }
    assert_eq!(fixture.fails(dma_map(map(1 << 40, PAGE)), vec![memfd(PAGE)]), ENOSPC);
    assert_eq!(fixture.fails(dma_map(map(1 << 40, PAGE)), Vec::new()), ENOSPC);
    fixture.succeeds(dma_unmap(unmap(PAGE, PAGE)), Vec::new());
    fixture.succeeds(dma_map(map(1 << 40, PAGE)), vec![memfd(PAGE)]);
}

#[derive(Clone, Debug)]
enum Change {
    Map {
        page: u64,
        pages: u64,
        kind: u8,
    },
    Unmap {
        page: u64,
        pages: u64,
    },
    /// A map that exists, by its place in the order.
    UnmapSome(usize),
    All,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (0..40_u64, 1..6_u64, 0..4_u8)
            .prop_map(|(page, pages, kind)| Change::Map { page, pages, kind }),
        1 => (0..40_u64, 0..6_u64).prop_map(|(page, pages)| Change::Unmap { page, pages }),
        3 => any::<usize>().prop_map(Change::UnmapSome),
        1 => Just(Change::All),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn memory_equals_a_model(changes in proptest::collection::vec(change(), 1..40)) {
        let mut fixture = Fixture::new();
        let mut model: Vec<(u64, u64, bool)> = Vec::new();
        for change in changes {
            let (ask, fds, fits) = match change {
                Change::Map { page, pages, kind } => {
                    let fits =
                        model.iter().all(|(at, len, _)| page + pages <= *at || at + len <= page);
                    let flags = if kind == 1 { 1 } else { 3 };
                    let fds = if kind == 2 { vec![] } else { vec![memfd(pages * PAGE)] };
                    if fits {
                        model.push((page, pages, kind != 1 && kind != 2));
                    }
                    (dma_map(DmaMap { flags, ..map(page * PAGE, pages * PAGE) }), fds, fits)
                }
                Change::Unmap { page, pages } => {
                    let found = model.iter().position(|(at, len, _)| (*at, *len) == (page, pages));
                    found.map(|found| model.swap_remove(found));
                    (dma_unmap(unmap(page * PAGE, pages * PAGE)), vec![], found.is_some())
                }
                Change::UnmapSome(some) => {
                    let Some(some) = some.checked_rem(model.len()) else { continue };
                    let (page, pages, _) = model.swap_remove(some);
                    (dma_unmap(unmap(page * PAGE, pages * PAGE)), vec![], true)
                }
                Change::All => {
                    model.clear();
                    let flags = vfio::DMA_UNMAP_FLAG_ALL;
                    (dma_unmap(DmaUnmap { flags, ..unmap(0, 0) }), vec![], true)
                }
            };
            prop_assert_eq!(fixture.ask(ask, fds).errno == 0, fits);
            let memory = fixture.function.memory();
            let pages: u64 =
                model.iter().filter(|(_, _, memory)| *memory).map(|(_, pages, _)| pages).sum();
            prop_assert_eq!(memory.len_bytes(), pages * PAGE);
            for page in 0..48 {
                let place = GuestAddress(page * PAGE);
                let is_there = memory.read_array::<8>(place, &mut RegionHint::default()).is_ok();
                let expected = model
                    .iter()
                    .any(|(at, len, memory)| *memory && (*at..at + len).contains(&page));
                prop_assert_eq!(is_there, expected, "page {}", page);
            }
        }
    }
}
