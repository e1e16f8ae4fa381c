//! The daemon on disks that do not answer, after a daemon that was killed with requests in flight,
//! and on pools that cannot be opened: all other devices are served.

use std::fmt::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use sidecore_control::report::DeviceReport;
use sidecore_control::{Client, Config, CreateVolume, Depth, NewDevice};
use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_units::Sector;

const BLOCK: usize = 4096;
const SUPERBLOCKS: u64 = 4 * 4096;
const READ_AT: u64 = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon, which is killed on drop.
struct Daemon<'a> {
    _process: Process,
    directory: &'a Path,
}

impl<'a> Daemon<'a> {
    /// Starts the daemon and waits until it is ready.
    fn start(directory: &'a Path, config: &str) -> Self {
        let file = directory.join("disks.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidecored"));
        command
            .arg("--config")
            .arg(file)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .stdout(Stdio::piped());
        let mut process = Process::start(&mut command).unwrap();
        let line = process.first_line().unwrap();
        assert!(line.starts_with("ready"), "{line}");
        Self { _process: process, directory }
    }

    fn client(&self) -> Client {
        Client::new(&self.directory.join("control.sock")).unwrap()
    }

    fn device(&self, name: &str) -> DeviceReport {
        self.client().devices().unwrap().into_iter().find(|device| device.name == name).unwrap()
    }

    /// Waits until a device is in a state.
    fn until(&self, name: &str, state: &str) -> DeviceReport {
        wait::succeed(PATIENCE, || {
            let device = self.device(name);
            let is_so = device.state.word() == state;
            if is_so {
                Ok(device)
            } else {
                Err(format!("{name} is {}: {:?}", device.state.word(), device.reason))
            }
        })
    }

    fn connect(&self, name: &str) -> BlkClient {
        let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
        BlkClient::connect(self.directory.join(format!("{name}.sock")), &options).unwrap()
    }
}

fn config(devices: &[&str], stores: &str) -> String {
    let mut text = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
        [[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"1MiB\"\n"
        .to_owned()
        + stores;
    for name in devices {
        let _ = write!(
            text,
            "[[device]]\nname = \"{name}\"\nstore = \"{name}\"\nsocket = \"{name}.sock\"\n"
        );
    }
    text
}

/// Submits a request without waiting for it.
fn send(client: &mut BlkClient, read: bool, offset_bytes: u64, data: &[u8]) {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    let sector = Sector(offset_bytes / 512);
    if read {
        queue.submit_read(slot, sector, data.len() as u32).unwrap();
    } else {
        queue.write_data(slot, 0, data);
        queue.submit_write(slot, sector, data.len() as u32).unwrap();
    }
    queue.publish().unwrap();
}

/// Waits for the one request in flight. Returns the data that it read.
fn answer(client: &mut BlkClient) -> Vec<u8> {
    let queue = client.queue(0).unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(Duration::from_secs(60)).unwrap());
    }
    assert_eq!(completions[0].status, Status::Ok);
    let slot = completions.remove(0).slot;
    let mut data = vec![0; BLOCK];
    queue.read_data(slot, 0, &mut data);
    queue.release_slot(slot);
    data
}

fn write(client: &mut BlkClient, data: &[u8]) {
    send(client, false, 0, data);
    answer(client);
}

fn read(client: &mut BlkClient) -> Vec<u8> {
    send(client, true, 0, &[0; BLOCK]);
    answer(client)
}

fn flush(client: &mut BlkClient) {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_flush(slot).unwrap();
    queue.publish().unwrap();
    answer(client);
}

/// A plain store, and two controllers with a volume each.
fn three_stores(plain: &SlowDisk, pool: &SlowDisk, other: &SlowDisk) -> String {
    format!(
        "[[store]]\nname = \"plain\"\ntype = \"file\"\npath = {:?}\n\
         [[store]]\nname = \"pool-file\"\ntype = \"file\"\npath = {:?}\n\
         [[controller]]\nname = \"pool\"\nstore = \"pool-file\"\nformat = \"blank\"\n\
         [[store]]\nname = \"root\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \"root\"\n\
         size = \"1MiB\"\n\
         [[store]]\nname = \"other-file\"\ntype = \"file\"\npath = {:?}\n\
         [[controller]]\nname = \"other\"\nstore = \"other-file\"\nformat = \"blank\"\n\
         [[store]]\nname = \"mapped\"\ntype = \"volume\"\ncontroller = \"other\"\n\
         volume = \"mapped\"\nsize = \"1MiB\"\n",
        plain.path(),
        pool.path(),
        other.path()
    )
}

