//! Encrypted disks of a daemon: their guests' data at rest, and a wrong key.

mod common;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use common::{Daemon, on_stages, state, waits_without};
use rustix::process::Signal;
use sidecore_control::NewDevice;
use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_luks::{Kdf, NewHeader, SectorSize};
use sidecore_units::Sector;

/// The size of a slot of the client.
const DATA_BYTES: usize = 4096;

fn stage(key_file: &str) -> String {
    format!("type = \"encrypt\"\nheader = \"disk.luks\"\nkey_file = \"{key_file}\"")
}

fn write_key(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

/// Runs one request, and returns the data of the buffer.
fn run(client: &mut BlkClient, write: Option<&[u8]>) -> Vec<u8> {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    match write {
        Some(data) => {
            queue.write_data(slot, 0, data);
            queue.submit_write(slot, Sector(8), data.len() as u32).unwrap();
        }
        None => queue.submit_read(slot, Sector(8), DATA_BYTES as u32).unwrap(),
    }
    queue.publish().unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(Duration::from_secs(60)).unwrap());
    }
    assert_eq!(completions[0].status, Status::Ok);
    let slot = completions.remove(0).slot;
    let mut data = vec![0; DATA_BYTES];
    queue.read_data(slot, 0, &mut data);
    queue.release_slot(slot);
    data
}

#[test]
fn cryptsetup_decrypts_what_a_guest_wrote_and_a_wrong_key_refuses_its_own_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let text = |name: &str| path(name).to_str().unwrap().to_owned();
    write_key(&path("disk.key"), b"right");
    write_key(&path("wrong.key"), b"wrong");
    std::fs::File::create(path("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let (image, header, key) = (text("disk.img"), text("disk.luks"), text("disk.key"));
    let format = ["luksFormat", "--batch-mode", "--type", "luks2", "--pbkdf-memory", "1024"];
    let cost = ["--pbkdf-force-iterations", "4", "--key-file", &key, "--header", &header, &image];
    sidecore_skip::run("cryptsetup", &[format.as_slice(), &cost].concat()).unwrap();

    let data: Vec<u8> = (0..DATA_BYTES).map(|at| (at * 13 + at / 251) as u8).collect();
    let config = on_stages(&stage("disk.key"), &stage("wrong.key"));
    let mut daemon = Daemon::start(directory, &config);
    waits_without(&daemon, "no key slot opens");
    assert_eq!(state(&daemon, "vd0").stages, ["encrypt"]);
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let socket = daemon.directory.path().join("vd0.sock");
    let mut client = BlkClient::connect(socket, &options).unwrap();
    run(&mut client, Some(&data));
    assert!(run(&mut client, None) == data);
    drop(client);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().0.success());

    let stored = std::fs::read(&image).unwrap();
    assert!(stored[4096..][..DATA_BYTES] != data);
    let decrypt = ["reencrypt", "--decrypt", "--batch-mode", "--force-offline-reencrypt"];
    let files = ["--key-file", &key, "--header", &header, &image];
    sidecore_skip::run("cryptsetup", &[decrypt.as_slice(), &files].concat()).unwrap();
    let decrypted = std::fs::read(&image).unwrap();
    assert!(decrypted[4096..][..DATA_BYTES] == data);
}

/// The header is read from a disk that does not answer, which takes as long as the derivation of a
/// key of any strength.
#[test]
fn an_encrypted_volume_that_takes_long_to_open_delays_no_other_device() {
    let Some(slow) = SlowDisk::mount(16 << 20) else { return };
    let releaser = slow.releaser();
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("disk.key");
    write_key(&key, b"right");
    let kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };
    let header = NewHeader { sector: SectorSize::SMALLEST, kdf }.make(b"right").unwrap();
    std::fs::OpenOptions::new().write(true).open(slow.path()).unwrap().write_all(&header).unwrap();
    let daemon = Daemon::start(
        directory,
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
         [[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"64MiB\"\n\
         [[store]]\nname = \"small\"\ntype = \"ram\"\nsize = \"1MiB\"\n\
         [[controller]]\nname = \"pool\"\nstore = \"mem\"\nformat = \"blank\"\n\
         [[store]]\nname = \"plain\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \
         \"one\"\nsize = \"8MiB\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"plain\"\nread_only = true\nsocket = \
         \"vd0.sock\"\n",
    );
    let socket = |name: &str| daemon.directory.path().join(name);
    let stage = serde_json::json!([{
        "type": "encrypt",
        "header": slow.path(),
        "key_file": key,
    }]);
    let mut sealed = NewDevice::new("sealed", &socket("sealed.sock")).of_volume("pool", "one");
    sealed.0["volume"]["stage"] = stage;
    slow.hold(|request| request.operation() == Operation::Read);
    std::thread::scope(|scope| {
        let control = daemon.client();
        let adding = scope.spawn(move || control.add_device(&sealed).unwrap());
        slow.wait_for_held(|held| !held.is_empty());
        let other = NewDevice::new("vd1", &socket("vd1.sock")).with("store", "small");
        daemon.client().add_device(&other).unwrap();
        daemon.client().remove_device("vd1").unwrap();
        assert!(!adding.is_finished());
        slow.hold_no_more();
        slow.release();
        assert_eq!(adding.join().unwrap().stages, ["encrypt"]);
    });
    drop(releaser);
}
