//! Links and their keys.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use sidecore_keys::{Key, Kind, Value, Values, keys};
use sidecore_link::{EthernetAddress, LinkAddress};
use sidecore_linux::XdpMode;
use sidecore_reactor::IdleMode;
use sidecore_units::Nanos;

use super::device::{DEFAULT_SPIN_US, MINUTE_US, is_power_of_two};
use super::rules::{NAME, is_socket_path};

/// The port of the remote channel, which is its ethertype too (docs/vrio.md).
pub const REMOTE_PORT: u16 = 0x88B5;

/// The smallest frame of the remote channel: UDP over IPv6 on Ethernet without jumbo frames.
const FRAME_MIN: u64 = 1_452;
/// The largest frame of the remote channel.
const FRAME_MAX: u64 = 65_000;

/// Fewer frames hold no request of the largest size.
const RING_MIN: u64 = 64;
/// The most frames of a ring.
const RING_MAX: u64 = 32_768;

/// The keys of every link that are more than a field.
pub const LINK: &[Key] = &[
    NAME,
    Key::required(
        "type",
        Kind::Word(&["packet", "xdp", "udp", "memory"]),
        "\"packet\"",
        "`packet`, `xdp`, `udp` or `memory`; the other keys depend on it",
    ),
    Key::new(
        "sidecores",
        Kind::Texts,
        "the first sidecore",
        "the sidecores that poll it, each a queue of its own",
    ),
    Key::new(
        "idle",
        Kind::Word(&["poll", "adaptive", "interrupt"]),
        "`\"adaptive\"`",
        "what its queues do without work: `poll` never sleeps, `adaptive` spins for a while and \
         then sleeps until a frame comes, `interrupt` sleeps at once",
    ),
    Key::new(
        "spin_us",
        Kind::Number(0, MINUTE_US),
        "that of its sidecores",
        "how long its queues spin, with `idle = \"adaptive\"`; of several sidecores' the longest; \
         0 to 60000000; 50 for a link that is added while the daemon runs",
    ),
];

keys! {
    /// A wire that carries the frames of remote devices.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct LinkSpec {
        plain {
            /// Unique among the links.
            name: String = String::new();
            /// The wire.
            kind: LinkKind = LinkKind::Memory(MemoryLinkSpec::default());
            /// The sidecores that poll it, each a queue of its own.
            sidecores: Vec<String> = Vec::new();
            /// How its queues spend idle time.
            idle: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(DEFAULT_SPIN_US) };
        }
        keys {
            "frame_size" => frame_bytes: u32 = 8_100, Kind::Number(FRAME_MIN, FRAME_MAX), "8100",
                "the largest frame in bytes, without the headers of the medium, 1452 to 65000; \
                 the interface's MTU may allow less, and both sides use the smaller one of theirs";
            "receive_frames" => receive_frames: u32 = 1_024,
                Kind::Number(RING_MIN, RING_MAX), "1024",
                "frames that each queue can have received and not handled, a power of two from 64 \
                 to 32768",
                is_power_of_two;
            "transmit_frames" => transmit_frames: u32 = 512,
                Kind::Number(RING_MIN, RING_MAX), "512",
                "frames that each queue can have on the way out, a power of two from 64 to \
                 32768", is_power_of_two;
        }
    }
}

keys! {
    /// The frames of an Ethernet interface, through a packet socket.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct PacketLinkSpec {
        plain {}
        keys {
            #[required = "\"eth1\""]
            "interface" => interface: String = String::new(), Kind::Text, "required",
                "the Ethernet interface, which is up; needs CAP_NET_RAW", is_interface;
            "bypass_qdisc" => bypass_qdisc: bool = true, Kind::Flag(true), "`true`",
                "give frames to the driver at once; with `false` they pass the interface's \
                 queueing discipline, where \
                 `tc` and tcpdump see them";
            "segmentation_offload" => segmentation_offload: bool = false, Kind::Flag(false),
                "`false`",
                "give long frames for one station to the interface as one packet of up to 64 KiB, \
                 if the station's link does so too; takes 16 MiB more for each queue";
        }
    }
}

keys! {
    /// The frames of an Ethernet interface, through AF_XDP.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct XdpLinkSpec {
        plain {
            /// The mode wanted; `None` is the best one that the interface has.
            mode: Option<XdpMode> = None;
        }
        keys {
            #[required = "\"eth1\""]
            "interface" => interface: String = String::new(), Kind::Text, "required",
                "the Ethernet interface, which is up; which has a receive queue for each \
                 sidecore; needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF", is_interface;
        }
    }
}

/// The key of an AF_XDP link that is more than a field.
const XDP_MODE: Key = Key::new(
    "mode",
    Kind::Word(&["zero-copy", "driver", "generic"]),
    "the first that the interface has",
    "how the interface gives its frames: `zero-copy`, `driver` or `generic`; `sidecore remote \
     list` shows the mode",
);

const XDP: &[Key] = &[XdpLinkSpec::KEYS[0], XDP_MODE];

/// The frames of a UDP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpLinkSpec {
    /// The address to receive at. Port 0 is one of the kernel's choice, for a client.
    pub listen: SocketAddr,
    /// Whether the kernel delivers datagrams of one sender together.
    pub coalesce: bool,
}

