//! A disk without space ends a recording. A program of its own, because the limit that stands for
//! the disk's size is that of the process.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sidecore_block::{BlockDevice, Geometry, RamStore, RecordingState, Stage as _};
use sidecore_block_contract::{Harness, pattern};
use sidecore_recording::{DataMode, EndReason, Reader, Record};
use sidecore_stage_record::RecordStage;

#[test]
fn a_recording_without_space_keeps_its_whole_records_and_the_disk_goes_on() {
    // The signal that comes with the limit would end the process.
    let signal = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, signal).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.recording");
    let (max_bytes, buffer_mib) = (None, None);
    let stage = RecordStage { file: file.clone(), data: DataMode::Full, max_bytes, buffer_mib };
    let ram: Arc<dyn BlockDevice> = Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap());
    let device = stage.open("disk", ram).unwrap();
    let recording = device.stages()[0].recording().cloned().unwrap();
    let mut guest = Harness::new(&device, 8);
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: Some(100_000), maximum }).unwrap();
    let begun = Instant::now();
    let mut count = 0;
    while recording.state() == RecordingState::Running {
        assert!(begun.elapsed() < Duration::from_secs(60), "no failure");
        guest.store(0, &pattern(count, 4096));
        count += 1;
    }
    setrlimit(Resource::Fsize, Rlimit { current: None, maximum }).unwrap();
    assert!(recording.problem().unwrap().contains("disk.recording"));
    assert_eq!(guest.load(0, 4096), pattern(count - 1, 4096));
    drop((guest, device));
    let mut reader = Reader::new(File::open(&file).unwrap()).unwrap();
    let mut whole = 0;
    // The limit leaves room for the end.
    let ended = loop {
        match reader.read().unwrap() {
            Some(Record::Request(_)) => {
                assert_eq!(reader.data(), pattern(whole, 4096));
                whole += 1;
            }
            Some(Record::Gap { requests, .. }) => panic!("{requests} are missing"),
            Some(Record::End { reason, requests, .. }) => break (reason, requests),
            None => panic!("no end"),
        }
    };
    assert_eq!(ended, (EndReason::Failed, recording.counts().recorded));
    assert_eq!(ended.1, whole);
    assert!(reader.read().unwrap().is_none(), "nothing is behind the end");
    assert!(whole <= count);
}
