//! Feature bits and configuration space (virtio 1.2, 5.1.3 and 5.1.4).

use sidecore_net::Offloads;
use sidecore_spec_virtio::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED, VERSION_1};
use sidecore_spec_virtio::net::{Config, MAC_BYTES, PacketHeader, feature, status};

/// The offloads of a driver that sends: the device completes what the driver left undone.
const SENDS: u64 =
    feature::CSUM | feature::HOST_TSO4 | feature::HOST_TSO6 | feature::HOST_ECN | feature::HOST_USO;

/// The offloads of a driver that receives.
const TAKES: u64 = feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::GUEST_USO4
    | feature::GUEST_USO6;

/// Size of the header of a legacy driver without merged buffers (5.1.6.1).
const LEGACY_HEADER_BYTES: usize = 10;

/// How a NIC presents itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Pairs of queues, 1 to 16.
    pub pairs: u16,
    /// The address.
    pub mac: [u8; MAC_BYTES],
    /// The largest MTU, in bytes.
    pub mtu: u16,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// Whether checksum and segmentation offloads are offered, both ways.
    pub offloads: bool,
}

impl Default for NetOptions {
    fn default() -> Self {
        Self { pairs: 1, mac: [2, 0, 0, 0, 0, 1], mtu: 1500, packed: false, offloads: true }
    }
}

impl NetOptions {
    /// The feature bits to offer. The control queue is the VMM's: the bits that need one are
    /// offered because a VMM masks its own features by them (QEMU, `hw/net/vhost_net.c`).
    #[must_use]
    pub fn features(&self) -> u64 {
        let mut bits = VERSION_1
            | INDIRECT_DESC
            | EVENT_IDX
            | feature::MAC
            | feature::MTU
            | feature::STATUS
            | feature::MRG_RXBUF
            | feature::CTRL_VQ
            | feature::GUEST_ANNOUNCE;
        let mut offer = |bit: u64, condition: bool| {
            if condition {
                bits |= bit;
            }
        };
        offer(feature::MQ, self.pairs > 1);
        offer(SENDS | TAKES, self.offloads);
        offer(RING_PACKED, self.packed);
        bits
    }

    /// The configuration space.
    #[must_use]
    pub fn config(&self, mtu: u16) -> [u8; Config::BYTES] {
        let max_virtqueue_pairs = self.pairs;
        Config { mac: self.mac, status: status::LINK_UP, max_virtqueue_pairs, mtu }.encode()
    }
}

/// Size of the header in front of each frame, with these features accepted.
pub(super) const fn header_bytes(features: u64) -> usize {
    if features & (VERSION_1 | feature::MRG_RXBUF) == 0 {
        LEGACY_HEADER_BYTES
    } else {
        PacketHeader::BYTES
    }
}

/// The offloads that the driver may ask for in frames that it sends.
pub(super) const fn sends(features: u64) -> Offloads {
    Offloads::CHECKSUM
        .when(features & feature::CSUM != 0)
        .and(Offloads::TSO4.when(features & feature::HOST_TSO4 != 0))
        .and(Offloads::TSO6.when(features & feature::HOST_TSO6 != 0))
        .and(Offloads::ECN.when(features & feature::HOST_ECN != 0))
        .and(Offloads::USO.when(features & feature::HOST_USO != 0))
}

/// The offloads that frames to the driver may ask for.
pub(super) const fn takes(features: u64) -> Offloads {
    let uso = feature::GUEST_USO4 | feature::GUEST_USO6;
    Offloads::CHECKSUM
        .when(features & feature::GUEST_CSUM != 0)
        .and(Offloads::TSO4.when(features & feature::GUEST_TSO4 != 0))
        .and(Offloads::TSO6.when(features & feature::GUEST_TSO6 != 0))
        .and(Offloads::ECN.when(features & feature::GUEST_ECN != 0))
        .and(Offloads::USO.when(features & uso == uso))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets as 5.1.4 lists them.
    #[test]
    fn every_field_is_at_its_offset() {
        let options =
            NetOptions { pairs: 3, mac: [2, 3, 4, 5, 6, 7], mtu: 9000, ..NetOptions::default() };
        assert_eq!(options.config(0x1234), [2, 3, 4, 5, 6, 7, 1, 0, 3, 0, 0x34, 0x12]);
    }

    #[test]
    fn each_feature_allows_its_own_offload() {
        let plain = NetOptions { offloads: false, ..NetOptions::default() }.features();
        assert_eq!((sends(plain), takes(plain)), (Offloads::NONE, Offloads::NONE));
        assert_eq!(plain & (RING_PACKED | feature::MQ), 0, "opt-in");
        let all = NetOptions { pairs: 2, packed: true, ..NetOptions::default() }.features();
        assert_eq!((sends(all), takes(all)), (Offloads::ALL, Offloads::ALL));
        let only = |bit| (sends(bit), takes(bit));
        assert_eq!(only(feature::HOST_TSO6), (Offloads::TSO6, Offloads::NONE));
        assert_eq!(only(feature::GUEST_TSO4), (Offloads::NONE, Offloads::TSO4));
        assert_eq!(only(feature::GUEST_USO4), (Offloads::NONE, Offloads::NONE), "both or none");
    }

    /// 5.1.6.1: the header has `num_buffers` with VERSION_1 or merged buffers.
    #[test]
    fn a_legacy_driver_without_merged_buffers_has_a_shorter_header() {
        assert_eq!(
            [0, VERSION_1, feature::MRG_RXBUF, feature::CSUM].map(header_bytes),
            [10, 12, 12, 10]
        );
    }
}
