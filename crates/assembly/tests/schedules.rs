//! Schedules of snapshots in a running assembly. The time is an argument: no test waits for one.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sidecore_assembly::offline::{OfflineVolume, ReadOptions};
use sidecore_assembly::report::{ScheduleReport, ScheduledVolumeReport};
use sidecore_assembly::spec::{
    ControllerSpec, DeviceSpec, FileOptions, FormatSpec, ScheduleSpec, SidecoreSpec, Spec,
    StageKind, StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_assembly::{Assembly, ControllerHandle, ErrorKind};
use sidecore_driver::Status;
use sidecore_kit::guest::{connect, flush, read, write};
use sidecore_kit::wait;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};

use common::device;

const VOLUME_BYTES: u64 = 8 << 20;
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// 2026-11-26T00:00Z.
const MIDNIGHT: u64 = 20_783 * DAY;

fn schedule(name: &str, volumes: &[&str], keep: &str) -> ScheduleSpec {
    ScheduleSpec {
        name: name.to_owned(),
        controller: None,
        volumes: volumes.iter().map(|&pattern| pattern.to_owned()).collect(),
        keep: keep.parse().unwrap(),
    }
}

/// A controller on a file, a device in front of its volume `vm1`, and these schedules.
fn spec(directory: &Path, store_bytes: u64, schedules: Vec<ScheduleSpec>) -> Spec {
    let image = directory.join("pool.img");
    if !image.exists() {
        std::fs::File::create(&image).unwrap().set_len(store_bytes).unwrap();
    }
    let vm1 = VolumeSpec { size_bytes: Some(VOLUME_BYTES), ..VolumeSpec::new("pool", "vm1") };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![
            StoreSpec::new("below", StoreKind::File(FileOptions::new(image))),
            StoreSpec::new("vm1", StoreKind::Volume(vm1)),
        ],
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "below")
        }],
        schedules,
        devices: vec![device(directory, "vm1")],
        ..Spec::default()
    }
}

fn pool(assembly: &Assembly) -> Arc<ControllerHandle> {
    assembly.controllers().swap_remove(0)
}

fn names(assembly: &Assembly) -> Vec<String> {
    let volumes = pool(assembly).volumes().unwrap();
    volumes.into_iter().map(|volume| volume.name).collect()
}

/// The only volume of the only schedule.
fn only(reports: &[ScheduleReport]) -> &ScheduledVolumeReport {
    let [ScheduleReport { volumes, .. }] = reports else { panic!("{reports:?}") };
    let [volume] = &volumes[..] else { panic!("{reports:?}") };
    volume
}

#[test]
fn snapshots_come_and_go_while_the_guest_writes() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["vm*"], "2 hourly, 2 daily")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    pool(&assembly).snapshot_volume("vm1", "mine").unwrap();
    for hour in 0..26 {
        assert_eq!(write(&mut guest, 8, hour as u8 + 1), Status::Ok);
        let report = assembly.run_schedules_at(MIDNIGHT + hour * HOUR + 61);
        let volume = only(&report);
        assert_eq!((volume.error.as_deref(), volume.unchanged), (None, false));
        assert_eq!(volume.newest_unix_s, Some(MIDNIGHT + hour * HOUR + 60));
        assert_eq!(report[0].next_unix_s, MIDNIGHT + (hour + 1) * HOUR);
        assert_eq!(report[0].last_success_unix_s, Some(MIDNIGHT + hour * HOUR + 61));
        // A second look in this hour finds nothing to do.
        assert_eq!(assembly.run_schedules_at(MIDNIGHT + hour * HOUR + 3599)[0].made, hour + 1);
    }
    let left = ["vm1", "mine", "vm1.auto-20261126T0001Z", "vm1.auto-20261127T0001Z"];
    let left = left.into_iter().chain(["vm1.auto-20261127T0101Z"]);
    assert_eq!(names(&assembly), Vec::from_iter(left));
    let report = &assembly.schedules()[0];
    assert_eq!((report.made, report.deleted, report.failures), (26, 23, 0));
    let snapshot = pool(&assembly).volume("vm1.auto-20261126T0001Z").unwrap();
    assert!(snapshot.read_only);
    assert_eq!(snapshot.created_at_unix_s, MIDNIGHT + 61);

    // The contents are those of the time.
    let store = StoreSpec::new(
        "old",
        StoreKind::Volume(VolumeSpec::new("pool", "vm1.auto-20261126T0001Z")),
    );
    let old = DeviceSpec { read_only: true, ..device(directory.path(), "old") };
    assembly.add_device(&old, Some(&store)).unwrap();
    assert_eq!((read(&mut connect(&old.socket), 8), read(&mut guest, 8)), (1, 26));
    flush(&mut guest);
    assert!(pool(&assembly).check().unwrap().clean);
}

