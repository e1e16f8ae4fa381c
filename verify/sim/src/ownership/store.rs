//! The store, its record, and requests in flight to it.

use sidecore_ownership::Record;
use sidecore_units::Nanos;

pub(super) const BLOCKS: usize = 4;

/// A request of the client. Each has a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) number: u64,
    pub(super) block: usize,
    /// The value that a write writes.
    pub(super) write: Option<u64>,
}

/// A request that the kernel has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    pub(super) request: Request,
    pub(super) lands_at: Nanos,
    /// The process that gave it to the kernel.
    pub(super) process: u64,
    /// The opening of the store that it belongs to.
    pub(super) opening: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub(super) values: [u64; BLOCKS],
    pub(super) record: Option<Record>,
    pub(super) in_flight: Vec<Landing>,
}

impl Disk {
    pub(super) fn has(&self, process: u64) -> bool {
        self.in_flight.iter().any(|landing| landing.process == process)
    }

    /// The path of a host to the disk was cut: what was in flight never lands.
    pub(super) fn cut(&mut self, process: u64) {
        self.in_flight.retain(|landing| landing.process != process);
    }
}
