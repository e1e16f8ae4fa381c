//! The stage keeps the contract of the block seam, and its file has what passed.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockDevice, BlockError, BlockRequest, Context, Flush, Geometry, InFlight, NullStore,
    Operation, RamStore, Recording, RecordingCounts, RecordingState, Stage as _, Tag,
};
use sidecore_block_contract::{Harness, check_at_each_depth, guest_memory, pattern, request};
use sidecore_reactor::CoreContext;
use sidecore_recording::{
    DataMode, EndReason, Header, Outcome, Reader, Record, Request, RequestKind, checksum,
};
use sidecore_stage_record::RecordStage;
use sidecore_units::Nanos;

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

fn stage(file: &Path, data: DataMode) -> RecordStage {
    RecordStage { file: file.to_owned(), data, max_bytes: None, buffer_mib: Some(1) }
}

/// The file of a recording, in a directory of its own.
fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.recording");
    (directory, file)
}

fn read(file: &Path) -> (Header, Vec<(Record, Vec<u8>)>) {
    let mut reader = Reader::new(BufReader::new(File::open(file).unwrap())).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.read().unwrap() {
        records.push((record, reader.data().to_vec()));
    }
    (reader.header().clone(), records)
}

fn requests(records: &[(Record, Vec<u8>)]) -> Vec<Request> {
    let requests = records.iter().filter_map(|(record, _)| match record {
        Record::Request(request) => Some(*request),
        _ => None,
    });
    requests.collect()
}

#[test]
fn record_keeps_the_contract() {
    let (_directory, file) = place();
    for data in [DataMode::None, DataMode::Full] {
        let directory = tempfile::tempdir_in(file.parent().unwrap()).unwrap();
        check_at_each_depth(&|| {
            // Each opening has a file of its own: more than one name has.
            let file = tempfile::tempdir_in(directory.path()).unwrap().keep();
            stage(&file.join("disk.recording"), data).open("disk", ram()).unwrap()
        });
    }
}

/// Writes, reads and ranges, and a request that fails. Returns what was written.
fn use_disk(guest: &mut Harness) -> Vec<u8> {
    let bytes = pattern(7, 12_288);
    guest.store(4096, &bytes);
    assert_eq!(guest.load(8192, 4096), bytes[4096..8192]);
    for operation in [
        Operation::Flush,
        Operation::Discard,
        Operation::WriteZeroes { may_unmap: false },
        Operation::WriteZeroes { may_unmap: true },
    ] {
        let len_bytes = if operation == Operation::Flush { 0 } else { 512 };
        let request = guest.range_request(operation, 0, len_bytes);
        assert_eq!(guest.run_one(request), Ok(()));
    }
    let outside = guest.range_request(Operation::Discard, 8 << 20, 512);
    assert_eq!(guest.run_one(outside), Err(BlockError::OutOfBounds));
    bytes
}

