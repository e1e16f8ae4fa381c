//! The peer: qemu-storage-daemon's vhost-user-blk export, in the newest version that this machine
//! can get and with its best settings.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_guest::root::{ROOTS, Root};

use crate::cores;
use crate::load::{self, Work};
use crate::process::Process;
use crate::record::Params;

/// The peer's name in the records.
pub const NAME: &str = "qemu-storage-daemon";

/// The program of the peer.
#[derive(Clone, Debug)]
pub struct Program {
    command: Vec<String>,
    /// The version that the program prints, for instance `11.1.0`.
    pub version: String,
    /// The reason why the program is not the newest one, if it is not.
    pub remark: Option<String>,
}

impl Program {
    /// Finds the newest program: in `roots`, fetched now if `may_fetch`; else the installed one.
    ///
    /// # Errors
    /// No program is found.
    pub fn find(roots: &Path, may_fetch: bool) -> Result<Self> {
        let root = if may_fetch {
            Root::find_or_fetch(roots, |what| eprintln!("  {what}"))
        } else {
            Root::find(roots)
        };
        match root.and_then(|root| root.command(NAME)) {
            Ok(command) => Ok(Self { version: version(&command)?, command, remark: None }),
            Err(error) => {
                let command = vec![NAME.to_owned()];
                let version = version(&command)
                    .with_context(|| format!("no {NAME}: install it to compare with it"))?;
                let remark = Some(format!("installed one, the newest is not to be had: {error:#}"));
                Ok(Self { command, version, remark })
            }
        }
    }
}

impl Program {
    /// Finds the newest program, in a cache beside the output of the build that `daemon` is from.
    /// Prints the version, or the reason why there is none.
    #[must_use]
    pub fn find_beside(daemon: &Path, may_fetch: bool) -> Option<Self> {
        // A cache like the build's own output, made once and kept.
        let target = daemon.parent().and_then(Path::parent);
        let roots = target.map_or_else(std::env::temp_dir, |target| target.join(ROOTS));
        match Self::find(&roots, may_fetch) {
            Ok(program) => {
                eprintln!("  peer: {NAME} {}", program.version);
                if let Some(remark) = &program.remark {
                    eprintln!("  peer: {remark}");
                }
                Some(program)
            }
            Err(error) => {
                eprintln!("  no peer: {error:#}");
                None
            }
        }
    }

    /// The words that start the program.
    #[must_use]
    pub fn command(&self) -> &[String] {
        &self.command
    }

    /// The parameters of the program's measurements.
    #[must_use]
    pub fn params(&self) -> Params {
        let remark = self.remark.iter().map(|remark| ("remark".to_owned(), remark.clone().into()));
        remark.chain([("version".to_owned(), self.version.clone().into())]).collect()
    }
}

fn version(command: &[String]) -> Result<String> {
    let (program, arguments) = command.split_first().context("an empty command")?;
    let output =
        Command::new(program).args(arguments).arg("--version").stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.split_whitespace().skip_while(|word| *word != "version").nth(1);
    version.map(str::to_owned).with_context(|| format!("{NAME} does not say its version"))
}

/// A disk that the peer serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A disk that keeps no data (`null-co`).
    Null {
        /// The size of the disk.
        bytes: u64,
    },
    /// A disk in a file.
    File {
        /// The file.
        path: PathBuf,
        /// Whether to try the page cache too.
        cached: bool,
    },
    /// A disk in a file under a header of LUKS1, with or without the page cache.
    Luks {
        /// The file, with its header.
        path: PathBuf,
        /// The file of the passphrase.
        key: PathBuf,
    },
}

/// Settings of the peer; all are tried, and the best are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time for which the iothread polls before it sleeps, in nanoseconds.
    pub poll_max_ns: u64,
    /// Whether a file is opened past the page cache.
    pub direct: bool,
}

impl Settings {
    fn all(disk: &Disk) -> Vec<Self> {
        let directs: &[bool] = match disk {
            Disk::Null { .. } => &[false],
            Disk::File { cached: true, .. } | Disk::Luks { .. } => &[false, true],
            Disk::File { cached: false, .. } => &[true],
        };
        let polls = [32_768, 1_000_000];
        polls
            .iter()
            .flat_map(|poll| {
                directs.iter().map(|direct| Self { poll_max_ns: *poll, direct: *direct })
            })
            .collect()
    }

    /// Describes the settings for the records.
    #[must_use]
    pub fn describe(&self, disk: &Disk) -> String {
        match disk {
            Disk::Null { .. } => format!("null-co, iothread poll-max-ns={}", self.poll_max_ns),
            Disk::File { .. } | Disk::Luks { .. } => {
                let direct = if self.direct { "on" } else { "off" };
                let kind = if matches!(disk, Disk::Luks { .. }) { "luks on file" } else { "file" };
                format!(
                    "{kind}, aio=io_uring, cache.direct={direct}, iothread poll-max-ns={}",
                    self.poll_max_ns
                )
            }
        }
    }
}

