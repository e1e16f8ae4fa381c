//! A daemon as a process, for the tests that start one.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::Client;
use tempfile::TempDir;

pub struct Daemon {
    pub child: Child,
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

    pub fn started(mut child: Child, directory: TempDir, config: &str) -> Self {
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let devices = config.matches("[[device]]").count();
        assert_eq!(line, format!("ready: {devices} devices\n"), "{}", rest(&mut child));
        Self { child, directory }
    }

    pub fn client(&self) -> Client {
        Client::new(&self.directory.path().join("control.sock")).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end of the daemon. Returns its standard error, too.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        (self.child.wait().unwrap(), rest(&mut self.child))
    }

    /// A field of /proc/PID/status, in KiB.
    pub fn status_kib(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
        line.split_ascii_whitespace().next().unwrap().parse().unwrap()
    }

    /// The CPU time of all the daemon's threads, in clock ticks.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name in parentheses may hold anything; user and system time are the 14th and 15th
        // fields.
        let fields = stat.rsplit_once(')').unwrap().1;
        fields.split_ascii_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn spawn(directory: &Path, config: &str, variables: &[(&str, &str)]) -> Child {
    let file = directory.join("disks.toml");
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidecored"));
    command.arg("--config").arg(file).env_remove("RUST_LOG");
    // The variables of a service manager around the tests are not for the daemon.
    command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The standard error of a daemon, once the daemon has ended.
pub fn rest(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut text).unwrap();
    }
    text
}

/// A configuration with `devices` devices. Relative paths start from the configuration's directory.
pub fn config(devices: usize) -> String {
    let mut text = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n[[sidecore]]\nname = \"sc1\"\n\
        [[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"1MiB\"\n"
        .to_owned();
    for index in 0..devices {
        let _ = write!(text, "[[device]]\nname = \"vd{index}\"\nstore = \"mem\"\nsocket = \"vd{index}.sock\"\n");
    }
    text
}

pub fn sockets(directory: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "sock")).collect()
}
