//! The hosts as network namespaces, and the cables between them.

use crate::process::{Event, Inbox, Running, Source};
use crate::text;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use sidecore_kit::namespace::{End, Namespace};
use std::path::Path;
use std::time::{Duration, Instant};

/// A VMhost, with its end of a cable and the IOhost's.
pub(super) struct Station {
    /// Its name as a client.
    pub(super) client: &'static str,
    /// Its disk at the IOhost.
    pub(super) disk: &'static str,
    /// The IOhost's link to it.
    pub(super) link: &'static str,
    /// The IOhost's interface on the cable.
    pub(super) iohost: End<'static>,
    /// The VMhost's interface.
    pub(super) vmhost: End<'static>,
    /// The ends of the lossy wire in the middle of the cable: to the VMhost, and to the IOhost.
    middle: [&'static str; 2],
}

pub(super) const STATIONS: [Station; 2] = [
    Station {
        client: "vmhost1",
        disk: "disk1",
        link: "wire1",
        iohost: End { interface: "eth1", address: "02:00:00:00:01:01" },
        vmhost: End { interface: Net::VMHOST_INTERFACE, address: "02:00:00:00:01:02" },
        middle: ["v1", "i1"],
    },
    Station {
        client: "vmhost2",
        disk: "disk2",
        link: "wire2",
        iohost: End { interface: "eth2", address: "02:00:00:00:02:01" },
        vmhost: End { interface: Net::VMHOST_INTERFACE, address: "02:00:00:00:02:02" },
        middle: ["v2", "i2"],
    },
];

/// A guest that is a client itself. Its cable is a TAP interface: the IOhost's end of it.
pub(super) const GUEST: Station = Station {
    client: "guest1",
    disk: "disk3",
    link: "wire3",
    iohost: End { interface: "eth3", address: "02:00:00:00:06:01" },
    vmhost: End { interface: Net::VMHOST_INTERFACE, address: "02:00:00:00:06:02" },
    middle: ["v3", "i3"],
};

const MTU: usize = 9000;
const WIRE: Source = Source::Host("sidecore-wire");
const PATIENCE: Duration = Duration::from_secs(20);

/// The chances of faults, in percent of the frames.
#[derive(Clone, Copy)]
pub(super) struct Faults {
    pub(super) loss: u32,
    pub(super) doubling: u32,
    pub(super) reordering: u32,
}

/// The fates of a wire's frames, as `sidecore-wire` counts them.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Fates {
    pub(super) carried: u64,
    pub(super) lost: u64,
    pub(super) doubled: u64,
    pub(super) overtaken: u64,
}

/// The namespaces.
pub(super) struct Net {
    pub(super) iohost: Namespace,
    pub(super) vmhosts: [Namespace; 2],
}

impl Net {
    pub(super) const VMHOST_INTERFACE: &'static str = "eth0";

    fn hosts() -> Result<Net> {
        Ok(Net { iohost: host()?, vmhosts: [host()?, host()?] })
    }

    /// Hosts with a plain cable from the IOhost to each VMhost.
    pub(super) fn plain() -> Result<Net> {
        let net = Net::hosts()?;
        for (station, vmhost) in STATIONS.iter().zip(&net.vmhosts) {
            vmhost.connect(&station.vmhost, &net.iohost, &station.iohost, MTU)?;
        }
        Ok(net)
    }
}

fn host() -> Result<Namespace> {
    Namespace::new()
        .context("cannot make a network namespace, which takes CAP_SYS_ADMIN; run this as root")
}

/// An IOhost with the TAP interface of the guest that is its client.
pub(super) fn with_tap() -> Result<Namespace> {
    let iohost = host()?;
    let End { interface, address } = GUEST.iohost;
    iohost
        .ip(&format!("tuntap add dev {interface} mode tap"))
        .context("cannot make a TAP interface; does the kernel have /dev/net/tun?")?;
    iohost.ip(&format!("link set {interface} address {address} up"))?;
    Ok(iohost)
}

/// Two IOhosts with one address, a switch for each link of a VMhost to them, and a network on which
/// they reach etcd.
pub(super) struct RackNet {
    pub(super) iohosts: [Namespace; 2],
    pub(super) vmhosts: [Namespace; 2],
    /// The namespace of the switches and of etcd.
    pub(super) middle: Namespace,
}

impl RackNet {
    /// The address of etcd's members.
    pub(super) const ETCD: &'static str = "10.0.0.1";
    const ETCD_INTERFACE: &'static str = "etcd0";

