//! Stores and their keys.

use std::path::PathBuf;
use std::time::Duration;

use sidecore_keys::{Key, Kind, Values};

use super::mirror::{MIRROR, MirrorSpec};
use super::remote::{REMOTE, RemoteSpec};
use super::rules::{NAME, is_block_size, is_positive, is_volume_name, is_volume_size};
use super::stage::{STAGE, StageSpec};
use super::{FileOptions, HostFileOptions};

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
    pub fn in_front_of(
        name: impl Into<String>,
        store: impl Into<String>,
        stage: impl Into<StageSpec>,
    ) -> Self {
        Self {
            stages: vec![stage.into()],
            ..Self::new(name, StoreKind::Store { store: store.into() })
        }
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

/// The keys of every store.
pub const STORE: &[Key] = &[
    NAME,
    Key::required(
        "type",
        Kind::Word(&[
            "null", "ram", "file", "delay", "fault", "volume", "pf", "remote", "mirror", "store",
        ]),
        "\"file\"",
        "`null`, `ram`, `file`, `volume`, `pf`, `remote`, `mirror` or `store`; the other keys \
         depend on it",
    ),
    STAGE,
];

/// The keys of a store of type `null` or `ram`.
const MEMORY: &[Key] = &[
    Key::required("size", Kind::Size, "\"512MiB\"", "its size, a multiple of the block size"),
    Key::new(
        "block_size",
        Kind::Number(0, u32::MAX as u64),
        "512",
        "unit of reads and writes: 512 or 4096 bytes",
    )
    .checked(is_block_size),
];

/// The value of `map` that goes around the filesystem.
const HOST_FILE: &str = "host-file";

/// The keys of a store of type `file`.
const FILE: &[Key] = &[
    Key::required(
        "path",
        Kind::Path,
        "\"/var/lib/sidecore/disk.img\"",
        "its path; its size is a multiple of the block size",
    ),
    Key::new(
        "read_only",
        Kind::Flag(false),
        "`false`",
        "open it for reading only; several such stores may share it",
    ),
    Key::new(
        "direct",
        Kind::Flag(true),
        "`true`",
        "bypass the host's page cache, if the filesystem can",
    ),
    Key::new(
        "block_size",
        Kind::Number(0, u32::MAX as u64),
        "what the file needs, else 512",
        "unit of reads and writes: 512 or 4096 bytes",
    )
    .checked(is_block_size),
    Key::new(
        "predecessor_timeout_s",
        Kind::Number(0, 3600),
        "60",
        "how long opening waits for requests of a killed daemon that are still in flight to the \
         file, 0 to 3600; then the store is refused",
    ),
    Key::new(
        "map",
        Kind::Word(&["file", HOST_FILE]),
        "`\"file\"`",
        "`\"host-file\"` bypasses the host's filesystem, and reaches the blocks of the file on the \
         device below it",
    ),
];

/// The keys of a store of type `store`.
const OTHER: &[Key] = &[Key::required(
    "store",
    Kind::Text,
    "\"the name of another [[store]]\"",
    "the other store's name",
)];

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
    /// A file whose blocks are reached on the device below its filesystem, for as long as no other
    /// program opens it.
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
    /// A device of an IOhost.
    Remote(RemoteSpec),
    /// Several other stores that hold the same bytes.
    Mirror(MirrorSpec),
}

