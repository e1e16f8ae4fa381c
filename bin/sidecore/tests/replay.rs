//! A guest's requests are recorded while it uses its disk, and replayed on another one.

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{Daemon, directory, failure, stdout};
use serde_json::Value;
use sidecore_driver::{BlkClient, ClientOptions, Notify, Operation, Slot, Status};
use sidecore_recording::{
    DataMode, EndReason, Header, Outcome, Record, Request, RequestKind, checksum,
};
use sidecore_units::Sector;

const DISK_BYTES: usize = 4 << 20;
/// The largest request of the guest.
const BUFFER_BYTES: usize = 64 << 10;
/// Bytes behind those that the guest writes: only read.
const READ_ONLY_AT: usize = 3 << 20;

/// The file of the recordings that the daemon makes.
const RECORDING: &str = "recordings/a.recording";

const CONFIG: &str = r#"
control_socket = "control.sock"
recording_directory = "recordings"
[[sidecore]]
name = "sc0"
[[store]]
name = "a"
type = "file"
path = "a.img"
[[store]]
name = "b"
type = "file"
path = "b.img"
[[store]]
name = "protected"
type = "store"
store = "b"
[[store.stage]]
type = "read-only"
[[device]]
name = "vda"
store = "a"
socket = "a.sock"
[[device]]
name = "vdb"
store = "b"
socket = "b.sock"
[[device]]
name = "vdc"
store = "protected"
socket = "c.sock"
"#;

/// A daemon with two equal disks.
fn daemon() -> Daemon {
    let directory = directory(CONFIG);
    let bytes: Vec<u8> =
        (0..DISK_BYTES as u32).map(|at| (at.wrapping_mul(at) >> 9) as u8 | 1).collect();
    for name in ["a.img", "b.img"] {
        fs::write(directory.path().join(name), &bytes).unwrap();
    }
    Daemon::start(directory)
}

/// A guest with several requests in flight.
struct Guest {
    client: BlkClient,
    random: u64,
    /// The sectors of the requests in flight, by slot.
    in_flight: Vec<Option<(u64, u64)>>,
}

impl Guest {
    fn connect(socket: &Path) -> Self {
        let options = ClientOptions {
            slots: 8,
            slot_bytes: BUFFER_BYTES as u32,
            notify: Notify::Interrupt,
            huge_pages: false,
            ..ClientOptions::default()
        };
        let client = BlkClient::connect(socket, &options).unwrap();
        Self { client, random: 1, in_flight: vec![None; 8] }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % below
    }

    /// Waits for one request, or all.
    fn wait(&mut self, all: bool) {
        let queue = self.client.queue(0).unwrap();
        queue.publish().unwrap();
        let mut completions = Vec::new();
        while queue.poll_completions(&mut completions).unwrap() == 0
            || (all && queue.in_flight() > 0)
        {
            if queue.in_flight() > 0 {
                assert!(queue.wait(Duration::from_secs(60)).unwrap(), "no completion");
            }
        }
        for completion in completions {
            assert_eq!(completion.status, Status::Ok);
            self.in_flight[completion.slot.index()] = None;
            queue.release_slot(completion.slot);
        }
    }

    /// A slot for a request of these sectors, with which none in flight overlaps.
    fn slot(&mut self, (start, end): (u64, u64)) -> Slot {
        let overlaps = |other: &(u64, u64)| start < other.1 && other.0 < end;
        while self.in_flight.iter().flatten().any(overlaps) {
            self.wait(false);
        }
        loop {
            if let Some(slot) = self.client.queue(0).unwrap().take_slot() {
                self.in_flight[slot.index()] = Some((start, end));
                return slot;
            }
            self.wait(false);
        }
    }

    fn request(&mut self, operation: Operation, start: u64, sectors: u64) {
        let slot = self.slot((start, start + sectors));
        let byte = self.random(255) as u8;
        let (sector, bytes) = (Sector(start), sectors as u32 * 512);
        let queue = self.client.queue(0).unwrap();
        match operation {
            Operation::Read => queue.submit_read(slot, sector, bytes),
            Operation::Write => {
                queue.write_data(slot, 0, &vec![byte; bytes as usize]);
                queue.submit_write(slot, sector, bytes)
            }
            Operation::WriteZeroes => {
                queue.submit_write_zeroes(slot, sector, sectors as u32, byte.is_multiple_of(2))
            }
            _ => queue.submit_flush(slot),
        }
        .unwrap();
    }

