//! The reasons for which an assembly cannot be started or changed.

use std::io;
use std::path::PathBuf;

use sidecore_block::StageError;
use sidecore_controller::ControllerError;
use sidecore_linux::cpu::PinError;
use sidecore_linux::{FileError, HostFileError};
use sidecore_peer::ServerError;
use sidecore_sidecore::ThreadError;

use crate::access::AccountError;
use crate::operation::{ErrorKind, OperationError};

/// Why [`Assembly::start`](crate::Assembly::start) or a change was refused. All parts that were
/// started by then have been stopped again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssemblyError {
    /// A specification names a part that does not exist.
    #[error("{user} names {kind} \"{name}\", which does not exist")]
    Unknown {
        /// The part that has the name in its specification.
        user: String,
        /// The kind of the missing part: `sidecore`, `store` or `controller`.
        kind: &'static str,
        /// The name of the missing part.
        name: String,
    },
    /// A switch, or a port of it, cannot be made.
    #[error("switch \"{name}\": {why}")]
    Switch {
        /// The switch.
        name: String,
        /// Why not.
        why: String,
    },
    /// Another part has the name.
    #[error("there is a {kind} \"{name}\" already; choose another name")]
    Duplicate {
        /// The kind of both parts: `device` or `store`.
        kind: &'static str,
        /// The name that is taken.
        name: String,
    },
    /// Another device has the socket.
    #[error(
        "device \"{name}\": {} is the socket of device \"{other}\"; give each its own",
        socket.display()
    )]
    SocketTaken {
        /// The device that was refused.
        name: String,
        /// The path of the socket.
        socket: PathBuf,
        /// The device that has the socket.
        other: String,
    },
    /// Two guests would write to one filesystem.
    #[error(
        "device \"{name}\": device \"{other}\" writes to store \"{store}\" too, which would \
         destroy it; set `read_only` on all of them but one"
    )]
    SecondWriter {
        /// The device that was refused.
        name: String,
        /// The store of the refused device.
        store: String,
        /// The device that writes to the same file or volume.
        other: String,
    },
    /// No device has this name.
    #[error("there is no device \"{name}\"")]
    NoDevice {
        /// The name that was asked for.
        name: String,
    },
    /// No link, client or IOhost has this name.
    #[error("there is no {kind} \"{name}\"")]
    NoPart {
        /// The kind of the part.
        kind: &'static str,
        /// The name that was asked for.
        name: String,
    },
    /// Another part uses a link, a client or an IOhost that is to be removed.
    #[error("{kind} \"{name}\" is in use: remove {user} before")]
    PartInUse {
        /// The kind of the part.
        kind: &'static str,
        /// The part that is to be removed.
        name: String,
        /// The part that uses it.
        user: String,
    },
    /// A link leads to clients, or to one IOhost.
    #[error("link \"{name}\" leads to {other} already: give {user} a link of its own")]
    LinkTaken {
        /// The link.
        name: String,
        /// The part that has the link.
        other: String,
        /// The part that was refused.
        user: String,
    },
    /// No loss can be accepted, because none is known.
    #[error("no answered writes are missing from device \"{name}\", as far as is known")]
    NothingMissing {
        /// The device that was asked for.
        name: String,
    },
    /// A controller cannot be opened, or refuses a function.
    #[error("{user}: {error}")]
    Controller {
        /// The part that needs the controller or function.
        user: String,
        /// The reason of the controller.
        error: OperationError,
    },
    /// The controller's specification permits no device in front of its physical function.
    #[error("{user}: controller \"{controller}\" has `physical_function = false`")]
    NoPhysicalFunction {
        /// The part that needs the physical function.
        user: String,
        /// The name of the controller.
        controller: String,
    },
    /// The assembly is being drained.
    #[error("the daemon is coming to its end")]
    Ending,
    /// A store leads to itself.
    #[error("store \"{name}\" is put in front of itself")]
    Cycle {
        /// The name of the store.
        name: String,
    },
    /// The legs of a mirror cannot be its legs.
    #[error("store \"{name}\": {why}")]
    Mirror {
        /// The name of the mirror.
        name: String,
        /// The reason and the remedy.
        why: String,
    },
    /// A device has no sidecore, or an impossible number of queues.
    #[error("device \"{name}\": {why}")]
    Device {
        /// The device that was refused.
        name: String,
        /// The rule that the device breaks.
        why: &'static str,
    },
    /// The kernel has no memory or thread for a function.
    #[error("device \"{name}\": {error}")]
    Function {
        /// The device with the function.
        name: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// The kernel starts no thread.
    #[error("a thread cannot be started: {0}")]
    Threads(io::Error),
    /// A file cannot be opened.
    #[error("store \"{name}\": {error}")]
    File {
        /// The store on the file.
        name: String,
        /// The reason, with the path.
        error: FileError,
    },
    /// The file of an added device's store was not opened in time.
    #[error(
        "store \"{name}\" does not answer, or has requests in flight of a daemon that was killed; \
         try again later"
    )]
    NoAnswer {
        /// The store on the file.
        name: String,
    },
    /// A file's blocks cannot be reached on the device below its filesystem.
    #[error("store \"{name}\": {error}")]
    HostFile {
        /// The store on the file.
        name: String,
        /// The reason, with the path.
        error: HostFileError,
    },
    /// A file's blocks can be reached, but there is no memory or thread for its function.
    #[error("store \"{name}\": {error}")]
    HostFunction {
        /// The store on the file.
        name: String,
        /// The error of the function.
        error: ControllerError,
    },
    /// A stage of a store cannot be opened.
    #[error("store \"{name}\": {error}")]
    Stage {
        /// The store with the stage.
        name: String,
        /// The reason, with the stage.
        error: StageError,
    },
    /// The kernel has too little memory for a store.
    #[error("store \"{name}\": no memory for {size_bytes} bytes: {error}; choose a smaller size")]
    Memory {
        /// The store in memory.
        name: String,
        /// The size that was asked for.
        size_bytes: u64,
        /// The error of the kernel.
        error: io::Error,
    },
    /// A sidecore cannot be pinned to its CPU.
    #[error("sidecore \"{name}\": {error}")]
    Pin {
        /// The name of the sidecore.
        name: String,
        /// The reason, with the CPU.
        error: PinError,
    },
    /// A sidecore gets no thread, eventfd or epoll descriptor.
    #[error("sidecore \"{name}\" cannot be started: {error}")]
    Sidecore {
        /// The name of the sidecore.
        name: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// The owner or group of a device's socket cannot be determined.
    #[error("device \"{name}\": {error}")]
    Account {
        /// The device with the socket.
        name: String,
        /// The reason, with the name of the account.
        error: AccountError,
    },
    /// A link cannot be opened.
    #[error("link \"{name}\": {error}")]
    Link {
        /// The link.
        name: String,
        /// The reason, with the remedy.
        error: String,
    },
    /// A client, or a device of it, cannot be served.
    #[error("client \"{name}\": {error}")]
    Client {
        /// The client.
        name: String,
        /// The reason.
        error: String,
    },
    /// There can be no session with an IOhost.
    #[error("iohost \"{name}\": {error}")]
    Iohost {
        /// The IOhost.
        name: String,
        /// The reason.
        error: String,
    },
    /// A remote device cannot be opened.
    #[error("store \"{name}\": {error}")]
    Remote {
        /// The store.
        name: String,
        /// The reason.
        error: String,
    },
    /// A block device or an interface of the kernel cannot be made or recovered.
    #[error("device \"{name}\": {error}")]
    Kernel {
        /// The device.
        name: String,
        /// The reason, with the remedy.
        error: String,
    },
    /// Another device has the number.
    #[error(
        "device \"{name}\": `number` {number} is that of device \"{other}\"; give each its own"
    )]
    NumberTaken {
        /// The device that was refused.
        name: String,
        /// The number of both.
        number: u32,
        /// The device that has the number.
        other: String,
    },
    /// The kernel gives no random bytes.
    #[error("no random numbers for the remote channel: {0}")]
    Random(io::Error),
    /// A device's socket cannot be served.
    #[error("device \"{name}\": {error}")]
    Server {
        /// The device with the socket.
        name: String,
        /// The reason, with the path.
        error: ServerError,
    },
}

