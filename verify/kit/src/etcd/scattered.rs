//! A cluster of etcd whose members have networks of their own, which can be cut from each other.
//!
//! ```text
//! candidates, in the hub ─┬─ 10.9.0.0/24 ─ m0
//!                         ├─ 10.9.1.0/24 ─ m1
//!                         └─ 10.9.2.0/24 ─ m2
//! ```

use std::io;

use tempfile::TempDir;

use super::{CLIENT_PORT, MEMBERS, PEER_PORT, leader, member};
use crate::namespace::{End, Namespace};
use crate::process::Process;

/// Three members, which end with this value.
#[derive(Debug)]
pub struct Scattered {
    /// End before their networks.
    #[expect(dead_code, reason = "kept until the drop")]
    members: Vec<Process>,
    #[expect(dead_code, reason = "kept until the drop")]
    networks: Vec<Namespace>,
    #[expect(dead_code, reason = "kept until the drop")]
    directory: TempDir,
}

impl Scattered {
    /// Starts the members in namespaces around the hub, which passes packets between them.
    ///
    /// # Errors
    /// etcd is not installed, or the kernel's.
    pub fn start(hub: &Namespace) -> io::Result<Self> {
        hub.ip("link set lo up")?;
        hub.within(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1"))??;
        let directory = TempDir::new_in("/dev/shm")?;
        let networks: Vec<Namespace> =
            (0..MEMBERS).map(|index| network(hub, index)).collect::<io::Result<_>>()?;
        let cluster: Vec<String> =
            (0..MEMBERS).map(|index| format!("m{index}={}", url(PEER_PORT, index))).collect();
        let cluster = cluster.join(",");
        let start = |(network, index): (&Namespace, u16)| {
            let (peer, client) = (url(PEER_PORT, index), url(CLIENT_PORT, index));
            let (at, of) = ((index, &*peer), (&*cluster, "scattered"));
            let mut command = member(network, directory.path(), at, of)?;
            command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            Process::start(&mut command)
        };
        let members = networks.iter().zip(0..).map(start).collect::<io::Result<_>>()?;
        Ok(Self { members, networks, directory })
    }

    /// The members' endpoints, as a command line in the hub takes them.
    #[must_use]
    pub fn endpoints() -> String {
        (0..MEMBERS).map(|index| url(CLIENT_PORT, index)).collect::<Vec<_>>().join(",")
    }

    /// All pairs of members.
    #[must_use]
    pub fn pairs() -> Vec<(u16, u16)> {
        let pairs = (0..MEMBERS).flat_map(|one| (one + 1..MEMBERS).map(move |other| (one, other)));
        pairs.collect()
    }

    /// Drops all packets between two members, until they are healed. The hub reaches both.
    ///
    /// # Errors
    /// ip's.
    pub fn cut(hub: &Namespace, pair: (u16, u16)) -> io::Result<()> {
        rules(hub, "add", pair)
    }

    /// Lets packets pass again after [`cut`](Self::cut).
    ///
    /// # Errors
    /// ip's: they are not cut.
    pub fn heal(hub: &Namespace, pair: (u16, u16)) -> io::Result<()> {
        rules(hub, "del", pair)
    }

    /// The member that leads in the newest term, and the term.
    #[must_use]
    pub fn leader(hub: &Namespace) -> Option<(u16, u64)> {
        leader(hub, |index| (host(index), CLIENT_PORT))
    }
}

/// The network of a member, with a wire to the hub.
fn network(hub: &Namespace, index: u16) -> io::Result<Namespace> {
    let network = Namespace::new()?;
    let (near, far) = (format!("m{index}"), format!("02:00:00:00:09:0{index}"));
    let end = End { interface: &near, address: &format!("02:00:00:00:08:0{index}") };
    hub.connect(&end, &network, &End { interface: "eth0", address: &far }, 1500)?;
    hub.ip(&format!("addr add 10.9.{index}.1/24 dev {near}"))?;
    network.ip(&format!("addr add {}/24 dev eth0", host(index)))?;
    network.ip("link set lo up")?;
    network.ip(&format!("route add default via 10.9.{index}.1"))?;
    Ok(network)
}

fn rules(hub: &Namespace, verb: &str, (one, other): (u16, u16)) -> io::Result<()> {
    for (from, to) in [(one, other), (other, one)] {
        hub.ip(&format!("rule {verb} iif m{from} to 10.9.{to}.0/24 blackhole"))?;
    }
    Ok(())
}

fn host(index: u16) -> String {
    format!("10.9.{index}.2")
}

fn url(port: u16, index: u16) -> String {
    format!("http://{}:{port}", host(index))
}
