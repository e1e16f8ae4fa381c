//! virtio-blk over a vhost-user socket.

use std::path::Path;
use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry};
use sidecore_nvme_subsystem::SubsystemState;
use sidecore_peer::{Disconnect, Service, Socket};
use sidecore_sidecore::Sidecore;
use sidecore_vhost_user::VirtioEndpoint;
use sidecore_virtio::VirtioDevice;
use sidecore_virtio::blk::{BlkDevice, BlkOptions};

use super::FrontEnd;
use super::socket::{DeviceSocket, Place, Watched};
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use crate::served::ServedBlk;
use crate::spec::{DeviceSpec, VirtioBlkSpec};
use crate::swap::{NotSwapped, Swapped};

pub(crate) struct VirtioBlk {
    served: Arc<ServedBlk>,
    service: Arc<Service>,
    socket: DeviceSocket,
}

impl VirtioBlk {
    /// Creates a disk without a socket; `sidecores` has one for each queue.
    pub(crate) fn new(
        spec: &DeviceSpec,
        own: &VirtioBlkSpec,
        store: Arc<dyn BlockDevice>,
        sidecores: Vec<Sidecore>,
        service: Arc<Service>,
    ) -> Self {
        let blk = BlkDevice::new(&spec.name, options(spec, own), store.geometry());
        let served =
            ServedBlk::new(blk, store, spec.idle, own.queue_size_max, sidecores.into_iter());
        Self { served: Arc::new(served), service, socket: DeviceSocket::default() }
    }
}

impl FrontEnd for VirtioBlk {
    fn serve(
        &self,
        socket: &Path,
        place: Place,
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError> {
        let endpoint = VirtioEndpoint(Arc::clone(&self.served) as Arc<dyn VirtioDevice>);
        let served = Arc::clone(&self.served);
        let endpoint = Watched { endpoint, gone: move || served.user_gone() };
        let name = self.served.device().name();
        self.socket.serve(name, &self.service, endpoint, (socket, place), left)
    }

    fn stop(&self) -> bool {
        self.socket.stop()
    }

    fn hand_over(&self) -> Option<LeftDevice> {
        LeftDevice::pack(
            self.served.device().name(),
            self.socket.export()?,
            SubsystemState::default(),
        )
    }

    fn close(&self) {
        self.served.close();
    }

    fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        self.served.swap_store(from, to)
    }

    fn refresh(&self) {
        if self.served.refresh() {
            self.socket.ask(Socket::notify);
        }
    }

    fn geometry(&self) -> Geometry {
        self.served.device().geometry()
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        self.served.queues_on(sidecore)
    }

    fn running_count(&self) -> u16 {
        self.served.running_count()
    }

    fn is_connected(&self) -> bool {
        self.socket.ask(Socket::is_serving).unwrap_or(false)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        self.socket.last_disconnect(&self.served.last_start)
    }

    fn broken(&self) -> Option<String> {
        self.served.device().broken()
    }

    fn loss(&self) -> Option<String> {
        self.served.loss()
    }

    fn accept_loss(&self) -> bool {
        self.served.accept_loss()
    }

    fn lost_sidecore(&self) -> Option<String> {
        self.served.lost_sidecore()
    }

    fn queues(&self) -> Vec<QueueCounters> {
        let device = self.served.device();
        let queue = |index| device.queue_stats(index).map(|stats| QueueCounters::of(index, stats));
        (0..device.options().queues).filter_map(queue).collect()
    }
}

fn options(device: &DeviceSpec, own: &VirtioBlkSpec) -> BlkOptions {
    let usual = BlkOptions::default();
    // A serial number that is too long is cut at its end, because serial numbers mostly differ at
    // the front.
    let serial = device.serial.as_ref().unwrap_or(&device.name);
    BlkOptions {
        queues: device.queues,
        seg_max: own.seg_max.unwrap_or(usual.seg_max),
        size_max_bytes: own.size_max_bytes,
        serial: serial.chars().take(crate::spec::SERIAL_MAX_BYTES).collect(),
        packed: own.packed,
        read_only: device.read_only,
        write_cache: own.write_cache,
    }
}