#[test]
fn the_file_has_each_request_with_the_data_that_was_asked_for() {
    for data in [DataMode::None, DataMode::Checksum, DataMode::Full] {
        let (_directory, file) = place();
        let device = stage(&file, data).open("pool/db", ram()).unwrap();
        let recording = device.stages()[0].recording().cloned().unwrap();
        let mut guest = Harness::new(&device, 8);
        let bytes = use_disk(&mut guest);
        drop((guest, device));
        let (header, records) = read(&file);
        assert_eq!((header.data, header.name.as_str()), (data, "pool/db"));
        assert_eq!((header.capacity_bytes, header.block_bytes), (4 << 20, 512));
        let (end, records) = records.split_last().unwrap();
        let closed = Record::End { reason: EndReason::Closed, requests: 7, dropped: 0 };
        assert_eq!(end.0, closed);
        let found = requests(records);
        let facts: Vec<_> = found
            .iter()
            .map(|request| (request.kind, request.offset_bytes, request.len_bytes))
            .collect();
        let expected = [
            (RequestKind::Write, 4096, 12_288),
            (RequestKind::Read, 8192, 4096),
            (RequestKind::Flush, 0, 0),
            (RequestKind::Discard, 0, 512),
            (RequestKind::WriteZeroes, 0, 512),
            (RequestKind::WriteZeroesUnmap, 0, 512),
            (RequestKind::Discard, 8 << 20, 512),
        ];
        assert_eq!(facts, expected);
        let outcomes: Vec<Outcome> = found.iter().map(|request| request.outcome).collect();
        assert_eq!(outcomes, [&[Outcome::Ok; 6][..], &[Outcome::OutOfBounds]].concat());
        let has = |is: bool, sum: u64| is.then_some(sum);
        let of_write = has(data != DataMode::None, checksum(&bytes));
        let of_read = has(data != DataMode::None, checksum(&bytes[4096..8192]));
        let sums: Vec<Option<u64>> = found.iter().map(|request| request.checksum).collect();
        assert_eq!(sums, [of_write, of_read, None, None, None, None, None]);
        assert_eq!(records[0].1, if data == DataMode::Full { bytes } else { Vec::new() });
        assert!(records[1..].iter().all(|(_, data)| data.is_empty()));
        let counts = RecordingCounts { recorded: 7, dropped: 0 };
        assert_eq!((recording.counts(), recording.state()), (counts, RecordingState::Running));
        assert_eq!(recording.file_bytes(), file.metadata().unwrap().len());
        assert_eq!(recording.file(), file);
    }
}

/// Ends the tags of requests that are dropped.
fn take_tags(completed: &mut Batch) {
    for request in completed {
        request.tag.take().map(Tag::into_bits);
    }
}

#[test]
fn times_are_those_of_the_sidecore() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::None).open("disk", ram()).unwrap();
    let now = Rc::new(std::cell::Cell::new(Nanos::from_millis(1_000_000)));
    let its = Rc::clone(&now);
    let core = CoreContext::default().with_clock(move || its.get());
    let mut channel = device.open_channel(&core, 4).unwrap();
    let mut taken = [Nanos::from_millis(1_000_500), Nanos::from_millis(1_000_700)].map(|at| {
        let mut request = BlockRequest::blank(0);
        (request.operation, request.taken_at) = (Operation::Flush, at);
        request.tag = Some(Tag::from_bits(at.0));
        request
    });
    taken.reverse();
    let (mut batch, mut completed) = (Batch::from(taken), Batch::new());
    now.set(Nanos::from_millis(1_000_900));
    channel.exchange(Nanos::from_millis(1_000_800), &mut batch, &mut completed);
    assert_eq!(completed.len(), 2);
    take_tags(&mut completed);
    drop((channel, device));
    let found = requests(&read(&file).1);
    let ms = |ns: u64| ns / 1_000_000;
    assert_eq!(ms(found[0].latency_ns), 200);
    assert_eq!(ms(found[1].latency_ns), 400);
    assert_eq!(ms(found[0].arrival_ns - found[1].arrival_ns), 200);
    // The recording began when the channel was opened, or a moment before.
    assert!((500..60_000).contains(&ms(found[1].arrival_ns)), "{found:?}");
}

/// A front end without data of its own.
struct Own;

impl Context for Own {
    fn into_words(self) -> [u64; 2] {
        [0; 2]
    }

    fn from_words(_: [u64; 2]) -> Self {
        Self
    }
}