impl StoreKind {
    /// The keys of a store of this type; of the other types, those of a store in front of another.
    #[must_use]
    pub fn keys(word: &str) -> &'static [Key] {
        match word {
            "null" | "ram" => MEMORY,
            "file" => FILE,
            "volume" => VOLUME,
            "pf" => &[CONTROLLER],
            "remote" => REMOTE,
            "mirror" => MIRROR,
            _ => OTHER,
        }
    }

    /// The bottom of this type, with these values of its keys; `None` if one is missing.
    #[must_use]
    pub fn from_values(word: &str, values: &Values) -> Option<Self> {
        let block_bytes: Option<u32> = values.get("block_size");
        let in_memory = || Some((values.get("size")?, block_bytes.unwrap_or(512)));
        Some(match word {
            "null" => in_memory()
                .map(|(size_bytes, block_bytes)| Self::Null { size_bytes, block_bytes })?,
            "ram" => in_memory()
                .map(|(size_bytes, block_bytes)| Self::Ram { size_bytes, block_bytes })?,
            "file" => Self::file(values, block_bytes)?,
            "volume" => Self::Volume(VolumeSpec::from_values(values)?),
            "pf" => Self::PhysicalFunction { controller: values.get("controller")? },
            "remote" => Self::Remote(RemoteSpec::from_values(values)?),
            "mirror" => Self::Mirror(MirrorSpec::from_values(values)?),
            _ => Self::Store { store: values.get("store")? },
        })
    }

    fn file(values: &Values, block_bytes: Option<u32>) -> Option<Self> {
        let path: PathBuf = values.get("path")?;
        let read_only = values.get("read_only").unwrap_or(false);
        let timeout_s = values.get("predecessor_timeout_s");
        let predecessor_timeout =
            timeout_s.map_or(FileOptions::PREDECESSOR_TIMEOUT, Duration::from_secs);
        if values.get::<String>("map").is_some_and(|map| map == HOST_FILE) {
            return Some(Self::HostFile(HostFileOptions { path, read_only, predecessor_timeout }));
        }
        let direct = values.get("direct").unwrap_or(true);
        Some(Self::File(FileOptions { path, read_only, direct, block_bytes, predecessor_timeout }))
    }

    /// The word for it in the configuration and in reports.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Null { .. } => "null",
            Self::Ram { .. } => "ram",
            Self::File(_) => "file",
            Self::HostFile(_) => HOST_FILE,
            Self::Store { .. } => "store",
            Self::Volume(_) => "volume",
            Self::PhysicalFunction { .. } => "pf",
            Self::Remote(_) => "remote",
            Self::Mirror(_) => "mirror",
        }
    }

    /// The device of an IOhost that it is.
    #[must_use]
    pub fn remote(&self) -> Option<&RemoteSpec> {
        match self {
            Self::Remote(remote) => Some(remote),
            _ => None,
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

    /// The mirror that it is.
    #[must_use]
    pub fn mirror(&self) -> Option<&MirrorSpec> {
        match self {
            Self::Mirror(mirror) => Some(mirror),
            _ => None,
        }
    }

    /// The stores directly below this one: that which it is put in front of, or its legs.
    pub fn stores_below(&self) -> impl Iterator<Item = &str> {
        let legs = self.mirror().into_iter().flat_map(|mirror| &mirror.legs);
        self.inner().into_iter().chain(legs.map(String::as_str))
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

    /// The volume, if it is a virtual function.
    #[must_use]
    pub fn volume(&self) -> Option<&VolumeSpec> {
        match self {
            Self::Volume(volume) => Some(volume),
            _ => None,
        }
    }
}

/// More than any disk does in a second.
const IOPS_LIMIT: u64 = 1_000_000_000;

/// The controller of a volume or physical function.
const CONTROLLER: Key = Key::required(
    "controller",
    Kind::Text,
    "\"the name of a [[controller]]\"",
    "the controller's name",
);

/// The keys of a store of type `volume`.
pub const VOLUME: &[Key] = &[
    CONTROLLER,
    Key::required("volume", Kind::Text, "\"the name of a volume\"", "the volume's name")
        .checked(is_volume_name),
    Key::new(
        "size",
        Kind::Size,
        "must exist",
        "create the volume with this size if it does not exist; it takes no space until it is \
         written. One that exists keeps the size that it has",
    )
    .checked(is_volume_size),
    Key::new(
        "quota",
        Kind::Size,
        "as it is",
        "the most that it may take of the controller's store, its metadata aside",
    )
    .checked(is_positive),
    Key::new(
        "weight",
        Kind::Number(1, VolumeSpec::WEIGHT_MAX as u64),
        "100",
        "its share when several functions want more than a sidecore or the store can do, however \
         many queues each has: 1 to 1000",
    ),
    Key::new("read_iops", Kind::Number(1, IOPS_LIMIT), "no limit", "reads a second"),
    Key::new(
        "read_iops_burst",
        Kind::Number(1, IOPS_LIMIT),
        "`read_iops`",
        "reads at once after a rest",
    ),
    Key::new(
        "write_iops",
        Kind::Number(1, IOPS_LIMIT),
        "no limit",
        "writes a second, discards and writes of zeros among them",
    ),
    Key::new(
        "write_iops_burst",
        Kind::Number(1, IOPS_LIMIT),
        "`write_iops`",
        "writes at once after a rest",
    ),
    Key::new(
        "read_bps",
        Kind::Size,
        "no limit",
        "bytes read a second, written as a size: `\"100MiB\"`",
    )
    .checked(is_positive),
    Key::new("read_bps_burst", Kind::Size, "`read_bps`", "bytes read at once after a rest")
        .checked(is_positive),
    Key::new("write_bps", Kind::Size, "no limit", "bytes written a second").checked(is_positive),
    Key::new("write_bps_burst", Kind::Size, "`write_bps`", "bytes written at once after a rest")
        .checked(is_positive),
    Key::new(
        "read_only",
        Kind::Flag(false),
        "`false`",
        "nothing may be written, whatever device is in front of it; a snapshot is read-only anyway",
    ),
];

/// A virtual function: a volume of a controller, and how much of the controller's time it gets.
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
    /// The most that it may do.
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

    fn from_values(values: &Values) -> Option<Self> {
        Some(Self {
            controller: values.get("controller")?,
            volume: values.get("volume")?,
            size_bytes: values.get("size"),
            quota_bytes: values.get("quota"),
            weight: values.get("weight").unwrap_or(Self::WEIGHT),
            limits: LimitsSpec::from_values(values),
            read_only: values.get("read_only").unwrap_or(false),
        })
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

impl LimitsSpec {
    /// The keys of limits.
    pub fn keys() -> impl Iterator<Item = &'static Key> {
        VOLUME.iter().filter(|key| key.name.contains("_iops") || key.name.contains("_bps"))
    }

    pub(super) fn from_values(values: &Values) -> Self {
        let limit = |rate: &str| {
            let per_s = values.get(rate)?;
            Some(LimitSpec { per_s, burst: values.get(&format!("{rate}_burst")).unwrap_or(per_s) })
        };
        Self {
            read_iops: limit("read_iops"),
            write_iops: limit("write_iops"),
            read_bps: limit("read_bps"),
            write_bps: limit("write_bps"),
        }
    }
}

/// A limit: so many a second in the long run, and `burst` at once after a rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// A second.
    pub per_s: u64,
    /// At once.
    pub burst: u64,
}
