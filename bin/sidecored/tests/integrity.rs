//! A disk with checksums of a daemon: a block that changes at rest, and a store without checksums.

mod common;

use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use common::Daemon;
use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_kit::wait;
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_integrity::{FormatOptions, format};
use sidecore_units::Sector;

const BLOCK_BYTES: usize = 4096;

const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
path = "disk.img"
type = "file"
name = "disk"
[[store.stage]]
type = "integrity"
[[store]]
name = "plain"
type = "ram"
size = "1MiB"
[[store.stage]]
type = "integrity"
[[device]]
name = "vd0"
store = "disk"
socket = "vd0.sock"
[[device]]
name = "vd1"
store = "plain"
socket = "vd1.sock"
"#;

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
    std::fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let store = FileStore::open(&FileOptions::new(&image)).unwrap();
    let options = FormatOptions { uuid: [5; 16], block_bytes: 4096, slots: None, force: false };
    let layout = format(&store, &options).unwrap();
    drop(store);

    let daemon = Daemon::start(directory, CONFIG);
    let state = |name: &str| {
        let devices = daemon.client().devices().unwrap();
        devices.into_iter().find(|device| device.name == name).unwrap()
    };
    wait::succeed(Duration::from_secs(60), || {
        let (good, plain) = (state("vd0"), state("vd1"));
        let reason = plain.reason.unwrap_or_default();
        let is_done = good.state.word() == "waiting" && reason.contains("has no checksums");
        if is_done { Ok(()) } else { Err(format!("{} and {reason}", good.state.word())) }
    });
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
}