#[test]
fn a_flush_that_another_request_needs_has_its_range_and_arrival() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::Full).open("disk", ram()).unwrap();
    let memory = guest_memory();
    let mut engine = InFlight::<Own>::new(Arc::default());
    engine.add_requests(2, 1);
    engine.set_channel(Some(device.open_channel(&CoreContext::default(), 2).unwrap()));
    engine.attach_memory(&memory).unwrap();
    let asked = [(Operation::Write, 4096, Flush::After), (Operation::Read, 8192, Flush::Before)];
    for ((operation, at, flush), now) in asked.into_iter().zip([10, 20].map(Nanos::from_millis)) {
        let mut asked = request(&memory, operation, at, &[(0x10_0000, 512)]);
        asked.taken_at = now;
        engine.submit(asked, Own, flush);
        engine.exchange(now);
        while let Some((Own, ended)) = engine.next_completed(now) {
            assert_eq!((ended.operation, ended.result), (operation, Ok(())));
            engine.recycle(ended);
        }
        assert_eq!(engine.in_flight(), 0);
    }
    drop((engine, device));
    let (_, records) = read(&file);
    let facts: Vec<_> = requests(&records)
        .iter()
        .map(|it| (it.kind, it.offset_bytes, it.len_bytes, it.arrival_ns / 1_000_000))
        .collect();
    let expected = [
        (RequestKind::Write, 4096, 512, 10),
        (RequestKind::Flush, 4096, 512, 10),
        (RequestKind::Flush, 8192, 512, 20),
        (RequestKind::Read, 8192, 512, 20),
    ];
    assert_eq!(facts, expected);
    let data: Vec<usize> = records.iter().map(|(_, data)| data.len()).collect();
    assert_eq!(data, [512, 0, 0, 0, 0]);
}

#[test]
fn times_of_queues_have_one_base() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::None).open("disk", ram()).unwrap();
    let now = Rc::new(std::cell::Cell::new(Nanos::from_millis(1_000_000)));
    // The sidecores' clock does not run as that of the process does.
    for at in [1_000_000, 2_000_000].map(Nanos::from_millis) {
        let its = Rc::clone(&now);
        now.set(at);
        let core = CoreContext::default().with_clock(move || its.get());
        let mut channel = device.open_channel(&core, 1).unwrap();
        let mut flush = BlockRequest::blank(0);
        (flush.operation, flush.taken_at) = (Operation::Flush, at);
        flush.tag = Some(Tag::from_bits(1));
        let (mut batch, mut completed) = (vec![flush], Batch::new());
        channel.exchange(at, &mut batch, &mut completed);
        assert_eq!(completed.len(), 1);
        take_tags(&mut completed);
    }
    drop(device);
    let mut arrivals: Vec<u64> = requests(&read(&file).1).iter().map(|it| it.arrival_ns).collect();
    arrivals.sort_unstable();
    assert_eq!(arrivals[1] - arrivals[0], Nanos::from_millis(1_000_000).0);
}

#[test]
fn queues_have_numbers_and_the_file_goes_on_with_each_of_them() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::None).open("disk", ram()).unwrap();
    for _ in 0..3 {
        let mut one = Harness::new(&device, 8);
        let mut two = Harness::new(&device, 1);
        for guest in [&mut one, &mut two] {
            let flush = guest.range_request(Operation::Flush, 0, 0);
            assert_eq!(guest.run_one(flush), Ok(()));
        }
    }
    drop(device);
    let mut queues: Vec<u16> = requests(&read(&file).1).iter().map(|it| it.queue).collect();
    queues.sort_unstable();
    assert_eq!(queues, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn what_does_not_fit_the_ring_is_missing_and_counted() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::Full).open("disk", ram()).unwrap();
    let recording = device.stages()[0].recording().cloned().unwrap();
    let mut guest = Harness::new(&device, 8);
    // 1 MiB of data and the record's facts are more than the ring has.
    guest.store(0, &pattern(1, 1 << 20));
    guest.store(0, &pattern(2, 1 << 20));
    guest.store(0, &pattern(3, 4096));
    guest.store(0, &pattern(4, 1 << 20));
    drop((guest, device));
    assert_eq!(recording.counts(), RecordingCounts { recorded: 1, dropped: 3 });
    let (_, records) = read(&file);
    let records: Vec<Record> = records.into_iter().map(|(record, _)| record).collect();
    let [Record::Gap { queue, at_ns, requests }, Record::Request(write), end] = records[..] else {
        panic!("{records:?}");
    };
    assert_eq!((queue, at_ns, requests, write.len_bytes), (0, write.arrival_ns, 2, 4096));
    assert_eq!(end, Record::End { reason: EndReason::Closed, requests: 1, dropped: 3 });
}

