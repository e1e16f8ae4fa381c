//! Why the driver gave up.

use std::io;

use sidecore_memory::MemoryError;
use sidecore_ring::driver::DriverError;

/// Why the driver gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The socket, the memory or an eventfd.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
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
        /// What is wrong with it.
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
    /// The memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl ClientError {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { what, source: errno.into() }
    }
}