/// The late writes have landed before the device is served, so they overwrite no later write.
fn check_late(daemon: &Daemon<'_>, name: &str, content: u8) {
    daemon.until(name, "waiting");
    let mut client = daemon.connect(name);
    assert!(read(&mut client) == [content; BLOCK], "{name}");
    write(&mut client, &[4; BLOCK]);
    assert!(read(&mut client) == [4; BLOCK], "{name}");
}

#[test]
fn requests_of_a_killed_daemon_land_before_the_next_one_serves() {
    // The kernel lets a process write to a file on FUSE once at a time, so the held requests are
    // spread over several disks.
    let disks = [SlowDisk::mount(1 << 20), SlowDisk::mount(16 << 20), SlowDisk::mount(16 << 20)];
    let [Some(plain), Some(pool), Some(other)] = disks else { return };
    let directory = tempfile::tempdir().unwrap();
    let stores = three_stores(&plain, &pool, &other);
    let text = config(&["mem", "plain", "root", "mapped"], &stores);
    let first = Daemon::start(directory.path(), &text);
    let (mut on_plain, mut on_root, mut on_mapped) =
        (first.connect("plain"), first.connect("root"), first.connect("mapped"));
    for client in [&mut on_plain, &mut on_root, &mut on_mapped] {
        write(client, &[1; BLOCK]);
    }
    flush(&mut on_root);
    flush(&mut on_mapped);

    // An overwrite and a read, an overwrite of a mapped block, and the superblock of a commit.
    let is_late = |data: &[u8]| data.windows(512).any(|sector| sector == [2; 512]);
    plain.hold(move |request| {
        is_late(request.data())
            || (request.operation() == Operation::Read && request.offset_bytes() == READ_AT)
    });
    pool.hold(|request| {
        request.operation() == Operation::Write && request.offset_bytes() < SUPERBLOCKS
    });
    other.hold(move |request| is_late(request.data()));
    send(&mut on_plain, false, 0, &[2; BLOCK]);
    send(&mut on_plain, true, READ_AT, &[0; BLOCK]);
    send(&mut on_mapped, false, 0, &[2; BLOCK]);
    std::thread::scope(|scope| {
        let client = first.client();
        scope.spawn(move || {
            let new = CreateVolume {
                name: "unfinished".to_owned(),
                size_bytes: 1 << 20,
                quota_bytes: None,
            };
            let _ = client.create_volume("pool", &new);
        });
        plain.wait_for_held(|held| held.len() >= 2);
        pool.wait_for_held(|held| !held.is_empty());
        other.wait_for_held(|held| !held.is_empty());
        drop(first);
    });
    for disk in [&plain, &pool, &other] {
        disk.hold_no_more();
    }

    let next = Daemon::start(directory.path(), &text);
    write(&mut next.connect("mem"), &[3; BLOCK]);
    for name in ["plain", "root", "mapped"] {
        let device = next.device(name);
        assert_eq!(device.state.word(), "opening", "{:?}", device.reason);
        assert!(device.reason.is_some());
    }
    plain.release();
    next.until("plain", "waiting");
    assert_eq!(next.device("root").state.word(), "opening");
    assert_eq!(next.device("mapped").state.word(), "opening");
    pool.release();
    other.release();
    for (name, content) in [("plain", 2), ("root", 1), ("mapped", 2)] {
        check_late(&next, name, content);
    }
    assert!(plain.bytes(0, BLOCK) == [4; BLOCK]);
    for controller in ["pool", "other"] {
        assert!(next.client().check_controller(controller).unwrap().clean);
    }
}

