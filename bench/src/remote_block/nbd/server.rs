//! NBD servers as peers: nbdkit, and qemu-storage-daemon's NBD export, over a virtual wire of their
//! own and with their best settings.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use quanta::Clock;

use super::NbdClient;
use crate::cores;
use crate::load::Work;
use crate::peer::{self, Program};
use crate::process::Process;
use crate::record::Params;
use crate::remote_block::iohost::Disk;
use crate::remote_block::wire::{Cable, HOST_IP};
use crate::stop;

/// The name of nbdkit in the records.
pub(in crate::remote_block) const NBDKIT: &str = "nbdkit";

/// The port that IANA has assigned to NBD.
const PORT: u16 = 10_809;
/// The name of the export of qemu-storage-daemon. nbdkit's plugins serve any name.
const EXPORT: &str = "disk";

/// The program of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::remote_block) enum Peer {
    Nbdkit,
    StorageDaemon,
}

impl Peer {
    pub(in crate::remote_block) const ALL: [Self; 2] = [Self::Nbdkit, Self::StorageDaemon];

    pub(in crate::remote_block) const fn name(self) -> &'static str {
        match self {
            Self::Nbdkit => NBDKIT,
            Self::StorageDaemon => peer::NAME,
        }
    }

    /// Whether the server has a store like this one.
    pub(in crate::remote_block) fn has(self, disk: Disk) -> bool {
        match (self, disk) {
            (_, Disk::Null) | (Self::Nbdkit, Disk::Ram) => true,
            (Self::StorageDaemon, Disk::Ram) | (_, Disk::Slow) => false,
        }
    }
}

/// The programs that this machine has.
pub(in crate::remote_block) struct Programs {
    /// The version of nbdkit, if it is installed.
    nbdkit: Option<String>,
    storage_daemon: Option<Program>,
}

impl Programs {
    /// Finds nbdkit, beside the other peer.
    pub(in crate::remote_block) fn find(storage_daemon: Option<Program>) -> Self {
        let nbdkit = nbdkit_version();
        match &nbdkit {
            Ok(version) => eprintln!("  peer: {NBDKIT} {version}"),
            Err(error) => eprintln!("  no peer: {error:#}"),
        }
        Self { nbdkit: nbdkit.ok(), storage_daemon }
    }

    pub(in crate::remote_block) fn has(&self, peer: Peer) -> bool {
        match peer {
            Peer::Nbdkit => self.nbdkit.is_some(),
            Peer::StorageDaemon => self.storage_daemon.is_some(),
        }
    }

    fn params(&self, peer: Peer) -> Params {
        match peer {
            Peer::Nbdkit => {
                let version = self.nbdkit.clone().unwrap_or_default();
                crate::record::params([("version", version.into())])
            }
            Peer::StorageDaemon => {
                self.storage_daemon.as_ref().map(Program::params).unwrap_or_default()
            }
        }
    }
}

fn nbdkit_version() -> Result<String> {
    let output = Command::new(NBDKIT).arg("--version").stdin(Stdio::null()).output();
    let output = output.context("no nbdkit: install it to compare with it")?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().nth(1).map(str::to_owned).context("nbdkit does not say its version")
}

/// Settings of a server; all are tried, and the best are taken.
#[derive(Clone, Copy, Debug)]
struct Settings {
    /// nbdkit's threads, or the nanoseconds for which qemu-storage-daemon's iothread polls.
    number: u32,
    is_structured: bool,
}

impl Settings {
    fn all(peer: Peer) -> Vec<Self> {
        let numbers: &[u32] = match peer {
            Peer::Nbdkit => &[1, 4, 16],
            Peer::StorageDaemon => &[32_768, 1_000_000],
        };
        let both = |number: &u32| {
            [true, false].map(|is_structured| Self { number: *number, is_structured })
        };
        numbers.iter().flat_map(both).collect()
    }

    fn describe(self, peer: Peer, disk: Disk) -> String {
        let replies = if self.is_structured { "structured" } else { "simple" };
        match peer {
            Peer::Nbdkit => {
                format!("plugin {}, threads={}, {replies} replies", plugin(disk), self.number)
            }
            Peer::StorageDaemon => {
                format!("null-co, iothread poll-max-ns={}, {replies} replies", self.number)
            }
        }
    }
}

const fn plugin(disk: Disk) -> &'static str {
    match disk {
        Disk::Null | Disk::Slow => "null",
        Disk::Ram => "memory",
    }
}

/// A server that is frozen between runs, and its client.
pub(in crate::remote_block) struct NbdServer {
    /// Dropped first: the server sees its client leave.
    pub(in crate::remote_block) client: NbdClient,
    pub(in crate::remote_block) process: Process,
    pub(in crate::remote_block) peer: Peer,
    pub(in crate::remote_block) disk: Disk,
    /// The version and the settings.
    pub(in crate::remote_block) params: Params,
    _cable: Cable,
}

