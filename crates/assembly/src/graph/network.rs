//! Switches and their ports.

use std::sync::Arc;

use super::{Graph, Occasion, lock};
use crate::AssemblyError;
use crate::disk::Disk;
use crate::front_end::{FrontEnd, Interface, RemotePort, VirtioNet};
use crate::plan::{Parts, Verb};
use crate::spec::{DeviceSpec, FrontEndSpec};

impl Graph {
    /// Starts or stops switches.
    pub(super) fn change_switches(
        &self,
        verb: Verb,
        names: &[&str],
        next: &Parts<'_>,
    ) -> Result<(), AssemblyError> {
        if verb == Verb::StopSwitch {
            names.iter().for_each(|name| self.lists.switches.stop(name));
            return Ok(());
        }
        let sidecores: Vec<_> = self.sidecores().collect();
        let mut specs = names.iter().filter_map(|name| next.switch(name));
        specs.try_for_each(|spec| self.lists.switches.start(spec, &sidecores))
    }

    /// Creates a port of a switch: a NIC, an interface of this host, or the end of a remote NIC.
    pub(super) fn start_port(
        &mut self,
        device: &DeviceSpec,
        occasion: Occasion,
    ) -> Result<(), AssemblyError> {
        match self.port(device) {
            Ok(port) => {
                let disk = Arc::new(Disk::nic(device, port));
                lock(&self.lists.disks).push(Arc::clone(&disk));
                self.created.push(disk);
                Ok(())
            }
            Err(error) if occasion == Occasion::Late => {
                self.refuse_device(&device.name, error.to_string());
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn port(&mut self, device: &DeviceSpec) -> Result<Box<dyn FrontEnd>, AssemblyError> {
        let service = self.service()?;
        let switches = &self.lists.switches;
        match &device.front_end {
            FrontEndSpec::VirtioNet(own) => {
                Ok(Box::new(VirtioNet::new(device, own, switches, service)?))
            }
            FrontEndSpec::Tap(own) => Ok(Box::new(Interface::tap(device, own, switches)?)),
            FrontEndSpec::Ethernet(own) => {
                Ok(Box::new(Interface::ethernet(device, own, switches)?))
            }
            FrontEndSpec::VrioNet(own) => {
                let remote = Arc::clone(&self.lists.remote);
                Ok(Box::new(RemotePort::exported(device, own, switches, remote)?))
            }
            FrontEndSpec::RemoteNet(own) => {
                let remote = Arc::clone(&self.lists.remote);
                Ok(Box::new(RemotePort::used(device, own, switches, remote)?))
            }
            _ => {
                let (name, why) = (device.name.clone(), "it is no port of a switch");
                Err(AssemblyError::Device { name, why })
            }
        }
    }
}
