//! What a device leaves to the next process, which serves it to the VMM that is connected.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};
use sidecore_vfio_user::{LeftSocket, SocketState};

use crate::front_end::Numbers;

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
    #[error("its state cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its state is of version {0}, and this daemon reads {VERSION}")]
    Version(u32),
}

/// An NVMe function. The last of the descriptors are its doorbells.
#[derive(Serialize, Deserialize)]
struct NvmeState {
    version: u32,
    socket: SocketState,
    /// There if it is a physical function with volumes to manage.
    numbers: Option<Numbers>,
}

impl LeftDevice {
    /// What is to be kept of a function's socket and doorbells, and of the numbers that its host knows.
    pub(crate) fn pack(
        name: &str,
        socket: LeftSocket,
        doorbells: BorrowedFd<'_>,
        numbers: Option<Numbers>,
    ) -> io::Result<Self> {
        let LeftSocket { state, mut fds } = socket;
        let state = serde_json::to_vec(&NvmeState { version: VERSION, socket: state, numbers })?;
        fds.push(doorbells.try_clone_to_owned()?);
        Ok(Self { name: name.to_owned(), state, fds })
    }

    /// The doorbells once more, for the function that is to go on.
    pub(crate) fn doorbells(&self) -> Option<OwnedFd> {
        self.fds.last()?.try_clone().ok()
    }

    /// The numbers of volumes and controllers, if it has any.
    pub(crate) fn numbers(&self) -> Option<Numbers> {
        /// The part that this is about.
        #[derive(Deserialize)]
        struct Numbered {
            numbers: Option<Numbers>,
        }
        serde_json::from_slice(&self.state).ok().and_then(|numbered: Numbered| numbered.numbers)
    }

    /// The socket.
    pub(crate) fn unpack(self) -> Result<LeftSocket, LeftError> {
        /// The part that all versions have.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Self { state, mut fds, .. } = self;
        let Versioned { version } = serde_json::from_slice(&state)?;
        if version != VERSION {
            return Err(LeftError::Version(version));
        }
        let NvmeState { socket, .. } = serde_json::from_slice(&state)?;
        fds.pop();
        Ok(LeftSocket { state: socket, fds })
    }
}
