//! What is to run, as plain data. The configuration file is one way to write it; a program can fill it in directly.
//!
//! Things refer to one another by name. [`crate::Assembly::start`] answers a name that leads nowhere with an error,
//! but the friendly checks, which know the place in the file, are made where the file is read.

use std::path::PathBuf;

pub use sidecore_block::{Affected, Fault, FaultPlan, FaultRule, When};
pub use sidecore_linux::FileOptions;
pub use sidecore_reactor::IdleMode;
pub use sidecore_units::{CoreId, Nanos, Sector};

/// Longest serial number of a disk, in bytes (virtio 1.2, 5.2.6).
pub const SERIAL_MAX_BYTES: usize = 20;

/// The most request queues that a device may have.
pub const QUEUES_MAX: u16 = 64;

/// All that one daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    /// The polling threads.
    pub sidecores: Vec<SidecoreSpec>,
    /// Where blocks end up.
    pub stores: Vec<StoreSpec>,
    /// The disks that guests see.
    pub devices: Vec<DeviceSpec>,
}

/// A polling thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidecoreSpec {
    /// Its name.
    pub name: String,
    /// The CPU that it is pinned to; `None` lets the kernel move it about.
    pub cpu: Option<CoreId>,
}

/// A store and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSpec {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: StoreKind,
}

/// What a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// Completes everything and keeps nothing.
    Null {
        /// Size in bytes.
        size_bytes: u64,
        /// Unit of reads and writes in bytes.
        block_bytes: u32,
    },
    /// Keeps the blocks in memory, until the daemon ends.
    Ram {
        /// Size in bytes.
        size_bytes: u64,
        /// Unit of reads and writes in bytes.
        block_bytes: u32,
    },
    /// A file or block device.
    File(FileOptions),
    /// Another store, each request held back for a while.
    Delay {
        /// The other store's name.
        store: String,
        /// For how long.
        delay: Nanos,
    },
    /// Another store, with failures planted in it.
    Fault {
        /// The other store's name.
        store: String,
        /// Which failures.
        plan: FaultPlan,
    },
}

impl StoreKind {
    /// The word for it in the configuration and in reports.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Null { .. } => "null",
            Self::Ram { .. } => "ram",
            Self::File(_) => "file",
            Self::Delay { .. } => "delay",
            Self::Fault { .. } => "fault",
        }
    }

    /// The store that this one is put in front of.
    #[must_use]
    pub fn inner(&self) -> Option<&str> {
        match self {
            Self::Delay { store, .. } | Self::Fault { store, .. } => Some(store),
            Self::Null { .. } | Self::Ram { .. } | Self::File(_) => None,
        }
    }
}

/// A disk that a guest sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// Its name.
    pub name: String,
    /// The store behind it.
    pub store: String,
    /// The vhost-user socket that it is served on.
    pub socket: PathBuf,
    /// How many request queues it has.
    pub queues: u16,
    /// The largest ring that it accepts, in entries.
    pub queue_size_max: u16,
    /// The sidecores that serve it, at least one: queue `i` is on number `i` modulo their count.
    pub sidecores: Vec<String>,
    /// How its queues spend idle time.
    pub idle: IdleMode,
    /// Whether it offers packed rings.
    pub packed: bool,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Most segments in a request; `None` for the device model's own limit.
    pub seg_max: Option<u32>,
    /// Most bytes in a segment; `None` for no limit.
    pub size_max_bytes: Option<u32>,
    /// What the guest sees as the disk's serial number; `None` for the name.
    pub serial: Option<String>,
}
