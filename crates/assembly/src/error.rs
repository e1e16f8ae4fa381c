//! Why an assembly cannot be started.

use std::io;

use sidecore_linux::FileError;
use sidecore_linux::cpu::PinError;
use sidecore_vhost_user::ServerError;

/// Why [`Assembly::start`](crate::Assembly::start) refused. Whatever was started until then has been stopped again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssemblyError {
    /// A name leads nowhere.
    #[error("{user} names {kind} \"{name}\", which there is not")]
    Unknown {
        /// Who names it.
        user: String,
        /// What it should be.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// A store is put in front of itself.
    #[error("store \"{name}\" is put in front of itself")]
    Cycle {
        /// The store.
        name: String,
    },
    /// A device has no sidecore, or not a possible number of queues.
    #[error("device \"{name}\": {why}")]
    Device {
        /// The device.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file cannot be opened.
    #[error("store \"{name}\": {error}")]
    File {
        /// The store.
        name: String,
        /// Why.
        error: FileError,
    },
    /// There is not enough memory for a store.
    #[error("store \"{name}\": no memory for {size_bytes} bytes: {error}; choose a smaller size")]
    Memory {
        /// The store.
        name: String,
        /// What it was to have.
        size_bytes: u64,
        /// What the kernel says.
        error: io::Error,
    },
    /// A sidecore cannot be pinned to its CPU.
    #[error("sidecore \"{name}\": {error}")]
    Pin {
        /// The sidecore.
        name: String,
        /// Why.
        error: PinError,
    },
    /// A sidecore gets no thread, no eventfd or no epoll.
    #[error("sidecore \"{name}\" cannot be started: {error}")]
    Sidecore {
        /// The sidecore.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
    /// A device's socket cannot be served.
    #[error("device \"{name}\": {error}")]
    Server {
        /// The device.
        name: String,
        /// Why.
        error: ServerError,
    },
}
