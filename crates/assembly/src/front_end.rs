//! The front ends of devices: the guest's view, with its transport.

mod interface;
mod nvme;
mod remote_port;
mod socket;
mod ublk;
mod virtio_blk;
mod virtio_net;
mod vrio;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use sidecore_block::{BlockDevice, Geometry};
use sidecore_reactor::IdleMode;
use sidecore_sidecore::Sidecore;

use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use crate::swap::{NotSwapped, Swapped};
use sidecore_peer::Disconnect;

pub(crate) use interface::Interface;
pub(crate) use nvme::{Nvme, NvmeParts, NvmeThreads};
pub(crate) use remote_port::RemotePort;
pub(crate) use socket::Place;
pub(crate) use ublk::{Ublk, remove_ublk_remnants};
pub(crate) use virtio_blk::VirtioBlk;
pub(crate) use virtio_net::VirtioNet;
pub(crate) use vrio::Vrio;

/// A device model with its transport and its queues on sidecores.
pub(crate) trait FrontEnd: Send + Sync {
    /// Serves the clients of the socket, which is made if it does not listen already, or resumes
    /// the client that another process has exported.
    fn serve(
        &self,
        socket: &Path,
        place: Place,
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError>;

    /// Removes the socket and stops the queues when their requests in flight are done. False if the
    /// front end was stopped before; then its queues have stopped, too.
    fn stop(&self) -> bool;

    /// Stops the front end because the daemon ends. A block device of the kernel stays, and its
    /// requests wait for the next daemon.
    fn end(&self) {
        self.stop();
    }

    /// The block device of this host's kernel, if the front end is one.
    fn node(&self) -> Option<PathBuf> {
        None
    }

    /// Stops the front end and exports the connected VMM for the next process, if the protocol
    /// allows that.
    fn hand_over(&self) -> Option<LeftDevice> {
        self.stop();
        None
    }

    /// Drops the store. No queue can be started afterwards.
    fn close(&self);

    /// Serves `to` in the place of `from`, a store that looks the same to the guest, without the
    /// guest's notice.
    ///
    /// # Errors
    /// See [`NotSwapped`]. Nothing has changed then.
    fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        let _ = (from, to);
        Err(NotSwapped::FrontEnd("it has no store"))
    }

    /// Adopts the store's size, and notifies the guest if the size has changed.
    fn refresh(&self) {}

    /// The store's geometry as last announced to the guest.
    fn geometry(&self) -> Geometry;

    /// The NVMe function, if the front end is one.
    fn nvme(&self) -> Option<&Nvme> {
        None
    }

    /// The sidecores of a NIC, which are those of its switch.
    fn sidecores(&self) -> Option<Vec<String>> {
        None
    }

    /// The way in which a NIC's switch spends idle time.
    fn idle(&self) -> Option<IdleMode> {
        None
    }

    /// The number of queues that the sidecore of this name serves.
    fn queues_on(&self, sidecore: &str) -> usize;

    /// The number of running queues.
    fn running_count(&self) -> u16;

    /// Whether a VMM is connected. False while the device is being stopped, without waiting.
    fn is_connected(&self) -> bool;

    /// Whether the kernel is to show the front end's block device, and does not yet.
    fn is_starting(&self) -> bool {
        false
    }

    /// The client that was disconnected for its errors, if no queue has been started since.
    fn disconnect(&self) -> Option<Disconnect>;

    /// Why the device is broken until the guest's driver resets it.
    fn broken(&self) -> Option<String>;

    /// Why clients of an earlier process are turned away: answered writes may be missing.
    fn loss(&self) -> Option<String> {
        None
    }

    /// A condition that an operator should know of while the device is served.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Serves clients of an earlier process although answered writes may be missing. False if none
    /// are missing.
    fn accept_loss(&self) -> bool {
        false
    }

    /// Whether a host has taken the device offline, which a reset by the guest does not end.
    fn is_offline(&self) -> bool {
        false
    }

    /// The name of a sidecore of the device's queues that has ended by itself.
    fn lost_sidecore(&self) -> Option<String>;

    /// The counters of each queue.
    fn queues(&self) -> Vec<QueueCounters>;
}

/// The time of the last start of a queue of a device.
#[derive(Debug, Default)]
pub(crate) struct LastStart(Mutex<Option<Instant>>);

impl LastStart {
    /// Records a start.
    pub(crate) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether no queue has been started since the disconnect.
    pub(crate) fn is_before(&self, disconnect: &Disconnect) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_none_or(|start| start < disconnect.instant)
    }
}

/// The name of a sidecore that has ended by itself.
pub(crate) fn lost<'a>(mut sidecores: impl Iterator<Item = &'a Sidecore>) -> Option<String> {
    sidecores.find(|sidecore| sidecore.is_lost()).map(|sidecore| sidecore.name().to_owned())
}
