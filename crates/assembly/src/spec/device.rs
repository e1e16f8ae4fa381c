//! Devices and their keys.

use std::path::PathBuf;

use sidecore_keys::{Key, Kind, Value, keys};
use sidecore_net::MacAddress;
use sidecore_nvme::Interrupts;
use sidecore_reactor::IdleMode;
use sidecore_units::Nanos;

use super::rules::{NAME, is_mode, is_socket_path};
use super::{
    EthernetSpec, QUEUE_PAIRS_MAX, QUEUES_MAX, RemoteNetSpec, SERIAL_MAX_BYTES, SocketAccess,
    TapSpec, VirtioNetSpec, VrioNetSpec,
};

/// Longer spinning or delaying than a minute is a slip of the unit.
pub const MINUTE_US: u64 = 60_000_000;

/// How long adaptive devices spin unless told otherwise.
pub const DEFAULT_SPIN_US: u64 = 50;

keys! {
    /// A disk or a NIC that a guest sees.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct DeviceSpec {
        plain {
            /// Unique among the devices.
            name: String = String::new();
            /// The guest's view, with the settings that this front end alone has.
            front_end: FrontEndSpec = FrontEndSpec::VirtioBlk(VirtioBlkSpec::default());
            /// The store behind it; none of a NIC.
            store: String = String::new();
            /// The socket that it is served on: of vhost-user for virtio-blk, of vfio-user for
            /// NVMe.
            socket: PathBuf = PathBuf::new();
            /// Owner and permissions of the socket.
            access: SocketAccess = SocketAccess::default();
            /// Request queues; for NVMe, I/O queue pairs that the driver may create.
            queues: u16 = 1;
            /// The sidecores that serve it: queue `i` is on number `i` modulo their count. None to
            /// have one chosen when it is added.
            sidecores: Vec<String> = Vec::new();
            /// How its queues spend idle time.
            idle: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(DEFAULT_SPIN_US) };
        }
        keys {
            "read_only" => read_only: bool = false, Kind::Flag(false), "`false`",
                "the guest may only read, whatever the store allows";
            "serial" => serial: Option<String> = None, Kind::Text, "the device's name",
                "the serial number that the guest sees, at most 20 bytes of ASCII", is_serial;
        }
    }
}

/// The keys of a device that are more than a field: their values depend on each other, or lead to
/// other sections.
pub const STRUCTURE: &[Key] = &[
    NAME,
    Key::new(
        "front_end",
        Kind::Word(&[
            "virtio-blk",
            "nvme",
            "virtio-net",
            "vrio",
            "vrio-net",
            "remote-net",
            "ublk",
            "tap",
            "ethernet",
        ]),
        "`\"virtio-blk\"`",
        "what the guest sees, `virtio-blk`, `nvme` or `virtio-net`; or `vrio` to export the device \
         to a client, and `vrio-net` a NIC, which is `remote-net` at the client; or `ublk` for a \
         block device of this host, or `tap` and `ethernet` for interfaces of this host on a \
         switch; each has [keys](#front_end--virtio-blk) of its own",
    ),
    Key::new("store", Kind::Text, "required, except on a switch", "the store behind it"),
    Key::new(
        "socket",
        Kind::Path,
        "required for `virtio-blk`, `nvme` and `virtio-net`",
        "the socket that it is served on, of vhost-user or, for `nvme`, of vfio-user: at most 107 \
         bytes. The daemon makes the directory (0755) if only that is missing. The socket of a \
         dead daemon is replaced",
    )
    .checked(is_socket_path),
    Key::new(
        "socket_owner",
        Kind::Text,
        "the daemon's user",
        "the user that the socket belongs to, by name or number. The daemon gives it away each \
         time that it makes it, before a client can connect, which takes root or CAP_CHOWN",
    ),
    Key::new(
        "socket_group",
        Kind::Text,
        "the daemon's group",
        "the group that it belongs to, by name or number; without root, one that the daemon is a \
         member of",
    ),
    Key::new(
        "socket_mode",
        Kind::Text,
        "`\"0600\"`, or `\"0660\"` with a `socket_group`",
        "the socket's permissions in octal digits. To connect takes the permission to write",
    )
    .checked(is_mode),
    Key::new(
        "queues",
        Kind::Number(1, QUEUES_MAX as u64),
        "1; 64 for `nvme`; 16 for `virtio-net`",
        "how many request queues it offers, 1 to 64; for `nvme`, pairs of I/O queues that the \
         driver may create; for `virtio-net`, pairs of queues that the VMM may ask for, at most \
         16",
    ),
    Key::new(
        "sidecore",
        Kind::Text,
        "one with the fewest queues",
        "the sidecore that serves all its queues",
    ),
    Key::new(
        "sidecores",
        Kind::Texts,
        "",
        "several instead: queue number `i` is served by sidecore number `i` modulo their count; at \
         most as many as queues",
    ),
    Key::new(
        "idle",
        Kind::Word(&["poll", "adaptive", "interrupt"]),
        "`\"adaptive\"`",
        "what it does without work: `poll` never sleeps (and pauses between polls while other work \
         [takes its sidecore's core](decisions/0026-a-sidecore-without-its-core.md)), `adaptive` \
         spins for a while and then sleeps until the guest kicks, `interrupt` sleeps at once",
    ),
    Key::new(
        "spin_us",
        Kind::Number(0, MINUTE_US),
        "that of its sidecore",
        "how long it spins, with `idle = \"adaptive\"`; of several sidecores' the longest; 0 to \
         60000000",
    ),
];

