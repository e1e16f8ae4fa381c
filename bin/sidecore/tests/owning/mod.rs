//! Three members of etcd, candidates, and the history of their commands.

mod restored;
mod scattered;
mod secure;
pub mod skewed;

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sidecore_cluster::boot_time;
use sidecore_kit::etcd::Etcd;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_linux::{FileOptions, FileStore};
use tempfile::TempDir;

pub const PATIENCE: Duration = Duration::from_secs(90);
/// The time of a daemon's lease.
pub const LEASE: Duration = Duration::from_secs(3);
const DIRECTORY: &str = "SIDECORE_TEST_DIRECTORY";
/// The time between two numbers of a writer.
const PACE: Duration = Duration::from_millis(1);
/// Lines that show that an owner writes.
const FEW: usize = 20;

/// The token of the first cluster of etcd.
const TOKEN: &str = "first";

/// A fence command with effect.
const FENCE: &str = "kill -9 $(cat \"$(dirname \"$0\")/$1.pids\")\n\
                         echo $1 >> \"$(dirname \"$0\")/fenced\"\n";

#[derive(Clone, Copy)]
pub enum Fence {
    Lock,
    Command,
}

/// A line of the history.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub epoch: u64,
    pub number: u64,
    pub at_ns: u64,
}

/// The owner's command: counts in the store, and notes each number in the history.
pub fn write_until_sigterm() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    let epoch = std::env::var("SIDECORE_EPOCH").unwrap();
    let ends = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&ends)).unwrap();
    let path = directory.join("disk.img");
    let locked = FileStore::open(&FileOptions::new(&path)).unwrap();
    let disk = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut history = OpenOptions::new().append(true).open(directory.join("history")).unwrap();
    let mut bytes = [0; 8];
    disk.read_exact_at(&mut bytes, 0).unwrap();
    let mut number = u64::from_le_bytes(bytes);
    while !ends.load(Ordering::Relaxed) {
        number += 1;
        disk.write_all_at(&number.to_le_bytes(), 0).unwrap();
        let line = format!("{epoch} {number} {}\n", boot_time().0);
        history.write_all(line.as_bytes()).unwrap();
        std::thread::sleep(PACE);
    }
    drop(locked);
}

/// Etcd and its network.
pub struct Site {
    /// Ends before its namespace.
    etcd: Option<Etcd>,
    namespace: Namespace,
}

impl Site {
    /// `None` if this machine has no network namespaces.
    pub fn start() -> Option<Self> {
        let namespace = match Namespace::new() {
            Ok(namespace) => namespace,
            Err(error) => {
                sidecore_skip::skip(error);
                return None;
            }
        };
        let etcd = Some(Etcd::start(&namespace, TOKEN).unwrap());
        Some(Self { etcd, namespace })
    }

    /// Ends etcd, and starts another cluster at the same addresses.
    pub fn replace_etcd(&mut self) {
        self.etcd = None;
        self.etcd = Some(Etcd::start(&self.namespace, "second").unwrap());
    }

    /// Ends etcd, and starts a cluster with this token from a backup at the same addresses.
    fn restore_etcd(&mut self, backup: &Path, token: &str) {
        let etcd = self.etcd.take().unwrap().restore(&self.namespace, (backup, token));
        self.etcd = Some(etcd.unwrap());
    }

    pub fn etcd(&self) -> &Etcd {
        self.etcd.as_ref().unwrap()
    }

    /// Cuts an address of etcd off.
    pub fn cut(&self, address: &str) {
        Etcd::cut(&self.namespace, address).unwrap();
    }

    /// Ends [`cut`](Self::cut).
    pub fn heal(&self, address: &str) {
        Etcd::heal(&self.namespace, address).unwrap();
    }

    pub fn depose_leader(&self) {
        self.etcd().depose_leader(&self.namespace);
    }
}

/// A store, its candidates' keys in etcd, and a directory for all.
pub struct Cluster {
    number: u64,
    directory: TempDir,
    history: RefCell<History>,
}

/// The part of the history that was read.
#[derive(Default)]
struct History {
    lines: Vec<Line>,
    read_bytes: u64,
}

impl Cluster {
    /// Different numbers have different keys in etcd.
    pub fn new(number: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        File::create(path.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
        for name in ["history", "fenced"] {
            File::create(path.join(name)).unwrap();
        }
        let cluster = Self { number, directory, history: RefCell::default() };
        cluster.set_fence(FENCE);
        cluster
    }

    /// Replaces the fence command by this shell script.
    pub fn set_fence(&self, script: &str) {
        let new = self.path("fence.new");
        std::fs::write(&new, format!("#!/bin/sh\n{script}")).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&new, executable).unwrap();
        std::fs::rename(new, self.path("fence")).unwrap();
    }

