//! Why the driver gave up.

use std::io;

use sidecore_memory::MemoryError;
use sidecore_ring::driver::DriverError;
use sidecore_ring::driver::nvme::QueueError;

use crate::nvme::NvmeStatus;

/// Why the driver gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The socket, the memory or an eventfd.
    #[error("{what}: {source}")]
    Io {
        /// The failed action.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The device closed the connection, which is how many of them refuse a message.
    #[error("the device hung up at {request}")]
    HungUp {
        /// The message it hung up at, or after.
        request: &'static str,
    },
    /// The device did not answer in time.
    #[error("the device did not answer {request} in time")]
    Timeout {
        /// The message.
        request: &'static str,
    },
    /// The device's answer makes no sense.
    #[error("the device's answer to {request} makes no sense: {why}")]
    Answer {
        /// The message that it answers.
        request: &'static str,
        /// The rule that is broken.
        why: String,
    },
    /// The device refused, in so many words.
    #[error("the device refused {request} (code {code})")]
    Refused {
        /// The message.
        request: &'static str,
        /// Its answer, not zero.
        code: u64,
    },
    /// The device refused, with an errno (vfio-user).
    #[error("the device refused {request}: {source}")]
    Denied {
        /// The message.
        request: &'static str,
        /// Its errno.
        source: io::Error,
    },
    /// The controller failed an admin command (NVMe).
    #[error("the controller failed {command} with {status}")]
    Command {
        /// The command.
        command: &'static str,
        /// Its status.
        status: NvmeStatus,
    },
    /// The controller did not get ready, or did not stop, in its own time (NVMe, CAP.TO).
    #[error("the controller did not {what} within {millis} ms: connect again, or reset the device")]
    NotReady {
        /// The intended action.
        what: &'static str,
        /// How long it had.
        millis: u128,
    },
    /// The controller has given up (NVMe, CSTS.CFS).
    #[error("the controller is in a fatal state (CSTS.CFS): reset it, or connect again")]
    Fatal,
    /// The controller completed what it was not given (NVMe). The queue is of no use any more.
    #[error(
        "queue {queue}: the controller completed command {id}, which is not in flight: reset it, \
         or connect again"
    )]
    NotInFlight {
        /// The queue pair.
        queue: u16,
        /// The command's identifier.
        id: u16,
    },
    /// The device has not got what was asked for.
    #[error("the device has no {what}")]
    Missing {
        /// The feature.
        what: &'static str,
    },
    /// The options contradict themselves.
    #[error("{0}")]
    Options(String),
    /// A request that the slot or the queue cannot hold.
    #[error("{0}")]
    Request(String),
    /// The ring, or the device's use of it.
    #[error(transparent)]
    Ring(#[from] DriverError),
    /// An NVMe queue, or the controller's use of it.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl ClientError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { what, source: errno.into() }
    }
}
