//! The interface under a packet or an AF_XDP link.

use std::io;

use sidecore_linux::{Interface, PacketSocket};
use sidecore_units::Nanos;

use crate::options::FRAME_BYTES_MIN;
use crate::{LinkError, LinkOptions, LinkState};

/// How often a link looks at its interface, and at the kernel's count of drops.
pub(crate) const LOOK_INTERVAL: Nanos = Nanos::from_millis(10);
/// The same while the interface cannot send.
pub(crate) const DOWN_INTERVAL: Nanos = Nanos::from_millis(100);
pub(crate) const DOWN: LinkState = LinkState::Down("the interface is down");

/// Whether an interface can send.
pub(crate) fn state(socket: &PacketSocket, name: &str) -> LinkState {
    match socket.is_running(name) {
        Ok((true, true)) => LinkState::Up,
        Ok((true, false)) => LinkState::Down("the interface has no carrier"),
        Ok((false, _)) => DOWN,
        Err(_) => LinkState::Down("the interface is gone"),
    }
}

/// A packet socket, which looks interfaces up.
pub(crate) fn packet_socket(capabilities: &'static str) -> Result<PacketSocket, LinkError> {
    PacketSocket::new().map_err(|error| {
        let step = "open a packet socket";
        if error.kind() == io::ErrorKind::PermissionDenied {
            return LinkError::Capability { step, capabilities };
        }
        LinkError::Kernel { step, error }
    })
}

/// Looks an interface up. Returns the options too, with the frames that its MTU permits.
pub(crate) fn find(
    socket: &PacketSocket,
    name: &str,
    options: &LinkOptions,
) -> Result<(Interface, LinkOptions), LinkError> {
    let missing = |error| LinkError::NoInterface { interface: name.to_owned(), error };
    let interface = socket.interface(name).map_err(missing)?;
    let mtu_bytes = usize::try_from(interface.mtu_bytes).unwrap_or(0);
    let wanted_bytes = options.frame_bytes;
    if mtu_bytes < FRAME_BYTES_MIN {
        return Err(LinkError::ShortFrames {
            interface: name.to_owned(),
            mtu_bytes,
            needed_bytes: FRAME_BYTES_MIN,
            wanted_bytes,
        });
    }
    if mtu_bytes < wanted_bytes {
        tracing::warn!(
            interface = name,
            mtu_bytes,
            "the link's frames are as short as the MTU: \
             for longer ones, `ip link set dev {name} mtu {wanted_bytes}`"
        );
    }
    let frame_bytes = wanted_bytes.min(mtu_bytes);
    Ok((interface, LinkOptions { frame_bytes, ..*options }))
}
