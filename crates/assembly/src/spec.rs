//! What is to run, as plain data. The configuration file is one way to write it; a program can fill it in directly.
//!
//! Things refer to one another by name. [`crate::Assembly::start`] answers a name that leads nowhere with an error,
//! but the friendly checks, which know the place in the file, are made where the file is read.

mod device;
mod stage;

use std::path::PathBuf;
use std::time::Duration;

pub use device::{DEFAULT_SPIN_US, DeviceSpec, FrontEndSpec, MINUTE_US, NvmeSpec, STRUCTURE, VOLUME, VirtioBlkSpec};
pub use sidecore_keys::{FromValue, Key, Kind, Value, Values, Variant, size};
pub use sidecore_linux::{FileOptions, HostFileOptions};
pub use sidecore_nvme::Interrupts;
pub use sidecore_reactor::IdleMode;
pub use sidecore_units::{CoreId, Nanos, Sector};
pub use stage::{STAGE, StageSpec};

/// Longest serial number of a disk, in bytes (virtio 1.2, 5.2.6).
pub const SERIAL_MAX_BYTES: usize = 20;

/// The most request queues that a device may have.
pub const QUEUES_MAX: u16 = 64;

/// The size of the largest volume, in bytes.
pub const VOLUME_MAX_BYTES: u64 = sidecore_volume::MAX_VOLUME_BYTES;

/// All that one daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    /// The polling threads.
    pub sidecores: Vec<SidecoreSpec>,
    /// Where blocks end up.
    pub stores: Vec<StoreSpec>,
    /// What divides a store into volumes.
    pub controllers: Vec<ControllerSpec>,
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

/// A store: a bottom, and the stages in front of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSpec {
    /// Unique among the stores.
    pub name: String,
    /// The bottom: where blocks end up, or another store.
    pub kind: StoreKind,
    /// In the order in which a request passes them: the last one is next to the bottom.
    pub stages: Vec<StageSpec>,
}

impl StoreSpec {
    /// A store without stages.
    #[must_use]
    pub fn new(name: impl Into<String>, kind: StoreKind) -> Self {
        Self { name: name.into(), kind, stages: Vec::new() }
    }

    /// One stage in front of the store called `store`, which other users may share.
    #[must_use]
    pub fn in_front_of(name: impl Into<String>, store: impl Into<String>, stage: StageSpec) -> Self {
        Self { stages: vec![stage], ..Self::new(name, StoreKind::Store { store: store.into() }) }
    }

    /// Its type in reports: the bottom's, or that of the stage in front of another store.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match (&self.kind, self.stages.first()) {
            (StoreKind::Store { .. }, Some(stage)) => stage.word(),
            (kind, _) => kind.word(),
        }
    }
}

/// A controller: a store divided into volumes, each of them seen through a virtual function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerSpec {
    /// Its name.
    pub name: String,
    /// The store that it owns.
    pub store: String,
    /// How to format the store if it is blank; `None` refuses a blank store.
    pub format: Option<FormatSpec>,
    /// Entries of each sidecore's translation buffer (BTLB); 0 for none.
    pub btlb_entries: usize,
    /// What the extent trees of all its virtual functions may take of memory, in bytes.
    pub tree_memory_bytes: u64,
    /// The longest that changed metadata waits to be written.
    pub commit_interval: Duration,
    /// The share of the store in use from which on it is called nearly full, in percent; 100 for never.
    pub warn_used_percent: u8,
    /// Whether a device may be put in front of its physical function: the whole store, metadata and all.
    pub physical_function: bool,
    /// Where changes of the volumes' mappings are kept that were answered and are not durable yet, for the case that this
    /// process dies and its guests do not. `None`: they are answered when they are durable, which takes longer.
    pub crash_log: Option<CrashLogSpec>,
}

/// A log in memory that outlives the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrashLogSpec {
    /// A directory on tmpfs; it is made if it is not there.
    pub directory: PathBuf,
    /// What a store's log takes.
    pub size_bytes: usize,
}

impl CrashLogSpec {
    /// The size unless told otherwise: 131,008 changes between two commits.
    pub const SIZE_BYTES: usize = 8 << 20;
    /// The smallest size.
    pub const SIZE_BYTES_MIN: usize = sidecore_volume::MIN_LOG_BYTES;

    /// A log of the usual size in a file in `directory`.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), size_bytes: Self::SIZE_BYTES }
    }
}

