//! The daemon as a process: started, measured, signalled, ended.

mod common;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Daemon, config, sockets, spawn};
use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::report::DeviceState;
use sidecore_control::{CreateVolume, NewDevice};

#[test]
fn sixty_four_devices_without_guests_cost_little_memory_and_no_time() {
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), &config(64));
    assert_eq!(sockets(daemon.directory.path()).len(), 65);
    let devices = daemon.client().devices().unwrap();
    assert_eq!(devices.len(), 64);
    assert!(
        devices
            .iter()
            .all(|device| device.state == DeviceState::Waiting && device.capacity_bytes == 1 << 20)
    );

    let resident_mib = daemon.status_kib("VmRSS") / 1024;
    assert!(resident_mib < 64, "{resident_mib} MiB resident");
    let before = daemon.cpu_ticks();
    std::thread::sleep(Duration::from_secs(3));
    let spent = daemon.cpu_ticks() - before;
    // A tick is a hundredth of a second: 1 % of three seconds are three.
    assert!(spent <= 3, "{spent} ticks of CPU time in three idle seconds");

    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(sockets(daemon.directory.path()), Vec::<PathBuf>::new());
}

#[test]
fn an_interrupt_ends_it_in_order_as_well_and_it_starts_again() {
    let mut directory = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let mut daemon = Daemon::start(directory, &config(2));
        daemon.signal(Signal::INT);
        let (status, log) = daemon.wait();
        assert_eq!(status.code(), Some(0), "{log}");
        directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
        assert!(sockets(directory.path()).is_empty());
    }
}

#[test]
fn a_service_manager_is_notified() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let receive = || {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    };
    let daemon_directory = tempfile::tempdir().unwrap();
    let variables = [("NOTIFY_SOCKET", path.to_str().unwrap())];
    let mut daemon = Daemon::start_with(daemon_directory, &config(1), &variables);
    assert_eq!(receive(), "READY=1");
    daemon.signal(Signal::TERM);
    assert_eq!(receive(), "STOPPING=1");
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

/// A device that was exported to the daemon exists nowhere else from then on: the daemon completes
/// its start, and exports the device again.
#[test]
fn an_end_that_comes_during_the_start_waits_for_exported_devices() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The socket is full: the start waits until the test reads from it.
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to(b"FILLED=1", &path).is_ok() {}
    let file = directory.path().join("disks.toml");
    std::fs::write(&file, config(1)).unwrap();
    let mut command = Command::new("sh");
    command.arg("-c").arg("exec 3<&0; LISTEN_PID=$$ exec \"$0\" --config \"$1\"");
    command.arg(env!("CARGO_BIN_EXE_sidecored")).arg(&file).env_remove("RUST_LOG");
    command
        .env("NOTIFY_SOCKET", &path)
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "nvme.unknown");
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("the state that an earlier daemon exported") {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "the daemon has ended");
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut said = Vec::new();
    let mut bytes = [0; 256];
    while said.last().is_none_or(|said| said != "STOPPING=1") {
        let length = manager.recv(&mut bytes).unwrap();
        said.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
    }
    assert!(said.iter().any(|said| said == "READY=1"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_daemon_serves_in_spite_of_an_invalid_service_manager() {
    let variables = [("NOTIFY_SOCKET", "nowhere"), ("LISTEN_PID", "none"), ("LISTEN_FDS", "many")];
    let mut daemon = Daemon::start_with(tempfile::tempdir().unwrap(), &config(1), &variables);
    assert_eq!(daemon.client().devices().unwrap().len(), 1);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("NOTIFY_SOCKET") && log.contains("LISTEN_PID"), "{log}");
}

#[test]
fn a_killed_daemons_sockets_and_files_do_not_stand_in_the_way_of_the_next() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::File::create(directory.path().join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let text = config(1)
        + "[[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"disk.img\"\n\
        [[device]]\nname = \"file\"\nstore = \"disk\"\nsocket = \"file.sock\"\n";
    let mut daemon = Daemon::start(directory, &text);
    daemon.child.kill().unwrap();
    daemon.wait();
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    assert_eq!(sockets(directory.path()).len(), 3);
    let mut daemon = Daemon::start(directory, &text);
    assert_eq!(daemon.client().devices().unwrap().len(), 2);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("flushed"), "{log}");
}

/// The user, group and permissions of a file.
fn access(path: &Path) -> (u32, u32, u32) {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
}

