//! A record that a full disk cuts off. A program of its own, because the limit that stands for the
//! disk's size is that of the process.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use sidecore_block::Meter;
use sidecore_stage_meter::{Names, Recorder};

/// Lets files grow to so many bytes, or without end. A write beyond is cut off, then fails.
fn limit_files(bytes: Option<u64>) {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: bytes, maximum }).unwrap();
}

#[test]
fn a_record_that_is_cut_off_is_written_when_there_is_room() {
    // The signal that comes with the limit would end the process.
    let signal = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, signal).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("usage.jsonl");
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let names = Names { store: "disk".to_owned(), name: "disk".to_owned() };
    let mut recorder = Recorder::new(path.clone(), names, at(0)).unwrap();
    let meter = Meter::new("disk");
    let channel = meter.open_channel();
    recorder.record(at(300), &meter);
    let whole = fs::metadata(&path).unwrap().len();
    // A part of the next record fits, then all of it but the newline.
    for (sequence, room) in (2_u64..).zip([100, whole - 1]) {
        let before = fs::metadata(&path).unwrap().len();
        limit_files(Some(before + room));
        for _ in 0..2 {
            channel.flushes.add(1);
            recorder.record(at(300 * sequence), &meter);
            assert!(meter.problem().unwrap().contains("usage.jsonl"));
        }
        assert_eq!(fs::metadata(&path).unwrap().len(), before + room);
        limit_files(None);
        recorder.record(at(300 * sequence), &meter);
        assert_eq!(meter.problem(), None);
        let text = fs::read_to_string(&path).unwrap();
        let records: Vec<Value> =
            text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        assert_eq!(records.len() as u64, sequence, "{text}");
        let last = records.last().unwrap();
        assert_eq!((&last["sequence"], &last["flushes"]), (&sequence.into(), &2.into()));
    }
}
