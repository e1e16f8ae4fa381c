//! The daemon under resource limits, and with several signals to end.

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Daemon, config};
use rustix::process::Signal;
use sidecore_control::report::DeviceState;
use sidecore_driver::Status;
use sidecore_kit::guest::{connect, read, submit_write, write};

/// A file of 1 MiB as a store, and its device.
const FILE: &str = "[[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"disk.img\"\n\
    [[device]]\nname = \"file\"\nstore = \"disk\"\nsocket = \"file.sock\"\n";

/// The daemon in a shell whose `ulimit -f` is 512 KiB; its log goes to `log`, or to a pipe.
fn start_with_file_limit(log_to_file: bool) -> Daemon {
    let directory = tempfile::tempdir().unwrap();
    std::fs::File::create(directory.path().join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let text = config(1) + FILE;
    std::fs::write(directory.path().join("disks.toml"), &text).unwrap();
    let mut command = Command::new("sh");
    // The unit is 512 bytes.
    command
        .arg("-c")
        .arg("ulimit -f 1024; exec \"$0\" --config disks.toml")
        .arg(env!("CARGO_BIN_EXE_sidecored"));
    command.current_dir(directory.path()).env_remove("RUST_LOG").stdout(Stdio::piped());
    if log_to_file {
        let path = directory.path().join("log");
        let log = std::fs::File::options().create_new(true).append(true).open(&path).unwrap();
        // The file is full: each line of the log is refused.
        log.set_len(512 << 10).unwrap();
        command.stderr(log);
    } else {
        command.stderr(Stdio::piped());
    }
    Daemon::started(command.spawn().unwrap(), directory, &text)
}

#[test]
fn a_write_past_the_file_size_limit_fails_alone() {
    let mut daemon = start_with_file_limit(false);
    let mut file = connect(&daemon.directory.path().join("file.sock"));
    let mut neighbour = connect(&daemon.directory.path().join("vd0.sock"));
    assert_eq!(write(&mut file, 0, 1), Status::Ok);
    assert_eq!(write(&mut file, 1024, 2), Status::IoError);
    assert_eq!(write(&mut neighbour, 1024, 3), Status::Ok);
    assert_eq!(write(&mut file, 8, 4), Status::Ok);
    assert_eq!([0, 8, 1024].map(|sector| read(&mut file, sector)), [1, 4, 0]);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_full_log_ends_no_thread() {
    let mut daemon = start_with_file_limit(true);
    // Each of these events is logged by its own thread.
    for name in ["file.sock", "vd0.sock"] {
        let mut client = connect(&daemon.directory.path().join(name));
        assert_eq!(write(&mut client, 0, 1), Status::Ok);
        drop(client);
        let mut client = connect(&daemon.directory.path().join(name));
        assert_eq!(read(&mut client, 0), 1);
    }
    assert!(daemon.client().devices().unwrap().iter().all(|device| device.reason.is_none()));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().0.code(), Some(0));
}

/// A client that connects again and again, and a client that sends nonsense, cannot fill the disk
/// of the log.
#[test]
fn clients_cannot_make_the_log_grow_nor_hide_other_clients_in_it() {
    let nvme = "[[device]]\nname = \"nvme\"\nfront_end = \"nvme\"\nstore = \"mem\"\n\
                socket = \"nvme.sock\"\n";
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), &(config(2) + nvme));
    let path = |name: &str| daemon.directory.path().join(name);
    for number in 0..400 {
        for name in ["vd0.sock", "nvme.sock"] {
            let mut stream = UnixStream::connect(path(name)).unwrap();
            let _ = stream.write_all(&[number as u8; 64]);
            // The next connection is served after the end of this one, so the test waits for the
            // end.
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
    drop(UnixStream::connect(path("vd1.sock")).unwrap());
    let client = daemon.client();
    while client.devices().unwrap()[1].state != DeviceState::Waiting {
        std::thread::yield_now();
    }
    // The last connection is served before the device is removed.
    client.remove_device("vd1").unwrap();
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let lines = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    assert!(lines("") < 300, "{} lines: {log}", lines(""));
    for device in ["vd0", "nvme"] {
        assert!(lines(&format!("\"{device}\"")) > 20, "{device}: {log}");
    }
    assert!(log.contains("device removed device=\"vd1\""), "{log}");
    assert!(lines(" lines were left out: ") >= 2, "{log}");
}

/// Many disconnects for one cause do not hide a disconnect for another cause.
#[test]
fn each_cause_of_a_disconnect_has_a_limit_of_its_own() {
    let nvme = "[[device]]\nname = \"nvme\"\nfront_end = \"nvme\"\nstore = \"mem\"\n\
                socket = \"nvme.sock\"\n";
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), &(config(1) + nvme));
    for name in ["vd0.sock", "nvme.sock"] {
        let say = |bytes: &[u8]| {
            let mut stream = UnixStream::connect(daemon.directory.path().join(name)).unwrap();
            let _ = stream.write_all(bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        };
        for _ in 0..100 {
            say(&[255; 64]);
        }
        // Half a header.
        say(&[0; 3]);
    }
    // Each disconnect is logged before its connection is closed, the last one perhaps a moment
    // later.
    for device in ["vd0", "nvme"] {
        daemon.client().remove_device(device).unwrap();
    }
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    let ends = |device: &str, words: &str| {
        let is_it = |line: &&str| line.contains(&format!("\"{device}\"")) && line.contains(words);
        let ends = log.lines().filter(|line| {
            line.contains("the connection to the VMM ended") && line.contains("error=")
        });
        ends.filter(is_it).count()
    };
    for device in ["vd0", "nvme"] {
        assert_eq!(ends(device, "in the middle of a message"), 1, "{log}");
        assert_eq!(ends(device, ""), 21, "{log}");
    }
}

/// `timeout` of GNU sends its signal to the process and to the process's group.
#[test]
fn two_signals_at_once_end_it_in_order() {
    // The drain waits for a service manager that does not read, until a timeout: no second signal
    // is late.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let _manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    let variables = [("NOTIFY_SOCKET", path.to_str().unwrap())];
    let mut daemon = Daemon::start_with(tempfile::tempdir().unwrap(), &config(1), &variables);
    for signal in [Signal::STOP, Signal::TERM, Signal::INT, Signal::CONT] {
        daemon.signal(signal);
    }
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_signal_that_comes_later_ends_it_at_once() {
    let text = config(1)
        + "[[store]]\nname = \"slow\"\ntype = \"delay\"\nstore = \"mem\"\ndelay_us = 60000000\n\
        [[device]]\nname = \"slow\"\nstore = \"slow\"\nsocket = \"slow.sock\"\n";
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), &text);
    let mut client = connect(&daemon.directory.path().join("slow.sock"));
    // The drain waits for this request, which takes a minute.
    submit_write(&mut client, 0, 1);
    let client_of = daemon.client();
    let in_flight =
        || client_of.stats().unwrap().devices[1].queues.first().map_or(0, |queue| queue.batches);
    while in_flight() == 0 {
        std::thread::yield_now();
    }
    daemon.signal(Signal::TERM);
    // After this time, a second signal no longer means the same.
    std::thread::sleep(Duration::from_millis(2100));
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(3), "{log}");
}