keys! {
    /// A virtio block device.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct VirtioBlkSpec {
        plain {}
        keys {
            "queue_size_max" => queue_size_max: u16 = 1024, Kind::Number(1, 32768), "1024",
                "the largest ring that it accepts, in entries; a power of two up to \
                 32768", is_power_of_two;
            "packed" => packed: bool = false, Kind::Flag(false), "`false`",
                "offer packed rings (VIRTIO_F_RING_PACKED) as well";
            "write_cache" => write_cache: bool = true, Kind::Flag(true), "`true`",
                "the cache mode until the guest's driver chooses another: with `false` each write \
                 is durable before it completes, at the cost of a flush for each";
            "seg_max" => seg_max: Option<u32> = None, Kind::Number(1, 1022), "126",
                "most segments in a request, 1 to 1022";
            // Drivers refuse disks whose segments hold less than a page.
            "size_max" => size_max_bytes: Option<u32> = None,
                Kind::Number(4096, u32::MAX as u64), "no limit",
                "most bytes in a segment, 4096 or more";
        }
    }
}

keys! {
    /// A PCI function that is an NVMe controller.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct NvmeSpec {
        plain {}
        keys {
            "interrupts" => interrupts: Interrupts = Interrupts::MsiX,
                Kind::Word(&["msi-x", "msi"]), "`\"msi-x\"`",
                "how the function interrupts its driver, `msi-x` or `msi`; see below";
            "model" => model: Option<String> = None, Kind::Text, "says that it is Sidecore's",
                "the model number that the guest sees, 1 to 40 bytes of ASCII: a part of \
                 `/dev/disk/by-id` names",
                is_model;
            "block_size" => block_bytes: Option<u32> = None,
                Kind::Number(1, u32::MAX as u64), "the store's",
                "the size of the namespace's blocks in bytes, 512 or 4096, and not less than the \
                 store's",
                is_block_size;
        }
    }
}

keys! {
    /// A device that is exported to a client on another host.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct VrioSpec {
        plain {}
        keys {
            #[required = "\"the name of a [[client]]\""]
            "client" => client: String = String::new(), Kind::Text, "required",
                "the client that may use it";
            "migrates_to" => migrates_to: Vec<String> = Vec::new(), Kind::Texts, "`[]`",
                "further clients that may use it, to which its guest migrates live. The client \
                 whose guest has started last writes; writes of the others then fail";
            "write_cache" => write_cache: bool = true, Kind::Flag(true), "`true`",
                "whether a write may be answered before it is durable, if the store has a \
                 volatile cache; the client \
                 keeps such writes until a flush. With `false` each write is durable before it is \
                 answered";
        }
    }
}

keys! {
    /// A block device of this host's kernel.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct UblkSpec {
        plain {}
        keys {
            #[required = "0"]
            "number" => number: u32 = 0, Kind::Number(0, UBLK_NUMBER_MAX as u64), "required",
                "the N of `/dev/ublkbN`, 0 to 1048575; the next daemon finds the device by it";
            "queue_depth" => queue_depth: u16 = 128, Kind::Number(1, 4096), "128",
                "requests that each queue has in flight, 1 to 4096";
            "io_size_max" => io_bytes_max: u64 = 256 << 10, Kind::Size, "`\"256KiB\"`",
                "the largest read or write, from 4KiB to 4MiB, a multiple of 4KiB; the kernel \
                 cuts larger ones. Each queue takes `queue_depth` times as much memory",
                is_io_size;
        }
    }
}

