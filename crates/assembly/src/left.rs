//! What a device leaves to the next process, which serves it to the VMM that is connected.

use std::os::fd::OwnedFd;

use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use sidecore_nvme_subsystem::SubsystemState;
use sidecore_peer::{Snapshot, SocketState, close_aside};
use sidecore_vfio_user::with_doorbells_last;

/// Of what is written here. A process that knows another one does not go on.
const VERSION: u32 = 2;

/// The doorbells were not in the socket's state, but behind its descriptors.
const VERSION_WITH_DOORBELLS_LAST: u32 = 1;

/// A device as it was left: data, and descriptors that it names by their places.
#[derive(Debug)]
pub struct LeftDevice {
    /// Its name in the configuration.
    pub name: String,
    /// In JSON. It is for a daemon of the same version, or a later one that still knows it.
    pub state: Vec<u8>,
    /// The descriptors that it is about.
    pub fds: Vec<OwnedFd>,
}

/// Why a device cannot be gone on with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeftError {
    #[error("its state cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its state is of version {0}, and this daemon reads up to {VERSION}")]
    Version(u32),
}

/// A device with its client.
#[derive(Serialize, Deserialize)]
struct ExportedDevice {
    version: u32,
    socket: SocketState,
    /// Empty unless it is an NVMe function.
    known: SubsystemState,
}

impl LeftDevice {
    /// The client of a device, and the state of its subsystem if it is an NVMe function. `None`,
    /// with a line in the log, if the state cannot be written.
    pub(crate) fn pack(name: &str, socket: Snapshot, known: SubsystemState) -> Option<Self> {
        let Snapshot { state, fds } = socket;
        match serde_json::to_vec(&ExportedDevice { version: VERSION, socket: state, known }) {
            Ok(state) => Some(Self { name: name.to_owned(), state, fds }),
            Err(error) => {
                tracing::error!(device = name, %error, "cannot hand the VMM over");
                close_aside(fds);
                None
            }
        }
    }

    /// The state of its subsystem; empty if it cannot be read.
    pub(crate) fn subsystem(&self) -> SubsystemState {
        /// The part that this is about.
        #[derive(Deserialize)]
        struct Part {
            known: SubsystemState,
        }
        serde_json::from_slice(&self.state).map(|part: Part| part.known).unwrap_or_default()
    }

    /// The client. If its state cannot be read it is disconnected, and the log says why.
    pub(crate) fn unpack_or_disconnect(self) -> Option<Snapshot> {
        match self.read() {
            Ok(ExportedDevice { version, socket, .. }) => {
                let socket = Snapshot { state: socket, fds: self.fds };
                Some(if version == VERSION_WITH_DOORBELLS_LAST { with_doorbells_last(socket) } else { socket })
            }
            Err(error) => {
                let device = &self.name;
                tracing::error!(device, %error, "cannot go on with the VMM that was connected, its guest has lost the device");
                self.disconnect();
                None
            }
        }
    }

    fn read(&self) -> Result<ExportedDevice, LeftError> {
        /// The part that all versions have.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        match serde_json::from_slice(&self.state)? {
            Versioned { version: VERSION_WITH_DOORBELLS_LAST | VERSION } => Ok(serde_json::from_slice(&self.state)?),
            Versioned { version } => Err(LeftError::Version(version)),
        }
    }

    /// Ends what nobody goes on with. Nobody waits for that: the VMM may have sent what takes for ever to be closed.
    pub(crate) fn disconnect(self) {
        // The first is the connection, if any is: then its VMM sees the end at once.
        if let Some(connection) = self.fds.first() {
            let _ = shutdown(connection, Shutdown::Both);
        }
        close_aside(self.fds);
    }
}