    /// Writes the whole disk.
    fn write_all(&mut self, bytes: &[u8]) {
        for (start, part) in (0..).step_by(BUFFER_BYTES / 512).zip(bytes.chunks(BUFFER_BYTES)) {
            let sectors = part.len() as u64 / 512;
            let slot = self.slot((start, start + sectors));
            let queue = self.client.queue(0).unwrap();
            queue.write_data(slot, 0, part);
            queue.submit_write(slot, Sector(start), part.len() as u32).unwrap();
        }
        self.wait(true);
    }

    /// Requests of all kinds, and many that overlap earlier ones.
    fn use_disk(&mut self, count: u64) {
        let sectors = READ_ONLY_AT as u64 / 512;
        for _ in 0..count {
            let len = 1 + self.random(BUFFER_BYTES as u64 / 512);
            let start = self.random(sectors - len);
            match self.random(10) {
                0..4 => self.request(Operation::Write, start, len),
                // The same page again and again: the last one counts.
                4 => self.request(Operation::Write, 8, 8),
                5..8 => self.request(Operation::Read, start, len),
                8 => self.request(Operation::WriteZeroes, start, len),
                _ => self.request(Operation::Flush, 0, 0),
            }
        }
        self.request(Operation::Read, READ_ONLY_AT as u64 / 512, 8);
        self.wait(true);
    }
}