/// The kernel has minor numbers of 20 bits.
const UBLK_NUMBER_MAX: u32 = (1 << 20) - 1;

fn is_io_size(key: &str, value: &Value) -> Result<(), String> {
    let bytes = value.number();
    if (4 << 10..=4 << 20).contains(&bytes) && bytes.is_multiple_of(4096) {
        return Ok(());
    }
    Err(format!("`{key}` is a multiple of 4KiB from 4KiB to 4MiB"))
}

/// A guest's view of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrontEndSpec {
    /// A virtio block device.
    VirtioBlk(VirtioBlkSpec),
    /// A PCI function that is an NVMe controller.
    Nvme(NvmeSpec),
    /// A device of a client's, on another host.
    Vrio(VrioSpec),
    /// A block device of this host's kernel.
    Ublk(UblkSpec),
    /// A NIC on a switch.
    VirtioNet(Box<VirtioNetSpec>),
    /// An interface of this host's kernel, on a switch.
    Tap(Box<TapSpec>),
    /// An Ethernet interface of this host, on a switch.
    Ethernet(Box<EthernetSpec>),
    /// A NIC of a client's, on a switch of this host.
    VrioNet(Box<VrioNetSpec>),
    /// A NIC at an IOhost, on a switch of this host.
    RemoteNet(Box<RemoteNetSpec>),
}

