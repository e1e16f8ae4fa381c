//! A daemon deduplicates two volumes under guests that write to them, and is killed meanwhile.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_control::report::DedupPhase;
use sidecore_control::{Client, Dedup};
use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_kit::guest::complete;
use sidecore_kit::process::Process;
use sidecore_units::Sector;

const PAGE: usize = 4096;
const PAGES: u64 = 1024;
/// Different contents of a page: few, so that many pages are equal.
const CONTENTS: u64 = 5;

/// The directories of a daemon: its sockets and its log are on tmpfs, its pool is not.
struct Place {
    run: tempfile::TempDir,
    disk: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self {
            run: tempfile::tempdir_in("/dev/shm").unwrap(),
            disk: tempfile::tempdir().unwrap(),
        };
        std::fs::File::create(place.disk.path().join("pool")).unwrap().set_len(64 << 20).unwrap();
        place
    }

    fn start(&self) -> Process {
        let mut text = format!(
            "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
             [[store]]\nname = \"below\"\ntype = \"file\"\npath = \"{}\"\ndirect = false\n\
             [[controller]]\nname = \"pool\"\nstore = \"below\"\nformat = \"blank\"\n\
             commit_interval_ms = 200\n",
            self.disk.path().join("pool").display(),
        );
        for volume in ["a", "b"] {
            text.push_str(&format!(
                "[[store]]\nname = \"{volume}\"\ntype = \"volume\"\ncontroller = \"pool\"\n\
                 volume = \"{volume}\"\nsize = \"8MiB\"\n[[device]]\nname = \"{volume}\"\n\
                 store = \"{volume}\"\nsocket = \"{volume}.sock\"\n"
            ));
        }
        let file = self.run.path().join("disks.toml");
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidecored"));
        command.arg("--config").arg(file).env("RUST_LOG", "error");
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
        let mut daemon = Process::start(command.stdout(Stdio::piped())).unwrap();
        assert_eq!(daemon.first_line().unwrap(), "ready: 2 devices\n");
        daemon
    }

    fn control(&self) -> Client {
        Client::new(&self.run.path().join("control.sock")).unwrap()
    }

    fn guest(&self, volume: &str) -> BlkClient {
        let socket = self.run.path().join(format!("{volume}.sock"));
        BlkClient::connect(socket, &ClientOptions::default()).unwrap()
    }

    /// A deduplication to its end.
    fn dedup(&self) -> u64 {
        let control = self.control();
        let request = Dedup { across: true, rate_bytes_per_s: Some(1 << 40), ..Dedup::default() };
        control.start_dedup("pool", &request).unwrap();
        let started = Instant::now();
        loop {
            let report = control.dedup("pool").unwrap();
            match report.state {
                DedupPhase::Done => return report.counts.saved_bytes,
                DedupPhase::Running => std::thread::sleep(Duration::from_millis(5)),
                _ => panic!("{report:?}"),
            }
            assert!(started.elapsed() < Duration::from_secs(60), "{report:?}");
        }
    }
}

/// The contents of a page, by their number.
fn page(contents: u64) -> Vec<u8> {
    (0..PAGE as u64 / 8).flat_map(|word| (contents * 1000 + word + 1).to_le_bytes()).collect()
}

/// A guest that writes pages, and remembers what it has written.
struct Guest {
    client: BlkClient,
    written: Vec<u64>,
    random: u64,
}

impl Guest {
    fn new(client: BlkClient, written: Vec<u64>, seed: u64) -> Self {
        Self { client, written, random: seed }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % below
    }

    fn write(&mut self, at: u64, contents: u64) {
        let queue = self.client.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        queue.write_data(slot, 0, &page(contents));
        queue.submit_write(slot, Sector(at * PAGE as u64 / 512), PAGE as u32).unwrap();
        assert_eq!(complete(queue).status, Status::Ok);
        queue.release_slot(slot);
        self.written[at as usize] = contents;
    }

    fn check(&mut self, at: u64) {
        let expected = self.written[at as usize];
        let queue = self.client.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        queue.submit_read(slot, Sector(at * PAGE as u64 / 512), PAGE as u32).unwrap();
        assert_eq!(complete(queue).status, Status::Ok);
        let mut found = vec![0; PAGE];
        queue.read_data(slot, 0, &mut found);
        queue.release_slot(slot);
        assert!(found == page(expected), "page {at} is not {expected}");
    }

    /// Writes and reads pages until it is to stop. Returns what is written where.
    fn work(mut self, stop: &AtomicBool) -> Vec<u64> {
        while !stop.load(Ordering::Relaxed) {
            let (at, contents) = (self.random(PAGES), self.random(CONTENTS));
            if self.random(3) == 0 {
                self.write(at, contents);
            } else {
                self.check(at);
            }
        }
        self.written
    }
}

#[test]
fn guests_keep_what_they_wrote_under_deduplications_and_kills() {
    let place = Place::new();
    let mut daemon = place.start();
    let mut written: Vec<Vec<u64>> = Vec::new();
    for volume in ["a", "b"] {
        let mut guest = Guest::new(place.guest(volume), vec![0; PAGES as usize], 1);
        for at in 0..PAGES {
            guest.write(at, at % CONTENTS);
        }
        written.push(guest.written);
    }
    let mut saved = 0;
    for round in 0..4_u64 {
        let stop = AtomicBool::new(false);
        written = std::thread::scope(|scope| {
            let guests: Vec<_> = ["a", "b"]
                .into_iter()
                .zip(&written)
                .map(|(volume, written)| {
                    let guest = Guest::new(place.guest(volume), written.clone(), round + 7);
                    let stop = &stop;
                    scope.spawn(move || guest.work(stop))
                })
                .collect();
            saved += place.dedup();
            if round % 2 == 1 {
                // One that is in progress when the daemon dies.
                let request =
                    Dedup { across: true, rate_bytes_per_s: Some(16 << 20), ..Dedup::default() };
                place.control().start_dedup("pool", &request).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
            stop.store(true, Ordering::Relaxed);
            guests.into_iter().map(|guest| guest.join().unwrap()).collect()
        });
        if round % 2 == 1 {
            // Dropped, it is killed.
            drop(daemon);
            daemon = place.start();
        }
        for (volume, written) in ["a", "b"].into_iter().zip(&written) {
            let mut guest = Guest::new(place.guest(volume), written.clone(), 1);
            for at in 0..PAGES {
                guest.check(at);
            }
        }
        assert!(place.control().check_controller("pool").unwrap().clean);
    }
    assert!(saved > 4 << 20, "{saved}");
    // A block that earlier remaps refer to from elsewhere is freed with its last reference, and
    // each run moves one. So after these runs without guests, whatever they wrote when, only blocks
    // with five references or more may be left, and one of each kind.
    for _ in 0..4 {
        place.dedup();
    }
    let space = place.control().controller("pool").unwrap().space;
    let mapped = 2 * PAGES * PAGE as u64;
    assert!(space.data_bytes < mapped / 2, "{space:?}");
}
