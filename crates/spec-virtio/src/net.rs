//! The network device (5.1).

use sidecore_units::layout;

/// Feature bits of a network device (5.1.3).
pub mod feature {
    /// The device takes packets with a partial checksum.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes packets with a partial checksum.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The driver may switch its receive offloads by the control queue.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The largest MTU is in `mtu`.
    pub const MTU: u64 = 1 << 3;
    /// The address is in `mac`.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TCP segments over IPv4 that are larger than the MTU.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The same over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes such segments with ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The driver takes UDP datagrams that are larger than the MTU, as fragments.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes TCP segments over IPv4 that are larger than the MTU.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The same over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes such segments with ECN.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device takes UDP datagrams that are larger than the MTU, as fragments.
    pub const HOST_UFO: u64 = 1 << 14;
    /// The driver merges receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The state of the link is in `status`.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// The control queue sets the receive mode.
    pub const CTRL_RX: u64 = 1 << 18;
    /// The control queue filters VLANs.
    pub const CTRL_VLAN: u64 = 1 << 19;
    /// The driver announces itself on the network when it is asked to.
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// The number of queue pairs is in `max_virtqueue_pairs`.
    pub const MQ: u64 = 1 << 22;
    /// The control queue sets the address.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The driver takes UDP payloads over IPv4 that are to be cut into datagrams (virtio 1.3,
    /// 5.1.3, as the next two).
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The same over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes such payloads, over both.
    pub const HOST_USO: u64 = 1 << 56;
}

/// Bits of `status` in the configuration space (5.1.4).
pub mod status {
    /// VIRTIO_NET_S_LINK_UP.
    pub const LINK_UP: u16 = 1;
    /// VIRTIO_NET_S_ANNOUNCE: the driver announces itself.
    pub const ANNOUNCE: u16 = 2;
}

/// Bits of a packet header's flags (5.1.6).
pub mod flag {
    /// VIRTIO_NET_HDR_F_NEEDS_CSUM: the checksum is partial, from `csum_start` on.
    pub const NEEDS_CSUM: u8 = 1;
    /// VIRTIO_NET_HDR_F_DATA_VALID: the checksum was verified.
    pub const DATA_VALID: u8 = 2;
}

/// Values of a packet header's `gso_type` (5.1.6).
pub mod gso {
    /// VIRTIO_NET_HDR_GSO_NONE: an ordinary packet.
    pub const NONE: u8 = 0;
    /// VIRTIO_NET_HDR_GSO_TCPV4: to be cut into TCP segments over IPv4.
    pub const TCPV4: u8 = 1;
    /// VIRTIO_NET_HDR_GSO_UDP: to be cut into fragments.
    pub const UDP: u8 = 3;
    /// VIRTIO_NET_HDR_GSO_TCPV6: to be cut into TCP segments over IPv6.
    pub const TCPV6: u8 = 4;
    /// VIRTIO_NET_HDR_GSO_UDP_L4: to be cut into UDP datagrams (virtio 1.3, 5.1.6).
    pub const UDP_L4: u8 = 5;
    /// VIRTIO_NET_HDR_GSO_ECN, with a TCP type: the segments have ECN.
    pub const ECN: u8 = 0x80;
}

/// Size of a hardware address.
pub const MAC_BYTES: usize = 6;

/// Size of the header of an Ethernet frame without a VLAN tag.
pub const ETHERNET_HEADER_BYTES: u32 = 14;

/// The least value of `mtu` that a device may have (5.1.4.1).
pub const MTU_MIN: u16 = 68;

/// Most queue pairs (5.1.4).
pub const QUEUE_PAIRS_MAX: u16 = 0x8000;

layout! {
    /// The header of a packet, in both directions (5.1.6), of a device that is not legacy.
    pub struct PacketHeader: 12 {
        /// See [`flag`].
        pub flags: u8 = 0,
        /// See [`gso`].
        pub gso_type: u8 = 1,
        /// Bytes of headers before the data that is cut.
        pub hdr_len: u16 = 2,
        /// Bytes of data in each segment.
        pub gso_size: u16 = 4,
        /// Where the checksum starts.
        pub csum_start: u16 = 6,
        /// Where the checksum goes, from `csum_start` on.
        pub csum_offset: u16 = 8,
        /// How many receive buffers the packet has; 1 without merged buffers, 0 from a driver.
        pub num_buffers: u16 = 10,
    }
}

layout! {
    /// The configuration space (5.1.4), up to and with `mtu`.
    pub struct Config: 12 {
        /// The device's address.
        pub mac: [u8; MAC_BYTES] = 0,
        /// See [`status`].
        pub status: u16 = 6,
        /// Most pairs of a receive and a transmit queue.
        pub max_virtqueue_pairs: u16 = 8,
        /// Largest MTU in bytes.
        pub mtu: u16 = 10,
    }
}

/// Whether a queue of this number receives: queues come in pairs, and the receiving one is first
/// (5.1.2).
#[must_use]
#[inline]
pub const fn is_receive(queue: u16) -> bool {
    queue.is_multiple_of(2)
}
