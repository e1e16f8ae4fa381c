//! A daemon as a process, for the tests that start one.
#![allow(dead_code, reason = "each test takes what it needs")]

pub mod remote;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use sidecore_control::Client;
use sidecore_control::report::{DeviceReport, DeviceState};
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use tempfile::TempDir;

pub struct Daemon {
    pub child: Process,
    pub directory: TempDir,
}

impl Daemon {
    /// Starts the daemon and waits until it is ready.
    pub fn start(directory: TempDir, config: &str) -> Self {
        Self::started(spawn(directory.path(), config, &[]), directory, config)
    }

    /// As [`start`](Self::start), with the variables of a service manager.
    pub fn start_with(directory: TempDir, config: &str, variables: &[(&str, &str)]) -> Self {
        Self::started(spawn(directory.path(), config, variables), directory, config)
    }

    /// As [`start`](Self::start), in a network namespace.
    pub fn start_in(namespace: &Namespace, directory: TempDir, config: &str) -> Self {
        let command = namespace.command(DAEMON.as_ref());
        Self::started(spawn_by(command, directory.path(), config, &[]), directory, config)
    }

    pub fn started(child: Child, directory: TempDir, config: &str) -> Self {
        let mut child = Process::from(child);
        let line = child.first_line().unwrap();
        let devices = config.matches("[[device]]").count();
        assert_eq!(line, format!("ready: {devices} devices\n"), "{}", child.complaint().unwrap());
        Self { child, directory }
    }

    pub fn client(&self) -> Client {
        Client::new(&self.directory.path().join("control.sock")).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal).unwrap();
    }

    /// Waits for the end of the daemon. Returns its standard error, too.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let status = self
            .child
            .wait_for_end(Duration::from_secs(20))
            .unwrap()
            .expect("the daemon does not end");
        (status, self.child.complaint().unwrap())
    }

    /// A field of /proc/PID/status, in KiB.
    pub fn status_kib(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line =
            status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
        line.split_ascii_whitespace().next().unwrap().parse().unwrap()
    }

    /// The CPU time of all the daemon's threads, in clock ticks.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name in parentheses may hold anything; user and system time are the 14th and 15th
        // fields.
        let fields = stat.rsplit_once(')').unwrap().1;
        fields
            .split_ascii_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse::<u64>().unwrap())
            .sum()
    }
}

const DAEMON: &str = env!("CARGO_BIN_EXE_sidecored");

pub fn spawn(directory: &Path, config: &str, variables: &[(&str, &str)]) -> Child {
    spawn_by(Command::new(DAEMON), directory, config, variables)
}

fn spawn_by(
    mut command: Command,
    directory: &Path,
    config: &str,
    variables: &[(&str, &str)],
) -> Child {
    let file = directory.join("disks.toml");
    std::fs::write(&file, config).unwrap();
    command.arg("--config").arg(file).env_remove("RUST_LOG");
    // The variables of a service manager around the tests are not for the daemon.
    command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A configuration with `devices` devices. Relative paths start from the configuration's directory.
pub fn config(devices: usize) -> String {
    let mut text = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
                    [[sidecore]]\nname = \"sc1\"\n\
                    [[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"1MiB\"\n"
        .to_owned();
    for index in 0..devices {
        let _ = write!(
            text,
            "[[device]]\nname = \"vd{index}\"\nstore = \"mem\"\nsocket = \"vd{index}.sock\"\n"
        );
    }
    text
}

/// A configuration with two disks, each behind a stage with these keys: `vd0` on the file
/// `disk.img`, and `vd1` in memory.
pub fn on_stages(of_file: &str, of_memory: &str) -> String {
    format!(
        r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[store]]
name = "disk"
type = "file"
path = "disk.img"
[[store.stage]]
{of_file}
[[store]]
name = "memory"
type = "ram"
size = "1MiB"
[[store.stage]]
{of_memory}
[[device]]
name = "vd0"
store = "disk"
socket = "vd0.sock"
[[device]]
name = "vd1"
store = "memory"
socket = "vd1.sock"
"#
    )
}

/// The report of a device.
pub fn state(daemon: &Daemon, name: &str) -> DeviceReport {
    let devices = daemon.client().devices().unwrap();
    devices.into_iter().find(|device| device.name == name).unwrap()
}

/// Waits until `vd0` waits for its guest, and `vd1` is not there for this reason.
pub fn waits_without(daemon: &Daemon, reason: &str) {
    wait::succeed(Duration::from_secs(60), || {
        let (good, bad) = (state(daemon, "vd0"), state(daemon, "vd1"));
        let found = bad.reason.unwrap_or_default();
        let is_done = good.state == DeviceState::Waiting && found.contains(reason);
        if is_done { Ok(()) } else { Err(format!("{} and {found}", good.state.word())) }
    });
}

pub fn sockets(directory: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "sock")).collect()
}
