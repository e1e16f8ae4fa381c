//! What a device leaves to the next process, which serves it to the VMM that is connected.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};
use sidecore_vfio_user::{LeftSocket, SocketState};

/// Of what is written here. A process that knows another one does not go on.
const VERSION: u32 = 1;

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
    #[error("its state is none: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its state is of version {0}, and this daemon reads {VERSION}")]
    Version(u32),
    #[error("its doorbells are missing")]
    Doorbells,
}

#[derive(Serialize, Deserialize)]
struct NvmeState {
    version: u32,
    socket: SocketState,
}

/// A left NVMe function.
pub(crate) struct LeftNvme {
    pub(crate) socket: LeftSocket,
    /// The file that its client has mapped.
    pub(crate) doorbells: OwnedFd,
}

impl LeftNvme {
    /// What is to be kept of a socket and its doorbells.
    pub(crate) fn pack(name: &str, socket: LeftSocket, doorbells: BorrowedFd<'_>) -> std::io::Result<LeftDevice> {
        let LeftSocket { state, mut fds } = socket;
        let state = serde_json::to_vec(&NvmeState { version: VERSION, socket: state })?;
        fds.push(doorbells.as_fd().try_clone_to_owned()?);
        Ok(LeftDevice { name: name.to_owned(), state, fds })
    }

    /// And back.
    pub(crate) fn unpack(left: LeftDevice) -> Result<Self, LeftError> {
        /// The part that all versions have.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let LeftDevice { state, mut fds, .. } = left;
        let Versioned { version } = serde_json::from_slice(&state)?;
        if version != VERSION {
            return Err(LeftError::Version(version));
        }
        let NvmeState { socket, .. } = serde_json::from_slice(&state)?;
        let doorbells = fds.pop().ok_or(LeftError::Doorbells)?;
        Ok(Self { socket: LeftSocket { state: socket, fds }, doorbells })
    }
}
