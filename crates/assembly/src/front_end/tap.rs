//! An interface of this host's kernel, as a port of a switch.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::Geometry;
use sidecore_linux::{TapMonitor, TapState};
use sidecore_net::{PortConfig, PortId, PortStats, QueueId, Vlans};
use sidecore_peer::Disconnect;
use sidecore_reactor::IdleMode;
use sidecore_uplink::{TapOptions, TapQueue};

use super::{FrontEnd, Place};
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, TapSpec};
use crate::switches::{RunningSwitch, Switches};

/// A TAP interface with its port.
pub(crate) struct Tap {
    name: String,
    options: TapOptions,
    switch: Arc<RunningSwitch>,
    port: PortId,
    stats: Arc<PortStats>,
    running: Mutex<Option<Running>>,
    is_stopped: AtomicBool,
    is_closed: AtomicBool,
}

/// The interface while it is served.
struct Running {
    queue: QueueId,
    monitor: TapMonitor,
}

impl Tap {
    /// Creates the port, without the interface.
    pub(crate) fn new(
        spec: &DeviceSpec,
        own: &TapSpec,
        switches: &Switches,
    ) -> Result<Self, AssemblyError> {
        let failed = |why: String| AssemblyError::Switch { name: own.switch.clone(), why };
        let switch = switches.get(&own.switch);
        let switch = switch.ok_or_else(|| failed("it does not run".to_owned()))?;
        let stages = own.stages();
        let stats = Arc::<PortStats>::default();
        let port = switch.add_port(&spec.name, port_config(own), &stages, Arc::clone(&stats));
        let port = port.map_err(failed)?;
        let options =
            TapOptions { interface: own.interface.clone(), mtu: own.mtu, offloads: own.offloads };
        Ok(Self {
            name: spec.name.clone(),
            options,
            switch,
            port,
            stats,
            running: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the interface; `None` unless it is served.
    fn state(&self) -> Option<TapState> {
        self.running().as_ref().map(|running| running.monitor.state())
    }

    fn open(&self) -> io::Result<Running> {
        let queue = TapQueue::open(&self.options, Arc::clone(&self.stats))?;
        let (monitor, port) = (queue.monitor()?, self.port);
        let attached = self.switch.ask(move |unit| unit.attach(port, Box::new(queue)));
        let attached = attached.ok_or_else(|| io::Error::other("its switch has stopped"))?;
        Ok(Running { queue: attached.map_err(io::Error::other)?, monitor })
    }
}

/// The port of an interface with these settings.
fn port_config(own: &TapSpec) -> PortConfig {
    let base = if own.is_uplink { PortConfig::uplink() } else { PortConfig::station() };
    let vlans = match own.trunk() {
        Some(allowed) => Vlans::Trunk { native: Some(own.vlan), allowed: allowed.collect() },
        None => Vlans::Access(own.vlan),
    };
    PortConfig { vlans, is_isolated: own.is_isolated, ..base }
}

/// Why an interface cannot be opened, and the remedy.
fn explained(interface: &str, error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!(
                "; give the daemon CAP_NET_ADMIN, or make the interface for its user: `ip tuntap \
                 add dev {interface} mode tap user USER`"
            )
        }
        io::ErrorKind::ResourceBusy => "; another program has it".to_owned(),
        io::ErrorKind::InvalidInput => {
            "; is it a TAP, and without multi_queue? `ip -d link show` says so".to_owned()
        }
        io::ErrorKind::NotFound => "; load the kernel's module: `modprobe tun`".to_owned(),
        _ => String::new(),
    };
    format!("interface \"{interface}\": {error}{remedy}")
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.close();
    }
}

impl FrontEnd for Tap {
    fn serve(&self, _: &Path, _: Place, _: Option<LeftDevice>) -> Result<(), AssemblyError> {
        let interface = &self.options.interface;
        let running = self.open().map_err(|error| AssemblyError::Kernel {
            name: self.name.clone(),
            error: explained(interface, &error),
        })?;
        *self.running() = Some(running);
        tracing::info!(device = self.name, interface, "interface opened");
        Ok(())
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
        Some(PathBuf::from(&self.options.interface))
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
        self.state().is_some_and(|state| state.is_up)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        let interface = &self.options.interface;
        self.state().filter(|state| state.is_gone).map(|_| {
            format!("interface \"{interface}\" was deleted; remove the device and add it again")
        })
    }

    fn warning(&self) -> Option<String> {
        let interface = &self.options.interface;
        self.state().filter(|state| !state.is_up && !state.is_gone).map(|_| {
            format!("interface \"{interface}\" is down; set it up: `ip link set {interface} up`")
        })
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(std::iter::once(&self.switch.sidecore))
    }

    fn queues(&self) -> Vec<QueueCounters> {
        Vec::new()
    }
}
