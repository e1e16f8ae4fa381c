//! Links from their specifications.

use sidecore_link::{
    Link, LinkDescription, LinkError, LinkOptions, Medium, MemoryEnd, Properties, open,
};
use sidecore_vrio::wire::DATA_HEADER_BYTES;

use crate::AssemblyError;
use crate::spec::{LinkKind, LinkSpec, REMOTE_PORT, SocketAccess};

/// The most clients of a memory link at a time, which is what its memory has places for.
const MEMORY_CLIENTS: usize = 64;

/// Which side of a link this host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Iohost,
    Client,
}

/// Opens the queues of a link, in the order of its sidecores.
pub(super) fn open_queues(
    spec: &LinkSpec,
    side: Side,
) -> Result<Vec<Box<dyn Link>>, AssemblyError> {
    let refused = |error: LinkError| AssemblyError::Link {
        name: spec.name.clone(),
        error: error.to_string(),
    };
    open(&description(spec, side)?).map_err(refused)
}

fn description(spec: &LinkSpec, side: Side) -> Result<LinkDescription, AssemblyError> {
    let frames = [spec.receive_frames, spec.transmit_frames].map(|frames| frames as usize);
    let [mut receive_frames, mut transmit_frames] = frames;
    let medium = match &spec.kind {
        LinkKind::Packet(packet) => Medium::Packet {
            interface: packet.interface.clone(),
            ethertype: REMOTE_PORT,
            bypass_qdisc: packet.bypass_qdisc,
            offload: packet.segmentation_offload,
        },
        LinkKind::Xdp(xdp) => {
            Medium::Xdp { interface: xdp.interface.clone(), ethertype: REMOTE_PORT, mode: xdp.mode }
        }
        LinkKind::Udp(udp) => Medium::Udp { listen: udp.listen, coalesce: udp.coalesce },
        LinkKind::Memory(memory) => {
            // The rings of a client lie in memory that the IOhost makes: what the one receives is
            // what the other sends.
            if side == Side::Iohost {
                receive_frames = receive_frames.max(transmit_frames);
                transmit_frames = receive_frames;
            }
            let end = match side {
                Side::Iohost => MemoryEnd::Listen {
                    users: users(&spec.name, &memory.users)?,
                    clients: MEMORY_CLIENTS,
                },
                Side::Client => MemoryEnd::Connect,
            };
            Medium::Memory { path: memory.socket.clone(), end }
        }
    };
    let options = LinkOptions {
        frame_bytes: spec.frame_bytes as usize,
        receive_frames,
        transmit_frames,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    };
    Ok(LinkDescription { medium, queues: spec.sidecores.len(), options })
}

/// The numbers of users.
fn users(link: &str, names: &[String]) -> Result<Vec<u32>, AssemblyError> {
    let number = |name: &String| {
        let account = SocketAccess { owner: Some(name.clone()), ..SocketAccess::default() };
        let resolved = account.resolve().map_err(|error| AssemblyError::Link {
            name: link.to_owned(),
            error: error.to_string(),
        })?;
        Ok(resolved.owner.unwrap_or(u32::MAX))
    };
    names.iter().map(number).collect()
}

/// The properties that a link grants, for reports.
#[derive(Clone, Debug, Default)]
pub(super) struct Granted {
    pub(super) address: String,
    pub(super) mode: String,
    pub(super) frame_bytes: u64,
}

impl Granted {
    pub(super) fn of(properties: &Properties) -> Self {
        Self {
            address: properties.address.to_string(),
            mode: properties.mode.to_owned(),
            frame_bytes: properties.frame_bytes as u64,
        }
    }
}
