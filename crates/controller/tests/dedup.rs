//! Deduplication: what becomes one, what is left alone, and writes that come between.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{guest, in_memory, over};
use sidecore_block::{BlockDevice, Geometry, Operation, RamStore};
use sidecore_block_contract::{Harness, pattern};
use sidecore_controller::{
    Controller, ControllerError, ControllerOptions, DedupCounts, DedupOptions, DedupReport,
    DedupRun, DedupState, DedupStep, PhysicalDisk,
};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn across() -> DedupOptions {
    DedupOptions { across: true, bytes_per_s: 1 << 40, ..DedupOptions::default() }
}

fn within() -> DedupOptions {
    DedupOptions { across: false, ..across() }
}

/// Runs to the end in the background.
fn run(controller: &Controller, options: &DedupOptions) -> DedupReport {
    controller.start_dedup(options).unwrap();
    let started = Instant::now();
    loop {
        let report = controller.dedup().unwrap();
        if report.state != DedupState::Running {
            return report;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{report:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn done(controller: &Controller, options: &DedupOptions) -> DedupCounts {
    let report = run(controller, options);
    assert_eq!(report.state, DedupState::Done);
    let check = controller.check().unwrap();
    assert!(check.is_clean(), "{:?}", check.problems);
    report.counts
}

/// Two volumes with the same contents, and their guests.
fn equal_volumes(controller: &Controller, len: usize) -> [(Harness, Arc<dyn BlockDevice>); 2] {
    ["a", "b"].map(|name| {
        controller.create_volume(name, 4 * MIB, None).unwrap();
        let (mut harness, device) = guest(controller, name);
        harness.store(0, &distinct(len));
        (harness, device)
    })
}

/// Data in which no page is like another one.
fn distinct(len: usize) -> Vec<u8> {
    (0..len as u64 / PAGE).flat_map(|page| pattern(page + 1, PAGE as usize)).collect()
}

fn flush(guest: &mut Harness) {
    let flush = guest.request(Operation::Flush, 0, &[]);
    guest.run_one(flush).unwrap();
}

/// Takes a step.
fn step(controller: &Controller, run: &mut DedupRun, disk: &mut PhysicalDisk) -> DedupStep {
    let step = controller.step_dedup(run, disk).unwrap();
    assert_ne!(step, DedupStep::NeedsCommit);
    step
}

#[test]
fn equal_blocks_become_one_and_the_space_comes_back() {
    for block_bytes in [512, 1024, 4096] {
        let (controller, store) = in_memory(16 * MIB, block_bytes);
        let data = distinct(1 << 20);
        let [(mut a, _a), (mut b, _b)] = equal_volumes(&controller, data.len());
        // Others before and behind, and a hole.
        b.store(2 * MIB, &pattern(12345, 8192));
        let before = controller.report().space;
        assert_eq!(done(&controller, &within()).saved_bytes, 0, "two families");
        let dry = done(&controller, &DedupOptions { dry_run: true, ..across() });
        assert_eq!(controller.report().space.data, before.data);
        let counts = done(&controller, &across());
        assert_eq!((counts.saved_bytes, dry.saved_bytes), (MIB, MIB), "{block_bytes}: {counts:?}");
        assert_eq!(counts.passed_bytes, counts.total_bytes);
        assert_eq!((counts.busy_bytes, counts.kept_bytes, counts.unreadable_bytes), (0, 0, 0));
        let after = controller.report();
        let freed = (before.data - after.space.data) * u64::from(block_bytes);
        assert_eq!((freed, after.counts.dedup_freed_bytes), (MIB, MIB));
        assert!(after.events.last().unwrap().what.contains("has freed 1048576 bytes"));
        // A second run finds nothing to do, and reads the common blocks once.
        let again = done(&controller, &across());
        assert_eq!((again.saved_bytes, again.remaps), (0, 0));
        assert_eq!(again.read_bytes, MIB + 8192);

        assert!(a.load(0, data.len()) == data && b.load(0, data.len()) == data);
        b.store(5 * PAGE, &pattern(99, 512));
        assert_eq!(a.load(0, data.len()), data, "a write to one does not change the other");
        let mut other = data.clone();
        other[5 * 4096..][..512].copy_from_slice(&pattern(99, 512));
        assert_eq!(b.load(0, data.len()), other);
        flush(&mut b);
        drop((a, b, _a, _b));
        controller.shutdown();
        drop(controller);
        let controller = over(&store, block_bytes);
        let (mut a, _a) = guest(&controller, "a");
        let (mut b, _b) = guest(&controller, "b");
        assert!(a.load(0, data.len()) == data && b.load(0, data.len()) == other);
        assert!(controller.check().unwrap().is_clean());
    }
}

#[test]
fn clones_and_their_snapshots_become_one_within_the_family() {
    let (controller, _store) = in_memory(32 * MIB, 4096);
    controller.create_volume("golden", 4 * MIB, None).unwrap();
    let base = pattern(54321, 4096);
    let (mut golden, device) = guest(&controller, "golden");
    golden.store(3 * MIB, &base);
    drop((golden, device));
    let data = distinct(1 << 20);
    for (clone, snapshots) in [("x", 1), ("y", 3)] {
        controller.clone_volume("golden", clone).unwrap();
        let (mut guest, _device) = guest(&controller, clone);
        // The same upgrade in each clone; of one, snapshots keep it.
        guest.store(0, &data);
        for index in 0..snapshots {
            controller.snapshot_volume(clone, &format!("{clone}-{index}")).unwrap();
        }
    }
    let before = controller.report().space.data;
    let counts = done(&controller, &within());
    assert_eq!((counts.saved_bytes, counts.kept_bytes), (MIB, 0), "{counts:?}");
    assert_eq!(before - controller.report().space.data, 256);
    for name in ["x", "x-0", "y", "y-0", "y-2"] {
        let (mut guest, _device) = guest(&controller, name);
        assert!(guest.load(0, data.len()) == data, "{name}");
        assert_eq!(guest.load(3 * MIB, 4096), base);
    }
    // Naming one of them brings its family along.
    let (mut x, _x) = guest(&controller, "x");
    x.store(MIB, &data);
    let named = DedupOptions { volumes: vec!["y".to_owned()], ..within() };
    assert_eq!(done(&controller, &named).saved_bytes, MIB, "at another place of x");
    let missing = DedupOptions { volumes: vec!["z".to_owned()], ..within() };
    assert!(matches!(
        controller.start_dedup(&missing),
        Err(ControllerError::NoSuchVolume(name)) if name == "z"
    ));
}

#[test]
fn blocks_that_a_volume_outside_keeps_are_left() {
    let (controller, _store) = in_memory(32 * MIB, 4096);
    let data = distinct(1 << 18);
    let [(_a, _ad), (_b, _bd)] = equal_volumes(&controller, data.len());
    assert_eq!(done(&controller, &across()).saved_bytes, data.len() as u64);
    // Now a copy within the family of "a", whose original "b" has too: the copy is the one to go.
    let (mut a, _device) = guest(&controller, "a");
    a.store(2 * MIB, &data);
    let counts = done(&controller, &within());
    assert_eq!((counts.saved_bytes, counts.kept_bytes), (data.len() as u64, 0), "{counts:?}");
    // And two that others have too: nothing would be freed.
    let (mut b, _device) = guest(&controller, "b");
    b.store(3 * MIB, &data);
    a.store(3 * MIB, &data);
    assert_eq!(done(&controller, &across()).saved_bytes, 2 * data.len() as u64);
    let counts = done(&controller, &within());
    assert_eq!((counts.saved_bytes, counts.remaps), (0, 0));
}

#[test]
fn zeros_become_holes() {
    let (controller, _store) = in_memory(16 * MIB, 1024);
    controller.create_volume("a", 4 * MIB, None).unwrap();
    let (mut a, _device) = guest(&controller, "a");
    a.store(0, &vec![0; 1 << 20]);
    a.store(MIB, &pattern(3, 4096));
    controller.snapshot_volume("a", "s").unwrap();
    let dry = done(&controller, &DedupOptions { dry_run: true, ..within() });
    let counts = done(&controller, &within());
    assert_eq!((counts.saved_bytes, counts.zero_bytes), (MIB, MIB), "{counts:?}");
    assert_eq!((dry.saved_bytes, dry.zero_bytes), (MIB, MIB));
    assert_eq!(controller.report().space.data, 4);
    assert!(a.load(0, 1 << 20).iter().all(|byte| *byte == 0));
    a.store(512, &pattern(4, 512));
    assert!(a.load(0, 512).iter().all(|byte| *byte == 0));
    assert_eq!(a.load(512, 512), pattern(4, 512));
    let (mut s, _device) = guest(&controller, "s");
    assert!(s.load(0, 1 << 20).iter().all(|byte| *byte == 0));
}

/// The next step of a run that is about to remap: its blocks were compared.
fn until_equal(controller: &Controller, run: &mut DedupRun, disk: &mut PhysicalDisk) {
    // A step scans the group, one each volume's chunk; a chunk is matched, guarded, compared.
    // Extents may be single pages.
    for _ in 0..4096 {
        if run.is_about_to_remap() {
            return;
        }
        step(controller, run, disk);
    }
    panic!("nothing was found: {:?}", run.counts());
}

#[test]
fn a_write_between_comparison_and_remap_wins() {
    // A snapshot keeps the former block, so that the mapping alone shows the write.
    let cases = [(0, 0), (0, 7), (1, 0), (1, 7)].into_iter();
    for ((volume, block), is_kept) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let (controller, store) = in_memory(16 * MIB, 4096);
        let mut guests = equal_volumes(&controller, 8 * 4096);
        for name in ["a", "b"].into_iter().filter(|_| is_kept) {
            controller.snapshot_volume(name, &format!("{name}-kept")).unwrap();
        }
        let mut disk = PhysicalDisk::open(&store).unwrap();
        let mut run = controller.begin_dedup(&across(), 1).unwrap();
        until_equal(&controller, &mut run, &mut disk);
        guests[volume].0.store(block * PAGE, &pattern(77, 512));
        while step(&controller, &mut run, &mut disk) != DedupStep::Done {}
        let mut written = distinct(8 * 4096);
        written[block as usize * 4096..][..512].copy_from_slice(&pattern(77, 512));
        let mut expected = [distinct(8 * 4096), distinct(8 * 4096)];
        expected[volume] = written;
        for (index, (guest, _)) in guests.iter_mut().enumerate() {
            assert!(guest.load(0, 8 * 4096) == expected[index], "{index} of {volume} {block}");
        }
        let counts = run.counts();
        // The write has changed the extent: what is left of it is shorter, or nothing.
        assert!(counts.saved_bytes < 8 * PAGE, "{counts:?}");
        assert!(controller.check().unwrap().is_clean());
    }
}

#[test]
fn a_block_that_was_freed_and_came_back_is_not_taken_for_the_compared_one() {
    let (controller, store) = in_memory(16 * MIB, 4096);
    let [(mut a, _a), (mut b, _b)] = equal_volumes(&controller, 4096);
    let mut disk = PhysicalDisk::open(&store).unwrap();
    let mut run = controller.begin_dedup(&across(), 1).unwrap();
    until_equal(&controller, &mut run, &mut disk);
    let at = |name| controller.volume_extents(name, sidecore_units::Vlba(0), 9).unwrap().0;
    let before = at("b")[0].physical;
    // The discarded block is free after the flush, and the next write gets it again.
    let discard = b.range_request(Operation::Discard, 0, PAGE);
    b.run_one(discard).unwrap();
    let started = Instant::now();
    let other = pattern(5, 4096);
    loop {
        flush(&mut b);
        std::thread::sleep(Duration::from_millis(5));
        b.store(0, &other);
        if at("b")[0].physical == before {
            break;
        }
        let discard = b.range_request(Operation::Discard, 0, PAGE);
        b.run_one(discard).unwrap();
        assert!(started.elapsed() < Duration::from_secs(20));
    }
    while step(&controller, &mut run, &mut disk) != DedupStep::Done {}
    assert_eq!((a.load(0, 4096), b.load(0, 4096)), (distinct(4096), other));
    assert_eq!(run.counts().saved_bytes, 0);
    assert!(run.counts().busy_bytes > 0);
}

#[test]
fn blocks_that_cannot_be_read_are_left_and_counted() {
    let ram: Arc<dyn BlockDevice> = Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap());
    let places = {
        let controller = over(&ram, 4096);
        let [(mut a, _a), (mut b, _b)] = equal_volumes(&controller, 1 << 18);
        flush(&mut a);
        flush(&mut b);
        let at = |name| controller.volume_extents(name, sidecore_units::Vlba(0), 9).unwrap().0;
        let places = ["a", "b"].map(|name| at(name)[0].physical.0 * PAGE);
        drop((a, b, _a, _b));
        controller.shutdown();
        places
    };
    // A page of "b" is broken.
    let rule = FaultRule {
        affected: Affected::Reads,
        when: When::Touching(places[1] + 3 * PAGE..places[1] + 4 * PAGE),
        fault: Fault::Eio,
    };
    let broken: Arc<dyn BlockDevice> =
        Arc::new(FaultStore::new(Arc::clone(&ram), FaultPlan { seed: 1, rules: vec![rule] }));
    let options = ControllerOptions::default();
    let controller = Controller::open("broken", broken, &options, None).unwrap();
    let counts = done(&controller, &across());
    assert_eq!(counts.unreadable_bytes, PAGE, "{counts:?}");
    assert_eq!(counts.saved_bytes, (1 << 18) - PAGE);
    assert!(
        controller.report().events.last().unwrap().what.contains("4096 bytes could not be read")
    );
    let (mut a, _a) = guest(&controller, "a");
    assert!(a.load(0, 1 << 18) == distinct(1 << 18));
}

#[test]
fn a_run_is_stopped_and_the_next_one_completes_it() {
    let (controller, _store) = in_memory(16 * MIB, 4096);
    let [(mut a, _a), (mut b, _b)] = equal_volumes(&controller, 1 << 20);
    // A chunk every 250 ms.
    let slow = DedupOptions { bytes_per_s: MIB, ..across() };
    controller.start_dedup(&slow).unwrap();
    assert!(matches!(controller.start_dedup(&slow), Err(ControllerError::DedupRuns)));
    let report = controller.stop_dedup().unwrap();
    assert_eq!(report.state, DedupState::Stopped);
    assert!(report.counts.passed_bytes < 2 * MIB);
    assert_eq!(done(&controller, &across()).saved_bytes, MIB);
    assert!(a.load(0, 1 << 20) == distinct(1 << 20) && b.load(0, 1 << 20) == distinct(1 << 20));
    // A controller that ends stops the run.
    controller.start_dedup(&slow).unwrap();
    controller.shutdown();
    assert_eq!(controller.dedup().unwrap().state, DedupState::Stopped);
    assert!(matches!(controller.start_dedup(&slow), Err(ControllerError::Down)));
}

/// Whether the guest could write a page.
fn writes(guest: &mut Harness, at: u64, data: &[u8]) -> bool {
    guest.poke(0x1_0000_0000, data);
    let request = guest.request(Operation::Write, at, &[(0x1_0000_0000, PAGE)]);
    guest.run_one(request).is_ok()
}

/// Fills a pool with equal pages of two volumes, which alternate on the store, and in the volumes
/// with holes.
fn fill(controller: &Controller, a: &mut Harness, b: &mut Harness) -> u64 {
    let mut pages = 0;
    loop {
        let data = pattern(pages + 1, 4096);
        if !writes(a, pages * 2 * PAGE, &data) || !writes(b, pages * 2 * PAGE, &data) {
            break;
        }
        pages += 1;
    }
    assert!(pages > 100 && controller.report().space.free < 2, "{pages}");
    pages
}

fn full_pool() -> (Arc<Controller>, Arc<dyn BlockDevice>) {
    let (controller, store) = in_memory(4 * MIB, 4096);
    for name in ["a", "b"] {
        controller.create_volume(name, 4 * MIB, None).unwrap();
    }
    (controller, store)
}

#[test]
fn a_full_pool_is_deduplicated() {
    let (controller, _store) = full_pool();
    let (mut a, _a) = guest(&controller, "a");
    let (mut b, _b) = guest(&controller, "b");
    let pages = fill(&controller, &mut a, &mut b);
    let counts = done(&controller, &across());
    assert_eq!(counts.saved_bytes, pages * PAGE, "{counts:?}");
    for page in 0..pages {
        let data = pattern(page + 1, 4096);
        assert_eq!(a.load(page * 2 * PAGE, 4096), data);
        assert_eq!(b.load(page * 2 * PAGE, 4096), data);
    }
}

#[test]
fn a_guest_overwrites_its_own_guarded_block_in_a_full_pool() {
    // A whole block, and parts of one.
    for (name, len) in [("a", 4096), ("b", 4096), ("a", 512), ("b", 512)] {
        let (controller, store) = full_pool();
        let (mut a, _a) = guest(&controller, "a");
        let (mut b, _b) = guest(&controller, "b");
        fill(&controller, &mut a, &mut b);
        assert!(!writes(&mut a, 3 * MIB + PAGE, &pattern(77, 4096)), "the pool is full");
        let mut disk = PhysicalDisk::open(&store).unwrap();
        let mut run = controller.begin_dedup(&across(), 1).unwrap();
        until_equal(&controller, &mut run, &mut disk);
        let (writer, other) = if name == "a" { (&mut a, &mut b) } else { (&mut b, &mut a) };
        writer.store(0, &pattern(99, len));
        controller.step_dedup(&mut run, &mut disk).unwrap();
        let counts = run.counts();
        assert_eq!((counts.remaps, counts.busy_bytes), (0, PAGE), "{counts:?}");
        assert_eq!(writer.load(0, len), pattern(99, len));
        assert_eq!(writer.load(len as u64, 4096 - len), pattern(1, 4096)[len..]);
        assert_eq!(other.load(0, 4096), pattern(1, 4096));
        controller.end_dedup(&mut run);
        assert!(controller.check().unwrap().is_clean());
    }
}
