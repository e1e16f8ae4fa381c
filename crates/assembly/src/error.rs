//! Why an assembly cannot be started, or not be changed.

use std::io;
use std::path::PathBuf;

use sidecore_controller::ControllerError;
use sidecore_linux::cpu::PinError;
use sidecore_linux::{FileError, HostFileError};
use sidecore_peer::ServerError;
use sidecore_sidecore::ThreadError;

use crate::access::AccountError;
use crate::operation::{ErrorKind, OperationError};

/// Why [`Assembly::start`](crate::Assembly::start) or a change refused. Whatever was started until then has been stopped
/// again.
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
    /// The name is another's.
    #[error("there is a {kind} \"{name}\" already; choose another name")]
    Duplicate {
        /// What is to have the name.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// The socket is another device's.
    #[error("device \"{name}\": {} is the socket of device \"{other}\"; give each its own", socket.display())]
    SocketTaken {
        /// The device that asks for it.
        name: String,
        /// The socket.
        socket: PathBuf,
        /// The device that has it.
        other: String,
    },
    /// Two guests would write to one filesystem.
    #[error(
        "device \"{name}\": device \"{other}\" writes to store \"{store}\" too, which would destroy it; set `read_only` \
         on all of them but one"
    )]
    SecondWriter {
        /// The device.
        name: String,
        /// Its store.
        store: String,
        /// The device that writes already.
        other: String,
    },
    /// There is no device of this name.
    #[error("there is no device \"{name}\"")]
    NoDevice {
        /// The name.
        name: String,
    },
    /// There is no loss to accept.
    #[error("no answered writes are missing from device \"{name}\", as far as is known")]
    NothingMissing {
        /// The name.
        name: String,
    },
    /// A controller refuses to be opened, or to open a function.
    #[error("{user}: {error}")]
    Controller {
        /// Who asked.
        user: String,
        /// Why it refuses.
        error: OperationError,
    },
    /// The physical function was not allowed.
    #[error("{user}: controller \"{controller}\" has `physical_function = false`")]
    NoPhysicalFunction {
        /// Who asked.
        user: String,
        /// The controller.
        controller: String,
    },
    /// The assembly is being drained.
    #[error("the daemon is coming to its end")]
    Ending,
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
    /// There is no memory or thread for a function.
    #[error("device \"{name}\": {error}")]
    Function {
        /// The device.
        name: String,
        /// What the kernel says.
        error: io::Error,
    },
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Threads(io::Error),
    /// A file cannot be opened.
    #[error("store \"{name}\": {error}")]
    File {
        /// The store.
        name: String,
        /// Why.
        error: FileError,
    },
    /// A file has not been opened in time.
    #[error("store \"{name}\" does not answer, or has requests in flight of a daemon that was killed; try again later")]
    NoAnswer {
        /// The store.
        name: String,
    },
    /// A file's blocks cannot be reached on the device below.
    #[error("store \"{name}\": {error}")]
    HostFile {
        /// The store.
        name: String,
        /// Why.
        error: HostFileError,
    },
    /// A file's blocks could be reached, and there is no memory or thread for it.
    #[error("store \"{name}\": {error}")]
    HostFunction {
        /// The store.
        name: String,
        /// Why.
        error: ControllerError,
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
    /// It cannot be said whose a device's socket is.
    #[error("device \"{name}\": {error}")]
    Account {
        /// The device.
        name: String,
        /// Why.
        error: AccountError,
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

impl AssemblyError {
    /// The thread of sidecore `name` could not be started.
    pub(crate) fn sidecore(name: &str, error: ThreadError) -> Self {
        let name = name.to_owned();
        match error {
            ThreadError::Start(error) => Self::Sidecore { name, error },
            ThreadError::Pin(error) => Self::Pin { name, error },
        }
    }

    /// Whether the specification is not to blame, but what is on a store or a process that was
    /// killed: then only the devices in front of that store are not served.
    pub(crate) fn is_of_a_store(&self) -> bool {
        match self {
            Self::Controller { error, .. } => error.kind == ErrorKind::Failed,
            Self::File { error, .. } => matches!(error, FileError::Predecessor { .. }),
            Self::HostFile { error, .. } => matches!(error, HostFileError::InUse { may_have_ended: true, .. }),
            _ => false,
        }
    }

    /// What kind of refusal of a change it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoDevice { .. } => ErrorKind::NotFound,
            Self::Duplicate { .. }
            | Self::SocketTaken { .. }
            | Self::SecondWriter { .. }
            | Self::NothingMissing { .. } => ErrorKind::Conflict,
            Self::Server { error: ServerError::InUse { .. } | ServerError::Ours { .. }, .. } => ErrorKind::Conflict,
            Self::File { error: FileError::Busy { .. } | FileError::Overlaps { .. }, .. } => ErrorKind::Conflict,
            Self::HostFile { error: HostFileError::InUse { .. }, .. } => ErrorKind::Conflict,
            Self::Unknown { .. } | Self::Cycle { .. } | Self::Device { .. } | Self::Account { .. } => {
                ErrorKind::Invalid
            }
            Self::NoPhysicalFunction { .. } | Self::Server { .. } | Self::File { .. } => ErrorKind::Invalid,
            Self::HostFile { .. } => ErrorKind::Invalid,
            Self::Controller { error, .. } => error.kind,
            Self::Memory { .. } => ErrorKind::NoSpace,
            Self::Pin { .. } | Self::Sidecore { .. } | Self::HostFunction { .. } => ErrorKind::Failed,
            Self::Function { .. } | Self::Threads(_) | Self::NoAnswer { .. } => ErrorKind::Failed,
            Self::Ending => ErrorKind::Ending,
        }
    }
}
