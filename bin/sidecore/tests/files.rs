//! Files that the command line refuses: no images, too short, or in use by another name.

mod common;

use std::fs::File;
use std::process::Command;

use sidecore_kit::loop_device::LoopDevice;

use common::{Daemon, directory, failure, stdout};

const CONFIG: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "below"
type = "file"
path = "pool.img"
[[controller]]
name = "pool"
store = "below"
format = "blank"
"#;

/// A directory with a configuration and the file of its pool.
fn pool() -> tempfile::TempDir {
    let directory = directory(CONFIG);
    File::create(directory.path().join("pool.img")).unwrap().set_len(8 << 20).unwrap();
    directory
}

#[test]
fn only_files_and_block_devices_are_imported() {
    let daemon = Daemon::start(pool());
    let path = daemon.path();
    let fifo = path.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (image, why) in [
        ("fifo", "neither a regular file"),
        ("control.sock", "neither a regular file"),
        (".", "a directory"),
    ] {
        let (_, message) = failure(path, &["volume", "import", image, "imported"]);
        assert!(message.contains(why), "{image}: {message}");
        let (_, message) =
            failure(path, &["volume", "import", "--format", "qcow2", image, "imported"]);
        assert!(message.contains(why), "{image}: {message}");
    }
    assert!(!stdout(path, &["volume", "list"]).contains("imported"));
}

#[test]
fn a_pool_that_is_shorter_than_its_format_is_a_fault() {
    let directory = pool();
    let path = directory.path();
    stdout(path, &["controller", "format", "pool.img"]);
    assert!(stdout(path, &["check", "disks.toml"]).contains("fine"));
    File::options().write(true).open(path.join("pool.img")).unwrap().set_len(4 << 20).unwrap();
    for arguments in [&["check", "disks.toml"][..], &["volume", "check", "--path", "pool.img"]] {
        let (code, message) = failure(path, arguments);
        assert!(code.is_some() && message.contains("pool.img"), "{message}");
        assert!(message.contains("and the store on it"), "{arguments:?}: {message}");
    }
}

#[test]
fn a_live_pool_is_not_formatted_through_a_loop_device() {
    let daemon = Daemon::start(pool());
    let path = daemon.path();
    stdout(path, &["volume", "create", "root", "1MiB"]);
    let Some(device) = LoopDevice::over(&path.join("pool.img"), &[]) else { return };
    let node = device.path().to_str().unwrap();
    for arguments in
        [&["controller", "format", "--force", node][..], &["volume", "check", "--path", node]]
    {
        let (_, message) = failure(path, arguments);
        assert!(message.contains("pool.img, which is in use"), "{message}");
    }
    // The configuration of a second daemon is refused, too.
    let second = CONFIG.replace("pool.img", node).replace("control.sock", "other.sock");
    std::fs::write(path.join("second.toml"), second).unwrap();
    let (_, message) = failure(path, &["check", "second.toml"]);
    assert!(message.contains("pool.img, which is in use"), "{message}");
    assert!(stdout(path, &["volume", "check"]).ends_with("fine\n"));
}
