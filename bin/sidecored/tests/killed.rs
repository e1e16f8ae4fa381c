//! The daemon is killed while its guests live: the writes that were answered are there.

use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use sidecore_control::{Client, NewDevice};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_kit::guest::complete;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_units::Sector;

const WRITES: u64 = 100;
const WRITE_BYTES: u32 = 4096;
/// The writes go to fresh blocks, of which no two are contiguous.
const STRIDE_SECTORS: u64 = 24;

/// The directories of a daemon: its sockets and logs are on tmpfs, its pool is not.
struct Place {
    run: tempfile::TempDir,
    disk: tempfile::TempDir,
    /// Further keys of the controller.
    keys: String,
}

impl Place {
    fn new(keys: &str) -> Self {
        let place = Self {
            run: tempfile::tempdir_in("/dev/shm").unwrap(),
            disk: tempfile::tempdir().unwrap(),
            keys: keys.to_owned(),
        };
        std::fs::File::create(place.disk.path().join("pool")).unwrap().set_len(64 << 20).unwrap();
        place
    }

    /// A pool with a device for each of these volumes, which commits only when it has to.
    fn config(&self, volumes: &[&str]) -> String {
        let mut text = format!(
            "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
             [[store]]\nname = \"below\"\ntype = \"file\"\npath = \"{}\"\ndirect = false\n\
             [[controller]]\nname = \"pool\"\nstore = \"below\"\nformat = \"blank\"\n\
             commit_interval_ms = 3600000\n{}\n",
            self.disk.path().join("pool").display(),
            self.keys,
        );
        for volume in volumes {
            let _ = write!(
                text,
                "[[store]]\nname = \"{volume}\"\ntype = \"volume\"\ncontroller = \"pool\"\n\
                 volume = \"{volume}\"\n\
                 size = \"16MiB\"\n[[device]]\nname = \"{volume}\"\nstore = \"{volume}\"\n\
                 socket = \"{volume}.sock\"\n"
            );
        }
        text
    }

