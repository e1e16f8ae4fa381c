//! A disk with checksums of a daemon: a block that changes at rest, and a store without checksums.

mod common;

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use common::remote::{BLOCK, data, flush, iohost, lose, pause, read, submit, vmhost, write};
use common::{Daemon, on_stages, state, waits_without};
use sidecore_control::report::DeviceState;
use sidecore_driver::{BlkClient, ClientOptions, Slot, Status};
use sidecore_kit::wait;
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_integrity::{FormatOptions, Layout, format};
use sidecore_units::Sector;

const BLOCK_BYTES: usize = BLOCK as usize;
const SOON: Duration = Duration::from_secs(60);

/// Makes a store with checksums.
fn formatted(image: &Path) -> Layout {
    std::fs::File::create(image).unwrap().set_len(4 << 20).unwrap();
    let store = FileStore::open(&FileOptions::new(image)).unwrap();
    let options = FormatOptions { uuid: [5; 16], block_bytes: BLOCK, slots: None, force: false };
    format(&store, &options).unwrap()
}

#[derive(Clone, Copy)]
enum Request<'a> {
    Write(&'a [u8]),
    Read,
    Flush,
}

/// Runs one request for block 1, and returns its status and the data of the buffer.
fn run(client: &mut BlkClient, request: Request<'_>) -> (Status, Vec<u8>) {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    match request {
        Request::Write(data) => {
            queue.write_data(slot, 0, data);
            queue.submit_write(slot, Sector(8), data.len() as u32).unwrap();
        }
        Request::Read => queue.submit_read(slot, Sector(8), BLOCK_BYTES as u32).unwrap(),
        Request::Flush => queue.submit_flush(slot).unwrap(),
    }
    queue.publish().unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(Duration::from_secs(60)).unwrap());
    }
    let completion = completions.remove(0);
    let mut data = vec![0; BLOCK_BYTES];
    queue.read_data(completion.slot, 0, &mut data);
    queue.release_slot(completion.slot);
    (completion.status, data)
}

#[test]
fn a_block_that_changes_at_rest_is_an_error_for_the_guest_and_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    let layout = formatted(&image);
    let stage = "type = \"integrity\"";
    let daemon = Daemon::start(directory, &on_stages(stage, stage));
    let state = |name: &str| state(&daemon, name);
    waits_without(&daemon, "has no checksums");
    assert_eq!(state("vd0").stages, ["integrity"]);
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let socket = daemon.directory.path().join("vd0.sock");
    let mut client = BlkClient::connect(socket, &options).unwrap();
    let data: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at * 13 + at / 251) as u8).collect();
    assert_eq!(run(&mut client, Request::Write(&data)).0, Status::Ok);
    assert_eq!(run(&mut client, Request::Flush).0, Status::Ok);
    assert!(run(&mut client, Request::Read) == (Status::Ok, data.clone()));
    assert_eq!(state("vd0").warnings, Vec::<String>::new());

    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let at = layout.data_at() + BLOCK_BYTES as u64 + 1000;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    assert_eq!(byte[0], data[1000]);
    file.write_all_at(&[!byte[0]], at).unwrap();
    let (status, seen) = run(&mut client, Request::Read);
    assert_eq!(status, Status::IoError);
    assert!(seen.iter().all(|byte| *byte == 0), "no bad byte is shown");
    let warnings = state("vd0").warnings.join("\n");
    assert!(warnings.contains("at byte 4096 (checksum)"), "{warnings}");
    let metrics = daemon.client().metrics(false).unwrap();
    let labels = r#"{device="vd0",position="1",stage="integrity"}"#;
    let line = format!("sidecore_integrity_checksum_total{labels} 1");
    assert!(metrics.contains(&line), "{metrics}");
    assert_eq!(run(&mut client, Request::Write(&data)).0, Status::Ok);
    assert!(run(&mut client, Request::Read) == (Status::Ok, data));
    assert_eq!(state("vd0").warnings, Vec::<String>::new(), "the write has mended it");
}

/// The VMM is killed while the IOhost is away: a write and a flush of it fail.
#[test]
fn a_remote_disk_whose_guest_was_killed_in_a_flush_is_good_for_the_next_one() {
    let shared = tempfile::tempdir().unwrap();
    formatted(&shared.path().join("disk.img"));
    let config = iohost(shared.path(), "");
    let mut iohost = Daemon::start(tempfile::tempdir().unwrap(), &config);
    let at_vmhost = vmhost(shared.path(), "");
    let at_vmhost =
        at_vmhost.replace("\"disk1\"\n", "\"disk1\"\n[[store.stage]]\ntype = \"integrity\"\n");
    let vmhost = Daemon::start(tempfile::tempdir().unwrap(), &at_vmhost);
    wait::until("the disk at the VMhost", SOON, || {
        state(&vmhost, "vd0").state == DeviceState::Waiting
    });
    let connect = || {
        let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
        BlkClient::connect(vmhost.directory.path().join("vd0.sock"), &options).unwrap()
    };
    let mut guest = connect();
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..3).map(|_| queue.take_slot().unwrap()).collect();
    write(queue, slots[0], 1, data(1, 1, BLOCK));
    flush(queue, slots[0]);
    write(queue, slots[0], 2, data(2, 1, BLOCK));
    pause(&iohost);
    submit(queue, slots[1], 3, data(3, 1, BLOCK));
    queue.submit_flush(slots[2]).unwrap();
    queue.publish().unwrap();
    lose(&mut iohost, &vmhost, 1);
    drop(guest);
    let has_failed = || {
        let warnings = state(&vmhost, "vd0").warnings;
        warnings.iter().any(|warning| warning.contains("all writes and flushes fail"))
    };
    wait::until("the failure", SOON, has_failed);
    let _iohost = Daemon::start(iohost.directory, &config);
    let mut guest = connect();
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    // An answered write that no flush has covered is there, since no power was cut.
    for index in 1..=2 {
        assert!(read(queue, slot, index, BLOCK) == data(index, 1, BLOCK), "block {index}");
    }
    let third = read(queue, slot, 3, BLOCK);
    assert!(third == data(3, 1, BLOCK) || third == [0; BLOCK_BYTES], "a torn block");
    for index in 1..=3 {
        write(queue, slot, index, data(index, 2, BLOCK));
    }
    flush(queue, slot);
    for index in 1..=3 {
        assert!(read(queue, slot, index, BLOCK) == data(index, 2, BLOCK), "block {index}");
    }
    assert!(!has_failed());
}
