//! Devices whose clients are exported for the next process.

use std::os::fd::OwnedFd;

use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use sidecore_nvme_subsystem::SubsystemState;
use sidecore_peer::{Snapshot, SocketState, close_aside};
use sidecore_vfio_user::with_doorbells_last;

/// The version of the state. A process refuses the state of any version that it does not know.
const VERSION: u32 = 2;

/// An earlier version, with the doorbells behind the socket's descriptors and not in its state.
const VERSION_WITH_DOORBELLS_LAST: u32 = 1;

/// A device with its exported client: data, and descriptors that the data names by their positions.
#[derive(Debug)]
pub struct LeftDevice {
    /// The device's name in the configuration.
    pub name: String,
    /// The state in JSON, for a daemon of the same version, or of a later one that still knows it.
    pub state: Vec<u8>,
    /// The client's connection and memory; the connection comes first.
    pub fds: Vec<OwnedFd>,
}

/// Why the client of a device cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResumeError {
    #[error("the state cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the state has version {0}, and this daemon reads versions up to {VERSION}")]
    Version(u32),
}

/// The JSON of a device with its client.
#[derive(Serialize, Deserialize)]
struct ExportedDevice {
    version: u32,
    socket: SocketState,
    /// Empty unless the device is an NVMe function.
    known: SubsystemState,
    /// Empty unless the device is a port of a switch. Versions without it ignore it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stations: Vec<LearntStation>,
    /// As above, and empty unless the port has a firewall with connections.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    connections: String,
}

/// The state of a port of a switch. Its fields are those of [`ExportedDevice`]: all that a device
/// without a client leaves.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct PortState {
    /// The stations that were learnt on it.
    #[serde(default)]
    pub stations: Vec<LearntStation>,
    /// The [connections](sidecore_stage_firewall::Snapshot) of its firewall, as text; empty if
    /// there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub connections: String,
}

/// A station that a switch has learnt on a device's port.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LearntStation {
    /// Its Ethernet address.
    pub mac: String,
    pub vlan: u16,
    /// The seconds since its last frame.
    pub silent_s: u64,
}

impl LeftDevice {
    /// Packs the client of a device, with its subsystem's state if the device is an NVMe function.
    /// `None`, and a line in the log, if the state cannot be written.
    pub(crate) fn pack(name: &str, socket: Snapshot, known: SubsystemState) -> Option<Self> {
        Self::pack_all(name, socket, known, PortState::default())
    }

    /// As [`pack`](Self::pack), of a NIC with the state of its port.
    pub(crate) fn pack_nic(name: &str, socket: Snapshot, port: PortState) -> Option<Self> {
        Self::pack_all(name, socket, SubsystemState::default(), port)
    }

    /// Packs the state of the port of a device without a client; `None` if there is none.
    pub(crate) fn pack_port(name: &str, port: &PortState) -> Option<Self> {
        if port.stations.is_empty() && port.connections.is_empty() {
            return None;
        }
        let state = serde_json::to_vec(port).ok()?;
        Some(Self { name: name.to_owned(), state, fds: Vec::new() })
    }

    fn pack_all(
        name: &str,
        socket: Snapshot,
        known: SubsystemState,
        port: PortState,
    ) -> Option<Self> {
        let Snapshot { state, fds } = socket;
        let PortState { stations, connections } = port;
        let exported =
            ExportedDevice { version: VERSION, socket: state, known, stations, connections };
        match serde_json::to_vec(&exported) {
            Ok(state) => Some(Self { name: name.to_owned(), state, fds }),
            Err(error) => {
                tracing::error!(device = name, %error, "the connected VMM cannot be exported");
                close_aside(fds);
                None
            }
        }
    }

    /// The subsystem's state; empty if it cannot be read.
    pub(crate) fn subsystem(&self) -> SubsystemState {
        /// The field of [`ExportedDevice`] that is read.
        #[derive(Deserialize)]
        struct Part {
            known: SubsystemState,
        }
        serde_json::from_slice(&self.state).map(|part: Part| part.known).unwrap_or_default()
    }

    /// The state of the device's port; an empty one if it cannot be read.
    pub(crate) fn port(&self) -> PortState {
        serde_json::from_slice(&self.state).unwrap_or_default()
    }

    /// Unpacks the client. A client whose state cannot be read is disconnected, and the log has the
    /// reason.
    pub(crate) fn unpack_or_disconnect(self) -> Option<Snapshot> {
        match self.read() {
            Ok(ExportedDevice { version, socket, .. }) => {
                let socket = Snapshot { state: socket, fds: self.fds };
                Some(if version == VERSION_WITH_DOORBELLS_LAST {
                    with_doorbells_last(socket)
                } else {
                    socket
                })
            }
            Err(error) => {
                let device = &self.name;
                tracing::error!(
                    device,
                    %error,
                    "the connected VMM cannot be resumed, so its guest loses the device"
                );
                self.disconnect();
                None
            }
        }
    }

    fn read(&self) -> Result<ExportedDevice, ResumeError> {
        /// The field that all versions have.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        match serde_json::from_slice(&self.state)? {
            Versioned { version: VERSION_WITH_DOORBELLS_LAST | VERSION } => {
                Ok(serde_json::from_slice(&self.state)?)
            }
            Versioned { version } => Err(ResumeError::Version(version)),
        }
    }

    /// Disconnects the client. Its descriptors are closed on a thread of their own, because the
    /// close of a descriptor that a VMM has sent may wait for ever.
    pub(crate) fn disconnect(self) {
        // The first descriptor is the connection, if the device has one: its VMM notices the
        // shutdown at once.
        if let Some(connection) = self.fds.first() {
            let _ = shutdown(connection, Shutdown::Both);
        }
        close_aside(self.fds);
    }
}
