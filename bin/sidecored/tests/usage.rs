//! Meters of a daemon: their counts in reports, and their records over an end and a kill.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use common::Daemon;
use rustix::process::Signal;
use serde_json::{Value, json};
use sidecore_control::NewDevice;
use sidecore_driver::Status;
use sidecore_kit::{guest, wait};

const SOON: Duration = Duration::from_secs(60);

/// Two devices on a pool whose store has a meter, and one of them behind a meter of its own.
const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "below"
type = "ram"
size = "64MiB"
[[store.stage]]
type = "meter"
[[controller]]
name = "pool"
store = "below"
format = "blank"
[[store]]
name = "plain"
type = "volume"
controller = "pool"
volume = "plain"
size = "16MiB"
[[store]]
name = "metered"
type = "volume"
controller = "pool"
volume = "metered"
size = "16MiB"
[[store.stage]]
type = "meter"
name = "tenant 7"
records = "usage.jsonl"
interval_s = 1
[[device]]
name = "vd0"
store = "plain"
socket = "vd0.sock"
[[device]]
name = "vd1"
store = "metered"
socket = "vd1.sock"
"#;

/// The records of each incarnation, in their order.
fn records(directory: &Path) -> BTreeMap<String, Vec<Value>> {
    let mut records: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    let text = std::fs::read_to_string(directory.join("usage.jsonl")).unwrap();
    // The last line may be half written.
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let record: Value = serde_json::from_str(line).unwrap();
        let incarnation = record["incarnation"].as_str().unwrap().to_owned();
        records.entry(incarnation).or_default().push(record);
    }
    for list in records.values() {
        let sequences = list.iter().map(|record| record["sequence"].as_u64().unwrap());
        assert!(sequences.eq(1..=list.len() as u64), "{list:?}");
        assert!(list.windows(2).all(|two| two[0]["end"] == two[1]["start"]), "{list:?}");
    }
    records
}

fn sum(records: &[Value], key: &str) -> u64 {
    records.iter().map(|record| record[key].as_u64().unwrap()).sum()
}

fn write(daemon: &Daemon, device: &str, count: u64) {
    let mut guest = guest::connect(&daemon.directory.path().join(device));
    for page in 0..count {
        assert_eq!(guest::write(&mut guest, 8 * page, 1), Status::Ok);
    }
}

#[test]
fn a_kill_loses_no_record_and_an_end_writes_the_last_one() {
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), CONFIG);
    write(&daemon, "vd1.sock", 3);
    let path = daemon.directory.path().to_owned();
    let first = || records(&path).into_values().next().unwrap_or_default();
    wait::until("the record of the writes", SOON, || {
        path.join("usage.jsonl").exists() && sum(&first(), "writes") == 3
    });
    daemon.signal(Signal::KILL);
    daemon.wait();
    let before = records(&path);
    let mut daemon = Daemon::start(daemon.directory, CONFIG);
    write(&daemon, "vd1.sock", 2);
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
    let mut after = records(&path);
    assert_eq!(after.len(), 2);
    after.retain(|incarnation, _| !before.contains_key(incarnation));
    let last = after.into_values().next().unwrap();
    assert_eq!((sum(&last, "writes"), sum(&last, "bytes_written")), (2, 8192));
    assert!(last.iter().all(|it| it["store"] == "metered" && it["name"] == "tenant 7"));
}

#[test]
fn counts_are_in_reports_and_a_file_that_fails_is_a_warning() {
    let daemon = Daemon::start(tempfile::tempdir().unwrap(), CONFIG);
    let control = daemon.client();
    write(&daemon, "vd0.sock", 1);
    write(&daemon, "vd1.sock", 2);
    let meters = control.stats().unwrap().meters;
    let names: Vec<&str> = meters.iter().map(|meter| meter.name.as_str()).collect();
    assert_eq!(names, ["below", "tenant 7"], "the pool's store, to which two devices lead, once");
    assert_eq!((meters[1].writes, meters[1].bytes_written), (2, 8192));
    assert!(meters[0].writes >= 3, "{meters:?}");
    let metrics = control.metrics(false).unwrap();
    assert!(metrics.contains("sidecore_meter_written_bytes_total{meter=\"tenant 7\"} 8192\n"));
    // With a path of their choice, users of the API could append to any file.
    let stage = json!([{ "type": "meter", "records": "/tmp/x" }]);
    let volume = json!({ "controller": "pool", "volume": "plain", "stage": stage });
    let socket = daemon.directory.path().join("vd2.sock");
    let refused = control.add_device(&NewDevice::new("vd2", &socket).with("volume", volume));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("`records` is allowed in the configuration file only"), "{refused}");
    // The file becomes a directory.
    let file = daemon.directory.path().join("usage.jsonl");
    wait::until("the file of the records", SOON, || file.exists());
    std::fs::remove_file(&file).unwrap();
    while std::fs::create_dir(&file).is_err() {
        std::fs::remove_file(&file).unwrap();
    }
    let warnings = || control.devices().unwrap()[1].warnings.join("");
    wait::until("a warning", SOON, || warnings().contains("it is no regular file"));
    write(&daemon, "vd1.sock", 1);
    assert_eq!(control.stats().unwrap().meters[1].writes, 3);
    std::fs::remove_dir(&file).unwrap();
    wait::until("the end of the warning", SOON, || warnings().is_empty());
}
