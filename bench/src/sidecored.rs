//! The daemon under measurement.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cores;
use crate::process::Process;
use crate::record::OURS;

/// The store of a device or a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// A store that keeps no data.
    Null {
        /// The size of the store.
        bytes: u64,
    },
    /// A store that keeps no data and answers late.
    Delayed {
        /// The size of the store.
        bytes: u64,
        /// The delay in microseconds.
        delay_us: u32,
    },
    /// A store in memory.
    Ram {
        /// The size of the store.
        bytes: u64,
    },
    /// A file or a block device.
    File {
        /// The file.
        path: PathBuf,
    },
    /// A virtual function: a volume of a controller, which is made if missing.
    Volume {
        /// The name of the controller.
        controller: &'static str,
        /// The name of the volume.
        volume: &'static str,
        /// The size of the volume.
        bytes: u64,
    },
    /// A controller's physical function.
    Physical {
        /// The name of the controller.
        controller: &'static str,
    },
    /// The store of another device.
    Shared {
        /// The name of the other device.
        with: &'static str,
    },
}

/// A controller on a store of its own, formatted when the daemon starts.
#[derive(Clone, Debug)]
pub struct Controller {
    /// The name in the configuration.
    pub name: &'static str,
    /// The store below the controller.
    pub store: Store,
    /// The unit of translation in bytes.
    pub block_bytes: u32,
}

/// The kind of device that a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum FrontEnd {
    /// A virtio block device over vhost-user.
    #[default]
    VirtioBlk,
    /// An NVMe controller over vfio-user.
    Nvme,
}

/// A device of the daemon on a store of its own.
#[derive(Clone, Debug)]
pub struct Device {
    /// The name in the configuration, and of the socket.
    pub name: String,
    /// The store below the device.
    pub store: Store,
    /// The idle policy: `poll`, `adaptive` or `interrupt`.
    pub idle: &'static str,
    /// The kind of device that the guest sees.
    pub front_end: FrontEnd,
    /// Virtqueues, or NVMe queue pairs.
    pub queues: u16,
    /// Whether a virtio device offers packed rings.
    pub packed: bool,
}

impl Device {
    /// Makes a virtio disk with one queue, which is polled.
    #[must_use]
    pub fn new(name: &str, store: Store) -> Self {
        Self {
            name: name.to_owned(),
            store,
            idle: "poll",
            front_end: FrontEnd::VirtioBlk,
            queues: 1,
            packed: false,
        }
    }
}

/// The daemon as a running process.
#[derive(Debug)]
pub struct Sidecored {
    /// The process, which is frozen between runs.
    pub process: Process,
    directory: PathBuf,
}

impl Sidecored {
    /// Starts `program` with one sidecore on the server's core, which serves `devices`, on stores
    /// of their own or of `controllers`. The daemon's files are in a new directory `name` below
    /// `directory`.
    ///
    /// # Errors
    /// The daemon does not start; the error has its output.
    pub fn start(
        program: &Path,
        directory: &Path,
        name: &str,
        controllers: &[Controller],
        devices: &[Device],
    ) -> Result<Self> {
        Self::start_configured((&[], program), directory, name, |directory| {
            configuration(directory, controllers, devices)
        })
    }

    /// As [`start`](Self::start), with the text of the configuration that `configuration` makes for
    /// the directory of the daemon's files, and these words in front of the program.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_configured(
        (prefix, program): (&[String], &Path),
        directory: &Path,
        name: &str,
        configuration: impl FnOnce(&Path) -> Result<String>,
    ) -> Result<Self> {
        ensure!(program.exists(), "there is no {}: build it first", program.display());
        let directory = directory.join(name);
        std::fs::create_dir(&directory)?;
        let config = directory.join("sidecored.toml");
        std::fs::write(&config, configuration(&directory)?)?;
        let mut command = prefix.to_vec();
        let program = program.display().to_string();
        command.extend([program, "--config".to_owned(), config.display().to_string()]);
        // The sidecore pins itself to its own core; the other threads, which have no work, run on
        // the client's.
        let mut process =
            Process::start(OURS, &[cores::CLIENT, cores::SERVER], &command, &directory)?;
        process.wait_until(|output| output.lines().any(|line| line.starts_with("ready")))?;
        Ok(Self { process, directory })
    }

    /// The socket of the device of that name.
    #[must_use]
    pub fn socket(&self, device: &str) -> PathBuf {
        socket(&self.directory, device)
    }

    /// The directory of the daemon's files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The socket of the control API.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        control_socket(&self.directory)
    }
}