impl ControllerSpec {
    /// Entries of a translation buffer unless told otherwise.
    pub const BTLB_ENTRIES: usize = 8;
    /// Memory for trees unless told otherwise.
    pub const TREE_MEMORY_BYTES: u64 = 64 << 20;
    /// The commit interval unless told otherwise.
    pub const COMMIT_INTERVAL: Duration = Duration::from_secs(5);
    /// When a store is nearly full, unless told otherwise.
    pub const WARN_USED_PERCENT: u8 = sidecore_controller::DEFAULT_WARN_USED_PERCENT;
    /// The granularity unless told otherwise, in bytes.
    pub const BLOCK_BYTES: u32 = 1024;

    /// A controller that owns `store`, with the usual settings: a blank store is refused.
    #[must_use]
    pub fn new(name: impl Into<String>, store: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            store: store.into(),
            format: None,
            btlb_entries: Self::BTLB_ENTRIES,
            tree_memory_bytes: Self::TREE_MEMORY_BYTES,
            commit_interval: Self::COMMIT_INTERVAL,
            warn_used_percent: Self::WARN_USED_PERCENT,
            physical_function: false,
            crash_log: None,
        }
    }
}

/// What a blank store becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatSpec {
    /// The unit of translation in bytes: 512, 1024 or 4096.
    pub block_bytes: u32,
    /// What people call it.
    pub label: String,
}

impl Default for FormatSpec {
    fn default() -> Self {
        Self { block_bytes: ControllerSpec::BLOCK_BYTES, label: String::new() }
    }
}

/// A virtual function: which volume of which controller, and how much of the controller's time it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    /// The controller's name.
    pub controller: String,
    /// The volume's name.
    pub volume: String,
    /// The size in bytes that it is created with if it does not exist; `None` if it must exist.
    pub size_bytes: Option<u64>,
    /// The most that it may take of the store, in bytes; `None` leaves it as it is.
    pub quota_bytes: Option<u64>,
    /// Its share among the virtual functions that want to be served at the same time, 1 to 1000.
    pub weight: u32,
    /// What it may do at most.
    pub limits: LimitsSpec,
    /// Whether it may only be read.
    pub read_only: bool,
}

impl VolumeSpec {
    /// The weight unless told otherwise.
    pub const WEIGHT: u32 = 100;
    /// The largest weight.
    pub const WEIGHT_MAX: u32 = 1000;

    /// An existing volume, with no limits.
    #[must_use]
    pub fn new(controller: impl Into<String>, volume: impl Into<String>) -> Self {
        Self {
            controller: controller.into(),
            volume: volume.into(),
            size_bytes: None,
            quota_bytes: None,
            weight: Self::WEIGHT,
            limits: LimitsSpec::default(),
            read_only: false,
        }
    }
}

/// The most that a virtual function may do, by kind; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsSpec {
    /// Reads.
    pub read_iops: Option<LimitSpec>,
    /// Writes.
    pub write_iops: Option<LimitSpec>,
    /// Bytes read.
    pub read_bps: Option<LimitSpec>,
    /// Bytes written.
    pub write_bps: Option<LimitSpec>,
}

/// A limit: so many a second in the long run, and `burst` at once after a rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// A second.
    pub per_s: u64,
    /// At once.
    pub burst: u64,
}

/// The bottom of a store.
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
    /// A file whose blocks are reached on the device below its filesystem, for as long as nobody else opens it.
    HostFile(HostFileOptions),
    /// Another store, opened once for all of its users.
    Store {
        /// The other store's name.
        store: String,
    },
    /// A virtual function of a controller.
    Volume(VolumeSpec),
    /// A controller's physical function: its whole store, past all translation.
    PhysicalFunction {
        /// The controller's name.
        controller: String,
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
            Self::HostFile(_) => "host-file",
            Self::Store { .. } => "store",
            Self::Volume(_) => "volume",
            Self::PhysicalFunction { .. } => "pf",
        }
    }

    /// The store that this one is put in front of.
    #[must_use]
    pub fn inner(&self) -> Option<&str> {
        match self {
            Self::Store { store } => Some(store),
            _ => None,
        }
    }

    /// The controller that it is a function of.
    #[must_use]
    pub fn controller(&self) -> Option<&str> {
        match self {
            Self::Volume(volume) => Some(&volume.controller),
            Self::PhysicalFunction { controller } => Some(controller),
            _ => None,
        }
    }

    /// What it says if it is a virtual function.
    #[must_use]
    pub fn volume(&self) -> Option<&VolumeSpec> {
        match self {
            Self::Volume(volume) => Some(volume),
            _ => None,
        }
    }
}

/// Whose the file of a socket is, and its permissions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Its user, by name or number; `None` for the daemon's.
    pub owner: Option<String>,
    /// Its group, by name or number; `None` for the daemon's.
    pub group: Option<String>,
    /// Its permissions; `None` for 0600, or 0660 if a group is given.
    pub mode: Option<u32>,
}