#[test]
fn a_time_that_was_missed_is_made_up_once_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "3 hourly")]);
    for (start, made) in [(0, 1), (0, 0), (5 * HOUR + 600, 1), (5 * HOUR + 1800, 0)] {
        let assembly = Assembly::start(&spec).unwrap();
        assert_eq!(write(&mut connect(&spec.devices[0].socket), 8, start as u8 + 1), Status::Ok);
        for look in 0..3 {
            let now = MIDNIGHT + start + look * 60;
            assert_eq!(assembly.run_schedules_at(now)[0].made, made, "{start} {look}");
        }
        assembly.drain();
    }
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(names(&assembly), ["vm1", "vm1.auto-20261126T0000Z", "vm1.auto-20261126T0510Z"]);
}

#[test]
fn what_a_killed_process_has_not_deleted_is_deleted_later() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "9 hourly")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    for hour in 0..4 {
        assert_eq!(write(&mut guest, 8, hour as u8 + 1), Status::Ok);
        assert_eq!(assembly.run_schedules_at(MIDNIGHT + hour * HOUR)[0].made, hour + 1);
    }
    drop((guest, assembly));
    // To the schedule, a snapshot that has expired by other rules is as one that was left.
    spec.schedules = vec![schedule("s", &["*"], "2 hourly")];
    let assembly = Assembly::start(&spec).unwrap();
    let report = assembly.run_schedules_at(MIDNIGHT + 3 * HOUR + 60);
    assert_eq!((report[0].made, report[0].deleted), (0, 2));
    assert_eq!(names(&assembly), ["vm1", "vm1.auto-20261126T0200Z", "vm1.auto-20261126T0300Z"]);
}

#[test]
fn a_volume_that_has_not_changed_gets_no_other_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "3 hourly, 2 daily")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    assert_eq!(write(&mut guest, 8, 1), Status::Ok);
    let run = |hour: u64, minute: u64| {
        let report = assembly.run_schedules_at(MIDNIGHT + hour * HOUR + minute * 60);
        (report[0].made, only(&report).unchanged)
    };
    assert_eq!(run(0, 0), (1, false));
    assert_eq!(run(1, 0), (1, true));
    // A write after the full hour waits for the next one.
    assert_eq!(write(&mut guest, 8, 2), Status::Ok);
    assert_eq!(run(1, 30), (1, true));
    assert_eq!(run(2, 0), (2, false));
    assert_eq!(run(3, 0), (2, true));
    pool(&assembly).resize_volume("vm1", 2 * VOLUME_BYTES).unwrap();
    assert_eq!(run(4, 0), (3, false));
    assert_eq!(run(23, 0), (3, true));
    assert_eq!(run(24, 0), (4, false), "each day has a snapshot of its own");
}