/// The peer as a running process.
#[derive(Debug)]
pub struct StorageDaemon {
    /// The process, which is frozen between runs.
    pub process: Process,
    /// The socket of the disk.
    pub socket: PathBuf,
    /// The settings in words.
    pub settings: String,
    command: Vec<String>,
    name: String,
    directory: PathBuf,
}

/// Starts the peer, and waits until its socket accepts.
fn run(name: &str, command: &[String], socket: &Path, directory: &Path) -> Result<Process> {
    let mut process = Process::start(name, &[cores::SERVER], command, directory)?;
    // The socket's file exists before the peer listens on it.
    process.wait_until(|_| UnixStream::connect(socket).is_ok())?;
    Ok(process)
}

impl StorageDaemon {
    /// Tries all settings with a short load each, and starts the peer with the best, frozen.
    ///
    /// # Errors
    /// No settings work.
    pub fn start_best(
        program: &Program,
        directory: &Path,
        name: &str,
        disk: &Disk,
        queues: u16,
        trial: Duration,
    ) -> Result<Self> {
        let mut best: Option<(f64, Settings)> = None;
        let mut failure = None;
        for (number, settings) in Settings::all(disk).into_iter().enumerate() {
            let result = Self::start(
                program,
                directory,
                &format!("{name}-{number}"),
                disk,
                queues,
                settings,
            )
            .and_then(|daemon| daemon.try_out(trial));
            match result {
                Ok(score) if best.is_none_or(|(other, _)| score > other) => {
                    best = Some((score, settings))
                }
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
            crate::stop::check()?;
        }
        let mut daemon = match (best, failure) {
            (Some((_, settings)), _) => {
                Self::start(program, directory, name, disk, queues, settings)
            }
            (None, Some(error)) => Err(error),
            (None, None) => bail!("no settings to try"),
        }?;
        eprintln!("  peer: {}", daemon.settings);
        daemon.process.freeze()?;
        Ok(daemon)
    }

    /// The parameters of the peer's measurements.
    #[must_use]
    pub fn params(&self, program: &Program) -> Params {
        let mut params = program.params();
        params.insert("settings".to_owned(), self.settings.clone().into());
        params
    }

    fn start(
        program: &Program,
        directory: &Path,
        name: &str,
        disk: &Disk,
        queues: u16,
        settings: Settings,
    ) -> Result<Self> {
        let socket = directory.join(format!("{name}.sock"));
        let direct = if settings.direct { "on" } else { "off" };
        let blockdev = match disk {
            Disk::Null { bytes } => {
                format!("driver=null-co,node-name=disk,size={bytes},read-zeroes=off")
            }
            Disk::File { path, .. } => {
                format!(
                    "driver=file,node-name=disk,aio=io_uring,cache.direct={direct},filename={}",
                    path.display()
                )
            }
            Disk::Luks { path, .. } => format!(
                "driver=luks,node-name=disk,key-secret=key,file.driver=file,file.aio=io_uring,\
                 file.cache.direct={direct},file.filename={}",
                path.display()
            ),
        };
        let export = format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},iothread=io,\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let object = format!("iothread,id=io,poll-max-ns={}", settings.poll_max_ns);
        let mut options: Vec<String> =
            ["--object", &object, "--blockdev", &blockdev, "--export", &export]
                .map(str::to_owned)
                .into();
        if let Disk::Luks { key, .. } = disk {
            let secret = format!("secret,id=key,file={}", key.display());
            options.splice(0..0, ["--object".to_owned(), secret]);
        }
        let command: Vec<String> = program.command.iter().cloned().chain(options).collect();
        let process = run(name, &command, &socket, directory)?;
        let (settings, name, directory) =
            (settings.describe(disk), name.to_owned(), directory.to_owned());
        Ok(Self { process, socket, settings, command, name, directory })
    }

    /// Kills the peer, and starts it again with the same settings, frozen.
    ///
    /// # Errors
    /// The peer does not start again.
    pub fn restart(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process = run(&self.name, &self.command, &self.socket, &self.directory)?;
        self.process.freeze()
    }

    /// Runs a short load. Returns the product of requests a second at depth 1 and at depth 32.
    fn try_out(self, trial: Duration) -> Result<f64> {
        let mut client = BlkClient::connect(&self.socket, &ClientOptions::default())?;
        let blocks = client.config().capacity_sectors / 8;
        let queue = client.queue(0).context("no queue")?;
        let clock = Clock::new();
        let mut score = 1.0;
        for depth in [1, 32] {
            let work = Work { depth, blocks, duration: trial, ..Work::default() };
            score *= load::run(queue, &work, &clock)?.iops;
        }
        Ok(score)
    }
}
