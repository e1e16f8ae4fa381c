//! An interface of this host's kernel, as a port of a switch.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::Geometry;
use sidecore_net::{PortConfig, PortId, PortQueue, PortStats, QueueId};
use sidecore_peer::Disconnect;
use sidecore_reactor::IdleMode;
use sidecore_uplink::{InterfaceMonitor, InterfaceState, PacketQueue, TapOptions, TapQueue};

use super::{FrontEnd, Place};
use crate::AssemblyError;
use crate::left::{LeftDevice, PortState};
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, EthernetSpec, TapSpec};
use crate::switches::{RunningSwitch, StagesSpec, Switches};

/// An interface with its port.
pub(crate) struct Interface {
    name: String,
    medium: Medium,
    switch: Arc<RunningSwitch>,
    port: PortId,
    stats: Arc<PortStats>,
    running: Mutex<Option<Running>>,
    is_stopped: AtomicBool,
    is_closed: AtomicBool,
}

/// The kind of an interface.
enum Medium {
    /// A way to the kernel itself.
    Tap(TapOptions),
    /// A way to a network, by the name of the interface.
    Ethernet(String),
}

/// The interface while it is served.
struct Running {
    queue: QueueId,
    monitor: InterfaceMonitor,
}

impl Interface {
    /// Creates the port of a TAP interface, without the interface.
    pub(crate) fn tap(
        spec: &DeviceSpec,
        own: &TapSpec,
        switches: &Switches,
    ) -> Result<Self, AssemblyError> {
        let options =
            TapOptions { interface: own.interface.clone(), mtu: own.mtu, offloads: own.offloads };
        let port = (own.switch.as_str(), own.port(), own.stages());
        Self::new(spec, Medium::Tap(options), port, switches)
    }

    /// Creates the port of an Ethernet interface.
    pub(crate) fn ethernet(
        spec: &DeviceSpec,
        own: &EthernetSpec,
        switches: &Switches,
    ) -> Result<Self, AssemblyError> {
        let port = (own.switch.as_str(), own.port(), own.stages());
        Self::new(spec, Medium::Ethernet(own.interface.clone()), port, switches)
    }