impl FrontEndSpec {
    /// Each front end by its word in the configuration and in reports, with the keys that it alone
    /// has.
    pub const KINDS: &'static [(&'static str, &'static [Key])] = &[
        ("virtio-blk", VirtioBlkSpec::KEYS),
        ("nvme", NvmeSpec::KEYS),
        ("virtio-net", VirtioNetSpec::KEYS),
        ("vrio-net", VrioNetSpec::KEYS),
        ("remote-net", RemoteNetSpec::KEYS),
        ("vrio", VrioSpec::KEYS),
        ("ublk", UblkSpec::KEYS),
        ("tap", TapSpec::KEYS),
        ("ethernet", EthernetSpec::KEYS),
    ];

    /// The front end of this word, with the usual settings.
    #[must_use]
    pub fn from_word(word: &str) -> Self {
        match word {
            "nvme" => Self::Nvme(NvmeSpec::default()),
            "vrio" => Self::Vrio(VrioSpec::default()),
            "ublk" => Self::Ublk(UblkSpec::default()),
            "virtio-net" => Self::VirtioNet(Box::default()),
            "tap" => Self::Tap(Box::default()),
            "ethernet" => Self::Ethernet(Box::default()),
            "vrio-net" => Self::VrioNet(Box::default()),
            "remote-net" => Self::RemoteNet(Box::default()),
            _ => Self::VirtioBlk(VirtioBlkSpec::default()),
        }
    }

    /// The word for it in the configuration and in reports.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::VirtioBlk(_) => "virtio-blk",
            Self::Nvme(_) => "nvme",
            Self::Vrio(_) => "vrio",
            Self::Ublk(_) => "ublk",
            Self::VirtioNet(_) => "virtio-net",
            Self::Tap(_) => "tap",
            Self::Ethernet(_) => "ethernet",
            Self::VrioNet(_) => "vrio-net",
            Self::RemoteNet(_) => "remote-net",
        }
    }

    /// Takes over the values of its keys that are there.
    pub fn set(&mut self, values: &sidecore_keys::Values) {
        match self {
            Self::VirtioBlk(spec) => spec.set(values),
            Self::Nvme(spec) => spec.set(values),
            Self::Vrio(spec) => spec.set(values),
            Self::Ublk(spec) => spec.set(values),
            Self::VirtioNet(spec) => spec.set(values),
            Self::Tap(spec) => spec.set(values),
            Self::Ethernet(spec) => spec.set(values),
            Self::VrioNet(spec) => spec.set(values),
            Self::RemoteNet(spec) => spec.set(values),
        }
    }

    /// The keys that it alone has.
    #[must_use]
    pub const fn keys(&self) -> &'static [Key] {
        match self {
            Self::VirtioBlk(_) => VirtioBlkSpec::KEYS,
            Self::Nvme(_) => NvmeSpec::KEYS,
            Self::Vrio(_) => VrioSpec::KEYS,
            Self::Ublk(_) => UblkSpec::KEYS,
            Self::VirtioNet(_) => VirtioNetSpec::KEYS,
            Self::Tap(_) => TapSpec::KEYS,
            Self::Ethernet(_) => EthernetSpec::KEYS,
            Self::VrioNet(_) => VrioNetSpec::KEYS,
            Self::RemoteNet(_) => RemoteNetSpec::KEYS,
        }
    }

    /// The first client that the device is exported to; `None` of a device of a guest on this host.
    #[must_use]
    pub fn client(&self) -> Option<&str> {
        match self {
            Self::Vrio(spec) => Some(&spec.client),
            Self::VrioNet(spec) => Some(&spec.client),
            _ => None,
        }
    }

    /// The clients that the device is exported to.
    pub fn clients(&self) -> impl Iterator<Item = &str> {
        let migrates_to = match self {
            Self::Vrio(spec) => spec.migrates_to.as_slice(),
            _ => &[],
        };
        self.client().into_iter().chain(migrates_to.iter().map(String::as_str))
    }

    /// The IOhost that has the other end of a NIC.
    #[must_use]
    pub fn iohost(&self) -> Option<&str> {
        match self {
            Self::RemoteNet(spec) => Some(&spec.iohost),
            _ => None,
        }
    }

    /// The address of a guest's NIC.
    #[must_use]
    pub fn mac(&self) -> Option<MacAddress> {
        match self {
            Self::VirtioNet(spec) => Some(spec.mac()),
            Self::VrioNet(spec) => Some(spec.mac()),
            _ => None,
        }
    }

    /// The number of the block device of this host's kernel, if it is one.
    #[must_use]
    pub const fn number(&self) -> Option<u32> {
        match self {
            Self::Ublk(spec) => Some(spec.number),
            _ => None,
        }
    }

    /// The interface of this host's kernel, if the device is one.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match self {
            Self::Tap(spec) => Some(&spec.interface),
            Self::Ethernet(spec) => Some(&spec.interface),
            _ => None,
        }
    }

    /// The switch that the device is a port of, if it is one.
    #[must_use]
    pub fn switch(&self) -> Option<&str> {
        match self {
            Self::VirtioNet(spec) => Some(&spec.switch),
            Self::Tap(spec) => Some(&spec.switch),
            Self::Ethernet(spec) => Some(&spec.switch),
            Self::VrioNet(spec) => Some(&spec.switch),
            Self::RemoteNet(spec) => Some(&spec.switch),
            _ => None,
        }
    }

    /// Whether VMMs connect to a socket.
    #[must_use]
    pub const fn has_socket(&self) -> bool {
        matches!(self, Self::VirtioBlk(_) | Self::Nvme(_) | Self::VirtioNet(_))
    }

    /// How many queues a device has unless told otherwise.
    #[must_use]
    pub const fn queues(&self) -> u16 {
        match self {
            Self::VirtioBlk(_)
            | Self::Vrio(_)
            | Self::Ublk(_)
            | Self::Tap(_)
            | Self::Ethernet(_)
            | Self::VrioNet(_)
            | Self::RemoteNet(_) => 1,
            // A driver creates as many as it has CPUs.
            Self::Nvme(_) => QUEUES_MAX,
            // A VMM that wants fewer leaves the others alone. QEMU compares its pairs with this
            // number, Cloud Hypervisor its queues.
            Self::VirtioNet(_) => QUEUE_PAIRS_MAX,
        }
    }
}

/// Drivers of both ring formats can use all of such a ring.
pub(super) fn is_power_of_two(key: &str, value: &Value) -> Result<(), String> {
    let size = value.number();
    if size.is_power_of_two() {
        return Ok(());
    }
    let nearest = size.checked_next_power_of_two().unwrap_or(1);
    Err(format!("{key} = {size} is no power of two; write for instance {nearest}"))
}

fn is_block_size(key: &str, value: &Value) -> Result<(), String> {
    if matches!(value.number(), 512 | 4096) {
        Ok(())
    } else {
        Err(format!("`{key}` of a device is 512 or 4096"))
    }
}

/// Identify Controller has 40 bytes of ASCII for it, padded with spaces (NVMe base 2.0, 5.17.2.1).
fn is_model(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    if (1..=40).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return Ok(());
    }
    Err(format!("`{key}` is empty, more than 40 bytes, or not plain ASCII"))
}

/// A serial number fits into the answer to a guest that asks for it.
fn is_serial(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    if text.len() <= SERIAL_MAX_BYTES && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return Ok(());
    }
    Err(format!("`{key}` is more than {SERIAL_MAX_BYTES} bytes, or not plain ASCII"))
}
