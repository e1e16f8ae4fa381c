//! An IOhost: a daemon that exports stores to clients of this process.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use sidecore_trust::{ClientName, ClientTrust, KeyDirectory};

use super::client::{Clients, Identity};
use super::faulty::FaultyLink;
use super::flood::FloodLink;
use super::wire::{Cable, Wire};
use crate::experiment::Experiment;
use crate::sidecored::{self, Sidecored, Store};

/// The store below a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disk {
    /// It keeps no data.
    Null,
    /// It is in memory.
    Ram,
    /// It keeps no data, and answers after [`DELAY_US`].
    Slow,
}

/// The delay of the slow store: about the read latency of a flash disk.
const DELAY_US: u32 = 80;

impl Disk {
    pub(super) const ALL: [Self; 3] = [Self::Null, Self::Ram, Self::Slow];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ram => "ram",
            Self::Slow => "delay80",
        }
    }

    pub(crate) const fn store(self, bytes: u64) -> Store {
        match self {
            Self::Null => Store::Null { bytes },
            Self::Ram => Store::Ram { bytes },
            Self::Slow => Store::Delayed { bytes, delay_us: DELAY_US },
        }
    }
}

/// The clients of an IOhost, and the link to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) wire: Wire,
    pub(super) clients: u16,
    /// Whether frames are encrypted.
    pub(super) is_sealed: bool,
    pub(super) fault: Fault,
}

/// A fault that the clients' side makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// Each link loses so many percent of its frames, both ways.
    Loss(u8),
    /// The last client floods the IOhost.
    Flood,
}

impl Setting {
    /// One client that sends in clear.
    pub(super) const fn plain(wire: Wire) -> Self {
        Self { wire, clients: 1, is_sealed: false, fault: Fault::None }
    }

    /// The disks of each client.
    pub(super) fn disks(self) -> &'static [Disk] {
        if self.clients > 1 { &[Disk::Null] } else { &Disk::ALL }
    }

    fn name(self) -> String {
        let sealed = if self.is_sealed { "-sealed" } else { "" };
        format!("iohost-{}-{}{sealed}{}", self.wire.name(), self.clients, self.fault.suffix("-"))
    }

    fn client_names(self) -> Vec<String> {
        (0..self.clients).map(|number| format!("client{number}")).collect()
    }
}

impl Fault {
    /// The fault in the name of a case, behind this separator.
    pub(super) fn suffix(self, separator: &str) -> String {
        match self {
            Self::None => String::new(),
            Self::Loss(percent) => format!("{separator}loss{percent}"),
            Self::Flood => format!("{separator}flood"),
        }
    }
}

/// The program of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Build {
    This,
    /// That of `--against`.
    Before,
}

/// A daemon that is frozen between runs, and its clients, which are connected.
pub(super) struct Iohost {
    /// Dropped first: the daemon sees its clients leave.
    pub(super) clients: Clients,
    pub(super) daemon: Sidecored,
    _cable: Cable,
    pub(super) setting: Setting,
    pub(super) build: Build,
}

impl Iohost {
    /// Starts a daemon and connects its clients.
    ///
    /// # Errors
    /// The daemon does not start; a client does not get its devices.
    pub(super) fn start(
        experiment: &Experiment,
        build: Build,
        setting: Setting,
        disk_bytes: u64,
    ) -> Result<Self> {
        let mut identities = Vec::new();
        let configuration = |directory: &Path| {
            identities = invite(directory, setting)?;
            configuration(directory, setting, disk_bytes)
        };
        let (name, cable) = (setting.name(), Cable::for_wire(setting.wire)?);
        let prefix = cable.prefix();
        let mut daemon = match build {
            Build::This => experiment.start_configured(&name, &prefix, configuration)?,
            Build::Before => experiment
                .start_configured_before(&name, &prefix, configuration)?
                .context("there is no other build")?,
        };
        let (wire, directory) = (setting.wire, daemon.directory());
        let (mut losses, mut flood, address) = (Vec::new(), None, wire.iohost()?);
        let link = |identity| {
            let mut link = wire.client(&cable, directory)?;
            match setting.fault {
                Fault::None => {}
                Fault::Loss(percent) => {
                    let faulty = FaultyLink::new(link, percent);
                    losses.push(faulty.losses());
                    link = Box::new(faulty);
                }
                Fault::Flood => {
                    let flooding = FloodLink::new(link, address);
                    flood = Some(flooding.flood());
                    link = Box::new(flooding);
                }
            }
            Ok((identity, link))
        };
        let links = identities.into_iter().map(link).collect::<Result<_>>()?;
        let mut clients = Clients::new(links, address, setting.disks())?;
        clients.set_losses(losses);
        match flood {
            Some(flood) => clients.prepare_flood(flood, &experiment.clock)?,
            None if setting.fault != Fault::None => clients.settle(&experiment.clock)?,
            None => {}
        }
        daemon.process.freeze()?;
        Ok(Self { clients, daemon, _cable: cable, setting, build })
    }
}

/// Invites the clients, if they need a key.
fn invite(directory: &Path, setting: Setting) -> Result<Vec<Identity>> {
    let keys = KeyDirectory::new(directory.join("keys"));
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let identity = |name: String| {
        let name: ClientName = name.parse()?;
        let trust = if setting.is_sealed {
            ClientTrust::invited(&keys.invite(name, now_s)?)
        } else {
            ClientTrust::off()
        };
        Ok(Identity { name, trust })
    };
    setting.client_names().into_iter().map(identity).collect()
}

fn configuration(directory: &Path, setting: Setting, disk_bytes: u64) -> Result<String> {
    let mut text = format!("key_directory = {:?}\n", directory.join("keys"));
    text.push_str(&sidecored::head(directory));
    text.push_str(&setting.wire.configuration(directory)?);
    for disk in setting.disks() {
        sidecored::write_store(&mut text, disk.name(), &disk.store(disk_bytes))?;
    }
    let encryption = if setting.is_sealed { "on" } else { "off" };
    for client in setting.client_names() {
        writeln!(text, "[[client]]\nname = {client:?}\nlinks = [\"wire\"]")?;
        writeln!(text, "encryption = {encryption:?}")?;
        for disk in setting.disks() {
            let (store, device) = (disk.name(), device_name(*disk, &client));
            writeln!(text, "[[device]]\nname = {device:?}\nfront_end = \"vrio\"")?;
            writeln!(text, "client = {client:?}\nstore = {store:?}")?;
        }
    }
    Ok(text)
}

/// The name of a client's device.
pub(crate) fn device_name(disk: Disk, client: &str) -> String {
    format!("{}-{client}", disk.name())
}