#[test]
fn a_file_that_is_full_is_complete_and_requests_go_on() {
    let (_directory, file) = place();
    let stage = RecordStage { max_bytes: Some(1 << 20), ..stage(&file, DataMode::Full) };
    let device = stage.open("disk", ram()).unwrap();
    let recording = device.stages()[0].recording().cloned().unwrap();
    let mut guest = Harness::new(&device, 8);
    let mut written = 0_u64;
    while recording.state() == RecordingState::Running {
        assert!(written < 10_000, "the limit does not come");
        guest.store(0, &pattern(written, 65_536));
        written += 1;
    }
    assert_eq!(recording.state(), RecordingState::Full);
    assert_eq!(recording.problem(), None);
    guest.store(0, &pattern(written, 65_536));
    drop((guest, device));
    let size = file.metadata().unwrap().len();
    assert!(size <= 1 << 20 && size > (1 << 20) - 66_000, "{size}");
    let (_, records) = read(&file);
    let Some((Record::End { reason, requests, .. }, _)) = records.last() else {
        panic!("no end");
    };
    assert_eq!((*reason, *requests), (EndReason::Limit, 15));
    assert_eq!(recording.counts().recorded, 15);
    assert_eq!(records[0].1, pattern(0, 65_536));
}

#[test]
fn a_disk_is_served_although_its_recording_cannot_be_made() {
    let stage = stage(Path::new("/proc/no/such/disk.recording"), DataMode::None);
    let device = stage.open("disk", ram()).unwrap();
    let problem = device.stages()[0].recording().cloned().unwrap().problem().unwrap();
    assert!(problem.contains("/proc/no/such/disk.recording"), "{problem}");
    let mut guest = Harness::new(&device, 8);
    guest.store(0, &pattern(1, 4096));
    assert_eq!(guest.load(0, 4096), pattern(1, 4096));
}

#[test]
fn a_recording_that_is_opened_again_has_another_file() {
    let (directory, file) = place();
    let files = || -> Vec<Arc<Recording>> {
        let below = Arc::new(NullStore::new(Geometry::new(1 << 20, 512)));
        let devices = [(); 2]
            .map(|()| stage(&file, DataMode::None).open("disk", Arc::clone(&below) as _).unwrap());
        devices.iter().filter_map(|device| device.stages()[0].recording().cloned()).collect()
    };
    let made: Vec<PathBuf> =
        [files(), files()].concat().iter().map(|it| it.file().to_owned()).collect();
    let names = ["disk.recording", "disk.1.recording", "disk.2.recording", "disk.3.recording"];
    assert_eq!(made, names.map(|name| directory.path().join(name)));
    assert!(made.iter().all(|file| read(file).1.len() == 1));
}

#[test]
fn memory_that_changes_after_the_record_changes_nothing_in_the_file() {
    let (_directory, file) = place();
    let device = stage(&file, DataMode::Full).open("disk", ram()).unwrap();
    let memory = guest_memory();
    let mut channel = device.open_channel(&CoreContext::default(), 4).unwrap();
    channel.attach_memory(&memory).unwrap();
    let address = sidecore_memory::GuestAddress(0x10_0000);
    let hint = &mut sidecore_memory::RegionHint::default();
    memory.write_slice(address, &[1; 8192], hint).unwrap();
    let mut write = request(&memory, Operation::Write, 0, &[(0x10_0000, 8192)]);
    write.tag = Some(Tag::from_bits(1));
    let (mut batch, mut completed) = (vec![write], Batch::new());
    channel.exchange(Nanos(1), &mut batch, &mut completed);
    memory.write_slice(address, &[2; 8192], hint).unwrap();
    take_tags(&mut completed);
    assert_eq!(completed.len(), 1);
    drop((channel, device));
    let (_, records) = read(&file);
    assert_eq!(records[0].1, vec![1; 8192]);
}