#[test]
fn a_store_whose_predecessor_does_not_end_is_refused_and_no_other() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let directory = tempfile::tempdir().unwrap();
    let store = format!(
        "[[store]]\nname = \"disk\"\ntype = \"file\"\npath = {:?}\npredecessor_timeout_s = 0\n",
        disk.path()
    );
    let text = config(&["mem", "disk"], &store);
    let first = Daemon::start(directory.path(), &text);
    let mut client = first.connect("disk");
    disk.hold(|request| request.operation() == Operation::Write);
    send(&mut client, false, 0, &[1; BLOCK]);
    disk.wait_for_held(|held| held.len() == 1);
    drop(first);
    disk.hold_no_more();
    let next = Daemon::start(directory.path(), &text);
    let device = next.device("disk");
    assert_eq!(device.state.word(), "refused");
    assert!(device.reason.unwrap().contains("predecessor_timeout_s"));
    write(&mut next.connect("mem"), &[3; BLOCK]);
    next.client().remove_device("disk").unwrap();
    assert_eq!(next.client().devices().unwrap().len(), 1);
}

#[test]
fn a_store_that_does_not_answer_keeps_no_other_from_being_served() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    disk.hold(|request| request.operation() != Operation::Init);
    let directory = tempfile::tempdir().unwrap();
    let store = format!("[[store]]\nname = \"disk\"\ntype = \"file\"\npath = {:?}\n", disk.path());
    let text = config(&["disk", "mem"], &store);
    let daemon = Daemon::start(directory.path(), &text);
    let device = daemon.device("disk");
    assert_eq!(device.state.word(), "opening");
    assert!(device.reason.unwrap().contains("does not answer yet"));
    let mut memory = daemon.connect("mem");
    write(&mut memory, &[3; BLOCK]);
    disk.release();
    daemon.until("disk", "waiting");
    let mut client = daemon.connect("disk");
    write(&mut client, &[5; BLOCK]);
    assert!(disk.bytes(0, BLOCK) == [5; BLOCK]);
}

#[test]
fn a_device_whose_store_does_not_answer_is_not_added() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let directory = tempfile::tempdir().unwrap();
    let store = format!("[[store]]\nname = \"disk\"\ntype = \"file\"\npath = {:?}\n", disk.path());
    let daemon = Daemon::start(directory.path(), &config(&["mem"], &store));
    disk.hold(|_| true);
    let device = NewDevice::new("disk", &directory.path().join("disk.sock")).with("store", "disk");
    let error = daemon.client().add_device(&device).unwrap_err();
    assert!(error.to_string().contains("does not answer"), "{error}");
    // Other changes are applied meanwhile.
    let other = NewDevice::new("other", &directory.path().join("other.sock")).with("store", "mem");
    daemon.client().add_device(&other).unwrap();
    disk.release();
    // The attempt that was abandoned ends in its own time.
    wait::succeed(PATIENCE, || daemon.client().add_device(&device));
    write(&mut daemon.connect("disk"), &[6; BLOCK]);
    assert!(disk.bytes(0, BLOCK) == [6; BLOCK]);
}

#[test]
fn a_check_names_the_file_that_does_not_answer() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    disk.hold(|request| request.operation() != Operation::Init);
    let directory = tempfile::tempdir().unwrap();
    let text = config(
        &["disk"],
        &format!("[[store]]\nname = \"disk\"\ntype = \"file\"\npath = {:?}\n", disk.path()),
    );
    let file = directory.path().join("disks.toml");
    let problems = Config::parse(&file, &text, Depth::Machine).unwrap_err().to_string();
    assert!(
        problems.contains("[[store]] \"disk\"") && problems.contains("does not answer within"),
        "{problems}"
    );
    // For a daemon that starts, such a file is no fault.
    Config::parse(&file, &text, Depth::Start).unwrap();
}

/// The sections of a file, a controller on it, and a volume: `pool-NAME` and `NAME`.
fn pool(name: &str, path: &Path) -> String {
    format!(
        "[[store]]\nname = \"file-{name}\"\ntype = \"file\"\npath = {path:?}\n\
         [[controller]]\nname = \"pool-{name}\"\nstore = \"file-{name}\"\nformat = \"blank\"\n\
         [[store]]\nname = \"{name}\"\ntype = \"volume\"\ncontroller = \"pool-{name}\"\n\
         volume = \"{name}\"\n\
         size = \"1MiB\"\n"
    )
}