    pub fn candidate(&self, site: &Site, name: &str, fence: Fence) -> Candidate {
        self.candidate_at(site, name, fence, &[&Etcd::endpoints_at(&self.address(name))])
    }

    /// A candidate with these endpoints of etcd, and options of how to reach them.
    pub fn candidate_at(&self, site: &Site, name: &str, fence: Fence, etcd: &[&str]) -> Candidate {
        let now = boot_time().0;
        let log = self.path(&format!("log-{name}-{now}"));
        let socket = self.path(&format!("{name}-{now}.sock"));
        let mut command = site.namespace.command(env!("CARGO_BIN_EXE_sidecore").as_ref());
        let keys = self.number.to_string();
        command.arg("--socket").arg(&socket);
        command.args(["own", "disk", "--name", name, "--cluster", &keys]);
        command.arg("--lease").arg(LEASE.as_secs().to_string());
        command.arg("--metrics").arg(metrics_of(&socket));
        command.arg("--etcd").args(etcd);
        command.arg("--record").arg(self.path("disk.owner"));
        command.arg("--path").arg(self.path("disk.img"));
        match fence {
            Fence::Lock => command.arg("--fence-lock"),
            Fence::Command => {
                command.args(["--fence-limit", "1", "--fence-command"]).arg(self.path("fence"))
            }
        };
        command.arg("--").arg(std::env::current_exe().unwrap());
        command.args(["--exact", "writer", "--ignored", "--nocapture"]);
        command.env(DIRECTORY, self.directory.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let process = Process::start(&mut command).unwrap();
        let pids = self.path(&format!("{name}.pids"));
        Candidate { process, log, read: 0, pids, socket }
    }

    /// The address at which a candidate has etcd.
    fn address(&self, name: &str) -> String {
        format!("127.{}.{}.1", self.number, name.as_bytes()[0])
    }

    /// Cuts a candidate off from etcd.
    pub fn cut(&self, site: &Site, name: &str) {
        site.cut(&self.address(name));
    }

    /// Ends [`cut`](Self::cut).
    pub fn heal(&self, site: &Site, name: &str) {
        site.heal(&self.address(name));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Reads on in the history.
    fn read_on(&self) {
        let mut history = self.history.borrow_mut();
        let mut file = File::open(self.path("history")).unwrap();
        file.seek(SeekFrom::Start(history.read_bytes)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        // The last line may be half there.
        let whole = text.rfind('\n').map_or(0, |last| last + 1);
        history.read_bytes += whole as u64;
        history.lines.extend(text[..whole].lines().map(|line| {
            let mut numbers = line.split(' ').map(|word| word.parse().unwrap());
            let mut next = || numbers.next().unwrap();
            Line { epoch: next(), number: next(), at_ns: next() }
        }));
    }

    /// The epoch of the last line, and the number of its lines.
    fn newest(&self) -> (u64, usize) {
        self.read_on();
        let lines = &self.history.borrow().lines;
        let epoch = lines.last().map_or(0, |line| line.epoch);
        (epoch, lines.iter().rev().take_while(|line| line.epoch == epoch).count())
    }

    /// The epoch of the last line.
    pub fn epoch(&self) -> u64 {
        self.newest().0
    }

    /// Waits for lines of a later epoch. Returns the epoch.
    pub fn progress_after(&self, epoch: u64) -> u64 {
        let mut newest = (0, 0);
        wait::until("an owner writes", PATIENCE, || {
            newest = self.newest();
            newest.0 > epoch && newest.1 >= FEW
        });
        newest.0
    }

    /// Waits for more lines.
    pub fn progress(&self) {
        let begin = self.newest();
        wait::until("the owner writes on", PATIENCE, || {
            let newest = self.newest();
            newest.0 > begin.0 || newest.1 >= begin.1 + FEW
        });
    }

    /// Waits for a line of this time or later, on the [boot time clock](boot_time).
    pub fn progress_until(&self, at_ns: u64) {
        wait::until("an owner writes at a later time", PATIENCE, || {
            self.read_on();
            self.history.borrow().lines.last().is_some_and(|line| line.at_ns >= at_ns)
        });
    }

    /// The time without a line before the first one of an epoch.
    pub fn pause_before(&self, epoch: u64) -> Duration {
        let history = &self.history.borrow().lines;
        let first = history.iter().position(|line| line.epoch == epoch).unwrap();
        Duration::from_nanos(history[first].at_ns - history[first - 1].at_ns)
    }

    /// Asserts that no two owners wrote at once, and that no number was lost.
    pub fn check(&self) {
        self.read_on();
        for pair in self.history.borrow().lines.windows(2) {
            assert!(pair[0].epoch <= pair[1].epoch, "a former owner wrote: {pair:?}");
            assert!(pair[0].number < pair[1].number, "an answered number was lost: {pair:?}");
        }
    }

    /// The daemon in the record.
    pub fn owner(&self) -> String {
        let text = std::fs::read(self.path("disk.owner")).unwrap();
        let record: Value = serde_json::from_slice(&text).unwrap();
        record["owner"]["daemon"].as_str().unwrap().to_owned()
    }

    /// The daemons that the fence command was given.
    pub fn fenced(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("fenced")).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Cluster {
    /// Prints the candidates' logs if the test has failed.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let Ok(entries) = self.directory.path().read_dir() else { return };
        let mut logs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        logs.retain(|path| {
            path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"log-"))
        });
        logs.sort();
        for path in logs {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            println!("{}:\n{text}", path.display());
        }
    }
}

/// A `sidecore own`.
pub struct Candidate {
    process: Process,
    log: PathBuf,
    /// The bytes of the log that [`until_it_says`](Self::until_it_says) has passed.
    read: usize,
    /// For the fence command.
    pids: PathBuf,
    /// The control socket of a daemon, which its command has none of.
    socket: PathBuf,
}

fn metrics_of(socket: &Path) -> PathBuf {
    socket.with_extension("prom")
}

impl Candidate {
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal).unwrap();
    }

    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// The processes of the command.
    fn commands(&self) -> Vec<Pid> {
        let pid = self.process.id();
        let children = Path::new("/proc").join(format!("{pid}/task/{pid}/children"));
        let text = std::fs::read_to_string(children).unwrap_or_default();
        text.split(' ').filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }

    pub fn has_a_command(&self) -> bool {
        !self.commands().is_empty()
    }

    pub fn kill_command(&self) {
        self.commands().into_iter().for_each(|pid| kill_process(pid, Signal::KILL).unwrap());
    }

    /// Sends a signal to this program and to its command, as a machine that is suspended.
    pub fn signal_with_its_command(&self, signal: Signal) {
        let commands = self.commands();
        let mut pids: Vec<String> = commands.iter().map(ToString::to_string).collect();
        pids.push(self.process.id().to_string());
        std::fs::write(&self.pids, pids.join(" ")).unwrap();
        // Both fail if the fence command was faster.
        let _ = self.process.signal(signal);
        for pid in commands {
            let _ = kill_process(pid, signal);
        }
    }

    /// The answer of `sidecore list` with these arguments.
    pub fn list(&self, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidecore"));
        let listed = command.arg("--socket").arg(&self.socket).arg("list").args(arguments).output();
        let listed = listed.unwrap();
        format!(
            "{}{}",
            String::from_utf8_lossy(&listed.stdout),
            String::from_utf8_lossy(&listed.stderr)
        )
    }

    /// Waits until `sidecore list` says something. Returns all that it says.
    pub fn until_list_says(&self, text: &str) -> String {
        wait::succeed(PATIENCE, || {
            let listed = self.list(&[]);
            if listed.contains(text) {
                return Ok(listed);
            }
            Err(format!("\"{text}\" is not in the list:\n{listed}"))
        })
    }

    /// The value of a metric's sample.
    pub fn metric(&self, sample: &str) -> Option<f64> {
        let page = std::fs::read_to_string(metrics_of(&self.socket)).unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(sample));
        line.and_then(|value| value.trim().parse().ok())
    }

    /// Has the next write of the metrics hang: it opens a pipe without a reader.
    pub fn hang_metrics(&self) {
        let mut path = metrics_of(&self.socket).into_os_string();
        path.push(".new");
        let mode = Mode::RUSR | Mode::WUSR;
        wait::until("a pipe in the place of the next page", PATIENCE, || {
            mknodat(CWD, &path, FileType::Fifo, mode, 0).is_ok()
        });
    }

    /// The length of its log.
    pub fn mark(&self) -> (PathBuf, usize) {
        let length = std::fs::metadata(&self.log).map_or(0, |log| log.len() as usize);
        (self.log.clone(), length)
    }

    /// Whether its log says something after a mark.
    pub fn says((log, begin): &(PathBuf, usize), text: &str) -> bool {
        let log = std::fs::read_to_string(log).unwrap();
        log.get(*begin..).is_some_and(|rest| rest.contains(text))
    }

    /// Waits until its log says something, after what the last call waited for.
    pub fn until_it_says(&mut self, text: &str) {
        wait::until(text, PATIENCE, || {
            let log = std::fs::read_to_string(&self.log).unwrap();
            let found = log.get(self.read..).and_then(|rest| rest.find(text));
            found.map(|at| self.read += at + text.len()).is_some()
        });
    }
}
