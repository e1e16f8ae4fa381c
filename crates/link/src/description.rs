//! Links from plain descriptions, as a configuration has them.

use std::net::SocketAddr;
use std::path::PathBuf;

use sidecore_linux::{XdpMode, peer_event};

use crate::{
    Link, LinkError, LinkOptions, LinkQueue, MemoryEnd, MemoryLink, MemoryOptions, PacketLink,
    PacketOptions, UdpLink, UdpOptions, XdpLink, XdpOptions,
};

/// A link with all its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkDescription {
    /// The wire.
    pub medium: Medium,
    /// The number of queues, each of which is polled by a sidecore of its own.
    pub queues: usize,
    /// Frames and rings, of each queue.
    pub options: LinkOptions,
}

/// A wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// An Ethernet interface, through a packet socket for each queue.
    Packet {
        /// The interface's name.
        interface: String,
        /// The protocol of the frames.
        ethertype: u16,
        /// As in [`PacketOptions`].
        bypass_qdisc: bool,
        /// As in [`PacketOptions`].
        offload: bool,
    },
    /// An Ethernet interface, through an AF_XDP socket for each of its queues.
    Xdp {
        /// The interface's name.
        interface: String,
        /// The protocol of the frames.
        ethertype: u16,
        /// As in [`XdpOptions`].
        mode: Option<XdpMode>,
    },
    /// A UDP port.
    Udp {
        /// The address to receive at; port 0 is one of the kernel's choice.
        listen: SocketAddr,
        /// As in [`UdpOptions`]; without effect on a link of several queues.
        coalesce: bool,
    },
    /// Memory that is shared with other processes of this host.
    Memory {
        /// The path of the Unix socket at which the IOhost listens.
        path: PathBuf,
        /// Which end this is.
        end: MemoryEnd,
    },
}

/// Opens a link: its queues in their order, each for a sidecore. May wait, for a second at most, so
/// it is not called on a sidecore. The network namespace is that of the calling thread.
///
/// # Errors
/// A [`LinkError`], which says what to do.
pub fn open(description: &LinkDescription) -> Result<Vec<Box<dyn Link>>, LinkError> {
    let LinkDescription { medium, queues, options } = description;
    let link = *options;
    match medium {
        Medium::Packet { interface, ethertype, bypass_qdisc, offload } => {
            let (ethertype, bypass_qdisc, offload) = (*ethertype, *bypass_qdisc, *offload);
            let open = |queue| {
                let interface = interface.clone();
                PacketLink::open(&PacketOptions {
                    interface,
                    ethertype,
                    queue,
                    link,
                    bypass_qdisc,
                    offload,
                })
            };
            LinkQueue::all(*queues)?.map(|queue| Ok(boxed(open(queue)?))).collect()
        }
        Medium::Xdp { interface, ethertype, mode } => {
            let (interface, ethertype, mode) = (interface.clone(), *ethertype, *mode);
            let options = XdpOptions { interface, ethertype, link, mode };
            Ok(XdpLink::open_queues(&options, *queues)?.into_iter().map(boxed).collect())
        }
        Medium::Udp { listen: address, coalesce } => {
            let options = UdpOptions { address: *address, link, coalesce: *coalesce };
            Ok(UdpLink::open_queues(&options, *queues)?.into_iter().map(boxed).collect())
        }
        Medium::Memory { path, end } => {
            let (path, end) = (path.clone(), end.clone());
            let options = MemoryOptions { path, end, link, make_signal: peer_event };
            Ok(MemoryLink::open_queues(&options, *queues)?.into_iter().map(boxed).collect())
        }
    }
}

fn boxed(link: impl Link + 'static) -> Box<dyn Link> {
    Box::new(link)
}