fn control_socket(directory: &Path) -> PathBuf {
    directory.join("control.sock")
}

fn socket(directory: &Path, device: &str) -> PathBuf {
    directory.join(format!("{device}.sock"))
}

/// The beginning of a configuration: the control socket, and a sidecore on the server's core.
#[must_use]
pub fn head(directory: &Path) -> String {
    let control = control_socket(directory);
    let cpu = cores::SERVER;
    format!("control_socket = {control:?}\n[[sidecore]]\nname = \"sc0\"\ncpu = {cpu}\n")
}

fn configuration(
    directory: &Path,
    controllers: &[Controller],
    devices: &[Device],
) -> Result<String> {
    let mut text = head(directory);
    for Controller { name, store, block_bytes } in controllers {
        let below = format!("{name}-store");
        write_store(&mut text, &below, store)?;
        writeln!(text, "[[controller]]\nname = {name:?}\nstore = {below:?}\nformat = \"blank\"")?;
        writeln!(text, "block_size = {block_bytes}\nphysical_function = true")?;
    }
    for Device { name, store, idle, front_end, queues, packed } in devices {
        write_store(&mut text, name, store)?;
        let store = if let Store::Shared { with } = store { with } else { name.as_str() };
        let socket = socket(directory, name);
        let front_end = match front_end {
            FrontEnd::VirtioBlk => "virtio-blk",
            FrontEnd::Nvme => "nvme",
        };
        writeln!(text, "[[device]]\nname = {name:?}\nstore = {store:?}\nsocket = {socket:?}")?;
        writeln!(
            text,
            "front_end = {front_end:?}\nqueues = {queues}\nsidecore = \"sc0\"\nidle = {idle:?}"
        )?;
        if *packed {
            writeln!(text, "packed = true")?;
        }
    }
    Ok(text)
}

/// Appends a store to a configuration.
///
/// # Errors
/// The size of the store is no multiple of 1 MiB.
pub fn write_store(text: &mut String, name: &str, store: &Store) -> Result<()> {
    if !matches!(store, Store::Shared { .. }) {
        writeln!(text, "[[store]]\nname = {name:?}")?;
    }
    match store {
        Store::Shared { .. } => {}
        Store::Null { bytes } => {
            writeln!(text, "type = \"null\"\nsize = {:?}", mebibytes(*bytes)?)?
        }
        Store::Delayed { bytes, delay_us } => {
            writeln!(text, "type = \"null\"\nsize = {:?}", mebibytes(*bytes)?)?;
            writeln!(text, "[[store.stage]]\ntype = \"delay\"\ndelay_us = {delay_us}")?;
        }
        Store::Ram { bytes } => writeln!(text, "type = \"ram\"\nsize = {:?}", mebibytes(*bytes)?)?,
        Store::File { path } => writeln!(text, "type = \"file\"\npath = {path:?}")?,
        Store::Volume { controller, volume, bytes } => {
            writeln!(text, "type = \"volume\"\ncontroller = {controller:?}")?;
            writeln!(text, "volume = {volume:?}\nsize = {:?}", mebibytes(*bytes)?)?;
        }
        Store::Physical { controller } => {
            writeln!(text, "type = \"pf\"\ncontroller = {controller:?}")?
        }
    }
    Ok(())
}

fn mebibytes(bytes: u64) -> Result<String> {
    ensure!(bytes.is_multiple_of(1 << 20), "a store's size is a multiple of 1 MiB");
    Ok(format!("{}MiB", bytes >> 20))
}

/// The path of the daemon that was built with this program.
///
/// # Errors
/// The path of this program is unknown.
pub fn beside_this_program() -> Result<PathBuf> {
    let this = std::env::current_exe().context("the path of this program is unknown")?;
    Ok(this.with_file_name(OURS))
}
