//! An end of a remote NIC, as a port of a switch: at the IOhost, or at its client.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::Geometry;
use sidecore_net::{PortConfig, PortId, PortStats, QueueId};
use sidecore_peer::Disconnect;
use sidecore_reactor::IdleMode;
use sidecore_remote::export::ExportedNic;
use sidecore_remote::{NicMonitor, NicState, RemoteNic};

use super::{FrontEnd, Place};
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::remote::Remote;
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, RemoteNetSpec, VrioNetSpec};
use crate::switches::{RunningSwitch, StagesSpec, Switches};

/// A port with a remote NIC.
pub(crate) struct RemotePort {
    name: String,
    far: Far,
    remote: Arc<Remote>,
    switch: Arc<RunningSwitch>,
    port: PortId,
    running: Mutex<Vec<Running>>,
    is_stopped: AtomicBool,
    is_closed: AtomicBool,
}

/// The other end.
enum Far {
    /// A client has it.
    Client(String, ExportedNic),
    /// An IOhost has it, by this name.
    Iohost { iohost: String, nic: String, mtu: u16 },
}

/// A queue of the port: the way through one session.
struct Running {
    queue: QueueId,
    monitor: NicMonitor,
}

impl RemotePort {
    /// Creates the port of a client's NIC.
    pub(crate) fn exported(
        spec: &DeviceSpec,
        own: &VrioNetSpec,
        switches: &Switches,
        remote: Arc<Remote>,
    ) -> Result<Self, AssemblyError> {
        let nic = ExportedNic {
            name: spec.name.as_str().into(),
            mac: own.mac().0,
            mtu: own.mtu,
            is_up: true,
            epoch: 0,
        };
        // Its frames come from another IOhost, or another client, before.
        let config = PortConfig { announces: Some(own.mac()), ..own.port() };
        let port = (own.switch.as_str(), config, own.stages());
        Self::new(spec, Far::Client(own.client.clone(), nic), port, (switches, remote))
    }

    /// Creates the port that leads to a NIC's other end at an IOhost.
    pub(crate) fn used(
        spec: &DeviceSpec,
        own: &RemoteNetSpec,
        switches: &Switches,
        remote: Arc<Remote>,
    ) -> Result<Self, AssemblyError> {
        let nic = own.device.as_ref().unwrap_or(&spec.name).clone();
        let far = Far::Iohost { iohost: own.iohost.clone(), nic, mtu: own.mtu };
        let port = (own.switch.as_str(), own.port(), own.stages());
        Self::new(spec, far, port, (switches, remote))
    }

    fn new(
        spec: &DeviceSpec,
        far: Far,
        (switch, config, stages): (&str, PortConfig, StagesSpec<'_>),
        (switches, remote): (&Switches, Arc<Remote>),
    ) -> Result<Self, AssemblyError> {
        let failed = |why: String| AssemblyError::Switch { name: switch.to_owned(), why };
        let running = switches.get(switch);
        let running = running.ok_or_else(|| failed("it does not run".to_owned()))?;
        let port = running.add_port(&spec.name, config, &stages, Arc::<PortStats>::default());
        Ok(Self {
            name: spec.name.clone(),
            far,
            remote,
            port: port.map_err(failed)?,
            switch: running,
            running: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        })
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the way that is furthest; `None` unless the port is served.
    fn state(&self) -> Option<NicState> {
        NicState::furthest(self.running().iter().map(|running| running.monitor.state()))
    }

    fn open(&self) -> Result<Vec<RemoteNic>, AssemblyError> {
        match &self.far {
            Far::Client(client, nic) => self.remote.export_nic(client, nic.clone()),
            Far::Iohost { iohost, nic, mtu } => {
                self.remote.use_nic(&self.name, (iohost, nic), *mtu).map(|queue| vec![queue])
            }
        }
    }

    fn attach(&self, queue: RemoteNic) -> Result<(), AssemblyError> {
        let (monitor, port) = (queue.monitor(), self.port);
        let failed = |why: String| AssemblyError::Switch { name: self.name.clone(), why };
        let attached = self.switch.ask(move |unit| unit.attach(port, Box::new(queue)));
        let attached = attached.ok_or_else(|| failed("it has stopped".to_owned()))?;
        let queue = attached.map_err(|error| failed(error.to_string()))?;
        self.running().push(Running { queue, monitor });
        Ok(())
    }
}

impl Drop for RemotePort {
    fn drop(&mut self) {
        self.close();
    }
}

impl FrontEnd for RemotePort {
    fn serve(&self, _: &Path, _: Place, _: Option<LeftDevice>) -> Result<(), AssemblyError> {
        let queues = self.open()?;
        if let Err(error) = queues.into_iter().try_for_each(|queue| self.attach(queue)) {
            self.stop();
            return Err(error);
        }
        tracing::info!(device = self.name, "remote NIC opened");
        Ok(())
    }

    fn stop(&self) -> bool {
        if self.is_stopped.swap(true, Ordering::Relaxed) {
            return false;
        }
        for Running { queue, .. } in std::mem::take(&mut *self.running()) {
            // Its memory is for this thread to free.
            drop(self.switch.ask(move |unit| unit.detach(queue)));
        }
        match &self.far {
            Far::Client(client, _) => self.remote.withdraw_nic(client, &self.name),
            Far::Iohost { iohost, .. } => self.remote.leave_nic(iohost, &self.name),
        }
        tracing::info!(device = self.name, "remote NIC closed");
        true
    }

    fn close(&self) {
        if !self.is_closed.swap(true, Ordering::Relaxed) {
            self.stop();
            self.switch.remove_port(self.port);
        }
    }

    fn sidecores(&self) -> Option<Vec<String>> {
        Some(vec![self.switch.sidecore.name().to_owned()])
    }

    fn idle(&self) -> Option<IdleMode> {
        Some(self.switch.idle())
    }

    fn running_count(&self) -> u16 {
        (!self.running().is_empty()).into()
    }

    fn geometry(&self) -> Geometry {
        Geometry::new(0, 0)
    }

    fn is_connected(&self) -> bool {
        self.state() == Some(NicState::Up)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        (self.state()? == NicState::Ended).then(|| {
            "the remote channel was stopped; remove the device and add it again".to_owned()
        })
    }

    fn warning(&self) -> Option<String> {
        let state = self.state()?;
        let Far::Iohost { iohost, nic, mtu } = &self.far else { return None };
        match state {
            NicState::Up => {
                let running = self.running();
                let (_, theirs) = running.first()?.monitor.address()?;
                (theirs != *mtu).then(|| {
                    format!(
                        "its MTU is {mtu}, and {theirs} at iohost \"{iohost}\": longer packets \
                         are dropped; set both to one value"
                    )
                })
            }
            NicState::Away => Some(format!(
                "NIC \"{nic}\" waits for iohost \"{iohost}\", which does not answer or has no \
                 such NIC for this client"
            )),
            NicState::Down => Some(format!("iohost \"{iohost}\" has set the NIC's link down")),
            NicState::Ended => None,
        }
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        usize::from(self.switch.sidecore.name() == sidecore)
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(std::iter::once(&self.switch.sidecore))
    }

    fn queues(&self) -> Vec<QueueCounters> {
        Vec::new()
    }
}
