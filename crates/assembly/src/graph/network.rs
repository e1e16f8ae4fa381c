//! Switches, and the NICs on them.

use std::sync::Arc;

use super::{Graph, Occasion, lock};
use crate::AssemblyError;
use crate::disk::Disk;
use crate::front_end::VirtioNet;
use crate::plan::{Parts, Verb};
use crate::spec::{DeviceSpec, VirtioNetSpec};

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

    /// Creates a NIC.
    pub(super) fn start_nic(
        &mut self,
        device: &DeviceSpec,
        own: &VirtioNetSpec,
        occasion: Occasion,
    ) -> Result<(), AssemblyError> {
        let service = self.service()?;
        match VirtioNet::new(device, own, &self.lists.switches, service) {
            Ok(nic) => {
                let disk = Arc::new(Disk::nic(device, Box::new(nic)));
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
}
