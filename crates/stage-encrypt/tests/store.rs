//! The ciphertext on the store, failures of parts, and headers that do not fit.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, Geometry, Operation, RamStore, Stage as _,
};
use sidecore_block_contract::{Harness, pattern};
use sidecore_luks::{Kdf, NewHeader, SectorSize, Segment, Tweaks, write_header};
use sidecore_reactor::CoreContext;
use sidecore_stage_encrypt::{EncryptStage, EncryptStore, Misfit};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};

use common::{encrypted, ram, segment, xts};

/// The guest's memory in one piece: the third region of the contract's guest.
const SCRATCH: u64 = 0x1_0000_0000;
const LONG_BYTES: usize = 1 << 20;

#[test]
fn the_store_holds_the_ciphertext_of_each_sector_at_its_place() {
    for (sector_bytes, first_unit) in [(512, 0), (4096, 0), (1024, 77), (4096, u64::MAX - 8)] {
        let below = ram();
        let sector = SectorSize::new(sector_bytes).unwrap();
        let offset_bytes = 64 << 10;
        let place = Segment { offset_bytes, len_bytes: Some(2 << 20), sector, first_unit };
        let device = encrypted(Arc::clone(&below), place);
        assert_eq!(device.geometry().capacity_bytes, 2 << 20);
        let (mut guest, mut raw) = (Harness::new(&device, 8), Harness::new(&below, 8));
        let plain = pattern(9, LONG_BYTES);
        guest.store(32 << 10, &plain);
        let mut stored = raw.load(offset_bytes + (32 << 10), LONG_BYTES);
        let is_there = |part: &[u8]| stored.windows(16).any(|window| window == part);
        assert!(!plain.chunks(65_536).any(|part| is_there(&part[..16])), "clear text is stored");
        let unit = first_unit.wrapping_add(64);
        xts().decrypt(unit, sector, &mut stored, &mut Tweaks::default()).unwrap();
        assert!(stored == plain, "sectors of {sector_bytes} bytes from {first_unit}");
        assert_eq!(raw.load(0, 64 << 10), vec![0; 64 << 10], "bytes before the data changed");
    }
}

#[test]
fn one_failed_part_fails_its_request_and_no_other() {
    let fault = FaultRule {
        affected: Affected::All,
        when: When::Touching(600_000..600_001),
        fault: Fault::Eio,
    };
    let plan = FaultPlan { seed: 0, rules: vec![fault] };
    let below: Arc<dyn BlockDevice> = Arc::new(FaultStore::new(ram(), plan));
    for depth in [1, 3, 64] {
        let mut guest =
            Harness::new(&encrypted(Arc::clone(&below), segment(SectorSize::SMALLEST)), depth);
        for operation in [Operation::Write, Operation::Read] {
            let long = guest.request(operation, 0, &[(SCRATCH, LONG_BYTES as u64)]);
            assert_eq!(guest.run_one(long), Err(BlockError::EIO));
            assert_eq!(guest.in_flight(), 0);
        }
        let bytes = pattern(depth as u64, 300_000 / 512 * 512);
        guest.store(0, &bytes);
        assert!(guest.load(0, bytes.len()) == bytes);
    }
}

#[test]
fn long_requests_of_all_slots_end() {
    for depth in [1, 2, 32] {
        let device = encrypted(ram(), segment(SectorSize::SMALLEST));
        let mut guest = Harness::new(&device, depth);
        let bytes = pattern(3, LONG_BYTES);
        guest.store(0, &bytes);
        let reads = (0..depth)
            .map(|_| guest.request(Operation::Read, 0, &[(SCRATCH, LONG_BYTES as u64)]))
            .collect();
        assert!(guest.run(reads).iter().all(Result::is_ok));
        assert!(guest.load(0, LONG_BYTES) == bytes);
    }
}

#[test]
fn discards_reach_the_store_where_they_are_allowed() {
    for allowed in [false, true] {
        let below = ram();
        let place = segment(SectorSize::SMALLEST);
        let device: Arc<dyn BlockDevice> =
            Arc::new(EncryptStore::new(Arc::clone(&below), xts(), place, allowed).unwrap());
        let geometry = device.geometry();
        assert_eq!((geometry.discard, geometry.discard_zeroes), (allowed, false));
        assert!(!geometry.write_zeroes);
        let mut guest = Harness::new(&device, 8);
        let bytes = pattern(5, 64 << 10);
        guest.store(0, &bytes);
        let discard = guest.range_request(Operation::Discard, 16 << 10, 32 << 10);
        let expected = if allowed { Ok(()) } else { Err(BlockError::Unsupported) };
        assert_eq!(guest.run_one(discard), expected);
        let after = guest.load(0, bytes.len());
        assert!(after[..16 << 10] == bytes[..16 << 10] && after[48 << 10..] == bytes[48 << 10..]);
        let stored = Harness::new(&below, 8).load(16 << 10, 32 << 10);
        assert_eq!(stored.iter().all(|byte| *byte == 0), allowed);
    }
}

