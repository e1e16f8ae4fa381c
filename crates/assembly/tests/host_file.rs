//! A file of the host's filesystem as a disk: its blocks are reached on the device below the
//! filesystem, and through the filesystem while another program has the file open. No data is lost
//! in between.

#[allow(dead_code)]
mod common;
#[path = "../../linux/src/host_file/tests/rig.rs"]
#[allow(dead_code)]
mod rig;

use std::io::Read as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_assembly::spec::{HostFileOptions, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_assembly::{Assembly, AssemblyError};
use sidecore_driver::{BlkClient, Status};
use sidecore_kit::guest::{PAGE, connect, discard, flush, read, write};

use common::{device, until};
use rig::{EXT4, EXT4_1K, Recipe, Rig, XFS};

const PAGES: u64 = 512;
const SECTORS: u64 = PAGE as u64 / 512;

fn spec(directory: &Path, file: &Path) -> Spec {
    named(directory, "disk", file)
}

fn named(directory: &Path, name: &str, file: &Path) -> Spec {
    let kind = StoreKind::HostFile(HostFileOptions::new(file));
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![StoreSpec::new(name, kind)],
        controllers: Vec::new(),
        devices: vec![device(directory, name)],
        ..Spec::default()
    }
}

/// The contents of page `page` after round `round`.
fn byte(page: u64, round: u64) -> u8 {
    (page.wrapping_mul(31) ^ round.wrapping_mul(7)) as u8 | 1
}

/// A guest at work, and the contents that its disk must have.
struct Worker {
    guest: BlkClient,
    /// The byte that each page is full of.
    model: Vec<u8>,
    round: u64,
}

impl Worker {
    /// Writes a page, and reads another.
    fn step(&mut self) {
        self.round += 1;
        let (round, page) = (self.round, self.round * 97 % PAGES);
        assert_eq!(
            write(&mut self.guest, page * SECTORS, byte(page, round)),
            Status::Ok,
            "round {round}"
        );
        self.model[page as usize] = byte(page, round);
        self.check(round * 61 % PAGES);
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    fn check(&mut self, page: u64) {
        let found = read(&mut self.guest, page * SECTORS);
        assert_eq!(found, self.model[page as usize], "round {}, page {page}", self.round);
    }
}

/// Another program opens the file while the guest works. It waits for the release of the lease, and
/// finds all of the guest's data.
fn open_elsewhere(path: &Path, assembly: &Assembly, worker: &mut Worker) {
    let before = worker.model.clone();
    let opened = AtomicBool::new(false);
    let (close, may_close) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // A thread that is started here sees this thread's mounts.
        let opened = &opened;
        let other = scope.spawn(move || {
            let mut file = std::fs::File::open(path).unwrap();
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            opened.store(true, Ordering::Release);
            may_close.recv().unwrap();
            bytes
        });
        while !opened.load(Ordering::Acquire) {
            worker.step();
        }
        worker.steps(100);
        let report = until(assembly, 0, |report| !report.warnings.is_empty());
        let why = "\"disk\" is reached through its filesystem: another program has opened it";
        assert_eq!(report.warnings, [why]);
        close.send(()).unwrap();
        let seen = other.join().unwrap();
        for (page, bytes) in seen.chunks(PAGE).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn");
            // Written since then, or as it was when the program opened the file.
            let written_since = before[page] != worker.model[page];
            assert!(
                written_since || bytes[0] == worker.model[page],
                "page {page} of the other program"
            );
        }
    });
}

fn check(recipe: Recipe) {
    let Some(rig) = Rig::new(recipe) else { return };
    // The first half has blocks, the second half is a hole.
    let path = rig.file("disk.img", &vec![0xee; PAGES as usize / 2 * PAGE]);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGES * PAGE as u64).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), &path);
    let assembly = Assembly::start(&spec).unwrap();
    let model = (0..PAGES).map(|page| if page < PAGES / 2 { 0xee } else { 0 }).collect();
    let mut worker = Worker { guest: connect(&spec.devices[0].socket), model, round: 0 };
    (0..PAGES).step_by(37).for_each(|page| worker.check(page));
    worker.steps(300);
    flush(&mut worker.guest);
    assert_eq!(assembly.devices()[0].warnings, [""; 0]);

    open_elsewhere(&path, &assembly, &mut worker);
    // The program has closed the file, so the blocks are reached directly again.
    while !assembly.devices()[0].warnings.is_empty() {
        worker.step();
    }
    worker.steps(300);
    (0..PAGES).for_each(|page| worker.check(page));
    flush(&mut worker.guest);
    let Worker { guest, model, .. } = worker;
    drop(guest);
    assembly.drain();
    let after = std::fs::read(&path).unwrap();
    for (page, bytes) in after.chunks(PAGE).enumerate() {
        assert!(bytes.iter().all(|byte| *byte == model[page]), "page {page} in the end");
    }
}

#[test]
fn on_ext4() {
    check(EXT4);
}

#[test]
fn on_ext4_with_small_blocks() {
    check(EXT4_1K);
}

#[test]
fn on_xfs() {
    check(XFS);
}

#[test]
fn a_discard_is_answered_while_another_program_has_the_file_and_after() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.file("disk.img", &vec![0xee; 8 * PAGE]);
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), &path);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    discard(&mut guest, 0);
    let other = std::fs::File::open(&path).unwrap();
    until(&assembly, 0, |report| !report.warnings.is_empty());
    discard(&mut guest, SECTORS);
    assert_eq!(write(&mut guest, 2 * SECTORS, 7), Status::Ok);
    drop(other);
    until(&assembly, 0, |report| report.warnings.is_empty());
    discard(&mut guest, 3 * SECTORS);
    let pages: Vec<u8> = (0..5).map(|page| read(&mut guest, page * SECTORS)).collect();
    assert_eq!(pages, [0, 0, 7, 0, 0xee]);
    // The lease is held again: the next program that opens the file waits for its release.
    drop(std::fs::File::open(&path).unwrap());
    until(&assembly, 0, |report| !report.warnings.is_empty());
    assert_eq!(read(&mut guest, 2 * SECTORS), 7);
}

/// The log of this program's tests.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_orderly_end_warns_of_nothing() {
    let Some(rig) = Rig::new(EXT4) else { return };
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_writer(|| Log)
        .init();
    let path = rig.file("calm.img", &vec![1; 1 << 20]);
    let directory = tempfile::tempdir().unwrap();
    let assembly = Assembly::start(&named(directory.path(), "calm", &path)).unwrap();
    assembly.drain();
    drop(assembly);
    let log = LOG.lock().unwrap();
    let log: Vec<&str> =
        std::str::from_utf8(&log).unwrap().lines().filter(|line| line.contains("calm")).collect();
    assert!(log.iter().any(|line| line.contains("lease is released")), "{log:#?}");
    assert!(!log.iter().any(|line| line.contains("WARN") || line.contains("ERROR")), "{log:#?}");
}

#[test]
fn an_unsafe_filesystem_is_refused_with_the_reason() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("disk.img");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let error = Assembly::start(&spec(directory.path(), &path)).err().unwrap();
    assert!(matches!(error, AssemblyError::HostFile { .. }), "{error}");
    assert!(error.to_string().contains("tmpfs"), "{error}");
}

#[test]
fn a_file_that_another_program_has_open_is_refused() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.file("disk.img", &vec![1; 1 << 20]);
    let open = std::fs::File::open(&path).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let error = Assembly::start(&spec(directory.path(), &path)).err().unwrap();
    assert!(error.to_string().contains("another program has"), "{error}");
    drop(open);
    drop(Assembly::start(&spec(directory.path(), &path)).unwrap());
}
