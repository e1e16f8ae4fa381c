//! A VMhost: a second daemon whose switch has the NIC of a guest, and the first one's switch its
//! port, with the remote channel between them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::checks::Checks;
use crate::config::{quoted, socket};
use crate::daemon::Daemon;
use crate::guest::Guest;
use crate::qemu::{Cable, Nic};
use crate::session::Session;
use crate::sidecore::Sidecore;

use super::send;

/// The NIC of the first guest, on the first daemon, and that of the second guest: name, address.
const NICS: [(&str, &str); 2] =
    [("nic-a30", "52:54:00:00:00:21"), ("nic-b30", "52:54:00:00:00:22")];
const VLAN: u16 = 30;
/// The size of the file that goes through both daemons: guests without KVM are slow.
const FILE_MIB: u64 = 4;

/// The second daemon.
pub(super) struct VmHost {
    daemon: Daemon,
    sockets: [PathBuf; 2],
}

fn directory(of_session: &Path) -> PathBuf {
    of_session.join("vmhost")
}

/// The link's socket, of both daemons.
fn link(of_session: &Path) -> Result<String> {
    let socket = quoted(&of_session.join("wire.sock"))?;
    Ok(format!("\n[[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = {socket}\n"))
}

/// The first daemon's parts for the second one: a link, a client, and the NICs of both guests.
pub(super) fn iohost(of_session: &Path) -> Result<String> {
    let [(near, near_mac), (far, far_mac)] = NICS;
    let (link, socket) = (link(of_session)?, quoted(&socket(of_session, near))?);
    Ok(format!(
        "{link}\n[[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n\n\
         [[device]]\nname = \"{near}\"\nfront_end = \"virtio-net\"\nswitch = \"lan\"\n\
         mac = \"{near_mac}\"\nvlan = {VLAN}\nsocket = {socket}\n\n\
         [[device]]\nname = \"{far}\"\nfront_end = \"vrio-net\"\nclient = \"vmhost\"\n\
         switch = \"lan\"\nmac = \"{far_mac}\"\nvlan = {VLAN}\n"
    ))
}

/// The second daemon's configuration.
fn vmhost(of_session: &Path) -> Result<String> {
    let [_, (far, mac)] = NICS;
    let directory = directory(of_session);
    let control = quoted(&directory.join("control.sock"))?;
    let (link, socket) = (link(of_session)?, quoted(&socket(&directory, far))?);
    Ok(format!(
        "control_socket = {control}\n\n[[sidecore]]\nname = \"vm0\"\n{link}\n\
         [[iohost]]\nname = \"io\"\nlink = \"wire\"\nclient = \"vmhost\"\n\n\
         [[switch]]\nname = \"guest\"\n\n\
         [[device]]\nname = \"uplink\"\nfront_end = \"remote-net\"\nswitch = \"guest\"\n\
         iohost = \"io\"\ndevice = \"{far}\"\n\n\
         [[device]]\nname = \"{far}\"\nfront_end = \"virtio-net\"\nswitch = \"guest\"\n\
         mac = \"{mac}\"\nsocket = {socket}\n"
    ))
}

impl VmHost {
    pub(super) fn start(session: &mut Session<'_>) -> Result<Self> {
        let directory = directory(session.directory);
        std::fs::create_dir(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let binaries = session.stage.binaries;
        let sidecore = Sidecore::new(binaries, &directory.join("control.sock"));
        let configuration = vmhost(session.directory)?;
        let place = (binaries, session.namespace.as_ref());
        let daemon =
            Daemon::start(&mut session.inbox, place, &directory, sidecore, &configuration)?;
        let sockets = [socket(session.directory, NICS[0].0), socket(&directory, NICS[1].0)];
        Ok(Self { daemon, sockets })
    }

    /// The third NIC of the first or of the second guest.
    pub(super) fn nic(&self, guest: usize) -> Nic<'_> {
        let (name, mac) = NICS[guest];
        Nic { name, mac, cable: Cable::Daemon(&self.sockets[guest]), packed: false }
    }

    /// The guests reach each other through both daemons.
    pub(super) fn check(
        &self,
        session: &mut Session<'_>,
        guests: &mut [Guest; 2],
        iohost: &Sidecore,
        checks: &mut Checks,
    ) -> Result<()> {
        for (guest, last) in guests.iter_mut().zip([1, 2]) {
            guest.order(session, &format!("up eth2 10.0.2.{last}/24"))?;
        }
        let received = guests[0].order(session, "ping 10.0.2.2")?.text("received")?.to_owned();
        let what = "the first guest pings a NIC of the second that is on another daemon";
        checks.note(session, what, received == "5", format!("{received} of 5"));
        let network = ("10.0.2", FILE_MIB);
        send(session, guests, (0, 1), network, "over the remote channel", checks)?;
        let report: Value = self.daemon.sidecore.json(&["remote", "list", "--json"])?;
        let nic = &report["iohosts"][0]["nics"][0];
        let is_up = nic["state"] == "up" && nic["mac"] == NICS[1].1;
        let found = format!("{} {}", nic["state"], nic["mac"]);
        checks.note(session, "the VMhost's list shows the NIC as up", is_up, found);
        checks.show(iohost, &["remote", "list"])
    }

    pub(super) fn stop(self, session: &mut Session<'_>) -> Result<()> {
        self.daemon.stop(&mut session.inbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_daemons_name_one_link_and_one_nic() {
        let session = Path::new("/t");
        let (there, here) = (iohost(session).unwrap(), vmhost(session).unwrap());
        for text in [&there, &here] {
            assert!(text.contains("socket = \"/t/wire.sock\""), "{text}");
        }
        assert!(there.contains("name = \"nic-b30\"\nfront_end = \"vrio-net\""));
        assert!(here.contains("device = \"nic-b30\""));
        assert!(here.contains("socket = \"/t/vmhost/nic-b30.sock\""));
    }
}