#[test]
fn the_newest_state_is_not_lost_by_coarser_rules() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "24 every 15min")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    for (minute, byte) in [(0, 1), (45, 2)] {
        assert_eq!(write(&mut guest, 8, byte), Status::Ok);
        let report = assembly.run_schedules_at(MIDNIGHT + 14 * HOUR + minute * 60);
        assert_eq!(report[0].made, u64::from(byte));
    }
    assert_eq!(assembly.run_schedules_at(MIDNIGHT + 15 * HOUR)[0].made, 2, "it is unchanged");
    // As the first of an hour, the older one stays.
    assembly.set_schedules(vec![schedule("s", &["*"], "24 hourly")]).unwrap();
    let reports = assembly.run_schedules_at(MIDNIGHT + 20 * HOUR + 600);
    assert_eq!((reports[0].made, reports[0].deleted, only(&reports).unchanged), (3, 1, false));
    let left = ["vm1", "vm1.auto-20261126T1400Z", "vm1.auto-20261126T2010Z"];
    assert_eq!(names(&assembly), left);
    let reports = assembly.run_schedules_at(MIDNIGHT + 21 * HOUR);
    assert_eq!((reports[0].made, only(&reports).unchanged), (3, true));
}

#[test]
fn replaced_schedules_delete_nothing_more() {
    const MANY: u64 = 60;
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "100 hourly")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    for (hour, byte) in (0..MANY).zip(1..) {
        assert_eq!(write(&mut guest, 8, byte), Status::Ok);
        assert_eq!(assembly.run_schedules_at(MIDNIGHT + hour * HOUR)[0].made, hour + 1);
    }
    let now = MIDNIGHT + (MANY - 1) * HOUR + 60;
    assembly.set_schedules(vec![schedule("s", &["*"], "1 hourly")]).unwrap();
    let left = std::thread::scope(|scope| {
        scope.spawn(|| assembly.run_schedules_at(now));
        wait::succeed(common::PATIENCE, || {
            let count = names(&assembly).len() as u64;
            if count < MANY { Ok(()) } else { Err(format!("{count} volumes")) }
        });
        assembly.set_schedules(vec![schedule("s", &["*"], "100 hourly")]).unwrap();
        names(&assembly).len()
    });
    assert!(left > 10, "{left} are left: the test is too slow");
    // The one that was being deleted goes.
    assert!(names(&assembly).len() + 1 >= left, "{left} became {}", names(&assembly).len());
    let report = assembly.run_schedules_at(now);
    assert_eq!(
        (only(&report).snapshots, &only(&report).error),
        (names(&assembly).len() as u64 - 1, &None)
    );
}

#[test]
fn a_store_that_takes_no_changes_is_no_success() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "9 hourly")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    for hour in 0..3 {
        assert_eq!(write(&mut guest, 8, hour as u8 + 1), Status::Ok);
        assert_eq!(assembly.run_schedules_at(MIDNIGHT + hour * HOUR)[0].made, hour + 1);
    }
    drop(guest);
    assembly.drain();
    drop(assembly);
    let options =
        FileOptions { read_only: true, ..FileOptions::new(directory.path().join("pool.img")) };
    spec.stores[0] = StoreSpec::new("below", StoreKind::File(options));
    spec.devices[0].read_only = true;
    spec.schedules = vec![schedule("s", &["*"], "1 hourly")];
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(assembly.schedules()[0].last_success_unix_s, None);
    // The first commit shows that the store takes none.
    for (minute, wanted) in [(1, "durable"), (2, "the store is read only: "), (3, "is read only")] {
        let reports = assembly.run_schedules_at(MIDNIGHT + 2 * HOUR + minute * 60);
        let volume = only(&reports);
        let error = volume.error.as_deref().unwrap();
        assert!(error.contains(wanted), "{error}");
        assert_eq!(volume.held, []);
        let report = &reports[0];
        assert_eq!((report.failures, report.last_success_unix_s), (minute, None));
    }
}

