//! Our daemon under measurement.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cores;
use crate::process::Process;
use crate::record::OURS;

/// What a store is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// Keeps nothing.
    Null {
        /// Size in bytes.
        bytes: u64,
    },
    /// Memory.
    Ram {
        /// Size in bytes.
        bytes: u64,
    },
    /// A file or a block device.
    File {
        /// Where it is.
        path: PathBuf,
    },
    /// A virtual function: a volume of a controller, made if there is none.
    Volume {
        /// The controller's name.
        controller: &'static str,
        /// The volume's name.
        volume: &'static str,
        /// The volume's size in bytes.
        bytes: u64,
    },
    /// A controller's physical function.
    Physical {
        /// The controller's name.
        controller: &'static str,
    },
    /// That of the device of this name.
    Shared {
        /// The other device.
        with: &'static str,
    },
}

/// A controller on a store of its own, formatted when the daemon starts.
#[derive(Clone, Debug)]
pub struct Controller {
    /// Its name.
    pub name: &'static str,
    /// Its store.
    pub store: Store,
    /// Its unit of translation in bytes.
    pub block_bytes: u32,
}

/// What a device looks like to its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrontEnd {
    /// A virtio block device over vhost-user.
    #[default]
    VirtioBlk,
    /// An NVMe controller over vfio-user.
    Nvme,
}

/// A device of the daemon's, on a store of its own.
#[derive(Clone, Debug)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its store.
    pub store: Store,
    /// How it idles: `poll`, `adaptive` or `interrupt`.
    pub idle: &'static str,
    /// What its guest sees.
    pub front_end: FrontEnd,
    /// Queues, or pairs of queues.
    pub queues: u16,
}

impl Device {
    /// A virtio disk with one queue, whose sidecore polls.
    #[must_use]
    pub fn new(name: &str, store: Store) -> Self {
        Self { name: name.to_owned(), store, idle: "poll", front_end: FrontEnd::VirtioBlk, queues: 1 }
    }
}

/// The daemon, running.
#[derive(Debug)]
pub struct Sidecored {
    /// Its process.
    pub process: Process,
    directory: PathBuf,
}

impl Sidecored {
    /// Starts `program` with one sidecore on the server's core, which serves `devices`, whose stores may be of
    /// `controllers`; its files are in a new directory `name` below `directory`.
    ///
    /// # Errors
    /// It does not start; the error has what it says.
    pub fn start(
        program: &Path,
        directory: &Path,
        name: &str,
        controllers: &[Controller],
        devices: &[Device],
    ) -> Result<Self> {
        ensure!(program.exists(), "there is no {}: build it first", program.display());
        let directory = directory.join(name);
        std::fs::create_dir(&directory)?;
        let config = directory.join("sidecored.toml");
        std::fs::write(&config, configuration(&directory, controllers, devices)?)?;
        let command = [program.display().to_string(), "--config".to_owned(), config.display().to_string()];
        // Its sidecore goes to its own core; the rest of it, which has nothing to do, to the client's.
        let mut process = Process::start(OURS, &[cores::CLIENT, cores::SERVER], &command, &directory)?;
        process.wait_until(|output| output.lines().any(|line| line.starts_with("ready")))?;
        Ok(Self { process, directory })
    }

    /// Where the device of that name is to be had.
    #[must_use]
    pub fn socket(&self, device: &str) -> PathBuf {
        socket(&self.directory, device)
    }

    /// Where its control API listens.
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

fn configuration(directory: &Path, controllers: &[Controller], devices: &[Device]) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "control_socket = {:?}", control_socket(directory))?;
    writeln!(text, "[[sidecore]]\nname = \"sc0\"\ncpu = {}", cores::SERVER)?;
    for Controller { name, store, block_bytes } in controllers {
        let below = format!("{name}-store");
        write_store(&mut text, &below, store)?;
        writeln!(text, "[[controller]]\nname = {name:?}\nstore = {below:?}\nformat = \"blank\"")?;
        writeln!(text, "block_size = {block_bytes}\nphysical_function = true")?;
    }
    for Device { name, store, idle, front_end, queues } in devices {
        write_store(&mut text, name, store)?;
        let store = if let Store::Shared { with } = store { with } else { name.as_str() };
        let socket = socket(directory, name);
        let front_end = match front_end {
            FrontEnd::VirtioBlk => "virtio-blk",
            FrontEnd::Nvme => "nvme",
        };
        writeln!(text, "[[device]]\nname = {name:?}\nstore = {store:?}\nsocket = {socket:?}")?;
        writeln!(text, "front_end = {front_end:?}\nqueues = {queues}\nsidecore = \"sc0\"\nidle = {idle:?}")?;
    }
    Ok(text)
}

fn write_store(text: &mut String, name: &str, store: &Store) -> Result<()> {
    if !matches!(store, Store::Shared { .. }) {
        writeln!(text, "[[store]]\nname = {name:?}")?;
    }
    match store {
        Store::Shared { .. } => {}
        Store::Null { bytes } => writeln!(text, "type = \"null\"\nsize = {:?}", mebibytes(*bytes)?)?,
        Store::Ram { bytes } => writeln!(text, "type = \"ram\"\nsize = {:?}", mebibytes(*bytes)?)?,
        Store::File { path } => writeln!(text, "type = \"file\"\npath = {path:?}")?,
        Store::Volume { controller, volume, bytes } => {
            writeln!(text, "type = \"volume\"\ncontroller = {controller:?}")?;
            writeln!(text, "volume = {volume:?}\nsize = {:?}", mebibytes(*bytes)?)?;
        }
        Store::Physical { controller } => writeln!(text, "type = \"pf\"\ncontroller = {controller:?}")?,
    }
    Ok(())
}

fn mebibytes(bytes: u64) -> Result<String> {
    ensure!(bytes.is_multiple_of(1 << 20), "a store's size is a multiple of 1 MiB");
    Ok(format!("{}MiB", bytes >> 20))
}

/// Where the daemon is that was built with this program.
///
/// # Errors
/// This program is nowhere.
pub fn beside_us() -> Result<PathBuf> {
    let us = std::env::current_exe().context("where is this program?")?;
    Ok(us.with_file_name(OURS))
}