    fn new(
        spec: &DeviceSpec,
        medium: Medium,
        (switch, config, stages): (&str, PortConfig, StagesSpec<'_>),
        switches: &Switches,
    ) -> Result<Self, AssemblyError> {
        let failed = |why: String| AssemblyError::Switch { name: switch.to_owned(), why };
        let running = switches.get(switch);
        let running = running.ok_or_else(|| failed("it does not run".to_owned()))?;
        let stats = Arc::<PortStats>::default();
        let port = running.add_port(&spec.name, config, &stages, Arc::clone(&stats));
        Ok(Self {
            name: spec.name.clone(),
            medium,
            port: port.map_err(failed)?,
            switch: running,
            stats,
            running: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    /// The name of the interface.
    fn interface(&self) -> &str {
        match &self.medium {
            Medium::Tap(options) => &options.interface,
            Medium::Ethernet(name) => name,
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the interface; `None` unless it is served.
    fn state(&self) -> Option<InterfaceState> {
        self.running().as_ref().map(|running| running.monitor.state())
    }

    fn open(&self) -> io::Result<Running> {
        let (stats, port) = (Arc::clone(&self.stats), self.port);
        let (queue, monitor): (Box<dyn PortQueue>, _) = match &self.medium {
            Medium::Tap(options) => {
                let queue = TapQueue::open(options, stats)?;
                let monitor = InterfaceMonitor::Tap(queue.monitor()?);
                (Box::new(queue), monitor)
            }
            Medium::Ethernet(name) => {
                let queue = PacketQueue::open(name, stats)?;
                let monitor = InterfaceMonitor::Ethernet(queue.monitor()?);
                (Box::new(queue), monitor)
            }
        };
        let attached = self.switch.ask(move |unit| unit.attach(port, queue));
        let attached = attached.ok_or_else(|| io::Error::other("its switch has stopped"))?;
        Ok(Running { queue: attached.map_err(io::Error::other)?, monitor })
    }

    /// Why the interface cannot be opened, and the remedy.
    fn explained(&self, error: &io::Error) -> String {
        let interface = self.interface();
        let remedy = match (&self.medium, error.kind()) {
            (Medium::Tap(_), io::ErrorKind::PermissionDenied) => {
                format!(
                    "; give the daemon CAP_NET_ADMIN, or make the interface for its user: `ip \
                     tuntap add dev {interface} mode tap user USER`"
                )
            }
            (Medium::Tap(_), io::ErrorKind::ResourceBusy) => "; another program has it".to_owned(),
            (Medium::Tap(_), io::ErrorKind::InvalidInput) => {
                "; is it a TAP, and without multi_queue? `ip -d link show` says so".to_owned()
            }
            (Medium::Tap(_), io::ErrorKind::NotFound) => {
                "; load the kernel's module: `modprobe tun`".to_owned()
            }
            (Medium::Ethernet(_), io::ErrorKind::PermissionDenied) => {
                "; give the daemon CAP_NET_RAW".to_owned()
            }
            (Medium::Ethernet(_), _) => "; `ip link show` lists the interfaces".to_owned(),
            _ => String::new(),
        };
        format!("interface \"{interface}\": {error}{remedy}")
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        self.close();
    }
}

impl FrontEnd for Interface {
    fn serve(&self, _: &Path, _: Place, left: Option<LeftDevice>) -> Result<(), AssemblyError> {
        let port = left.as_ref().map(LeftDevice::port).unwrap_or_default();
        // Before the first frame, which may be of one of them.
        self.switch.resume_connections(&self.name, self.port, &port.connections);
        let running = self.open().map_err(|error| AssemblyError::Kernel {
            name: self.name.clone(),
            error: self.explained(&error),
        })?;
        *self.running() = Some(running);
        tracing::info!(device = self.name, interface = self.interface(), "interface opened");
        self.switch.resume_stations(&self.name, self.port, port.stations);
        Ok(())
    }

    fn hand_over(&self) -> Option<LeftDevice> {
        let stations = self.switch.learnt(self.port);
        self.stop();
        let connections = self.switch.connections(self.port);
        LeftDevice::pack_port(&self.name, &PortState { stations, connections })
    }

    fn stop(&self) -> bool {
        if self.is_stopped.swap(true, Ordering::Relaxed) {
            return false;
        }
        if let Some(Running { queue, .. }) = self.running().take() {
            // The kernel takes a while to close an interface: that is not for the sidecore.
            drop(self.switch.ask(move |unit| unit.detach(queue)));
            tracing::info!(device = self.name, "interface closed");
        }
        true
    }

    fn close(&self) {
        if !self.is_closed.swap(true, Ordering::Relaxed) {
            self.stop();
            self.switch.remove_port(self.port);
        }
    }

    fn node(&self) -> Option<PathBuf> {
        Some(PathBuf::from(self.interface()))
    }

    fn geometry(&self) -> Geometry {
        Geometry::new(0, 0)
    }

    fn sidecores(&self) -> Option<Vec<String>> {
        Some(vec![self.switch.sidecore.name().to_owned()])
    }

    fn idle(&self) -> Option<IdleMode> {
        Some(self.switch.idle())
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        usize::from(self.switch.sidecore.name() == sidecore)
    }

    fn running_count(&self) -> u16 {
        self.running().is_some().into()
    }

    fn is_connected(&self) -> bool {
        self.state() == Some(InterfaceState::Up)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        let interface = self.interface();
        (self.state()? == InterfaceState::Gone).then(|| {
            format!("interface \"{interface}\" was deleted; remove the device and add it again")
        })
    }

    fn warning(&self) -> Option<String> {
        let interface = self.interface();
        match self.state()? {
            InterfaceState::Down => Some(format!(
                "interface \"{interface}\" is down; set it up: `ip link set {interface} up`"
            )),
            InterfaceState::NoCarrier => {
                Some(format!("interface \"{interface}\" has no carrier; is its cable connected?"))
            }
            InterfaceState::Up | InterfaceState::Gone => None,
        }
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(std::iter::once(&self.switch.sidecore))
    }

    fn queues(&self) -> Vec<QueueCounters> {
        Vec::new()
    }
}
