//! Reports of links, and of the remote devices behind them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_link::LinkCounts;
use sidecore_remote::export::ExecutorCounts;
use sidecore_vrio::VrioCounts;

/// The remote channel of a daemon, on both of its sides.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RemoteReport {
    /// The links, in the order of the configuration.
    pub links: Vec<LinkReport>,
    /// The clients of this daemon, in the same order.
    pub clients: Vec<ClientReport>,
    /// The IOhosts that this daemon is a client of, in the same order.
    pub iohosts: Vec<IohostReport>,
    /// The patterns by which devices of IOhosts are served, in the same order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub serves: Vec<ServeReport>,
}

/// A pattern by which devices of an IOhost are served.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ServeReport {
    /// The pattern's name in the configuration.
    pub name: String,
    /// The name of the IOhost.
    pub iohost: String,
    /// The pattern.
    pub pattern: String,
    /// The devices that it serves. Here and at the IOhost, they have these names.
    pub devices: Vec<String>,
    /// Those of them that the IOhost has no longer, and that VMMs are connected to.
    pub leaving: Vec<String>,
    /// Devices of the IOhost that fit and are not served, with the reasons.
    pub refused: Vec<RefusedDeviceReport>,
}

/// A device of an IOhost that is not served.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RefusedDeviceReport {
    /// The device's name at the IOhost.
    pub device: String,
    /// Why it is not served.
    pub reason: String,
}

/// A link, with all its queues.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct LinkReport {
    /// The link's name in the configuration.
    pub name: String,
    /// The type of the link: `packet`, `xdp`, `udp` or `memory`.
    #[serde(rename = "type")]
    pub link_type: String,
    /// The mode of operation that the kernel granted; empty while the link is not open.
    pub mode: String,
    /// This host's address on the link.
    pub address: String,
    /// The largest frame in bytes, without the headers of the medium; 0 while the link is not open.
    pub frame_bytes: u64,
    /// `up`, `down` (for now), `closed` (for good) or `opening`.
    pub state: String,
    /// Why the link is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The names of the sidecores that poll the link's queues.
    pub sidecores: Vec<String>,
    /// The sidecores that execute requests of clients, at an IOhost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub executors: Vec<ExecutorReport>,
    /// The counters of all queues together.
    #[serde(flatten)]
    pub counts: LinkCounts,
    /// Frames that were dropped, for whatever reason.
    pub dropped: u64,
}

/// A sidecore that executes requests from a link.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ExecutorReport {
    /// The name of the sidecore.
    pub sidecore: String,
    /// The counters of all the link's queues together.
    #[serde(flatten)]
    pub counts: ExecutorCounts,
}

/// A host that uses devices of this one.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ClientReport {
    /// The client's name.
    pub name: String,
    /// The links on which the client may come.
    pub links: Vec<String>,
    /// Whether the client's frames are sealed: `on`, `off`, or `off` on some links only.
    pub encryption: String,
    /// `not invited` (or revoked), `waiting` (not heard of since the daemon was started),
    /// `connected` or `away`; or `draining` or `drained`, with or without sessions.
    pub state: String,
    /// The time of the last change of the state, in seconds since 1970.
    pub since_unix_s: u64,
    /// The client's address, as of its newest session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The number of sessions whose client was heard of within the last second.
    pub sessions_open: u64,
    /// Requests that the client may have unanswered now, in all of its sessions.
    pub credits: u64,
    /// Requests that stores execute now.
    pub executing: u64,
    /// The devices that are exported to the client.
    pub devices: Vec<ExportReport>,
    /// The client's NICs, which are ports of switches of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<ExportedNicReport>,
    /// The counters of all the client's sessions together.
    #[serde(flatten)]
    pub counts: VrioCounts,
}

/// A device that is exported to a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ExportReport {
    /// The device's name.
    pub device: String,
    /// The size of the device in bytes.
    pub capacity_bytes: u64,
    /// Requests of the device that stores execute now.
    pub in_flight: u64,
    /// The device's epoch: another one makes the client send unflushed writes again.
    pub epoch: String,
}

