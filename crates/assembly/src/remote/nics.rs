//! NICs of clients of this host, and NICs of this host at IOhosts.

use sidecore_remote::RemoteNic;
use sidecore_remote::export::ExportedNic;

use super::Remote;
use crate::AssemblyError;

fn unknown(device: &str, kind: &'static str, name: &str) -> AssemblyError {
    let (user, name) = (format!("device \"{device}\""), name.to_owned());
    AssemblyError::Unknown { user, kind, name }
}

impl Remote {
    /// Gives a client a NIC. Returns its queues for the port of a switch.
    pub(crate) fn export_nic(
        &self,
        client: &str,
        mut nic: ExportedNic,
    ) -> Result<Vec<RemoteNic>, AssemblyError> {
        let mut parts = self.lock();
        // Without a lease of a cluster, each start is another owner (docs/vrio.md).
        nic.epoch = parts.incarnation.unwrap_or(1);
        let served = parts.clients.get_mut(client);
        let served = served.ok_or_else(|| unknown(&nic.name, "client", client))?;
        let failed = |error| AssemblyError::Client { name: client.to_owned(), error };
        served.export_nic(&nic).map_err(failed)
    }

    /// Takes a NIC from a client.
    pub(crate) fn withdraw_nic(&self, client: &str, nic: &str) {
        if let Some(served) = self.lock().clients.get_mut(client) {
            served.withdraw_nic(nic);
        }
    }

    /// Begins to use a NIC of an IOhost for a device. The port of a switch that has the queue ends
    /// the use when it drops it; [`leave_nic`](Self::leave_nic) follows.
    pub(crate) fn use_nic(
        &self,
        device: &str,
        (iohost, nic): (&str, &str),
        mtu: u16,
    ) -> Result<RemoteNic, AssemblyError> {
        let mut parts = self.lock();
        let used = parts.iohosts.get_mut(iohost);
        let used = used.ok_or_else(|| unknown(device, "iohost", iohost))?;
        let failed = |error| AssemblyError::Remote { name: device.to_owned(), error };
        used.open_nic(device, nic, mtu).map_err(failed)
    }

    /// The device does not use its NIC any more.
    pub(crate) fn leave_nic(&self, iohost: &str, device: &str) {
        if let Some(used) = self.lock().iohosts.get_mut(iohost) {
            used.nics.remove(device);
        }
    }
}