const UDP: &[Key] = &[
    Key::new(
        "listen",
        Kind::Text,
        "`\"0.0.0.0:34997\"`",
        "the address and port to receive at; a client may leave the port to the kernel, with port \
         0",
    )
    .checked(is_socket_address),
    Key::new(
        "coalesce",
        Kind::Flag(false),
        "`false`",
        "let the kernel deliver datagrams of one sender together: less work for long requests, \
         and 64 KiB of memory \
         for each receive frame",
    ),
];

/// Memory that two daemons of one host share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryLinkSpec {
    /// The Unix socket where the IOhost offers the memory.
    pub socket: PathBuf,
    /// The users whose processes may connect; none is the daemon's.
    pub users: Vec<String>,
}

const MEMORY: &[Key] = &[
    Key::required(
        "socket",
        Kind::Path,
        "\"/run/sidecore/wire.sock\"",
        "the Unix socket that the IOhost makes and a client connects to, at most 107 bytes",
    )
    .checked(is_socket_path),
    Key::new(
        "users",
        Kind::Texts,
        "the daemon's user",
        "at the IOhost: the users whose processes may connect, by name or number",
    ),
];

/// The wire of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// An Ethernet interface, through a packet socket.
    Packet(PacketLinkSpec),
    /// An Ethernet interface, through AF_XDP.
    Xdp(XdpLinkSpec),
    /// A UDP port.
    Udp(UdpLinkSpec),
    /// Memory that two daemons of one host share.
    Memory(MemoryLinkSpec),
}

impl LinkKind {
    /// The words for all types.
    pub const WORDS: [&str; 4] = ["packet", "xdp", "udp", "memory"];

    /// The keys of a link of this type.
    #[must_use]
    pub fn keys(word: &str) -> &'static [Key] {
        match word {
            "packet" => PacketLinkSpec::KEYS,
            "xdp" => XDP,
            "udp" => UDP,
            _ => MEMORY,
        }
    }

    /// The wire of this type, with these values of its keys.
    #[must_use]
    pub fn from_values(word: &str, values: &Values) -> Self {
        match word {
            "packet" => Self::Packet(PacketLinkSpec::from_values(values)),
            "xdp" => Self::Xdp(XdpLinkSpec {
                mode: values.get::<String>("mode").as_deref().and_then(xdp_mode),
                ..XdpLinkSpec::from_values(values)
            }),
            "udp" => {
                let usual = SocketAddr::from((Ipv4Addr::UNSPECIFIED, REMOTE_PORT));
                let listen = values.get::<String>("listen").and_then(|text| text.parse().ok());
                Self::Udp(UdpLinkSpec {
                    listen: listen.unwrap_or(usual),
                    coalesce: values.get("coalesce").unwrap_or(false),
                })
            }
            _ => Self::Memory(MemoryLinkSpec {
                socket: values.get("socket").unwrap_or_default(),
                users: values.get("users").unwrap_or_default(),
            }),
        }
    }

    /// The word for it in the configuration and in reports.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Packet(_) => "packet",
            Self::Xdp(_) => "xdp",
            Self::Udp(_) => "udp",
            Self::Memory(_) => "memory",
        }
    }

    /// The address of an IOhost on this link.
    ///
    /// # Errors
    /// The text is no address there, with the remedy.
    pub fn address(&self, text: Option<&str>) -> Result<LinkAddress, String> {
        let text = text.unwrap_or_default();
        match self {
            Self::Memory(_) => Ok(LinkAddress::Peer(0)),
            Self::Udp(_) => match text.parse::<SocketAddr>() {
                Ok(address) if address.port() != 0 => Ok(LinkAddress::Udp(address)),
                _ => Err(format!(
                    "\"{}\" is no IP address with a port; write for instance \
                     \"192.0.2.1:{REMOTE_PORT}\"",
                    text.escape_debug()
                )),
            },
            Self::Packet(_) | Self::Xdp(_) => match text.parse::<EthernetAddress>() {
                Ok(address) if address.is_multicast() => Err(format!(
                    "\"{text}\" is the address of several stations; `ip link` at the IOhost shows \
                     its own"
                )),
                Ok(address) => Ok(LinkAddress::Ethernet(address)),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// Whether both ends are on one host, where frames need no encryption.
    #[must_use]
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }
}

fn xdp_mode(word: &str) -> Option<XdpMode> {
    match word {
        "zero-copy" => Some(XdpMode::ZeroCopy),
        "driver" => Some(XdpMode::Driver),
        "generic" => Some(XdpMode::Generic),
        _ => None,
    }
}

/// The kernel's names have 15 bytes, and neither spaces nor slashes (IFNAMSIZ).
fn is_interface(key: &str, value: &Value) -> Result<(), String> {
    let name = value.text();
    let is_fit = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':');
    if (1..=15).contains(&name.len()) && name.chars().all(is_fit) {
        return Ok(());
    }
    Err(format!("{key} = \"{}\" is no interface; `ip link` lists them", name.escape_debug()))
}

fn is_socket_address(key: &str, value: &Value) -> Result<(), String> {
    if value.text().parse::<SocketAddr>().is_ok() {
        return Ok(());
    }
    Err(format!(
        "{key} = \"{}\" is no IP address with a port; write for instance \"0.0.0.0:{REMOTE_PORT}\"",
        value.text().escape_debug()
    ))
}
