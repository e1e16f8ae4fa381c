//! Records: their contents, their file, and its failures.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use sidecore_block::{BlockDevice, Geometry, Meter, NullStore, Operation, Stage as _, observe};
use sidecore_block_contract::Harness;
use sidecore_stage_meter::{MeterObserver, MeterStage, Names, Recorder};

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds)
}

fn recorder(path: &Path) -> Recorder {
    let names = Names { store: "pool/db@db".to_owned(), name: "db".to_owned() };
    Recorder::new(path.to_owned(), names, at(0)).unwrap()
}

fn null() -> Arc<dyn BlockDevice> {
    Arc::new(NullStore::new(Geometry::new(1 << 20, 512)))
}

/// The meter of a device, and the device's guest.
fn metered() -> (Arc<Meter>, Harness) {
    let meter = Arc::new(Meter::new("db"));
    let observer = Arc::new(MeterObserver::new(Arc::clone(&meter)));
    let device = observe("meter", "disk", null(), || Ok(observer)).unwrap();
    (meter, Harness::new(&device, 8))
}

fn discard(guest: &mut Harness, bytes: u64) {
    let request = guest.range_request(Operation::Discard, 0, bytes);
    assert_eq!(guest.run(vec![request]), [Ok(())]);
}

/// The records of the file, if there is one.
fn records(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_record_has_the_names_the_times_and_the_counts_since_the_one_before() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("usage.jsonl");
    let (meter, mut guest) = metered();
    let mut recorder = recorder(&path);
    discard(&mut guest, 4096);
    recorder.record(at(300), &meter);
    recorder.record(at(600), &meter);
    discard(&mut guest, 512);
    discard(&mut guest, 512);
    recorder.record(at(900), &meter);
    let records = records(&path);
    let column = |key: &str| records.iter().map(|record| record[key].clone()).collect::<Vec<_>>();
    assert_eq!(column("sequence"), [1, 2, 3]);
    assert_eq!(column("discards"), [1, 0, 2]);
    assert_eq!(column("bytes_discarded"), [4096, 0, 1024]);
    let times = ["2023-11-14T22:13:20Z", "2023-11-14T22:18:20Z", "2023-11-14T22:23:20Z"];
    assert_eq!(column("start"), times);
    assert_eq!(column("end")[..2], times[1..]);
    let first = &records[0];
    assert_eq!((&first["store"], &first["name"]), (&"pool/db@db".into(), &"db".into()));
    let incarnation = first["incarnation"].as_str().unwrap();
    assert_eq!((incarnation.len(), &records[2]["incarnation"]), (16, &first["incarnation"]));
    let others = ["reads", "writes", "flushes", "write_zeroes", "errors"];
    let bytes = ["bytes_read", "bytes_written", "bytes_zeroed"];
    assert!(others.iter().chain(&bytes).all(|key| first[key] == 0), "{first}");
    assert_eq!(first.as_object().unwrap().len(), 6 + 10, "{first}");
}

#[test]
fn while_a_file_fails_the_meter_has_a_problem_and_the_next_record_has_all() {
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("usage");
    let path = below.join("usage.jsonl");
    let (meter, mut guest) = metered();
    let mut recorder = recorder(&path);
    for minutes in [5, 10] {
        discard(&mut guest, 512);
        recorder.record(at(60 * minutes), &meter);
        let problem = meter.problem().unwrap();
        assert!(problem.contains("\"db\"") && problem.contains("usage.jsonl"), "{problem}");
    }
    fs::create_dir(&below).unwrap();
    recorder.record(at(900), &meter);
    assert_eq!(meter.problem(), None);
    let [record] = &records(&path)[..] else { panic!("one record") };
    assert_eq!((&record["sequence"], &record["discards"]), (&1.into(), &2.into()));
    assert_eq!(record["start"], "2023-11-14T22:13:20Z");
    // The file goes while it is used: another one is made.
    fs::remove_file(&path).unwrap();
    recorder.record(at(1200), &meter);
    let [record] = &records(&path)[..] else { panic!("one record") };
    assert_eq!((&record["sequence"], meter.problem()), (&2.into(), None));
}

#[test]
fn the_thread_writes_each_interval_and_once_more_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("usage.jsonl");
    let open = |interval_s: u64, name: Option<&str>| {
        let (name, records) = (name.map(str::to_owned), Some(path.clone()));
        let stage = MeterStage { name, records, interval_s: Some(interval_s) };
        stage.open("disk", null()).unwrap()
    };
    let device = open(86_400, None);
    let mut guest = Harness::new(&device, 8);
    discard(&mut guest, 512);
    drop(guest);
    assert!(records(&path).is_empty());
    drop(device);
    let [record] = &records(&path)[..] else { panic!("one record") };
    assert_eq!((&record["discards"], &record["name"]), (&1.into(), &"disk".into()));
    let before = record["incarnation"].clone();
    let device = open(1, Some("tenant 7"));
    let begun = Instant::now();
    // A reader may see a line before its end: newlines are counted.
    while fs::read(&path).unwrap().iter().filter(|byte| **byte == b'\n').count() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no records");
        std::thread::yield_now();
    }
    drop(device);
    let last = records(&path).pop().unwrap();
    assert_eq!((&last["name"], &last["store"]), (&"tenant 7".into(), &"disk".into()));
    assert_ne!(last["incarnation"], before);
}

#[test]
fn a_store_is_served_although_its_records_cannot_be_written() {
    let records = Some("/proc/no/such/usage.jsonl".into());
    let stage = MeterStage { records, ..MeterStage::default() };
    let device = stage.open("disk", null()).unwrap();
    let [meter] = &device.meters()[..] else { panic!("one meter") };
    assert!(meter.problem().unwrap().contains("/proc/no/such/usage.jsonl"));
    let mut guest = Harness::new(&device, 8);
    discard(&mut guest, 512);
    assert_eq!(meter.counts().discards, 1);
}