/// A NIC of a client, of which this host's switch has the port.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ExportedNicReport {
    /// The name of the device, and of the port.
    pub device: String,
    /// `up`, or why no packets pass: `away` (no session of the client has it), `down` or `closed`.
    pub state: String,
    /// The time of the last change of the state, in seconds since 1970.
    pub since_unix_s: u64,
    /// The NIC's hardware address.
    pub mac: String,
    /// The largest packet in bytes without Ethernet header.
    pub mtu: u16,
}

/// A NIC of this host whose port is at an IOhost's switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RemoteNicReport {
    /// The name of the device, which is a port of a switch of this host.
    pub device: String,
    /// The name of the NIC at the IOhost.
    pub nic: String,
    /// `up`, or why no packets pass: `away` (the IOhost does not answer, or has no such NIC),
    /// `down` (set by the IOhost) or `closed`.
    pub state: String,
    /// The time of the last change of the state, in seconds since 1970.
    pub since_unix_s: u64,
    /// The hardware address, as the IOhost has given it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The largest packet in bytes without Ethernet header, as the IOhost has given it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
}

/// A host whose devices this one uses.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct IohostReport {
    /// The IOhost's name in the configuration.
    pub name: String,
    /// The link to it: of two, the one that the session is on.
    pub link: String,
    /// The IOhost's address on the link.
    pub address: String,
    /// The name under which the IOhost knows this host.
    pub client: String,
    /// Whether frames are sealed: `on` or `off`.
    pub encryption: String,
    /// `connecting`, `connected` or `away`; or `draining` or `drained`, with or without a session.
    pub state: String,
    /// The time of the last change of the state, in seconds since 1970.
    pub since_unix_s: u64,
    /// The incarnation of the IOhost that the session is with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<String>,
    /// The size of the session's frames in bytes; 0 before the first session.
    pub frame_bytes: u32,
    /// The smoothed round trip of the path in nanoseconds; 0 before it was measured.
    pub round_trip_ns: u64,
    /// Requests that may be unanswered at the IOhost now.
    pub credits: u64,
    /// Stores that are devices of the IOhost.
    pub devices: Vec<RemoteDeviceReport>,
    /// The NICs of this host whose ports are at the IOhost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<RemoteNicReport>,
    /// The names of all disks that the IOhost has for this host, while there is a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced: Option<Vec<String>>,
    /// The counters of all sessions with the IOhost together.
    #[serde(flatten)]
    pub counts: VrioCounts,
}

/// The sessions with an IOhost that were moved to its other link.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LinkMove {
    /// The name of the IOhost.
    pub iohost: String,
    /// The link that they are on.
    pub link: String,
    /// The number of sessions.
    pub sessions: usize,
    /// The longest time in which a session's requests were not served, in nanoseconds; 0 if they
    /// were on the link.
    pub pause_ns: u64,
}

/// A store that is a device of an IOhost.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RemoteDeviceReport {
    /// The name of the store.
    pub store: String,
    /// The name of the device at the IOhost.
    pub device: String,
    /// Whether requests are carried out now: the device is attached, and nothing is to be replayed.
    pub ready: bool,
    /// For whom the device's requests wait, if it is not ready, and since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// The same in a word: `link` (which is down), `handshake` (the first answer), `admission`,
    /// `iohost` (which does not answer any more), `device`, `same_device`, `replay`,
    /// `drained_there`, `drained_here` or `session`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<String>,
    /// The time since when the device waits, or is ready, in seconds since 1970.
    pub since_unix_s: u64,
    /// Requests of guests that have no answer now.
    pub in_flight: u64,
    /// Answered writes that no flush covers. They are kept for an IOhost that restarts.
    pub kept_writes: u64,
    /// The epoch of the device's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<String>,
    /// The size of the device in bytes; 0 before it was attached.
    pub capacity_bytes: u64,
}
