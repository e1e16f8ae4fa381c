//! The IOhost's side: units that serve the block devices of an IOhost to clients behind a link.
//!
//! # Architecture
//!
//! ```text
//! sidecore A   link ─► LinkPort ─► vrio::Host ─► turns ─► steering ─► executor ─► stores
//!                                                            │ batches of requests
//! sidecore B                                              Helper ──► executor ─► stores
//! ```
//!
//! * [`Export`] is a unit for each queue of a link. It has the sessions of all clients behind it.
//! * The requests of sessions take turns, so that a client that floods its queue does not delay the
//!   others.
//! * An executor gives requests to the stores, and is the same on each sidecore. A [`Helper`] is
//!   the unit around one that executes requests which another sidecore has received.
//!   docs/decisions/0043-exports.md has the reasons.
//!
//! Each slot of a session has a buffer, which frames are copied to and from, and which the store
//! reads and writes. The data of a long write may stay in their frame instead:
//! docs/decisions/0054-writes-stay-in-their-frames.md.

mod entry;
mod executor;
mod executors;
mod helper;
mod nics;
mod sharing;
mod slots;
mod status;
mod steering;
mod tenure;
mod turns;
mod unit;

use std::io;
use std::sync::Arc;

use sidecore_block::{BlockDevice, Gate, Limits, Operation};
use sidecore_units::Nanos;

pub use executors::{SteeringCounts, SteeringStats};
pub use helper::{Helper, HelperEnd, HelperSeed, helper};
pub use nics::ExportedNic;
pub use status::{DeviceStatus, ExportStatus, SessionStatus};
pub use steering::{Assigned, ExecutorCounts, ExecutorStats, Load, OwnLoad};
pub use tenure::Tenure;
pub use unit::{Export, Removed};

/// Names a client of an [`Export`] until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientId(usize);

/// A client of an IOhost.
#[derive(Clone, Debug)]
pub struct ClientSpec {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// The name by which it asks for a session, made by its invitation.
    pub id: [u8; 16],
    /// Its link queues, each of which may have a session.
    pub queues: u8,
    /// Its share of what is short.
    pub share: ClientShare,
}

/// A client's share of what an IOhost has.
#[derive(Clone, Debug)]
pub struct ClientShare {
    /// Its part of a sidecore's time; from 1.
    pub weight: u32,
    /// The requests that each of its sessions may have unanswered, if that is less than the session
    /// has slots.
    pub slots: u16,
    /// Its limits, which all links share.
    pub limits: Option<Arc<ClientLimits>>,
}

impl Default for ClientShare {
    /// Of weight 1, and without limits.
    fn default() -> Self {
        Self { weight: 1, slots: u16::MAX, limits: None }
    }
}

/// The rate limits of a client, over all of its devices, sessions and links.
#[derive(Debug)]
pub struct ClientLimits {
    reads: Gate,
    writes: Gate,
}

impl ClientLimits {
    /// Makes the buckets of these limits, full.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        let Limits { read_iops, write_iops, read_bytes_per_s, write_bytes_per_s } = *limits;
        Self {
            reads: Gate::new(read_iops, read_bytes_per_s),
            writes: Gate::new(write_iops, write_bytes_per_s),
        }
    }

    /// Lets a request pass.
    ///
    /// # Errors
    /// When to try again, if `now` is too early.
    fn pass(&self, now: Nanos, operation: Operation, len_bytes: u64) -> Result<(), Nanos> {
        match operation {
            Operation::Read => self.reads.pass(now, len_bytes),
            Operation::Write => self.writes.pass(now, len_bytes),
            // They move no data.
            Operation::Discard | Operation::WriteZeroes { .. } => self.writes.pass(now, 0),
            Operation::Flush => Ok(()),
        }
    }
}

/// A device for a client.
#[derive(Clone)]
pub struct ExportedDevice {
    /// The name by which the client asks for it.
    pub name: Arc<str>,
    /// The serial number that guests read, of at most 20 bytes.
    pub serial: String,
    /// The store, with its stages.
    pub store: Arc<dyn BlockDevice>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether a write may be answered before it is durable. The client then keeps it until a flush
    /// covers it.
    pub write_cache: bool,
    /// The owner's epoch.
    pub epoch: u64,
    /// One for the device, whatever the number of links and queues that it is added to.
    pub tenure: Arc<Tenure>,
}

/// Why a client or a device cannot be added or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The client has sessions here already, or there are too many clients.
    #[error("client {name} is on this link already, or the link has too many clients")]
    Client {
        /// The client's name.
        name: Arc<str>,
    },
    /// There is no such client.
    #[error("no such client on this link")]
    NoClient,
    /// The client has a device of this name.
    #[error("the client has a device {name} already: use another name")]
    Device {
        /// The device's name.
        name: Arc<str>,
    },
    /// The name of the device does not fit into a message.
    #[error("device {name}: use a name of 1 to 64 bytes")]
    Name {
        /// The device's name.
        name: Arc<str>,
    },
    /// There is no such device.
    #[error("no such device on this link")]
    NoDevice,
    /// All numbers of devices were used.
    #[error("65536 devices were added to this link: restart the daemon to add more")]
    Full,
    /// The kernel refused what is needed.
    #[error(transparent)]
    Io(#[from] io::Error),
}