#[test]
fn each_success_is_durable_on_a_store_that_fails_commits() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec =
        spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "99 every 30min, 99 hourly")]);
    Assembly::start(&spec).unwrap().drain();
    let (when, fault) = (When::EveryNth(5), Fault::NoSpace);
    let rules = vec![FaultRule { affected: Affected::Writes, when, fault }];
    spec.stores[0].stages = vec![StageKind::Fault(FaultPlan { seed: 0, rules }).into()];
    // The commits of guests do not make up for those that fail.
    spec.controllers[0].commit_interval = Duration::from_secs(3600);
    spec.devices.clear();
    let assembly = Assembly::start(&spec).unwrap();
    for hour in 0..12 {
        let look = |_| only(&assembly.run_schedules_at(MIDNIGHT + hour * HOUR)).error.clone();
        let errors: Vec<String> = (0..50).map_while(look).collect();
        let is_wanted = |error: &String| error.contains("space") || error.contains("durable");
        assert!(errors.len() < 50 && errors.iter().all(is_wanted), "{errors:?}");
        // As a power cut leaves it.
        let copy = directory.path().join("copy.img");
        std::fs::copy(directory.path().join("pool.img"), &copy).unwrap();
        let snapshot = format!("vm1.auto-20261126T{hour:02}00Z");
        let options = ReadOptions { accept_loss: true, ..ReadOptions::default() };
        OfflineVolume::open(&copy, &snapshot, &options).unwrap();
    }
    assert!(assembly.schedules()[0].failures > 0);
}

#[test]
fn only_its_own_snapshots_that_nothing_needs_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["vm1"], "1 hourly")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    let pool = pool(&assembly);
    let mut hour = 0;
    let mut run = || {
        hour += 1;
        assert_eq!(write(&mut guest, 8, hour as u8), Status::Ok);
        assembly.run_schedules_at(MIDNIGHT + hour * HOUR)
    };
    run();
    pool.clone_volume("vm1.auto-20261126T0100Z", "copy").unwrap();
    run();
    let served = StoreSpec::new(
        "served",
        StoreKind::Volume(VolumeSpec::new("pool", "vm1.auto-20261126T0200Z")),
    );
    let device = DeviceSpec { read_only: true, ..device(directory.path(), "served") };
    assembly.add_device(&device, Some(&served)).unwrap();
    run();
    // It belongs to its operator from now on.
    pool.rename_volume("vm1.auto-20261126T0300Z", "precious").unwrap();
    // A volume without a schedule keeps its snapshots, and a user's own one is never deleted.
    pool.snapshot_volume("copy", "vm1.auto-mine").unwrap();
    let report = run();
    let held: Vec<_> = only(&report)
        .held
        .iter()
        .map(|held| (held.snapshot.as_str(), held.reason.as_str()))
        .collect();
    assert_eq!(
        held,
        [
            ("vm1.auto-20261126T0100Z", "volume \"copy\" was made from it"),
            ("vm1.auto-20261126T0200Z", "store \"served\" is configured on it"),
        ]
    );
    assert_eq!(only(&report).error, None);
    assembly.remove_device("served").unwrap();
    pool.delete_volume("vm1.auto-mine").unwrap();
    pool.delete_volume("copy").unwrap();
    let report = run();
    assert_eq!(only(&report).held, []);
    assert_eq!(names(&assembly), ["vm1", "precious", "vm1.auto-20261126T0500Z"]);
}

#[test]
fn names_of_scheduled_snapshots_are_reserved() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, Vec::new());
    let assembly = Assembly::start(&spec).unwrap();
    let pool = pool(&assembly);
    let reserved = "vm1.auto-20261126T1000Z";
    for refused in [
        pool.create_volume(reserved, VOLUME_BYTES, None),
        pool.snapshot_volume("vm1", reserved),
        pool.clone_volume("vm1", reserved),
        pool.rename_volume("vm1", reserved),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert!(error.message.contains("a schedule makes and deletes"), "{error}");
    }
    let kind = VolumeSpec { size_bytes: Some(VOLUME_BYTES), ..VolumeSpec::new("pool", reserved) };
    let store = StoreSpec::new("other", StoreKind::Volume(kind));
    assert!(assembly.add_device(&device(directory.path(), "other"), Some(&store)).is_err());
    assert_eq!(names(&assembly), ["vm1"]);
}

