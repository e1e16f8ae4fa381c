//! The unit that `make install` installs, under a systemd of the test's own, in namespaces. One
//! test kills the main process: writes that were answered are there when systemd has started the
//! daemon again. Another test ends the process in order: guests continue with the next daemon.
//! Needs root.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::Client;
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_kit::guest::complete;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_units::Sector;

const SYSTEMD: &str = "/usr/lib/systemd/systemd";
const WRITES: u64 = 100;
const WRITE_BYTES: usize = 4096;
/// The writes go to fresh blocks, of which no two are contiguous.
const STRIDE_SECTORS: u64 = 24;
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine in small: systemd's own `/run`, processes and control groups, and the host's files.
const MACHINE: &str = r#"
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/lock
umount -R /sys/fs/cgroup
mount -t tmpfs tmpfs /sys/fs/cgroup
if ! mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null; then
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
cp "$UNITS"/* /run/systemd/system
export container=other
exec "$SYSTEMD" --system --unit=sidecore-test.target --log-target=console
"#;

/// The installed unit, for this configuration.
fn unit(config: &Path) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/sidecored.service");
    let unit = std::fs::read_to_string(path).unwrap();
    assert!(
        unit.contains("\nRuntimeDirectoryPreserve=yes\n") && unit.contains("\nRestart="),
        "{unit}"
    );
    let line = |line: &str| match line {
        // No other unit of an installed system is needed.
        "[Unit]" => "[Unit]\nDefaultDependencies=no\n".to_owned(),
        _ if line.starts_with("ExecStart=") => {
            format!("ExecStart={} --config {}\n", env!("CARGO_BIN_EXE_sidecored"), config.display())
        }
        _ => format!("{line}\n"),
    };
    unit.lines().map(line).collect()
}

/// Allows one machine at a time: their systemds have the same control group as root, and each would
/// end the daemon of the other, whose unit has the same name.
static ONE: Mutex<()> = Mutex::new(());

struct Machine {
    /// The first process of the namespace, whose end ends all others there.
    unshare: Process,
    directory: tempfile::TempDir,
    /// The last field, so that it is dropped last.
    _one: MutexGuard<'static, ()>,
}

impl Machine {
    fn start(change: impl Fn(String) -> String) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::File::create(path.join("pool")).unwrap().set_len(64 << 20).unwrap();
        let config = format!(
            "control_socket = \"/run/sidecore/control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
             [[store]]\nname = \"below\"\ntype = \"file\"\npath = \"{}\"\ndirect = false\n\
             [[controller]]\nname = \"pool\"\nstore = \"below\"\nformat = \"blank\"\n\
             commit_interval_ms = 3600000\n\
             [[store]]\nname = \"vd\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \"vd\"\n\
             size = \"16MiB\"\n\
             [[device]]\nname = \"vd\"\nstore = \"vd\"\nsocket = \"/run/sidecore/vd.sock\"\n",
            path.join("pool").display()
        );
        std::fs::write(path.join("disks.toml"), config).unwrap();
        let units = path.join("units");
        std::fs::create_dir(&units).unwrap();
        std::fs::write(units.join("sidecore.service"), change(unit(&path.join("disks.toml"))))
            .unwrap();
        let target = "[Unit]\nDefaultDependencies=no\nWants=sidecore.service\n";
        std::fs::write(units.join("sidecore-test.target"), target).unwrap();
        let log = std::fs::File::create(path.join("log")).unwrap();
        let unshare = Command::new("unshare")
            .args([
                "--pid",
                "--fork",
                "--kill-child",
                "--mount",
                "--cgroup",
                "--uts",
                "--ipc",
                "sh",
                "-c",
                MACHINE,
            ])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("UNITS", &units)
            .env("SYSTEMD", SYSTEMD)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        Self { unshare: unshare.into(), directory, _one: one }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Calls `look` until it finds a value.
    fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let missing = || format!("{what}: not within {PATIENCE:?}:\n{}", self.log());
        wait::succeed(PATIENCE, || look().ok_or_else(missing))
    }

    /// The daemon's process id in the test's namespace, and the path to its files, once the daemon
    /// serves.
    fn daemon(&self) -> (Pid, PathBuf) {
        self.until("the daemon serves", || {
            let systemd = children(self.unshare.id()).into_iter().next()?;
            let is_daemon = |pid: &u32| {
                std::fs::read_link(format!("/proc/{pid}/exe"))
                    .is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_sidecored")))
            };
            let daemon = children(systemd).into_iter().find(is_daemon)?;
            let run = PathBuf::from(format!("/proc/{systemd}/root/run/sidecore"));
            let client = Client::new(&run.join("control.sock")).ok()?;
            // An answer shows that this process serves, and not the one before it.
            client.devices().ok()?;
            Some((Pid::from_raw(daemon.try_into().unwrap()).unwrap(), run))
        })
    }
}

fn children(pid: u32) -> Vec<u32> {
    let list =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Completes one request.
fn one(queue: &mut BlkQueue) {
    assert_eq!(complete(queue).status, Status::Ok);
}

fn read(queue: &mut BlkQueue, slot: Slot, index: u64) -> Vec<u8> {
    queue.submit_read(slot, Sector(index * STRIDE_SECTORS), WRITE_BYTES as u32).unwrap();
    one(queue);
    let mut back = vec![0; WRITE_BYTES];
    queue.read_data(slot, 0, &mut back);
    back
}

/// The number of answered writes that are there after the main process was killed, and the daemon's
/// warnings.
fn written_killed_and_found(change: impl Fn(String) -> String) -> (u64, Vec<String>) {
    let machine = Machine::start(change);
    let (first, run) = machine.daemon();
    let data = |index: u64| vec![index as u8 + 1; WRITE_BYTES];
    let mut client = BlkClient::connect(run.join("vd.sock"), &ClientOptions::default()).unwrap();
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for index in 0..WRITES {
        queue.write_data(slot, 0, &data(index));
        queue.submit_write(slot, Sector(index * STRIDE_SECTORS), WRITE_BYTES as u32).unwrap();
        one(queue);
    }
    kill_process(first, Signal::KILL).unwrap();
    let run = machine.until("systemd starts it again", || {
        let (pid, run) = machine.daemon();
        (pid != first).then_some(run)
    });
    let mut client = BlkClient::connect(run.join("vd.sock"), &ClientOptions::default()).unwrap();
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    let found =
        (0..WRITES).filter(|index| read(queue, slot, *index) == data(*index)).count() as u64;
    let warnings =
        Client::new(&run.join("control.sock")).unwrap().devices().unwrap().remove(0).warnings;
    (found, warnings)
}

fn can_run() -> bool {
    let can_run = rustix::process::geteuid().is_root() && Path::new(SYSTEMD).exists();
    if !can_run {
        sidecore_skip::skip("it needs root, and systemd");
    }
    can_run
}

#[test]
fn a_guest_continues_with_the_next_daemon_on_its_connection() {
    if !can_run() {
        return;
    }
    let machine = Machine::start(|unit| unit.replace("Restart=on-failure", "Restart=always"));
    let (first, run) = machine.daemon();
    let data = |index: u64| vec![index as u8 + 1; WRITE_BYTES];
    let mut client = BlkClient::connect(run.join("vd.sock"), &ClientOptions::default()).unwrap();
    let mut queue = client.take_queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for index in 0..WRITES {
        if index == WRITES / 2 {
            kill_process(first, Signal::TERM).unwrap();
        }
        queue.write_data(slot, 0, &data(index));
        queue.submit_write(slot, Sector(index * STRIDE_SECTORS), WRITE_BYTES as u32).unwrap();
        one(&mut queue);
    }
    machine.until("systemd starts it again", || (machine.daemon().0 != first).then_some(()));
    for index in 0..WRITES {
        assert_eq!(read(&mut queue, slot, index), data(index), "{index}");
    }
    // DRIVER_OK, read through the socket that was connected at the beginning.
    assert_eq!(client.status().unwrap() & 4, 4);
}

#[test]
fn answered_writes_are_there_when_systemd_has_started_a_killed_daemon_again() {
    if !can_run() {
        return;
    }
    assert_eq!(written_killed_and_found(|unit| unit), (WRITES, Vec::new()));
    // The setting that docs/restart.md explains is the one that preserves the log.
    let (found, warnings) =
        written_killed_and_found(|unit| unit.replace("RuntimeDirectoryPreserve=yes\n", ""));
    assert!(
        found == 0 && warnings.iter().any(|warning| warning.contains("may be missing")),
        "{found}: {warnings:?}"
    );
}
