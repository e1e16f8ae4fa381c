//! The kinds of links, and the namespaces that those over Ethernet are between.

use std::fmt::Write as _;
use std::net::TcpStream;
use std::path::Path;

use anyhow::{Context, Result};
use sidecore_kit::namespace::{End, Namespace};
use sidecore_link::{
    EthernetAddress, Link, LinkAddress, LinkDescription, LinkOptions, Medium, MemoryEnd, open,
};
use sidecore_linux::XdpMode;
use sidecore_vrio::wire::{DATA_HEADER_BYTES, ETHERTYPE};

/// A kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    /// Shared memory.
    Memory,
    /// The rings of a packet socket, over a virtual wire.
    Packet,
    /// AF_XDP, over a virtual wire.
    Xdp,
    /// UDP, over a virtual wire.
    Udp,
}

const MTU: usize = 9000;
const INTERFACE: &str = "eth0";
const CLIENT_MAC: &str = "02:00:00:00:00:01";
const HOST_MAC: &str = "02:00:00:00:00:02";
const CLIENT_IP: &str = "10.9.0.1";
pub(super) const HOST_IP: &str = "10.9.0.2";
/// The socket of a link through shared memory.
const SOCKET: &str = "wire.sock";

impl Wire {
    pub(super) const ALL: [Self; 4] = [Self::Memory, Self::Packet, Self::Xdp, Self::Udp];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Packet => "packet",
            Self::Xdp => "xdp",
            Self::Udp => "udp",
        }
    }

    /// The link of an IOhost, as its configuration has it.
    pub(crate) fn configuration(self, directory: &Path) -> Result<String> {
        let mut text = format!("[[link]]\nname = \"wire\"\ntype = {:?}\n", self.name());
        match self {
            Self::Memory => writeln!(text, "socket = {:?}", directory.join(SOCKET))?,
            Self::Packet => {
                writeln!(text, "interface = {INTERFACE:?}\nsegmentation_offload = true")?;
            }
            Self::Xdp => writeln!(text, "interface = {INTERFACE:?}")?,
            Self::Udp => writeln!(text, "listen = \"{HOST_IP}:{ETHERTYPE}\"\ncoalesce = true")?,
        }
        Ok(text)
    }

    /// The IOhost's address.
    pub(crate) fn iohost(self) -> Result<LinkAddress> {
        Ok(match self {
            Self::Memory => LinkAddress::Peer(0),
            Self::Packet | Self::Xdp => LinkAddress::Ethernet(HOST_MAC.parse()?),
            Self::Udp => LinkAddress::Udp(format!("{HOST_IP}:{ETHERTYPE}").parse()?),
        })
    }

    /// The client's end in front of the IOhost whose files are in `directory`.
    pub(crate) fn client(self, cable: &Cable, directory: &Path) -> Result<Box<dyn Link>> {
        match &cable.0 {
            None => {
                let path = directory.join(SOCKET);
                one(&describe(Medium::Memory { path, end: MemoryEnd::Connect }))
            }
            Some((client, _)) => client.within(|| one(&describe(self.medium(CLIENT_IP, true)?)))?,
        }
    }

    /// Both ends of a link over a cable, without an IOhost: the client's and the other one, with
    /// their addresses.
    pub(super) fn ends(self, cable: &Cable) -> Result<[(Box<dyn Link>, LinkAddress); 2]> {
        let (client, host) = cable.0.as_ref().context("a cable without ends")?;
        let clients = client.within(|| one(&describe(self.medium(CLIENT_IP, false)?)))??;
        let hosts = host.within(|| one(&describe(self.medium(HOST_IP, false)?)))??;
        let client = match self {
            Self::Udp => LinkAddress::Udp(format!("{CLIENT_IP}:{ETHERTYPE}").parse()?),
            _ => LinkAddress::Ethernet(CLIENT_MAC.parse::<EthernetAddress>()?),
        };
        Ok([(clients, client), (hosts, self.iohost()?)])
    }

    /// `offload` is of a packet link: the floor is an exchange of single frames.
    fn medium(self, address: &str, offload: bool) -> Result<Medium> {
        let interface = INTERFACE.to_owned();
        Ok(match self {
            Self::Udp => {
                let listen = format!("{address}:{ETHERTYPE}").parse()?;
                Medium::Udp { listen, coalesce: true }
            }
            Self::Xdp => {
                let mode = Some(XdpMode::Generic);
                Medium::Xdp { interface, ethertype: ETHERTYPE, mode }
            }
            _ => Medium::Packet { interface, ethertype: ETHERTYPE, bypass_qdisc: true, offload },
        })
    }
}

fn describe(medium: Medium) -> LinkDescription {
    LinkDescription { medium, queues: 1, options: LinkOptions::new(DATA_HEADER_BYTES) }
}

fn one(description: &LinkDescription) -> Result<Box<dyn Link>> {
    open(description)?.pop().context("a link without queues")
}

/// A virtual wire between two namespaces, the client's and the IOhost's; none for shared memory.
pub(crate) struct Cable(Option<(Namespace, Namespace)>);

impl Cable {
    /// The cable that a kind of link needs.
    ///
    /// # Errors
    /// The machine has no namespaces or no virtual wires, or the process no privilege.
    pub(crate) fn for_wire(wire: Wire) -> Result<Self> {
        if wire == Wire::Memory { Ok(Self(None)) } else { Self::ethernet() }
    }

    /// A virtual wire.
    ///
    /// # Errors
    /// As [`for_wire`](Self::for_wire).
    pub(super) fn ethernet() -> Result<Self> {
        let (client, host) = (Namespace::new()?, Namespace::new()?);
        let end = |address| End { interface: INTERFACE, address };
        client.connect(&end(CLIENT_MAC), &host, &end(HOST_MAC), MTU)?;
        client.ip(&format!("addr add {CLIENT_IP}/24 dev {INTERFACE}"))?;
        host.ip(&format!("addr add {HOST_IP}/24 dev {INTERFACE}"))?;
        Ok(Self(Some((client, host))))
    }

    /// Connects the client's end with a TCP server at the IOhost's.
    ///
    /// # Errors
    /// The server does not listen; the cable is none.
    pub(super) fn connect(&self, port: u16) -> Result<TcpStream> {
        let (client, _) = self.0.as_ref().context("a cable without ends")?;
        let connected = client.within(|| TcpStream::connect((HOST_IP, port)))?;
        connected.with_context(|| format!("cannot connect to {HOST_IP}:{port}"))
    }

    /// The words in front of a command that runs at the IOhost's end.
    pub(super) fn prefix(&self) -> Vec<String> {
        let Some((_, host)) = &self.0 else { return Vec::new() };
        let pid = host.pid().to_string();
        ["nsenter", "--net", "--target", &pid, "--"].map(str::to_owned).to_vec()
    }
}