#[test]
fn a_full_pool_keeps_the_old_snapshots_and_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 4 << 20, vec![schedule("s", &["*"], "1 hourly")]);
    let assembly = Assembly::start(&spec).unwrap();
    let pool = pool(&assembly);
    let mut guest = connect(&spec.devices[0].socket);
    assert_eq!(write(&mut guest, 8, 1), Status::Ok);
    assert_eq!(assembly.run_schedules_at(MIDNIGHT)[0].made, 1);
    assert_eq!(write(&mut guest, 80, 1), Status::Ok);
    // Another guest takes all of the rest.
    let filler = VolumeSpec { size_bytes: Some(VOLUME_BYTES), ..VolumeSpec::new("pool", "filler") };
    let store = StoreSpec::new("filler", StoreKind::Volume(filler));
    let other = device(directory.path(), "filler");
    assembly.add_device(&other, Some(&store)).unwrap();
    let mut client = connect(&other.socket);
    let is_full = |block: &u64| write(&mut client, block * 8, 1) != Status::Ok;
    assert!((0..1024).find(is_full).is_some(), "a store of 4 MiB is full at some time");
    // Metadata has space of its own, which the records of other volumes take.
    let mut failures = 0;
    for number in 0..10_000 {
        let created = pool.create_volume(&format!("v{number}"), 4096, None);
        failures = if created.is_err() { failures + 1 } else { 0 };
        assert!(created.err().is_none_or(|error| error.kind == ErrorKind::NoSpace));
        if failures == 20 {
            break;
        }
        if failures > 0 {
            // A commit frees what earlier records have had.
            flush(&mut guest);
        }
    }
    assert_eq!(failures, 20, "the records take all of it at some time");
    assembly.set_schedules(vec![schedule("s", &["vm1"], "1 hourly")]).unwrap();
    let now = MIDNIGHT + HOUR;
    assert_eq!(write(&mut guest, 8, 2), Status::IoError, "a snapshot needs a block for this");
    let report = assembly.run_schedules_at(now);
    let error = only(&report).error.clone();
    let error = error.unwrap_or_else(|| panic!("the pool is full: {report:?}"));
    assert!(error.contains("space"), "{error}");
    assert_eq!((report[0].failures, report[0].next_unix_s), (1, now + 60));
    assert_eq!(report[0].last_success_unix_s, Some(MIDNIGHT));
    assert!(names(&assembly).contains(&"vm1.auto-20261126T0000Z".to_owned()));
    let said = |words: &str| pool.report().events.iter().any(|event| event.what.contains(words));
    assert!(said("schedule \"s\" failed at volume \"vm1\", and is repeated"));
    drop(client);
    assembly.remove_device("filler").unwrap();
    pool.delete_volume("filler").unwrap();
    // Its blocks are free after an epoch.
    let report = wait::succeed(common::PATIENCE, || {
        let report = assembly.run_schedules_at(now + 60);
        if only(&report).error.is_none() { Ok(report) } else { Err(format!("{report:?}")) }
    });
    assert_eq!(report[0].deleted, 1);
    assert!(said("schedule \"s\" has succeeded again at volume \"vm1\""));
    assert!(names(&assembly).contains(&"vm1.auto-20261126T0101Z".to_owned()));
}

