//! The configurations of the IOhost and its VMhosts, as a user would write them.

use super::net::{GUEST, Net, STATIONS, Station};
use crate::config::quoted;
use anyhow::Result;
use sidecore_kit::namespace::End;
use std::path::{Path, PathBuf};

/// The size of each VMhost's disk.
pub(super) const DISK_MIB: u64 = 256;
/// The disk of the first VMhost that it may only read.
pub(super) const READ_ONLY: &str = "manual";
pub(super) const READ_ONLY_MIB: u64 = 4;
/// Reads a second that the IOhost lets each client do, once it limits them.
pub(super) const READS_PER_SECOND: u64 = 300;

/// Whether the IOhost limits its clients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Limits {
    None,
    Reads,
}

/// The file behind a disk of the IOhost.
pub(super) fn store(directory: &Path, disk: &str) -> PathBuf {
    directory.join(format!("{disk}.img"))
}

/// The file with a VMhost's invitation.
pub(super) fn invitation(directory: &Path, client: &str) -> PathBuf {
    directory.join(format!("{client}.invitation"))
}

/// The IOhost's configuration: a link and a client for each VMhost. The stores are in `stores`, all
/// other files in `directory`.
pub(super) fn iohost(directory: &Path, stores: &Path, limits: Limits) -> Result<String> {
    let mut text = iohost_head(directory, "iohost")?;
    for station in &STATIONS {
        let limits = match limits {
            Limits::None => String::new(),
            Limits::Reads => format!("read_iops = {READS_PER_SECOND}\n"),
        };
        text.push_str(&client(station, &limits));
        text.push_str(&export(stores, station.client, station.disk, "")?);
    }
    text.push_str(&export(stores, STATIONS[0].client, READ_ONLY, "read_only = true\n")?);
    Ok(text)
}

/// The configuration of an IOhost with one disk, whose guest migrates from the first VMhost to the
/// second. All IOhosts with it have the same keys.
pub(super) fn shared(directory: &Path, stores: &Path, host: &str) -> Result<String> {
    let mut text = iohost_head(directory, host)?;
    STATIONS.iter().for_each(|station| text.push_str(&client(station, "")));
    let [from, to] = &STATIONS;
    let migrates = format!("migrates_to = [\"{}\"]\n", to.client);
    text.push_str(&export(stores, from.client, from.disk, &migrates)?);
    Ok(text)
}

/// The configuration of an IOhost whose client is a guest.
pub(super) fn iohost_of_guest(directory: &Path, stores: &Path, host: &str) -> Result<String> {
    let Station { client: name, disk, .. } = GUEST;
    let head = iohost_head(directory, host)?;
    Ok(head + &client(&GUEST, "") + &export(stores, name, disk, "")?)
}

/// The configuration of the daemon in that guest, whose files are in `directory`: the disk is a
/// block device of the guest's own kernel.
pub(super) fn guest(directory: &Path) -> Result<String> {
    let Station { client, disk, .. } = GUEST;
    let mut text = head(directory, client)?;
    text.push_str(&format!("key_directory = {}\n", quoted(&directory.join("keys"))?));
    text.push_str(&sidecore("sc0"));
    text.push_str(&link(&GUEST, "", &invitation(directory, client))?);
    text.push_str(&format!(
        "\n[[store]]\nname = \"{disk}\"\ntype = \"remote\"\niohost = \"io\"\n\n\
         [[device]]\nname = \"{disk}\"\nstore = \"{disk}\"\n\
         front_end = \"ublk\"\nnumber = 0\nqueues = 2\n"
    ));
    Ok(text)
}

/// The name of the link between a VMhost's own daemons.
pub(super) const NEAR: &str = "near";

/// The configuration of an IOhost on the first VMhost itself, with the same disk and the same keys.
pub(super) fn near(directory: &Path, stores: &Path) -> Result<String> {
    let [station, _] = &STATIONS;
    let client = station.client;
    Ok(format!(
        "{}{}\n[[client]]\nname = \"{client}\"\nlinks = [\"{NEAR}\"]\nencryption = \"on\"\n{}",
        iohost_head(directory, NEAR)?,
        near_link(directory, station)?,
        export(stores, client, station.disk, "")?
    ))
}

fn near_link(directory: &Path, station: &Station) -> Result<String> {
    let socket = quoted(&directory.join(format!("{}-near.sock", station.client)))?;
    Ok(format!("\n[[link]]\nname = \"{NEAR}\"\ntype = \"memory\"\nsocket = {socket}\n"))
}

fn iohost_head(directory: &Path, host: &str) -> Result<String> {
    let keys = quoted(&directory.join("keys"))?;
    Ok(format!("{}key_directory = {keys}\n{}", head(directory, host)?, sidecore("io0")))
}

/// A link, and the client behind it; `keys` are further keys of the client.
fn client(station: &Station, keys: &str) -> String {
    let Station { client, link, iohost: End { interface, .. }, .. } = station;
    format!(
        "\n[[link]]\nname = \"{link}\"\ntype = \"packet\"\ninterface = \"{interface}\"\n\n\
         [[client]]\nname = \"{client}\"\nlinks = [\"{link}\"]\n{keys}"
    )
}