    pub(super) fn new() -> Result<RackNet> {
        let Net { iohost, vmhosts } = Net::hosts()?;
        let iohosts = [iohost, Namespace::new()?];
        let middle = Namespace::new()?;
        let join =
            |port: &str, switch: &str| middle.ip(&format!("link set {port} master {switch}"));
        switch(&middle, "etcd")?;
        middle.ip(&format!("address add {}/24 dev etcd", Self::ETCD))?;
        // The first VMhost is a candidate for its guest's disk, too.
        for (number, iohost) in (1..).zip(iohosts.iter().chain(vmhosts.first())) {
            let port = format!("e{number}");
            let interface = Self::ETCD_INTERFACE;
            let end = End { interface, address: &format!("02:00:00:00:03:0{number}") };
            let its = End { interface: &port, address: &format!("02:00:00:00:04:0{number}") };
            iohost.connect(&end, &middle, &its, MTU)?;
            iohost.ip(&format!("address add 10.0.0.1{number}/24 dev {interface}"))?;
            join(&port, "etcd")?;
        }
        for (station, vmhost) in STATIONS.iter().zip(&vmhosts) {
            let Station { link, middle: [port, to_iohost], .. } = *station;
            switch(&middle, link)?;
            let its = End { interface: port, address: "02:00:00:00:05:01" };
            vmhost.connect(&station.vmhost, &middle, &its, MTU)?;
            join(port, link)?;
            for (number, iohost) in (1..).zip(&iohosts) {
                let port = format!("{to_iohost}-{number}");
                let address = format!("02:00:00:00:05:1{number}");
                let its = End { interface: &port, address: &address };
                iohost.connect(&station.iohost, &middle, &its, MTU)?;
                join(&port, link)?;
            }
        }
        Ok(RackNet { iohosts, vmhosts, middle })
    }
}

/// Makes a switch that sends each frame to all ports: two of them have hosts with one address.
fn switch(namespace: &Namespace, name: &str) -> Result<()> {
    namespace.ip(&format!("link add {name} type bridge ageing_time 0"))?;
    namespace.ip(&format!("link set {name} up"))?;
    Ok(())
}

/// Hosts with a lossy wire in the middle of each cable.
pub(super) struct LossyNet {
    pub(super) net: Net,
    /// The namespace of the wires.
    pub(super) middle: Namespace,
    wires: Running,
}

impl LossyNet {
    pub(super) fn new(inbox: &mut Inbox, binaries: &Path, faults: Faults) -> Result<LossyNet> {
        let net = Net::hosts()?;
        let middle = Namespace::new()?;
        let mut words = vec![text(&binaries.join("sidecore-wire"))?.to_owned()];
        for (station, vmhost) in STATIONS.iter().zip(&net.vmhosts) {
            let Station { middle: [to_vmhost, to_iohost], .. } = *station;
            // Each end of a wire has the address of the station behind the other end.
            let end = End { interface: to_vmhost, address: station.iohost.address };
            vmhost.connect(&station.vmhost, &middle, &end, MTU)?;
            let end = End { interface: to_iohost, address: station.vmhost.address };
            net.iohost.connect(&station.iohost, &middle, &end, MTU)?;
            words.extend(["--between".to_owned(), format!("{to_vmhost}:{to_iohost}")]);
        }
        for (option, percent) in [
            ("--loss", faults.loss),
            ("--doubling", faults.doubling),
            ("--reordering", faults.reordering),
        ] {
            words.extend([option.to_owned(), percent.to_string()]);
        }
        let wires = start_in(inbox, middle.pid(), &words, WIRE)?;
        let ready = |event: &Event| {
            matches!(event, Event::Line(WIRE, line) if line.starts_with("ready:"))
                || matches!(event, Event::Closed(WIRE))
        };
        let found = inbox.find(Instant::now() + PATIENCE, ready)?;
        ensure!(matches!(found, Some(Event::Line(..))), "sidecore-wire did not start");
        Ok(LossyNet { net, middle, wires })
    }

    /// The interface in the middle that gets the frames of a VMhost.
    pub(super) fn tap(station: &Station) -> &'static str {
        station.middle[0]
    }

    /// Ends all faults.
    pub(super) fn repair(&mut self) -> Result<()> {
        self.wires.write("chances 0 0 0 0\n")
    }

    /// The fates of the frames of each cable so far.
    pub(super) fn fates(&mut self, inbox: &mut Inbox) -> Result<Vec<Fates>> {
        self.wires.write("counts\n")?;
        let deadline = Instant::now() + PATIENCE;
        let is_count =
            |event: &Event| matches!(event, Event::Line(WIRE, line) if line.starts_with('{'));
        let mut fates = Vec::new();
        for _ in &STATIONS {
            let Some(Event::Line(_, line)) = inbox.find(deadline, is_count)? else {
                anyhow::bail!("sidecore-wire does not count its frames");
            };
            fates.push(serde_json::from_str(&line).context("cannot read the wire's counts")?);
        }
        Ok(fates)
    }
}

/// Starts a program in a namespace, which the process of this number keeps.
pub(super) fn start_in(
    inbox: &Inbox,
    namespace: u32,
    words: &[String],
    source: Source,
) -> Result<Running> {
    let pid = namespace.to_string();
    let mut all = vec!["--net", "--target", &pid, "--"];
    all.extend(words.iter().map(String::as_str));
    Running::start(inbox, "nsenter".as_ref(), all, source, source)
}