    fn start(&self, volumes: &[&str]) -> Process {
        let file = self.run.path().join("disks.toml");
        std::fs::write(&file, self.config(volumes)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidecored"));
        command
            .arg("--config")
            .arg(file)
            .env("RUST_LOG", "warn")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS");
        let mut daemon = Process::start(command.stdout(Stdio::piped())).unwrap();
        assert_eq!(daemon.first_line().unwrap(), format!("ready: {} devices\n", volumes.len()));
        daemon
    }

    fn client(&self, volume: &str) -> BlkClient {
        BlkClient::connect(
            self.run.path().join(format!("{volume}.sock")),
            &ClientOptions::default(),
        )
        .unwrap()
    }

    /// Serves a volume that is not in the configuration.
    fn serve(&self, volume: &str) -> BlkClient {
        let socket = self.run.path().join(format!("{volume}.sock"));
        let device = NewDevice::new(volume, &socket).of_volume("pool", volume);
        self.control().add_device(&device).unwrap();
        self.client(volume)
    }

    fn control(&self) -> Client {
        Client::new(&self.run.path().join("control.sock")).unwrap()
    }

    fn logs(&self) -> usize {
        std::fs::read_dir(self.run.path().join("log")).map_or(0, Iterator::count)
    }
}

/// Terminates the daemon, and waits for its end in order.
fn end(mut daemon: Process) {
    daemon.signal(Signal::TERM).unwrap();
    assert!(daemon.wait().unwrap().success());
}

/// Completes one request.
fn one(queue: &mut BlkQueue) {
    assert_eq!(complete(queue).status, Status::Ok);
}

fn data(seed: u64, index: u64) -> Vec<u8> {
    (0..WRITE_BYTES as u64).map(|at| (at / 512 + seed * 31 + index * 7 + 1) as u8).collect()
}

fn sector(index: u64) -> Sector {
    Sector(index * STRIDE_SECTORS)
}

fn write(queue: &mut BlkQueue, slot: Slot, seed: u64, index: u64) {
    queue.write_data(slot, 0, &data(seed, index));
    queue.submit_write(slot, sector(index), WRITE_BYTES).unwrap();
    one(queue);
}

fn read(queue: &mut BlkQueue, slot: Slot, index: u64) -> Vec<u8> {
    queue.write_data(slot, 0, &[0xee; WRITE_BYTES as usize]);
    queue.submit_read(slot, sector(index), WRITE_BYTES).unwrap();
    one(queue);
    let mut back = vec![0; WRITE_BYTES as usize];
    queue.read_data(slot, 0, &mut back);
    back
}

/// The indexes of the writes whose data is missing.
fn missing(place: &Place, volume: &str, expected: impl Fn(u64) -> Vec<u8>) -> Vec<u64> {
    let mut client = place.client(volume);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    let missing =
        (0..WRITES).filter(|index| read(queue, slot, *index) != expected(*index)).collect();
    // The next flush must succeed, too.
    queue.submit_flush(slot).unwrap();
    one(queue);
    missing
}

fn fill(place: &Place, volume: &str, seed: u64) {
    let mut client = place.client(volume);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for index in 0..WRITES {
        write(queue, slot, seed, index);
    }
    for index in 0..WRITES {
        assert!(read(queue, slot, index) == data(seed, index));
    }
}

#[test]
fn answered_writes_to_fresh_blocks_are_there_after_the_daemon_was_killed() {
    let place = Place::new("");
    let daemon = place.start(&["a", "b"]);
    fill(&place, "a", 1);
    fill(&place, "b", 2);
    drop(daemon);
    let daemon = place.start(&["a", "b"]);
    assert_eq!(missing(&place, "a", |index| data(1, index)), [0_u64; 0]);
    assert_eq!(missing(&place, "b", |index| data(2, index)), [0_u64; 0]);
    // Clients may be gone at the end, so the log is of no use any more.
    assert_eq!(place.logs(), 1);
    end(daemon);
    assert_eq!(place.logs(), 0);
    let daemon = place.start(&["a", "b"]);
    assert_eq!(missing(&place, "a", |index| data(1, index)), [0_u64; 0]);
    assert!(place.control().check_controller("pool").unwrap().clean);
    end(daemon);
}

/// Overwrites, discards, snapshots and clones, with several kills.
fn history(place: &Place) {
    let zeroes = || vec![0; WRITE_BYTES as usize];
    let mut daemon = place.start(&["a"]);
    fill(place, "a", 1);
    for round in 0..3_u64 {
        let (snapshot, clone) = (format!("s{round}"), format!("c{round}"));
        place.control().snapshot_volume("pool", "a", &snapshot).unwrap();
        place.control().clone_volume("pool", "a", &clone).unwrap();
        let before: Vec<Vec<u8>> = {
            let mut client = place.serve(&clone);
            let queue = client.queue(0).unwrap();
            let slot = queue.take_slot().unwrap();
            let before = (0..WRITES).map(|index| read(queue, slot, index)).collect();
            // Into blocks that the clone shares with other volumes.
            for index in (0..WRITES).step_by(5) {
                write(queue, slot, round + 30, index);
            }
            before
        };
        {
            let mut client = place.client("a");
            let queue = client.queue(0).unwrap();
            let slot = queue.take_slot().unwrap();
            // Copies on write, then holes, then fresh blocks in some of the holes.
            for index in (0..WRITES).step_by(2) {
                write(queue, slot, round + 10, index);
            }
            for index in (0..WRITES).step_by(3) {
                queue.submit_discard(slot, sector(index), WRITE_BYTES / 512).unwrap();
                one(queue);
            }
            for index in (0..WRITES).step_by(9) {
                write(queue, slot, round + 20, index);
            }
        }
        drop(daemon);
        daemon = place.start(&["a"]);
        let expected = |index: u64| match index {
            index if index.is_multiple_of(9) => data(round + 20, index),
            index if index.is_multiple_of(3) => zeroes(),
            index if index.is_multiple_of(2) => data(round + 10, index),
            index => data(1, index),
        };
        assert_eq!(missing(place, "a", expected), [0_u64; 0], "round {round}");
        assert!(place.control().volume("pool", &snapshot).is_ok());
        drop(place.serve(&clone));
        let expected = |index: u64| match index {
            index if index.is_multiple_of(5) => data(round + 30, index),
            index => before[index as usize].clone(),
        };
        assert_eq!(missing(place, &clone, expected), [0_u64; 0], "clone {round}");
    }
    let report = place.control().check_controller("pool").unwrap();
    assert!(report.clean, "{:?}", report.problems);
    end(daemon);
}

#[test]
fn a_history_with_snapshots_and_discards_survives_several_kills() {
    history(&Place::new(""));
}

#[test]
fn a_tiny_log_makes_room_by_committing() {
    // Room for 63 changes between two commits.
    history(&Place::new("crash_log_size = \"8KiB\""));
}

#[test]
fn without_memory_that_outlives_it_the_daemon_answers_durable_writes_only() {
    let elsewhere = tempfile::tempdir().unwrap();
    history(&Place::new(&format!("crash_log = \"{}\"", elsewhere.path().display())));
}

#[test]
fn a_client_that_misses_answered_writes_is_refused_until_the_operator_accepts_the_loss() {
    let place = Place::new("");
    let daemon = place.start(&["a"]);
    let mut client = place.client("a");
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, 0);
    drop(daemon);
    std::fs::remove_dir_all(place.run.path().join("log")).unwrap();
    // The next daemon's log has nothing to say of the first one's either.
    drop(place.start(&["a"]));
    let daemon = place.start(&["a"]);
    let socket = place.run.path().join("a.sock");
    // One request was used; whether the last message of the setup is answered is a matter of
    // timing.
    let _ = client.reconnect(&socket, &ClientOptions::default(), &[1]);
    let control = place.control();
    let device = || control.devices().unwrap().remove(0);
    wait::until("the device disconnects its guest", Duration::from_secs(60), || {
        device().disconnect.is_some()
    });
    let reason = device().disconnect.unwrap().reason;
    assert!(reason.contains("writes that were answered may be missing"), "{reason}");
    assert!(device().warnings[0].contains("accept-loss a"), "{:?}", device().warnings);
    // A guest that starts anew relies on no earlier write.
    let mut other = place.client("a");
    let queue = other.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert!(read(queue, slot, 0) == vec![0; WRITE_BYTES as usize]);
    drop(other);
    control.accept_loss("a").unwrap();
    client.reconnect(&socket, &ClientOptions::default(), &[1]).unwrap();
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert!(read(queue, slot, 0) == vec![0; WRITE_BYTES as usize]);
    assert!(device().warnings.is_empty(), "{:?}", device().warnings);
    // After an orderly end nothing is missing.
    end(daemon);
    let daemon = place.start(&["a"]);
    let error = control.accept_loss("a").unwrap_err().to_string();
    assert!(error.contains("no answered writes are missing"), "{error}");
    end(daemon);
}
