//! What a guest sees of a disk, and how it is served.

mod nvme;
mod socket;
mod virtio_blk;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use sidecore_block::Geometry;
use sidecore_sidecore::Sidecore;

use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use sidecore_peer::{Access, Disconnect};

pub(crate) use nvme::{Nvme, NvmeParts, NvmeThreads};
pub(crate) use virtio_blk::VirtioBlk;

/// A device model with its transport and its queues on sidecores.
pub(crate) trait FrontEnd: Send + Sync {
    /// Makes the socket and serves whoever connects, or is connected since another process.
    fn serve(&self, socket: &Path, access: Access, left: Option<LeftDevice>) -> Result<(), AssemblyError>;

    /// Removes the socket and stops the queues, when what is in flight is done. False if it was stopped before; then it
    /// has stopped, too.
    fn stop(&self) -> bool;

    /// The same, and leaves the VMM that is connected to the next process, if it can be left.
    fn hand_over(&self) -> Option<LeftDevice> {
        self.stop();
        None
    }

    /// Lets go of the store: nothing can be served any more.
    fn close(&self);

    /// The store may have another size by now: the guest is told, if it can be.
    fn refresh(&self) {}

    /// The store's geometry, as far as it was made known to the guest.
    fn geometry(&self) -> Geometry;

    /// It, if it is an NVMe function.
    fn nvme(&self) -> Option<&Nvme> {
        None
    }

    /// How many queues the sidecore of this name was given.
    fn queues_on(&self, sidecore: &str) -> usize;

    /// How many queues are running.
    fn running_count(&self) -> u16;

    /// Whether a VMM is connected; of a device that is being stopped nobody waits for the answer.
    fn is_connected(&self) -> bool;

    /// The client that was disconnected for what it did, if no queue has been started since.
    fn disconnect(&self) -> Option<Disconnect>;

    /// Why the guest's driver has to reset it, if it has to.
    fn broken(&self) -> Option<String>;

    /// Why clients that used it with an earlier process are turned away, if they are: answered writes may be missing.
    fn loss(&self) -> Option<String> {
        None
    }

    /// Serves them all the same. False if nothing is missing.
    fn accept_loss(&self) -> bool {
        false
    }

    /// Whether somebody has taken it offline: no reset by the guest helps.
    fn is_offline(&self) -> bool {
        false
    }

    /// A sidecore of its queues that has ended by itself.
    fn lost_sidecore(&self) -> Option<String>;

    /// The counters of each queue.
    fn queues(&self) -> Vec<QueueCounters>;
}

/// When a queue of a device was started last.
#[derive(Debug, Default)]
pub(crate) struct LastStart(Mutex<Option<Instant>>);

impl LastStart {
    /// A queue was started just now.
    pub(crate) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether none has been started since then.
    pub(crate) fn is_before(&self, disconnect: &Disconnect) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|start| start < disconnect.instant)
    }
}

/// A sidecore that has ended by itself.
pub(crate) fn lost<'a>(mut sidecores: impl Iterator<Item = &'a Sidecore>) -> Option<String> {
    sidecores.find(|sidecore| sidecore.is_lost()).map(|sidecore| sidecore.name().to_owned())
}