/// A VMM of another user must be able to connect, also after a restart, and to devices that are
/// added while the daemon runs.
#[test]
fn sockets_belong_to_the_configured_users_and_groups() {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid().as_raw());
    // Only root may change the owner of a file.
    let (owner, group) = if uid.is_root() { (64055, 64056) } else { (uid.as_raw(), gid) };
    let devices = format!(
        "[[device]]\nname = \"nvme\"\nfront_end = \"nvme\"\nstore = \"mem\"\n\
         socket = \"nvme.sock\"\nsocket_owner = \"{owner}\"\n\
         [[device]]\nname = \"blk\"\nstore = \"mem\"\nsocket = \"blk.sock\"\n\
         socket_group = \"{group}\"\nsocket_mode = \"0620\"\n"
    );
    let text = format!("control_socket_group = \"{group}\"\n{}{devices}", config(1));
    let mut directory = tempfile::tempdir().unwrap();
    for kill in [true, false] {
        let mut daemon = Daemon::start(directory, &text);
        let of = |name: &str| access(&daemon.directory.path().join(name));
        assert_eq!(of("control.sock"), (uid.as_raw(), group, 0o660));
        assert_eq!(of("vd0.sock"), (uid.as_raw(), gid, 0o600));
        assert_eq!(of("nvme.sock"), (owner, gid, 0o600));
        assert_eq!(of("blk.sock"), (uid.as_raw(), group, 0o620));
        let added = NewDevice::new("added", &daemon.directory.path().join("added.sock"))
            .with("store", "mem");
        let added =
            added.with("socket_owner", owner.to_string()).with("socket_group", group.to_string());
        daemon.client().add_device(&added).unwrap();
        assert_eq!(of("added.sock"), (owner, group, 0o660));
        let unknown = added.with("name", "x").with("socket_owner", "no-such-user");
        let refused = daemon.client().add_device(&unknown).unwrap_err().to_string();
        assert!(refused.contains("no user \"no-such-user\" on this machine"), "{refused}");
        let control = daemon.directory.path().join("control.sock");
        let same = NewDevice::new("x", &control).with("store", "mem");
        let refused = daemon.client().add_device(&same).unwrap_err().to_string();
        assert!(refused.contains("control.sock is another socket of this daemon"), "{refused}");
        daemon.signal(if kill { Signal::KILL } else { Signal::TERM });
        daemon.wait();
        directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    }
    let text = text.replace(&format!("\"{owner}\""), "\"no-such-user\"").replace("0620", "620x");
    let output = spawn(directory.path(), &text, &[]).wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("there is no user \"no-such-user\" on this machine"), "{message}");
    assert!(message.contains("`socket_mode` is three octal digits"), "{message}");
}

/// A controller on a file, which is formatted if it is blank.
const POOL: &str = "[[store]]\nname = \"pool-file\"\ntype = \"file\"\npath = \"pool.img\"\n\
    [[controller]]\nname = \"pool\"\nstore = \"pool-file\"\nformat = \"blank\"\n";

#[test]
fn volumes_outlive_a_killed_daemon_and_devices_that_were_added_do_not() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::File::create(directory.path().join("pool.img")).unwrap().set_len(64 << 20).unwrap();
    let text = config(1) + POOL;
    let mut daemon = Daemon::start(directory, &text);
    let client = daemon.client();
    let new =
        |name: &str| CreateVolume { name: name.to_owned(), size_bytes: 1 << 20, quota_bytes: None };
    client.create_volume("pool", &new("root")).unwrap();
    client.snapshot_volume("pool", "root", "monday").unwrap();
    let socket = daemon.directory.path().join("root.sock");
    let device = NewDevice::new("root", &socket).of_volume("pool", "root");
    client.add_device(&device).unwrap();
    assert_eq!(client.devices().unwrap().len(), 2);

    daemon.child.kill().unwrap();
    daemon.wait();
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    let mut daemon = Daemon::start(directory, &text);
    let client = daemon.client();
    let names: Vec<String> =
        client.volumes("pool").unwrap().into_iter().map(|volume| volume.name).collect();
    assert_eq!(names, ["root", "monday"]);
    assert!(client.check_controller("pool").unwrap().clean);
    assert_eq!(client.devices().unwrap().len(), 1);
    // The socket of the added device was left behind, and is replaced.
    client.add_device(&device).unwrap();
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(sockets(daemon.directory.path()).is_empty());
}

#[test]
fn a_second_daemon_on_the_same_sockets_fails_and_the_first_continues() {
    let mut daemon = Daemon::start(tempfile::tempdir().unwrap(), &config(1));
    let second = spawn(daemon.directory.path(), &config(1), &[]).wait_with_output().unwrap();
    let message = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(2), "{message}");
    assert!(message.contains("control.sock already; stop it or choose another path"), "{message}");
    assert!(message.contains("vd0.sock already"), "{message}");
    // By another name of the same directory, which a check of the text cannot find.
    let alias = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(daemon.directory.path(), alias.path().join("here")).unwrap();
    let second = spawn(&alias.path().join("here"), &config(1), &[]).wait_with_output().unwrap();
    let message = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{message}");
    assert!(message.contains("another sidecored is serving"), "{message}");

    assert_eq!(daemon.client().devices().unwrap().len(), 1);
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().0.code(), Some(0));
}

#[test]
fn a_bad_configuration_starts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let output = spawn(directory.path(), &(config(2) + "queues = 65\nqueeus = 1\n"), &[])
        .wait_with_output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("disks.toml:18:10: [[device]] \"vd1\": `queues`"), "{message}");
    assert!(message.contains("2 faults, nothing was started"), "{message}");
    assert!(output.stdout.is_empty());
    assert!(sockets(directory.path()).is_empty());
}