#[test]
fn schedules_are_replaced_and_the_first_that_fits_has_a_volume() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, Vec::new());
    let assembly = Assembly::start(&spec).unwrap();
    let pool = pool(&assembly);
    for volume in ["vm2", "db", &"v".repeat(45)] {
        pool.create_volume(volume, VOLUME_BYTES, None).unwrap();
    }
    let unknown =
        ScheduleSpec { controller: Some("pond".to_owned()), ..schedule("s", &["*"], "1 daily") };
    let said = assembly.set_schedules(vec![unknown]).unwrap_err().to_string();
    assert!(said.contains("controller \"pond\", which does not exist"), "{said}");
    let twice = vec![schedule("s", &["*"], "1 daily"), schedule("s", &["vm*"], "2 daily")];
    let said = assembly.set_schedules(twice).unwrap_err().to_string();
    assert!(said.contains("there is a schedule \"s\" already"), "{said}");
    assert!(assembly.schedules().is_empty());
    let schedules = vec![
        schedule("second", &["vm2"], "1 weekly"),
        schedule("all", &["*"], "1 daily"),
        schedule("never", &["vm2", "x?"], "1 daily"),
    ];
    assembly.set_schedules(schedules).unwrap();
    let reports = assembly.run_schedules_at(MIDNIGHT);
    let volumes = |index: usize| {
        let volumes: &Vec<ScheduledVolumeReport> = &reports[index].volumes;
        volumes.iter().map(|volume| volume.volume.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(volumes(0), ["vm2"]);
    assert_eq!(volumes(1), ["db", "vm1", &"v".repeat(45)]);
    let error = reports[1].volumes[2].error.as_deref().unwrap();
    assert!(error.contains("has 45 bytes") && error.contains("have room for 44"), "{error}");
    assert_eq!(reports[2].volumes, []);
    let warning = reports[2].warning.as_deref().unwrap();
    assert!(warning.contains("no volume has a name like vm2, x?"), "{warning}");
    // Without a schedule, the snapshots stay.
    let before = names(&assembly);
    assembly.set_schedules(Vec::new()).unwrap();
    assert!(assembly.run_schedules_at(MIDNIGHT + 9 * DAY).is_empty());
    assert_eq!(names(&assembly), before);
}

/// With `--nocapture`, the longest request beside a snapshot, and beside none.
#[test]
fn requests_go_on_while_snapshots_are_made() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), 64 << 20, vec![schedule("s", &["*"], "2 every 1min")]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    let (end, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let longest = [AtomicU64::new(0), AtomicU64::new(0)];
    let is_busy = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut last = 0;
            while !end.load(Ordering::SeqCst) {
                last = (last % 200) + 1;
                let (start, busy) = (Instant::now(), is_busy.load(Ordering::SeqCst));
                assert_eq!(write(&mut guest, 8 * u64::from(last), last), Status::Ok);
                let busy = busy || is_busy.load(Ordering::SeqCst);
                let took = u64::try_from(start.elapsed().as_micros()).unwrap();
                longest[usize::from(busy)].fetch_max(took, Ordering::SeqCst);
                writes.fetch_add(1, Ordering::SeqCst);
            }
            read(&mut guest, 8 * u64::from(last)) == last
        });
        for minute in 0..20 {
            let before = writes.load(Ordering::SeqCst);
            let deadline = Instant::now() + Duration::from_secs(10);
            while writes.load(Ordering::SeqCst) < before + 3 {
                assert!(Instant::now() < deadline && !guest.is_finished(), "the guest goes on");
                std::thread::yield_now();
            }
            is_busy.store(true, Ordering::SeqCst);
            let report = assembly.run_schedules_at(MIDNIGHT + minute * 60);
            is_busy.store(false, Ordering::SeqCst);
            assert_eq!((report[0].made, report[0].failures), (minute + 1, 0));
        }
        end.store(true, Ordering::SeqCst);
        assert!(guest.join().unwrap());
    });
    let [alone, beside] = longest.map(AtomicU64::into_inner);
    println!("longest write: {alone} us alone, {beside} us beside a snapshot");
    assert_eq!(pool(&assembly).volumes().unwrap().len(), 3);
    assert!(pool(&assembly).check().unwrap().clean);
}
