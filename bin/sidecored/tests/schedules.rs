//! Schedules of snapshots in a daemon: it is killed while it deletes, and its schedules are
//! replaced while it runs.

mod common;

use std::path::Path;
use std::time::Duration;

use common::Daemon;
use rustix::process::Signal;
use sidecore_assembly::Assembly;
use sidecore_control::report::ScheduleReport;
use sidecore_control::{Client, Config, Depth, NewSchedules};
use sidecore_driver::Status;
use sidecore_kit::{guest, wait};

const SOON: Duration = Duration::from_secs(60);

/// 2024-01-01T00:00Z.
const YEAR: u64 = 1_704_067_200;
const HOUR: u64 = 3600;

/// As many snapshots as an earlier process has left.
const LEFT: usize = 30;

/// A yearly snapshot is due at any time of the test, and another one at none, but for a test that
/// runs on New Year's Eve.
fn config(keep: &str) -> String {
    format!(
        r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[schedule]]
name = "guests"
volumes = ["vm*"]
keep = "{keep}"
[[store]]
name = "image"
type = "file"
path = "pool.img"
[[controller]]
name = "pool"
store = "image"
format = "blank"
[[store]]
name = "vm1"
type = "volume"
controller = "pool"
volume = "vm1"
size = "8MiB"
[[device]]
name = "vm1"
store = "vm1"
socket = "vm1.sock"
"#
    )
}

fn parse(directory: &Path, keep: &str) -> Config {
    Config::parse(&directory.join("disks.toml"), &config(keep), Depth::Text).unwrap()
}

fn write(directory: &Path, byte: u8) {
    let mut client = guest::connect(&directory.join("vm1.sock"));
    assert_eq!(guest::write(&mut client, 8, byte), Status::Ok);
    guest::flush(&mut client);
}

/// Leaves hourly snapshots of the year 2024 on the pool.
fn leave_snapshots(directory: &Path) {
    std::fs::File::create(directory.join("pool.img")).unwrap().set_len(64 << 20).unwrap();
    let assembly = Assembly::start(&parse(directory, "1000 hourly").spec).unwrap();
    for (hour, byte) in (0..LEFT).zip(1..) {
        write(directory, byte);
        let reports = assembly.run_schedules_at(YEAR + hour as u64 * HOUR);
        assert_eq!(reports[0].made, hour as u64 + 1);
    }
    write(directory, u8::MAX);
    assembly.drain();
}

fn snapshots(client: &Client) -> Vec<String> {
    let volumes = client.volumes("pool").unwrap().into_iter();
    let snapshots = volumes.filter(|volume| volume.origin.is_some());
    snapshots.map(|volume| volume.name).collect()
}

/// Waits until the only schedule has looked at its volume.
fn looked(client: &Client) -> ScheduleReport {
    wait::succeed(SOON, || {
        let report = client.schedules().unwrap().swap_remove(0);
        if report.volumes.is_empty() { Err(format!("{report:?}")) } else { Ok(report) }
    })
}

#[test]
fn a_daemon_that_is_killed_while_it_deletes_goes_on_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    leave_snapshots(directory.path());
    let config = config("1 yearly");
    let mut daemon = Daemon::start(directory, &config);
    let (mut newest, mut fewest) = (None, LEFT + 2);
    for _ in 0..4 {
        let client = daemon.client();
        // Killed as soon as the new one is there, or another old one is gone.
        let names = wait::succeed(SOON, || {
            let names = snapshots(&client);
            let is_new = |name: &&String| !name.contains(".auto-2024");
            // There is never a second one.
            assert!(names.iter().filter(is_new).count() <= 1, "{names:?}");
            match names.iter().find(is_new).cloned() {
                Some(new) if names.len() < fewest => Ok((names.len(), new)),
                // The new one is made before the first of the old ones goes.
                None if names.len() < LEFT => panic!("{names:?}"),
                _ => Err(format!("{names:?}")),
            }
        });
        daemon.signal(Signal::KILL);
        let (status, complaint) = daemon.wait();
        assert!(!status.success(), "{complaint}");
        let (left, new) = names;
        fewest = left;
        assert_eq!(newest.get_or_insert_with(|| new.clone()), &new);
        daemon = Daemon::start(daemon.directory, &config);
        if fewest == 1 {
            break;
        }
    }
    let client = daemon.client();
    let report = wait::succeed(SOON, || {
        let report = looked(&client);
        if report.volumes[0].snapshots == 1 { Ok(report) } else { Err(format!("{report:?}")) }
    });
    assert_eq!((report.made, report.failures), (0, 0));
    assert_eq!(snapshots(&client), Vec::from_iter(newest));
    assert!(client.check_controller("pool").unwrap().clean);
}

#[test]
fn schedules_are_made_up_at_the_start_run_by_hand_and_replaced() {
    let directory = tempfile::tempdir().unwrap();
    leave_snapshots(directory.path());
    let path = directory.path().to_owned();
    let daemon = Daemon::start(directory, &config("2 yearly"));
    let client = daemon.client();
    let report = looked(&client);
    assert_eq!((report.made, report.deleted), (1, LEFT as u64 - 1));
    let kept = snapshots(&client);
    assert_eq!((kept.len(), kept[0].as_str()), (2, "vm1.auto-20240101T0000Z"));
    let metric = |name: &str| {
        let page = client.metrics(false).unwrap();
        let start = format!("sidecore_schedule_{name}{{schedule=\"guests\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&start).map(str::to_owned));
        line.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((metric("made_total"), metric("snapshots")), (1, 2));
    assert!(metric("last_success_timestamp_seconds") > YEAR);

    // Nothing is due, also when the volume has changed.
    write(&path, 1);
    assert_eq!(client.run_schedules().unwrap()[0].made, 1);
    let next = NewSchedules::of(&parse(&path, "1 yearly").spec);
    client.set_schedules(&next).unwrap();
    assert_eq!(client.schedules().unwrap()[0].keep, "1 yearly");
    client.run_schedules().unwrap();
    assert_eq!(snapshots(&client), kept[1..]);
    let mut wrong = next.clone();
    wrong.schedules[0].0.insert("keep".to_owned(), "0 yearly".into());
    let said = client.set_schedules(&wrong).unwrap_err().to_string();
    assert!(said.contains("a rule keeps 1 to 1000"), "{said}");
    wrong.schedules[0].0.insert("keep".to_owned(), "1 yearly".into());
    wrong.schedules[0].0.insert("controller".to_owned(), "pond".into());
    let said = client.set_schedules(&wrong).unwrap_err().to_string();
    assert!(said.contains("names controller \"pond\", which does not exist"), "{said}");
    assert_eq!(client.schedules().unwrap()[0].controller, None);
}