impl AssemblyError {
    /// The error of a sidecore whose thread could not be started.
    pub(crate) fn sidecore(name: &str, error: ThreadError) -> Self {
        let name = name.to_owned();
        match error {
            ThreadError::Start(error) => Self::Sidecore { name, error },
            ThreadError::Pin(error) => Self::Pin { name, error },
        }
    }

    /// Whether the cause is not the specification, but the contents of a store or a killed process.
    /// Then only the devices in front of that store are not served.
    pub(crate) fn is_of_a_store(&self) -> bool {
        match self {
            Self::Controller { error, .. } => error.kind == ErrorKind::Failed,
            Self::Stage { .. } | Self::Mirror { .. } => true,
            Self::File { error, .. } => matches!(error, FileError::Predecessor { .. }),
            Self::HostFile { error, .. } => {
                matches!(error, HostFileError::InUse { may_have_ended: true, .. })
            }
            _ => false,
        }
    }

    /// The kind of the refusal, for the API's status.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoDevice { .. } | Self::NoPart { .. } => ErrorKind::NotFound,
            Self::Duplicate { .. }
            | Self::PartInUse { .. }
            | Self::LinkTaken { .. }
            | Self::SocketTaken { .. }
            | Self::NumberTaken { .. }
            | Self::SecondWriter { .. }
            | Self::NothingMissing { .. } => ErrorKind::Conflict,
            Self::Server {
                error: ServerError::InUse { .. } | ServerError::Ours { .. }, ..
            } => ErrorKind::Conflict,
            Self::File { error: FileError::Busy { .. } | FileError::Overlaps { .. }, .. } => {
                ErrorKind::Conflict
            }
            Self::HostFile { error: HostFileError::InUse { .. }, .. } => ErrorKind::Conflict,
            Self::Unknown { .. }
            | Self::Cycle { .. }
            | Self::Mirror { .. }
            | Self::Device { .. }
            | Self::Account { .. } => ErrorKind::Invalid,
            Self::NoPhysicalFunction { .. } | Self::Server { .. } | Self::File { .. } => {
                ErrorKind::Invalid
            }
            Self::HostFile { .. } | Self::Stage { .. } => ErrorKind::Invalid,
            Self::Controller { error, .. } => error.kind,
            Self::Memory { .. } => ErrorKind::NoSpace,
            Self::Pin { .. } | Self::Sidecore { .. } | Self::HostFunction { .. } => {
                ErrorKind::Failed
            }
            Self::Switch { .. } => ErrorKind::Failed,
            Self::Link { .. } | Self::Client { .. } | Self::Iohost { .. } | Self::Remote { .. } => {
                ErrorKind::Invalid
            }
            Self::Kernel { .. } | Self::Random(_) => ErrorKind::Failed,
            Self::Function { .. } | Self::Threads(_) | Self::NoAnswer { .. } => ErrorKind::Failed,
            Self::Ending => ErrorKind::Ending,
        }
    }
}
