//! A file of the host's filesystem as a disk: reached on the device below, and through the filesystem from the moment
//! that another program opens it until that has closed it, with nothing lost in between.

#[allow(dead_code)]
mod common;
#[path = "common/guest.rs"]
mod guest;
#[path = "../../linux/src/host_file/tests/rig.rs"]
#[allow(dead_code)]
mod rig;

use std::io::Read as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_assembly::spec::{HostFileOptions, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_assembly::{Assembly, AssemblyError};
use sidecore_driver::Status;

use common::{device, until};
use guest::{PAGE, connect, discard, flush, read, write};
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
    }
}

/// What page `page` holds after round `round`.
fn byte(page: u64, round: u64) -> u8 {
    (page.wrapping_mul(31) ^ round.wrapping_mul(7)) as u8 | 1
}

fn check(recipe: Recipe) {
    let Some(rig) = Rig::new(recipe) else { return };
    // Half of it has blocks, the other half is hole.
    let path = rig.file("disk.img", &vec![0xee; PAGES as usize / 2 * PAGE]);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(PAGES * PAGE as u64).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), &path);
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    let mut model: Vec<u8> = (0..PAGES).map(|page| if page < PAGES / 2 { 0xee } else { 0 }).collect();
    for page in (0..PAGES).step_by(37) {
        assert_eq!(read(&mut guest, page * SECTORS), model[page as usize], "page {page}");
    }
    let mut round = 0;
    let mut step = |guest: &mut sidecore_driver::BlkClient, model: &mut Vec<u8>| {
        round += 1;
        let page = round * 97 % PAGES;
        assert_eq!(write(guest, page * SECTORS, byte(page, round)), Status::Ok, "round {round}");
        model[page as usize] = byte(page, round);
        let other = round * 61 % PAGES;
        assert_eq!(read(guest, other * SECTORS), model[other as usize], "round {round}, page {other}");
    };
    for _ in 0..300 {
        step(&mut guest, &mut model);
    }
    flush(&mut guest);
    let before = model.clone();

    assert_eq!(assembly.devices()[0].warnings, [""; 0]);

    // Another program opens it while the guest works: it waits until the file is its
    // own as well, and finds everything in it.
    let opened = AtomicBool::new(false);
    let (close, may_close) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // A thread made here sees this thread's mounts.
        let (path, opened) = (&path, &opened);
        let other = scope.spawn(move || {
            let mut file = std::fs::File::open(path).unwrap();
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            opened.store(true, Ordering::Release);
            may_close.recv().unwrap();
            bytes
        });
        while !opened.load(Ordering::Acquire) {
            step(&mut guest, &mut model);
        }
        for _ in 0..100 {
            step(&mut guest, &mut model);
        }
        let report = until(&assembly, 0, |report| !report.warnings.is_empty());
        let why = "\"disk\" is reached through its filesystem: another program has opened it";
        assert_eq!(report.warnings, [why]);
        close.send(()).unwrap();
        let seen = other.join().unwrap();
        for (page, bytes) in seen.chunks(PAGE).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn");
            // Written since then, or as it was when the program opened it.
            let written_since = before[page] != model[page];
            assert!(written_since || bytes[0] == model[page], "page {page} of what the other program read");
        }
    });
    // It is closed again, and the blocks are reached directly as before.
    while !assembly.devices()[0].warnings.is_empty() {
        step(&mut guest, &mut model);
    }
    for _ in 0..300 {
        step(&mut guest, &mut model);
    }
    for page in 0..PAGES {
        assert_eq!(read(&mut guest, page * SECTORS), model[page as usize], "page {page}");
    }
    flush(&mut guest);
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
    // The lease is held again: whoever opens the file has to wait, and is noticed.
    drop(std::fs::File::open(&path).unwrap());
    until(&assembly, 0, |report| !report.warnings.is_empty());
    assert_eq!(read(&mut guest, 2 * SECTORS), 7);
}

/// All that is logged by this program's tests.
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
    let log: Vec<&str> = std::str::from_utf8(&log).unwrap().lines().filter(|line| line.contains("calm")).collect();
    assert!(log.iter().any(|line| line.contains("lease is released")), "{log:#?}");
    assert!(!log.iter().any(|line| line.contains("WARN") || line.contains("ERROR")), "{log:#?}");
}

#[test]
fn what_is_not_safe_is_refused_with_the_reason() {
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
