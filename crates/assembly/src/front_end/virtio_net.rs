//! virtio-net over a vhost-user socket, as a port of a switch.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::Geometry;
use sidecore_linux::peer_event;
use sidecore_net::{PortId, QueueId, SwitchError, SwitchUnit};
use sidecore_peer::{Disconnect, Service};
use sidecore_reactor::IdleMode;
use sidecore_ring::RingState;
use sidecore_vhost_user::VirtioEndpoint;
use sidecore_virtio::net::{NetDevice, NetOptions, NetPair};
use sidecore_virtio::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};

use super::socket::{DeviceSocket, Place};
use super::{FrontEnd, LastStart};
use crate::AssemblyError;
use crate::left::{LeftDevice, PortState};
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, VirtioNetSpec};
use crate::switches::{RunningSwitch, Switches};

/// A NIC with its socket.
pub(crate) struct VirtioNet {
    served: Arc<ServedNet>,
    service: Arc<Service>,
    socket: DeviceSocket,
}

/// A NIC as its transport sees it. Each call that changes a queue asks the switch, on its sidecore.
struct ServedNet {
    device: Arc<NetDevice>,
    queue_size_max: u16,
    switch: Arc<RunningSwitch>,
    port: PortId,
    /// The pairs that are attached to the switch.
    pairs: Mutex<Vec<Option<QueueId>>>,
    running_count: AtomicU16,
    last_start: LastStart,
    /// Whether the port was removed.
    is_closed: AtomicBool,
}

impl VirtioNet {
    /// Creates a NIC without a socket, with its port of the switch.
    pub(crate) fn new(
        spec: &DeviceSpec,
        own: &VirtioNetSpec,
        switches: &Switches,
        service: Arc<Service>,
    ) -> Result<Self, AssemblyError> {
        let failed = |why: String| AssemblyError::Switch { name: own.switch.clone(), why };
        let switch = switches.get(&own.switch);
        let switch = switch.ok_or_else(|| failed("it does not run".to_owned()))?;
        let stages = own.stages();
        let port = switch.add_port(&spec.name, own.port(), &stages, Arc::default());
        let port = port.map_err(failed)?;
        let options = NetOptions {
            pairs: spec.queues,
            mac: own.mac().0,
            mtu: own.mtu,
            packed: own.packed,
            offloads: own.offloads,
        };
        let served = ServedNet {
            device: Arc::new(NetDevice::new(&spec.name, options)),
            queue_size_max: own.queue_size_max,
            switch,
            port,
            pairs: Mutex::new(vec![None; usize::from(spec.queues)]),
            running_count: AtomicU16::new(0),
            last_start: LastStart::default(),
            is_closed: AtomicBool::new(false),
        };
        Ok(Self { served: Arc::new(served), service, socket: DeviceSocket::default() })
    }
}

impl Drop for ServedNet {
    fn drop(&mut self) {
        self.close();
    }
}

impl ServedNet {
    /// Removes the port. No queue can be started afterwards.
    fn close(&self) {
        if !self.is_closed.swap(true, Ordering::Relaxed) {
            self.switch.remove_port(self.port);
        }
    }

    fn pairs(&self) -> MutexGuard<'_, Vec<Option<QueueId>>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `task` on the pair of queue `index`, detached from the switch, and attaches it again if
    /// one of its queues runs.
    fn change<T: Send + 'static>(
        &self,
        index: u16,
        task: impl FnOnce(&mut NetPair) -> T + Send + 'static,
    ) -> Option<(T, Result<(), SwitchError>)> {
        let mut pairs = self.pairs();
        let place = pairs.get_mut(usize::from(index / 2))?;
        let (old, port, device) = (*place, self.port, Arc::clone(&self.device));
        let (answer, attached) = self.switch.ask(move |unit: &mut SwitchUnit| {
            let mut pair = old
                .and_then(|old| detached(unit, old))
                .unwrap_or_else(|| Box::new(NetPair::new(&device, index / 2)));
            let answer = task(&mut pair);
            let attached =
                if pair.is_empty() { Ok(None) } else { unit.attach(port, pair).map(Some) };
            (answer, attached)
        })?;
        *place = attached.unwrap_or_default();
        Some((answer, attached.map(drop)))
    }

    /// Runs `task` on the pair of queue `index`, if it is attached.
    fn tell<T: Send + 'static>(
        &self,
        index: u16,
        task: impl FnOnce(&mut NetPair) -> T + Send + 'static,
    ) -> Option<T> {
        let pairs = self.pairs();
        let id = (*pairs.get(usize::from(index / 2))?)?;
        self.switch.ask(move |unit| unit.with_queue::<NetPair, T>(id, task)).flatten()
    }
}

/// The pair that was attached as `id`.
fn detached(unit: &mut SwitchUnit, id: QueueId) -> Option<Box<NetPair>> {
    let queue: Box<dyn std::any::Any> = unit.detach(id)?;
    queue.downcast().ok()
}

impl VirtioDevice for ServedNet {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn queue_count(&self) -> u16 {
        self.device.queue_count()
    }

    fn is_network(&self) -> bool {
        true
    }

    fn set_enabled(&self, index: u16, is_enabled: bool) {
        self.tell(index, move |pair| pair.set_enabled(index, is_enabled));
    }

