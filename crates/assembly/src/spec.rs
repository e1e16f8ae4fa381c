//! The specification of an assembly as plain data, read from a configuration file or filled in by a
//! program.
//!
//! Parts refer to one another by name. [`crate::Assembly::start`] refuses an unknown name; the
//! checks that know the place in the file are made where the file is read.

use std::path::PathBuf;

mod controller;
mod device;
mod link;
mod mirror;
mod net;
mod remote;
mod rules;
mod schedule;
mod stage;
mod store;

pub use controller::{CONTROLLER, ControllerSpec, CrashLogSpec, FormatSpec};
pub use device::{
    DEFAULT_SPIN_US, DeviceSpec, FrontEndSpec, MINUTE_US, NvmeSpec, STRUCTURE, UblkSpec,
    VirtioBlkSpec, VrioSpec,
};
pub use link::{
    LINK, LinkKind, LinkSpec, MemoryLinkSpec, PacketLinkSpec, REMOTE_PORT, UdpLinkSpec, XdpLinkSpec,
};
pub use mirror::{Below, MirrorSpec, unfit_as_leg, unfit_number_of_legs, used_twice};
pub use net::{
    EthernetSpec, QUEUE_PAIRS_MAX, RemoteNetSpec, SWITCH, SwitchSpec, TapSpec, VirtioNetSpec,
    VrioNetSpec,
};
pub use remote::{
    CLIENT, CLIENT_NAME_MAX, ClientSpec, DEVICE_IN_PATH, IOHOST, IohostSpec,
    REMOTE_DEVICE_NAME_MAX, RemoteKind, RemotePart, RemoteSpec, SERVE, ServeSpec,
};
pub use rules::{is_mode, is_name, is_socket_path};
pub use schedule::{SCHEDULE, ScheduleSpec};
pub use sidecore_keys::{FromValue, Key, Kind, Value, Values, Variant, size};
pub use sidecore_linux::{FileOptions, HostFileOptions};
pub use sidecore_nvme::Interrupts;
pub use sidecore_reactor::IdleMode;
pub use sidecore_schedule::Keep;
pub use sidecore_units::{CoreId, Nanos, Sector};
pub use sidecore_volume::Owner;
pub use stage::{STAGE, STAGE_THREADS, StageKind, StageOfMany, StageSpec};
pub use store::{LimitSpec, LimitsSpec, STORE, StoreKind, StoreSpec, VOLUME, VolumeSpec};

use rules::NAME;

/// Longest serial number of a disk, in bytes (virtio 1.2, 5.2.6).
pub const SERIAL_MAX_BYTES: usize = 20;

/// The most request queues that a device may have.
pub const QUEUES_MAX: u16 = 64;

/// The size of the largest volume, in bytes.
pub const VOLUME_MAX_BYTES: u64 = sidecore_volume::MAX_VOLUME_BYTES;

/// The exit code of a process whose store has another owner.
pub const LOST_STORE: u8 = 5;

/// All that one daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spec {
    /// The polling threads.
    pub sidecores: Vec<SidecoreSpec>,
    /// Where blocks end up.
    pub stores: Vec<StoreSpec>,
    /// Each divides a store into volumes.
    pub controllers: Vec<ControllerSpec>,
    /// The snapshots that are made of their volumes. The first one that fits a volume has it.
    pub schedules: Vec<ScheduleSpec>,
    /// The directory of this host's key, and of those of its clients.
    pub key_directory: PathBuf,
    /// The directory of recordings of stages that are added at run time.
    pub recording_directory: PathBuf,
    /// The file that keeps the sizes of devices of IOhosts for the next process; `None` keeps none.
    pub remote_state: Option<PathBuf>,
    /// The epoch in which `sidecore own` lets this process serve. A controller whose store another
    /// program has written to ends the process, with exit code [`LOST_STORE`].
    pub owner: Option<Owner>,
    /// The wires of remote devices.
    pub links: Vec<LinkSpec>,
    /// The hosts that use devices of this one.
    pub clients: Vec<ClientSpec>,
    /// The hosts whose devices this one uses.
    pub iohosts: Vec<IohostSpec>,
    /// The ways to serve devices that IOhosts have, by their names.
    pub serves: Vec<ServeSpec>,
    /// The switches between NICs.
    pub switches: Vec<SwitchSpec>,
    /// The disks and NICs that guests see, and the devices exported to clients.
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

/// The keys of a sidecore.
pub const SIDECORE: &[Key] = &[
    NAME,
    Key::new(
        "cpu",
        Kind::Number(0, u32::MAX as u64),
        "not pinned",
        "the CPU that it runs on, alone among the sidecores; best one that the kernel gives to no \
         other thread (`isolcpus`, `cpuset`)",
    ),
    Key::new(
        "spin_us",
        Kind::Number(0, MINUTE_US),
        "50",
        "how long its adaptive devices spin after their last work, unless they have a `spin_us` of \
         their own; 0 to 60000000",
    ),
];

impl SidecoreSpec {
    /// The sidecore with these values of its keys.
    #[must_use]
    pub fn from_values(values: &Values) -> Self {
        Self { name: values.get("name").unwrap_or_default(), cpu: values.get("cpu").map(CoreId) }
    }
}

/// Owner and permissions of the file of a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Its user, by name or number; `None` for the daemon's.
    pub owner: Option<String>,
    /// Its group, by name or number; `None` for the daemon's.
    pub group: Option<String>,
    /// Its permissions; `None` for 0600, or 0660 if a group is given.
    pub mode: Option<u32>,
}

impl SocketAccess {
    /// The values of `socket` with `_owner`, `_group` and `_mode`.
    #[must_use]
    pub fn from_values(values: &Values, socket: &str) -> Self {
        let text = |part| values.get::<String>(&format!("{socket}_{part}"));
        let mode = text("mode").and_then(|mode| u32::from_str_radix(&mode, 8).ok());
        Self { owner: text("owner"), group: text("group"), mode }
    }
}