/// The controllers are listed with the reason why they are closed.
fn check_refused(daemon: &Daemon<'_>) {
    let all = daemon.client().all_controllers().unwrap();
    let open: Vec<_> = all.controllers.iter().map(|controller| controller.name.as_str()).collect();
    let closed: Vec<_> =
        all.closed.iter().map(|closed| (closed.name.as_str(), closed.state.word())).collect();
    assert_eq!(open, ["pool-good"]);
    assert_eq!(closed, [("pool-torn", "refused"), ("pool-short", "refused")]);
    let denied = daemon.client().volumes("pool-short").unwrap_err().to_string();
    assert!(
        denied.contains("\"pool-short\" is refused") && denied.contains("the disk has"),
        "{denied}"
    );
    let device = NewDevice::new("new", &daemon.directory.join("new.sock")).with("store", "short");
    let denied = daemon.client().add_device(&device).unwrap_err().to_string();
    assert!(denied.contains("\"pool-short\" is refused"), "{denied}");
}

#[test]
fn a_pool_that_cannot_be_opened_is_refused_and_no_other() {
    const POOL_BYTES: u64 = 16 << 20;
    let directory = tempfile::tempdir().unwrap();
    let names = ["torn", "short", "good"];
    let mut stores = String::new();
    for name in names {
        let path = directory.path().join(format!("{name}.img"));
        std::fs::File::create(&path).unwrap().set_len(POOL_BYTES).unwrap();
        stores += &pool(name, &path);
    }
    let text = config(&["torn", "mem", "short", "good"], &stores);
    let first = Daemon::start(directory.path(), &text);
    for name in names {
        let mut client = first.connect(name);
        write(&mut client, &[1; BLOCK]);
        flush(&mut client);
    }
    drop(first);
    let file = |name: &str| {
        std::fs::File::options().write(true).open(directory.path().join(name)).unwrap()
    };
    for at in (0..SUPERBLOCKS).step_by(BLOCK) {
        // Overwrites the part behind the magic number.
        file("torn.img").write_all_at(&[0xff; 8], at + 100).unwrap();
    }
    let path = |name: &str| directory.path().join(name);
    std::fs::copy(path("short.img"), path("whole.img")).unwrap();
    file("short.img").set_len(POOL_BYTES / 2).unwrap();

    let next = Daemon::start(directory.path(), &text);
    let devices = next.client().devices().unwrap();
    let states: Vec<_> =
        devices.iter().map(|device| (device.name.as_str(), device.state.word())).collect();
    assert_eq!(
        states,
        [("torn", "refused"), ("mem", "waiting"), ("short", "refused"), ("good", "waiting")]
    );
    let reason = |index: usize| devices[index].reason.clone().unwrap();
    assert!(
        reason(0).contains("controller \"pool-torn\"") && reason(0).contains("superblock"),
        "{}",
        reason(0)
    );
    assert!(
        reason(2).contains("controller \"pool-short\"") && reason(2).contains("the disk has"),
        "{}",
        reason(2)
    );
    assert!(read(&mut next.connect("good")) == [1; BLOCK]);

    check_refused(&next);

    // The next start with the original file serves it.
    drop(next);
    std::fs::copy(path("whole.img"), path("short.img")).unwrap();
    assert_eq!(Daemon::start(directory.path(), &text).device("short").state.word(), "waiting");
}

#[test]
fn controllers_are_listed_in_the_order_of_the_configuration() {
    let Some(slow) = SlowDisk::mount(16 << 20) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fast.img");
    std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
    slow.hold(|request| request.operation() != Operation::Init);
    let text = config(&["slow", "fast"], &(pool("slow", &slow.path()) + &pool("fast", &path)));
    let daemon = Daemon::start(directory.path(), &text);
    let closed = daemon.client().all_controllers().unwrap().closed;
    assert_eq!((closed[0].name.as_str(), closed[0].state.word()), ("pool-slow", "opening"));
    slow.release();
    daemon.until("slow", "waiting");
    let all = daemon.client().all_controllers().unwrap();
    let open: Vec<_> = all.controllers.iter().map(|controller| controller.name.as_str()).collect();
    assert_eq!((open.as_slice(), all.closed.len()), (["pool-slow", "pool-fast"].as_slice(), 0));
    let devices: Vec<_> =
        daemon.client().devices().unwrap().into_iter().map(|device| device.name).collect();
    assert_eq!(devices, ["slow", "fast"]);
    let stats: Vec<_> =
        daemon.client().stats().unwrap().devices.into_iter().map(|device| device.name).collect();
    assert_eq!(stats, ["slow", "fast"]);
}
