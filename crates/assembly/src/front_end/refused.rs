//! A device whose store cannot be served: listed with the reason, and without a socket.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::Geometry;
use sidecore_peer::{Access, Disconnect};
use sidecore_units::SECTOR_BYTES;

use super::FrontEnd;
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;

/// Stands for a device until the daemon is started again with its store in order, or
/// until the device is removed.
pub(crate) struct Refused {
    device: String,
    reason: String,
    stopped: AtomicBool,
}

impl Refused {
    pub(crate) fn new(device: &str, reason: String) -> Self {
        Self { device: device.to_owned(), reason, stopped: AtomicBool::new(false) }
    }
}

impl FrontEnd for Refused {
    fn serve(&self, _socket: &Path, _access: Access, left: Option<LeftDevice>) -> Result<(), AssemblyError> {
        tracing::error!(device = self.device, "the device is not served: {}", self.reason);
        if let Some(left) = left {
            left.disconnect();
        }
        Ok(())
    }

    fn stop(&self) -> bool {
        !self.stopped.swap(true, Ordering::AcqRel)
    }

    fn close(&self) {}

    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..Geometry::new(0, SECTOR_BYTES as u32) }
    }

    fn queues_on(&self, _sidecore: &str) -> usize {
        0
    }

    fn running_count(&self) -> u16 {
        0
    }

    fn is_connected(&self) -> bool {
        false
    }

    /// It has no socket.
    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        None
    }

    fn refused(&self) -> Option<String> {
        Some(self.reason.clone())
    }

    fn lost_sidecore(&self) -> Option<String> {
        None
    }

    fn queues(&self) -> Vec<QueueCounters> {
        Vec::new()
    }
}