/// A file, exported to a client.
fn export(stores: &Path, client: &str, disk: &str, rest: &str) -> Result<String> {
    let path = quoted(&store(stores, disk))?;
    Ok(format!(
        "\n[[store]]\nname = \"{disk}-file\"\ntype = \"file\"\npath = {path}\n\n\
         [[device]]\nname = \"{disk}\"\nfront_end = \"vrio\"\nclient = \"{client}\"\n\
         store = \"{disk}-file\"\n{rest}"
    ))
}

/// A VMhost's configuration: its IOhost, and devices for guests.
pub(super) fn vmhost(
    directory: &Path,
    station: &Station,
    devices: &[Device<'_>],
) -> Result<String> {
    let mut text = head(directory, station.client)?;
    text.push_str(&sidecore("vm0"));
    text.push_str(&link(station, "", &invitation(directory, station.client))?);
    for Device { disk, keys } in devices {
        text.push_str(&format!(
            "\n[[store]]\nname = \"{disk}\"\ntype = \"remote\"\niohost = \"io\"\n{}",
            device(directory, disk, keys)?
        ));
    }
    Ok(text)
}

/// A VMhost's configuration with a disk whose guest migrates, and whose IOhost may be on the VMhost
/// itself.
pub(super) fn vmhost_of(directory: &Path, station: &Station, disk: &str) -> Result<String> {
    let device = moving_disk(station);
    let socket = quoted(&crate::config::socket(directory, &device))?;
    Ok(format!(
        "{}second_link = \"{NEAR}\"\nencryption = \"on\"\n{}\n\
         [[store]]\nname = \"{disk}\"\ntype = \"remote\"\niohost = \"io\"\n\n\
         [[device]]\nname = \"{device}\"\nstore = \"{disk}\"\nsocket = {socket}\n\
         serial = \"{disk}\"\nqueues = 2\n",
        vmhost(directory, station, &[])?,
        near_link(directory, station)?
    ))
}

/// The name at a VMhost of the disk whose guest migrates.
pub(super) fn moving_disk(station: &Station) -> String {
    format!("{}-moving", station.client)
}

/// A guest's disk at a VMhost.
pub(super) struct Device<'a> {
    /// The name of the device at the IOhost, of the store and of the device here.
    pub(super) disk: &'a str,
    /// Further keys of the device here.
    pub(super) keys: &'a str,
}

pub(super) fn head(directory: &Path, host: &str) -> Result<String> {
    Ok(format!("control_socket = {}\n", quoted(&control(directory, host))?))
}

/// The control socket of a host's daemon.
pub(super) fn control(directory: &Path, host: &str) -> PathBuf {
    directory.join(format!("{host}-control.sock"))
}

pub(super) fn sidecore(name: &str) -> String {
    format!("\n[[sidecore]]\nname = \"{name}\"\n")
}

/// A VMhost's link and its IOhost; `keys` are further keys of the link.
pub(super) fn link(station: &Station, keys: &str, invitation: &Path) -> Result<String> {
    let Station { client, iohost: End { address, .. }, .. } = station;
    Ok(format!(
        "\n[[link]]\nname = \"wire\"\ntype = \"packet\"\ninterface = \"{}\"\n{keys}\n\
         [[iohost]]\nname = \"io\"\nlink = \"wire\"\naddress = \"{address}\"\n\
         client = \"{client}\"\ninvitation = {}\n",
        Net::VMHOST_INTERFACE,
        quoted(invitation)?
    ))
}

/// A device of the store with the same name.
pub(super) fn device(directory: &Path, disk: &str, keys: &str) -> Result<String> {
    let socket = quoted(&crate::config::socket(directory, disk))?;
    Ok(format!("\n[[device]]\nname = \"{disk}\"\nstore = \"{disk}\"\nsocket = {socket}\n{keys}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_iohost_has_a_link_and_a_client_for_each_vmhost() {
        let (directory, stores) = (Path::new("/d"), Path::new("/s"));
        let text = iohost(directory, stores, Limits::None).unwrap();
        assert_eq!(text.matches("[[link]]").count(), 2);
        assert_eq!(text.matches("[[client]]").count(), 2);
        assert_eq!(text.matches("front_end = \"vrio\"").count(), 3);
        assert_eq!(text.matches("read_only = true").count(), 1);
        assert!(!text.contains("encryption") && !text.contains("iops"));
        let limited = iohost(directory, stores, Limits::Reads).unwrap();
        assert_eq!(limited.matches("read_iops = 300").count(), 2);
    }

    #[test]
    fn a_guest_that_is_a_client_has_a_block_device_and_the_iohosts_address() {
        let text = guest(Path::new("/run")).unwrap();
        for line in [
            "address = \"02:00:00:00:06:01\"",
            "invitation = \"/run/guest1.invitation\"",
            "front_end = \"ublk\"",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        let iohost = iohost_of_guest(Path::new("/d"), Path::new("/s"), "io").unwrap();
        assert!(
            iohost.contains("[[client]]\nname = \"guest1\"\nlinks = [\"wire3\"]\n"),
            "{iohost}"
        );
    }

    #[test]
    fn a_vmhost_has_its_own_invitation_and_disks() {
        let devices = [Device { disk: "disk2", keys: "front_end = \"nvme\"\n" }];
        let text = vmhost(Path::new("/d"), &STATIONS[1], &devices).unwrap();
        assert!(text.contains("invitation = \"/d/vmhost2.invitation\"\n"), "{text}");
        assert!(text.contains("socket = \"/d/disk2.sock\"\nfront_end = \"nvme\"\n"), "{text}");
    }
}