    fn set_mtu(&self, mtu: u64) -> bool {
        let is_set = u16::try_from(mtu).is_ok_and(|mtu| self.device.set_mtu(mtu));
        if is_set {
            // The switch reads the properties of each pair again.
            for index in (0..self.queue_count()).step_by(2) {
                self.tell(index, |_| ());
            }
        }
        is_set
    }

    fn announce(&self) {
        let (now, port) = (self.switch.now(), self.port);
        let mac = sidecore_net::MacAddress(self.device.options().mac);
        let announced = self.switch.ask(move |unit| unit.switch_mut().announce(now, port, mac));
        if let Some(Err(error)) = announced {
            tracing::warn!(device = self.name(), "the NIC cannot be announced: {error}");
        }
    }

    fn features(&self) -> u64 {
        self.device.options().features()
    }

    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        self.device.read_config(offset_bytes, data)
    }

    fn config_generation(&self) -> u32 {
        0
    }

    fn write_config(&self, offset_bytes: u32, _: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError::ReadOnly { offset_bytes })
    }

    fn start_queue(
        &self,
        index: u16,
        resources: QueueResources,
        state: RingState,
    ) -> Result<(), StartError> {
        let size = resources.layout.size;
        let refused = |why: String| {
            let error = io::Error::new(io::ErrorKind::InvalidInput, why);
            StartError::Io { index, error }
        };
        if index >= self.queue_count() {
            return Err(StartError::NoSuchQueue { index, queue_count: self.queue_count() });
        }
        if size > self.queue_size_max {
            let most = self.queue_size_max;
            return Err(refused(format!("a ring of {size} entries; `queue_size_max` is {most}")));
        }
        let started =
            self.change(index, move |pair| pair.start(index, resources, state, peer_event));
        let (started, attached) = started.ok_or(StartError::SidecoreGone)?;
        started?;
        attached.map_err(|error| refused(error.to_string()))?;
        self.running_count.fetch_add(1, Ordering::Relaxed);
        self.last_start.set();
        tracing::info!(device = self.name(), queue = index, size, "queue started");
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<RingState> {
        let (state, attached) = self.change(index, move |pair| pair.stop(index))?;
        if let Err(error) = attached {
            tracing::error!(device = self.name(), queue = index, "the other queue ends: {error}");
        }
        let state = state?;
        self.running_count.fetch_sub(1, Ordering::Relaxed);
        tracing::info!(device = self.name(), queue = index, "queue stopped");
        Some(state)
    }

    fn set_call(&self, index: u16, call: Option<OwnedFd>) {
        match call.map(|call| peer_event(call.as_fd())).transpose() {
            // The asking thread drops the previous interrupt.
            Ok(call) => drop(self.tell(index, move |pair| pair.set_call(index, call))),
            Err(error) => self
                .device
                .health()
                .break_with(&format!("queue {index}: the call descriptor is unusable: {error}")),
        }
    }

    /// The session offers no log of a network device.
    fn set_log(&self, _: u16, _: Option<QueueLog>) {}

    fn reset(&self) {
        self.device.reset();
    }

    fn broken(&self) -> Option<String> {
        self.device.health().reason()
    }
}

impl FrontEnd for VirtioNet {
    fn serve(
        &self,
        socket: &Path,
        place: Place,
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError> {
        let endpoint = VirtioEndpoint(Arc::clone(&self.served) as Arc<dyn VirtioDevice>);
        let (served, name) = (&self.served, self.served.device.name());
        let port = left.as_ref().map(LeftDevice::port).unwrap_or_default();
        // Before the first frame, which may be of one of them.
        served.switch.resume_connections(name, served.port, &port.connections);
        self.socket.serve(name, &self.service, endpoint, (socket, place), left)?;
        served.switch.resume_stations(name, served.port, port.stations);
        Ok(())
    }

    fn stop(&self) -> bool {
        self.socket.stop()
    }

    fn hand_over(&self) -> Option<LeftDevice> {
        // The switch forgets them when the queues stop.
        let (switch, port) = (&self.served.switch, self.served.port);
        let stations = switch.learnt(port);
        let socket = self.socket.export()?;
        // Behind the last frame.
        let connections = switch.connections(port);
        let state = PortState { stations, connections };
        LeftDevice::pack_nic(self.served.device.name(), socket, state)
    }

    fn close(&self) {
        self.served.close();
    }

    fn geometry(&self) -> Geometry {
        Geometry::new(0, 0)
    }

    fn sidecores(&self) -> Option<Vec<String>> {
        Some(vec![self.served.switch.sidecore.name().to_owned()])
    }

    fn idle(&self) -> Option<IdleMode> {
        Some(self.served.switch.idle())
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        if self.served.switch.sidecore.name() == sidecore {
            usize::from(self.served.device.options().pairs)
        } else {
            0
        }
    }

    fn running_count(&self) -> u16 {
        self.served.running_count.load(Ordering::Relaxed)
    }

    fn is_connected(&self) -> bool {
        self.socket.ask(sidecore_peer::Socket::is_serving).unwrap_or(false)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        self.socket.last_disconnect(&self.served.last_start)
    }

    fn broken(&self) -> Option<String> {
        self.served.device.health().reason()
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(std::iter::once(&self.served.switch.sidecore))
    }

    fn queues(&self) -> Vec<QueueCounters> {
        let device = &self.served.device;
        let pair = |index| device.pair_stats(index).map(|stats| QueueCounters::of(index, stats));
        (0..device.options().pairs).filter_map(pair).collect()
    }
}