impl NbdServer {
    /// Starts a server with its best settings, each of which is tried for `trial`.
    ///
    /// # Errors
    /// The server does not start with any settings; the machine has no virtual wires.
    pub(in crate::remote_block) fn start_best(
        programs: &Programs,
        directory: &Path,
        (peer, disk): (Peer, Disk),
        disk_bytes: u64,
        trial: Duration,
    ) -> Result<Self> {
        let mut best: Option<(f64, Settings)> = None;
        let start = |settings, number| {
            let name = format!("{}-{}-{number}", peer.name(), disk.name());
            Self::start(programs, (directory, &name), (peer, disk), settings, disk_bytes)
        };
        for (number, settings) in Settings::all(peer).into_iter().enumerate() {
            stop::check()?;
            let score = start(settings, number)?.try_out(trial)?;
            if best.is_none_or(|(other, _)| score > other) {
                best = Some((score, settings));
            }
        }
        let (_, settings) = best.context("no settings to try")?;
        let mut server = start(settings, usize::MAX)?;
        let described = settings.describe(peer, disk);
        eprintln!("  peer: {}: {described}", peer.name());
        server.params = programs.params(peer);
        server.params.insert("settings".to_owned(), described.into());
        server.process.freeze()?;
        Ok(server)
    }

    fn start(
        programs: &Programs,
        (directory, name): (&Path, &str),
        (peer, disk): (Peer, Disk),
        settings: Settings,
        disk_bytes: u64,
    ) -> Result<Self> {
        let cable = Cable::ethernet()?;
        let pid_file = directory.join(format!("{name}.pid"));
        let pid_path = pid_file.display().to_string();
        let mut command = cable.prefix();
        match peer {
            Peer::Nbdkit => command.extend(nbdkit(disk, settings, disk_bytes, &pid_path)),
            Peer::StorageDaemon => {
                let program = programs.storage_daemon.as_ref().context("no such program")?;
                command.extend(program.command().iter().cloned());
                command.extend(storage_daemon(settings, disk_bytes, &pid_path));
            }
        }
        let mut process = Process::start(name, &[cores::SERVER], &command, directory)?;
        // Both programs write this file once they listen.
        process.wait_until(|_| pid_file.exists())?;
        let client = NbdClient::open(cable.connect(PORT)?, EXPORT, settings.is_structured)?;
        let found = client.disk_bytes();
        ensure!(found == disk_bytes, "{name} has {found} bytes instead of {disk_bytes}");
        Ok(Self { client, process, peer, disk, params: Params::new(), _cable: cable })
    }

    /// Runs a short load. Returns the product of requests a second at depth 1 and at depth 32.
    fn try_out(mut self, trial: Duration) -> Result<f64> {
        let (clock, mut score) = (Clock::new(), 1.0);
        for depth in [1, 32] {
            let work = Work { depth, duration: trial, ..Work::default() };
            let blocks = self.client.disk_bytes() / u64::from(work.bytes);
            score *= self.client.run(&Work { blocks, ..work }, &clock)?.iops;
        }
        Ok(score)
    }

    /// Ends the server.
    ///
    /// # Errors
    /// As [`Process::end`].
    pub(in crate::remote_block) fn end(self) -> Result<()> {
        let Self { client, mut process, .. } = self;
        process.thaw()?;
        drop(client);
        process.end()
    }
}

/// nbdkit with a plugin that sends the data of every read: the plugin `null` sends zeros.
fn nbdkit(disk: Disk, settings: Settings, disk_bytes: u64, pid_file: &str) -> Vec<String> {
    let (threads, port) = (settings.number.to_string(), PORT.to_string());
    let words = [NBDKIT, "--foreground", "--newstyle", "--pidfile", pid_file, "--ipaddr", HOST_IP];
    let more = ["--port", &port, "--threads", &threads, plugin(disk)];
    let words = words.into_iter().chain(more).map(str::to_owned);
    words.chain([format!("size={disk_bytes}")]).collect()
}

/// Arguments of qemu-storage-daemon for a null device that sends data: with `read-zeroes=on` it
/// would answer reads with holes.
fn storage_daemon(settings: Settings, disk_bytes: u64, pid_file: &str) -> Vec<String> {
    let arguments = [
        "--pidfile".to_owned(),
        pid_file.to_owned(),
        "--object".to_owned(),
        format!("iothread,id=io,poll-max-ns={}", settings.number),
        "--blockdev".to_owned(),
        format!("driver=null-co,node-name=disk,size={disk_bytes},read-zeroes=off"),
        "--nbd-server".to_owned(),
        format!("addr.type=inet,addr.host={HOST_IP},addr.port={PORT}"),
        "--export".to_owned(),
        format!("nbd,id=export,node-name=disk,name={EXPORT},writable=on,iothread=io"),
    ];
    arguments.to_vec()
}