/// Records a guest's use of the first disk, while the guest is there.
fn record(daemon: &Daemon, data: &str, count: u64) -> Guest {
    let path = daemon.path();
    let mut guest = Guest::connect(&path.join("a.sock"));
    let data = format!("data={data}");
    stdout(path, &["stage", "add", "vda", "record", "file=a.recording", &data, "buffer_mib=16"]);
    guest.use_disk(count);
    guest
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_replay_makes_an_equal_disk_and_finds_a_byte_that_differs() {
    let daemon = daemon();
    let path = daemon.path();
    let guest = record(&daemon, "full", 400);
    let list = stdout(path, &["stage", "list", "vda"]);
    assert!(list.contains("0 missing, in ") && list.contains(RECORDING), "{list}");
    let elsewhere = ["stage", "add", "vda", "record", "file=./a.recording"];
    let (_, said) = failure(path, &elsewhere);
    assert!(said.contains("`recording_directory`"), "{said}");
    stdout(path, &["stage", "remove", "vda", "record"]);
    drop(guest);
    let summary = json(&stdout(path, &["replay", RECORDING, "--dry-run", "--json"]));
    assert_eq!((&summary["name"], &summary["end"]), (&"vda".into(), &"closed".into()));
    let requests = |report: &Value| -> u64 {
        let kinds = report["requests"].as_object().unwrap().values();
        kinds.map(|kind| kind["requests"].as_u64().unwrap()).sum()
    };
    assert_eq!((requests(&summary), summary["missing"].as_u64()), (401, Some(0)));

    // Reads alone change nothing.
    let before = fs::read(path.join("b.img")).unwrap();
    let text = stdout(path, &["replay", RECORDING, "b.sock"]);
    assert!(text.contains("were not replayed: --write does"), "{text}");
    assert!(text.contains("differences: 0 in results, 0 in data"), "{text}");
    assert!(fs::read(path.join("b.img")).unwrap() == before, "a replay of reads writes");

    let whole = ["replay", RECORDING, "b.sock", "--write", "--json"];
    let report = json(&stdout(path, &whole));
    let replay = &report["replay"];
    assert_eq!(requests(replay), 401, "{replay}");
    assert!(replay["compared_reads"].as_u64().unwrap() > 20, "{replay}");
    assert!(replay["latency_ns"]["p50"].as_u64().unwrap() > 0, "{replay}");
    let (a, b) = ("a.img", "b.img");
    assert!(fs::read(path.join(a)).unwrap() == fs::read(path.join(b)).unwrap(), "they differ");
    assert!(fs::read(path.join(b)).unwrap() != before, "nothing was written");

    // The disk as it was before, but for a bit of the data that is only read.
    let mut other = before;
    other[READ_ONLY_AT + 77] ^= 4;
    Guest::connect(&path.join("b.sock")).write_all(&other);
    let output = common::command(path, &["replay", RECORDING, "b.sock"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("differences: 0 in results, 1 in data"), "{text}");
    assert!(text.contains(&format!("read of bytes {READ_ONLY_AT}+4096")), "{text}");
    let (_, said) = failure(path, &["replay", RECORDING, "c.sock", "--write"]);
    assert!(said.contains("c.sock is a read-only device"), "{said}");
}

#[test]
fn a_recording_without_data_replays_its_load() {
    let daemon = daemon();
    let path = daemon.path();
    drop(record(&daemon, "none", 50));
    stdout(path, &["stage", "remove", "vda", "1"]);
    let report = json(&stdout(path, &["replay", RECORDING, "b.sock", "--write", "--json"]));
    let replay = &report["replay"];
    let writes = replay["requests"]["write"]["requests"].as_u64().unwrap();
    assert!(writes > 0, "{replay}");
    assert_eq!(replay["made_up_writes"].as_u64(), Some(writes), "{replay}");
    assert_eq!(replay["compared_reads"].as_u64(), Some(0), "{replay}");
}

/// A read of the first page, with the checksum of this data.
fn read(arrival_ns: u64, data: &[u8]) -> Request {
    Request {
        kind: RequestKind::Read,
        queue: 0,
        write_through: false,
        outcome: Outcome::Ok,
        errno: 0,
        checksum: Some(checksum(data)),
        arrival_ns,
        latency_ns: 1_000,
        offset_bytes: 0,
        len_bytes: 4096,
    }
}

/// Writes a recording with these requests.
fn made(file: &Path, requests: &[Request]) {
    let (data, block_bytes, started_unix_ns) = (DataMode::Checksum, 512, 1 << 60);
    let (capacity_bytes, name) = (DISK_BYTES as u64, "made\u{1b}[2J".to_owned());
    let header = Header { data, capacity_bytes, block_bytes, started_unix_ns, name };
    let mut bytes = header.encode().to_vec();
    requests.iter().for_each(|request| Record::Request(*request).append_to(&mut bytes, &[]));
    let (reason, requests) = (EndReason::Closed, requests.len() as u64);
    Record::End { reason, requests, dropped: 0 }.append_to(&mut bytes, &[]);
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_replay_in_time_keeps_the_times_and_tells_results_that_differ() {
    let daemon = daemon();
    let path = daemon.path();
    let page = fs::read(path.join("b.img")).unwrap()[..4096].to_vec();
    let file = path.join("made.recording");
    let times = [0, 100_000_000, 200_000_000].map(|after| 5_000_000_000 + after);
    made(&file, &times.map(|at| read(at, &page)));
    for (speed, least_ns) in [("1", 200_000_000), ("2.0", 100_000_000)] {
        let arguments = ["replay", "made.recording", "b.sock", "--in-time", "--speed", speed];
        let report = json(&stdout(path, &[&arguments[..], &["--json"]].concat()));
        let replay = &report["replay"];
        assert!(replay["elapsed_ns"].as_u64().unwrap() >= least_ns, "{replay}");
        assert!(replay["lateness_ns"]["max"].is_u64(), "{replay}");
        assert_eq!(replay["compared_reads"], 3, "{replay}");
    }
    let failed = Request { outcome: Outcome::Io, errno: 5, checksum: None, ..read(0, &page) };
    let outside = Request { offset_bytes: DISK_BYTES as u64, ..read(10_000, &page) };
    made(&file, &[failed, outside, read(20_000, &page)]);
    let arguments = ["replay", "made.recording", "b.sock"];
    let output = common::command(path, &arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("differences: 1 in results, 0 in data"), "{text}");
    assert!(text.contains("recorded I/O error (errno 5), replayed success"), "{text}");
    assert!(text.contains("1 requests do not fit the device"), "{text}");
    assert!(text.contains("\"made [2J\""), "a control character is printed: {text}");
}

#[test]
fn files_that_are_damaged_or_no_recordings_are_named() {
    let directory = directory(CONFIG);
    let path = directory.path();
    let file = path.join("made.recording");
    made(&file, &[read(0, &[1; 4096]), read(5, &[1; 4096])]);
    let dry = ["replay", "made.recording", "--dry-run"];
    let text = stdout(path, &dry);
    assert!(text.contains("read") && text.contains("8KiB"), "{text}");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 40]).unwrap();
    let output = common::command(path, &dry).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("cut off") && said.contains("the records before count"), "{said}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("4KiB"), "the first is read");
    fs::write(&file, "something else").unwrap();
    let (code, said) = failure(path, &dry);
    assert_eq!(code, Some(1));
    assert!(said.contains("no recording of Sidecore"), "{said}");
    let (code, _) = failure(path, &["replay", "made.recording"]);
    assert_eq!(code, Some(2), "a device or --dry-run is needed");
}