#[test]
fn a_header_that_does_not_fit_the_store_is_refused() {
    let open = |offset_bytes, len_bytes| {
        let below = Arc::new(RamStore::new(Geometry::new(4 << 20, 4096)).unwrap());
        let sector = SectorSize::SMALLEST;
        let place = Segment { offset_bytes, len_bytes, sector, first_unit: 0 };
        EncryptStore::new(below, xts(), place, false).map(|store| store.geometry().capacity_bytes)
    };
    assert_eq!(open(1 << 20, None), Ok(3 << 20));
    assert_eq!(open(0, Some((4 << 20) - 512)), Ok((4 << 20) - 4096));
    assert!(matches!(open(512, None), Err(Misfit::Offset { .. })));
    for (offset_bytes, len_bytes) in
        [(4 << 20, None), (16 << 20, None), (4096, Some(4 << 20)), (0, Some(u64::MAX - 511))]
    {
        assert!(matches!(open(offset_bytes, len_bytes), Err(Misfit::Size { .. })));
    }
}

/// A store that grows, as a volume does.
struct Growing {
    ram: Arc<dyn BlockDevice>,
    capacity_bytes: AtomicU64,
}

impl BlockDevice for Growing {
    fn geometry(&self) -> Geometry {
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        Geometry { capacity_bytes, ..self.ram.geometry() }
    }

    fn open_channel(
        &self,
        core: &CoreContext,
        depth: usize,
    ) -> std::io::Result<Box<dyn BlockChannel>> {
        self.ram.open_channel(core, depth)
    }
}

#[test]
fn the_data_grows_with_the_store_unless_the_header_names_its_size() {
    for (len_bytes, grows) in [(None, true), (Some(1 << 20), false)] {
        let capacity_bytes = AtomicU64::new(2 << 20);
        let below = Arc::new(Growing { ram: ram(), capacity_bytes });
        let sector = SectorSize::SMALLEST;
        let place = Segment { offset_bytes: 4096, len_bytes, sector, first_unit: 0 };
        let device = encrypted(Arc::clone(&below) as Arc<dyn BlockDevice>, place);
        let before = device.geometry().capacity_bytes;
        below.capacity_bytes.store((3 << 20) + 100, Ordering::Relaxed);
        let after = device.geometry().capacity_bytes;
        assert_eq!(after, if grows { (3 << 20) - 4096 } else { before });
        let mut guest = Harness::new(&device, 8);
        if grows {
            let bytes = pattern(1, 4096);
            guest.store(before, &bytes);
            assert!(guest.load(before, 4096) == bytes);
        } else {
            let write = guest.request(Operation::Write, before, &[(SCRATCH, 4096)]);
            assert_eq!(guest.run_one(write), Err(BlockError::OutOfBounds));
        }
    }
}

#[test]
fn the_stage_opens_with_its_key_alone_and_says_why_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let write_key = |name: &str, bytes: &[u8]| {
        std::fs::write(path(name), bytes).unwrap();
        std::fs::set_permissions(path(name), PermissionsExt::from_mode(0o600)).unwrap();
    };
    write_key("key", b"right");
    write_key("other", b"wrong");
    let kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };
    let start = NewHeader { sector: SectorSize::SMALLEST, kdf }.make(b"right").unwrap();
    write_header(&path("header"), &start, false).unwrap();
    let open = |header: &str, key_file: &str| {
        let stage =
            EncryptStage { header: path(header), key_file: path(key_file), allow_discards: false };
        stage.open("disk", ram()).map(|device| device.geometry().capacity_bytes)
    };
    assert_eq!(open("header", "key"), Ok(4 << 20));
    for (header, key, words) in [
        ("none", "key", "cannot open it"),
        ("key", "key", "sidecore luks format"),
        ("header", "other", "no key slot opens"),
        ("header", "none", "cannot open it"),
    ] {
        let error = open(header, key).unwrap_err().to_string();
        assert!(error.starts_with("stage \"encrypt\": ") && error.contains(words), "{error}");
        assert!(error.contains(directory.path().to_str().unwrap()), "{error}");
    }
}
