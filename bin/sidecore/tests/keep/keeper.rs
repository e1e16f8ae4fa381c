//! The program under test, and the test's end of the sessions with its command.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use tempfile::TempDir;

/// Longer than any event here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// The command gets a signal when the keeper is killed.
pub struct Keeper {
    process: Process,
    listener: UnixListener,
    directory: TempDir,
}

impl Keeper {
    /// Starts the program with this test binary as its command.
    pub fn start(options: &[&str]) -> Self {
        let exe = std::env::current_exe().unwrap();
        Self::of(
            options,
            &[exe.to_str().unwrap(), "--exact", "child::child", "--nocapture", "--test-threads=1"],
            &[],
        )
    }

    pub fn with_environment(variables: &[(&str, &str)]) -> Self {
        let exe = std::env::current_exe().unwrap();
        let command =
            [exe.to_str().unwrap(), "--exact", "child::child", "--nocapture", "--test-threads=1"];
        Self::of(&[], &command, variables)
    }

    pub fn of(options: &[&str], command: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("talk")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let temporary = directory.path().join("tmp");
        std::fs::create_dir(&temporary).unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut keeper = Command::new(env!("CARGO_BIN_EXE_sidecore"));
        keeper.arg("keep").args(options).arg("--").args(command);
        keeper.env(super::child::TALK, directory.path().join("talk")).env("TMPDIR", temporary);
        keeper.env_remove("NOTIFY_SOCKET").envs(variables.iter().copied());
        let process = Process::start(keeper.stdout(Stdio::null()).stderr(log)).unwrap();
        Self { process, listener, directory }
    }

    /// The session of the next process of the command, which must be started.
    pub fn next(&self) -> Session {
        self.accept(&[]).expect("the command was not started")
    }

    /// The session of the next process of the command, unless the keeper ends.
    pub fn next_or_end(&self) -> Option<Session> {
        self.accept(&[Pid::from_child(&self.process)])
    }

    fn accept(&self, unless_ended: &[Pid]) -> Option<Session> {
        let ends: Vec<_> =
            unless_ended.iter().map(|pid| pidfd_open(*pid, PidfdFlags::empty()).unwrap()).collect();
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(ends.iter().map(|end| PollFd::new(end, PollFlags::IN)));
        let timeout = Timespec::try_from(PATIENCE).unwrap();
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&timeout))).unwrap();
        assert!(ready > 0, "nothing happens: {}", self.log());
        let (stream, _) = self.listener.accept().ok()?;
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut session = Session { pid: 0, stream: BufReader::new(stream) };
        session.pid = session.line().expect("a greeting").parse().unwrap();
        Some(session)
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal).unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the end of the keeper.
    pub fn wait(&mut self) -> ExitStatus {
        let status = self.process.wait_for_end(PATIENCE).unwrap();
        status.unwrap_or_else(|| panic!("the keeper does not end: {}", self.log()))
    }

    /// The messages of the keeper and the command so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// The files in the keeper's temporary directory.
    pub fn left_behind(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.directory.path().join("tmp"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    }
}

/// Waits until a process has seen its signals and is in this state: see proc_pid_status(5).
pub fn until(pid: u32, state: &str) {
    wait::until(&format!("process {pid} is in state {state}"), PATIENCE, || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let is = |key: &str, value: &str| {
            status.lines().any(|line| {
                line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(value))
            })
        };
        let none = "0000000000000000";
        is("State:", state) && is("SigPnd:", none) && is("ShdPnd:", none)
    });
}

/// A session with one process of the command.
pub struct Session {
    pub pid: u32,
    stream: BufReader<UnixStream>,
}

impl Session {
    /// Sends a command that has no answer.
    pub fn send(&mut self, command: &str) {
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.send(command);
        self.line().unwrap_or_else(|| panic!("{command}: no answer"))
    }

    /// Waits for the process to get its SIGTERM.
    pub fn gets_sigterm(&mut self) -> bool {
        self.line().is_some_and(|line| line == "SIGTERM")
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line.strip_suffix('\n').map(str::to_owned)
    }
}
