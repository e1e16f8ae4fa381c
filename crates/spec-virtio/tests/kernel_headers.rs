//! The numbers and layouts against those of the kernel, which has them from other hands.
#![forbid(unsafe_code)]

use sidecore_kit::field_offsets;
use sidecore_kit::headers::assert_matches;
use sidecore_spec_virtio::blk::{self, Config, Range, RequestHeader};
use sidecore_spec_virtio::net::{self, PacketHeader};
use sidecore_spec_virtio::vhost_user::{MemoryRegion, MemoryTableHeader, VringAddress, VringState};
use sidecore_spec_virtio::{MMIO_CONFIG_OFFSET, descriptor, feature, packed, split, status};

#[test]
fn features_and_status_bits() {
    assert_matches(
        &["linux/virtio_config.h", "linux/virtio_ring.h", "linux/virtio_mmio.h"],
        &[
            ("1ull << VIRTIO_RING_F_INDIRECT_DESC", feature::INDIRECT_DESC),
            ("1ull << VIRTIO_RING_F_EVENT_IDX", feature::EVENT_IDX),
            ("1ull << VIRTIO_F_VERSION_1", feature::VERSION_1),
            ("1ull << VIRTIO_F_RING_PACKED", feature::RING_PACKED),
            ("VIRTIO_CONFIG_S_ACKNOWLEDGE", status::ACKNOWLEDGE.into()),
            ("VIRTIO_CONFIG_S_DRIVER", status::DRIVER.into()),
            ("VIRTIO_CONFIG_S_DRIVER_OK", status::DRIVER_OK.into()),
            ("VIRTIO_CONFIG_S_FEATURES_OK", status::FEATURES_OK.into()),
            ("VIRTIO_CONFIG_S_NEEDS_RESET", status::DEVICE_NEEDS_RESET.into()),
            ("VIRTIO_MMIO_CONFIG", MMIO_CONFIG_OFFSET.into()),
        ],
    );
}

#[test]
fn descriptors_of_both_formats() {
    assert_matches(
        &["linux/virtio_ring.h"],
        &[
            ("sizeof(struct vring_desc)", descriptor::BYTES as u64),
            ("sizeof(struct vring_packed_desc)", descriptor::BYTES as u64),
            ("VRING_DESC_ALIGN_SIZE", descriptor::ALIGN_BYTES as u64),
            ("offsetof(struct vring_desc, addr)", descriptor::ADDRESS_OFFSET as u64),
            ("offsetof(struct vring_packed_desc, addr)", descriptor::ADDRESS_OFFSET as u64),
            ("offsetof(struct vring_desc, len)", descriptor::LEN_OFFSET as u64),
            ("offsetof(struct vring_packed_desc, len)", descriptor::LEN_OFFSET as u64),
            ("offsetof(struct vring_desc, flags)", split::DESCRIPTOR_FLAGS_OFFSET as u64),
            ("offsetof(struct vring_desc, next)", split::DESCRIPTOR_NEXT_OFFSET as u64),
            ("offsetof(struct vring_packed_desc, id)", packed::DESCRIPTOR_ID_OFFSET as u64),
            ("offsetof(struct vring_packed_desc, flags)", packed::DESCRIPTOR_FLAGS_OFFSET as u64),
            ("VRING_DESC_F_NEXT", descriptor::NEXT.into()),
            ("VRING_DESC_F_WRITE", descriptor::WRITE.into()),
            ("VRING_DESC_F_INDIRECT", descriptor::INDIRECT.into()),
            ("1 << VRING_PACKED_DESC_F_AVAIL", packed::AVAIL.into()),
            ("1 << VRING_PACKED_DESC_F_USED", packed::USED.into()),
        ],
    );
}

#[test]
fn the_split_rings() {
    assert_matches(
        &["linux/virtio_ring.h"],
        &[
            ("VRING_AVAIL_ALIGN_SIZE", split::AVAIL_ALIGN_BYTES as u64),
            ("VRING_USED_ALIGN_SIZE", split::USED_ALIGN_BYTES as u64),
            ("offsetof(struct vring_avail, flags)", split::FLAGS_OFFSET as u64),
            ("offsetof(struct vring_used, flags)", split::FLAGS_OFFSET as u64),
            ("offsetof(struct vring_avail, idx)", split::INDEX_OFFSET as u64),
            ("offsetof(struct vring_used, idx)", split::INDEX_OFFSET as u64),
            ("offsetof(struct vring_avail, ring[0])", split::avail_entry_offset(0) as u64),
            ("offsetof(struct vring_used, ring[0])", split::used_entry_offset(0) as u64),
            ("offsetof(struct vring_avail, ring[256])", split::avail_entry_offset(256) as u64),
            ("offsetof(struct vring_used, ring[256])", split::used_entry_offset(256) as u64),
            ("offsetof(struct vring_used_elem, len)", split::USED_LEN_OFFSET as u64),
            ("VRING_AVAIL_F_NO_INTERRUPT", split::NO_INTERRUPT.into()),
            ("VRING_USED_F_NO_NOTIFY", split::NO_NOTIFY.into()),
            // vring_size with an alignment of 4: the descriptors and both rings, with padding
            // between.
            (
                "16 * 256 + ((sizeof(__virtio16) * (3 + 256) + 3) & ~3ull)",
                (descriptor::BYTES * 256 + split::avail_bytes(256).next_multiple_of(4)) as u64,
            ),
            (
                "sizeof(__virtio16) * 3 + sizeof(struct vring_used_elem) * 256",
                split::used_bytes(256) as u64,
            ),
        ],
    );
}

#[test]
fn the_packed_ring() {
    assert_matches(
        &["linux/virtio_ring.h"],
        &[
            ("sizeof(struct vring_packed_desc_event)", packed::EVENT_BYTES as u64),
            (
                "offsetof(struct vring_packed_desc_event, off_wrap)",
                packed::EVENT_POSITION_OFFSET as u64,
            ),
            ("offsetof(struct vring_packed_desc_event, flags)", packed::EVENT_FLAGS_OFFSET as u64),
            ("VRING_PACKED_EVENT_FLAG_ENABLE", packed::EVENT_ENABLE.into()),
            ("VRING_PACKED_EVENT_FLAG_DISABLE", packed::EVENT_DISABLE.into()),
            ("VRING_PACKED_EVENT_FLAG_DESC", packed::EVENT_DESCRIPTOR.into()),
            ("1 << VRING_PACKED_EVENT_F_WRAP_CTR", packed::WRAP.into()),
        ],
    );
}

#[test]
fn block_requests() {
    let mut expected = vec![
        ("VIRTIO_BLK_T_IN", u64::from(blk::request_type::IN)),
        ("VIRTIO_BLK_T_OUT", blk::request_type::OUT.into()),
        ("VIRTIO_BLK_T_FLUSH", blk::request_type::FLUSH.into()),
        ("VIRTIO_BLK_T_GET_ID", blk::request_type::GET_ID.into()),
        ("VIRTIO_BLK_T_DISCARD", blk::request_type::DISCARD.into()),
        ("VIRTIO_BLK_T_WRITE_ZEROES", blk::request_type::WRITE_ZEROES.into()),
        ("VIRTIO_BLK_S_OK", blk::status::OK.into()),
        ("VIRTIO_BLK_S_IOERR", blk::status::IOERR.into()),
        ("VIRTIO_BLK_S_UNSUPP", blk::status::UNSUPP.into()),
        ("VIRTIO_BLK_ID_BYTES", blk::ID_BYTES as u64),
        ("VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP", blk::UNMAP.into()),
        ("sizeof(struct virtio_blk_outhdr)", RequestHeader::BYTES as u64),
        ("sizeof(struct virtio_blk_discard_write_zeroes)", Range::BYTES as u64),
    ];
    expected.extend(field_offsets!(RequestHeader, "struct virtio_blk_outhdr", {
        kind: "type",
        sector: "sector",
    }));
    expected.extend(field_offsets!(Range, "struct virtio_blk_discard_write_zeroes", {
        sector: "sector",
        sectors: "num_sectors",
        flags: "flags",
    }));
    assert_matches(&["linux/virtio_blk.h"], &expected);
}

#[test]
fn block_features_and_configuration() {
    let mut expected = vec![
        ("1ull << VIRTIO_BLK_F_SIZE_MAX", blk::feature::SIZE_MAX),
        ("1ull << VIRTIO_BLK_F_SEG_MAX", blk::feature::SEG_MAX),
        ("1ull << VIRTIO_BLK_F_RO", blk::feature::RO),
        ("1ull << VIRTIO_BLK_F_BLK_SIZE", blk::feature::BLK_SIZE),
        ("1ull << VIRTIO_BLK_F_FLUSH", blk::feature::FLUSH),
        ("1ull << VIRTIO_BLK_F_TOPOLOGY", blk::feature::TOPOLOGY),
        ("1ull << VIRTIO_BLK_F_CONFIG_WCE", blk::feature::CONFIG_WCE),
        ("1ull << VIRTIO_BLK_F_MQ", blk::feature::MQ),
        ("1ull << VIRTIO_BLK_F_DISCARD", blk::feature::DISCARD),
        ("1ull << VIRTIO_BLK_F_WRITE_ZEROES", blk::feature::WRITE_ZEROES),
        ("offsetof(struct virtio_blk_config, write_zeroes_may_unmap) + 4", Config::BYTES as u64),
        ("offsetof(struct virtio_blk_config, wce)", blk::WRITEBACK_OFFSET.into()),
    ];
    expected.extend(field_offsets!(Config, "struct virtio_blk_config", {
        capacity: "capacity",
        size_max: "size_max",
        seg_max: "seg_max",
        blk_size: "blk_size",
        physical_block_exp: "physical_block_exp",
        min_io_size: "min_io_size",
        opt_io_size: "opt_io_size",
        writeback: "wce",
        num_queues: "num_queues",
        max_discard_sectors: "max_discard_sectors",
        max_discard_seg: "max_discard_seg",
        discard_sector_alignment: "discard_sector_alignment",
        max_write_zeroes_sectors: "max_write_zeroes_sectors",
        max_write_zeroes_seg: "max_write_zeroes_seg",
        write_zeroes_may_unmap: "write_zeroes_may_unmap",
    }));
    assert_matches(&["linux/virtio_blk.h"], &expected);
}

#[test]
fn network_features() {
    assert_matches(
        &["linux/virtio_net.h"],
        &[
            ("1ull << VIRTIO_NET_F_CSUM", net::feature::CSUM),
            ("1ull << VIRTIO_NET_F_GUEST_CSUM", net::feature::GUEST_CSUM),
            ("1ull << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS", net::feature::CTRL_GUEST_OFFLOADS),
            ("1ull << VIRTIO_NET_F_MTU", net::feature::MTU),
            ("1ull << VIRTIO_NET_F_MAC", net::feature::MAC),
            ("1ull << VIRTIO_NET_F_GUEST_TSO4", net::feature::GUEST_TSO4),
            ("1ull << VIRTIO_NET_F_GUEST_TSO6", net::feature::GUEST_TSO6),
            ("1ull << VIRTIO_NET_F_GUEST_ECN", net::feature::GUEST_ECN),
            ("1ull << VIRTIO_NET_F_GUEST_UFO", net::feature::GUEST_UFO),
            ("1ull << VIRTIO_NET_F_HOST_TSO4", net::feature::HOST_TSO4),
            ("1ull << VIRTIO_NET_F_HOST_TSO6", net::feature::HOST_TSO6),
            ("1ull << VIRTIO_NET_F_HOST_ECN", net::feature::HOST_ECN),
            ("1ull << VIRTIO_NET_F_HOST_UFO", net::feature::HOST_UFO),
            ("1ull << VIRTIO_NET_F_MRG_RXBUF", net::feature::MRG_RXBUF),
            ("1ull << VIRTIO_NET_F_STATUS", net::feature::STATUS),
            ("1ull << VIRTIO_NET_F_CTRL_VQ", net::feature::CTRL_VQ),
            ("1ull << VIRTIO_NET_F_CTRL_RX", net::feature::CTRL_RX),
            ("1ull << VIRTIO_NET_F_CTRL_VLAN", net::feature::CTRL_VLAN),
            ("1ull << VIRTIO_NET_F_GUEST_ANNOUNCE", net::feature::GUEST_ANNOUNCE),
            ("1ull << VIRTIO_NET_F_MQ", net::feature::MQ),
            ("1ull << VIRTIO_NET_F_CTRL_MAC_ADDR", net::feature::CTRL_MAC_ADDR),
        ],
    );
}

#[test]
fn packets_and_the_configuration_of_a_network_device() {
    let mut expected = vec![
        ("VIRTIO_NET_S_LINK_UP", u64::from(net::status::LINK_UP)),
        ("VIRTIO_NET_S_ANNOUNCE", net::status::ANNOUNCE.into()),
        ("VIRTIO_NET_HDR_F_NEEDS_CSUM", net::flag::NEEDS_CSUM.into()),
        ("VIRTIO_NET_HDR_F_DATA_VALID", net::flag::DATA_VALID.into()),
        ("VIRTIO_NET_HDR_GSO_NONE", net::gso::NONE.into()),
        ("VIRTIO_NET_HDR_GSO_TCPV4", net::gso::TCPV4.into()),
        ("VIRTIO_NET_HDR_GSO_UDP", net::gso::UDP.into()),
        ("VIRTIO_NET_HDR_GSO_TCPV6", net::gso::TCPV6.into()),
        ("VIRTIO_NET_HDR_GSO_ECN", net::gso::ECN.into()),
        ("VIRTIO_NET_CTRL_MQ_VQ_PAIRS_MAX", net::QUEUE_PAIRS_MAX.into()),
        ("ETH_ALEN", net::MAC_BYTES as u64),
        ("ETH_HLEN", net::ETHERNET_HEADER_BYTES.into()),
        ("ETH_MIN_MTU", net::MTU_MIN.into()),
        ("sizeof(struct virtio_net_hdr_v1)", PacketHeader::BYTES as u64),
        ("offsetof(struct virtio_net_config, mac)", 0),
        ("offsetof(struct virtio_net_config, mtu) + 2", net::Config::BYTES as u64),
    ];
    expected.extend(field_offsets!(PacketHeader, "struct virtio_net_hdr_v1", {
        flags: "flags",
        gso_type: "gso_type",
        hdr_len: "hdr_len",
        gso_size: "gso_size",
        csum_start: "csum_start",
        csum_offset: "csum_offset",
        num_buffers: "num_buffers",
    }));
    type NetConfig = net::Config;
    expected.extend(field_offsets!(NetConfig, "struct virtio_net_config", {
        status: "status",
        max_virtqueue_pairs: "max_virtqueue_pairs",
        mtu: "mtu",
    }));
    assert_matches(&["linux/virtio_net.h", "linux/if_ether.h"], &expected);
}

/// vhost-user carries the structures of the kernel's vhost, of whose regions it uses the last field
/// for the offset in the file.
#[test]
fn structures_of_vhost() {
    let mut expected = vec![
        ("sizeof(struct vhost_vring_state)", VringState::BYTES as u64),
        ("sizeof(struct vhost_vring_addr)", VringAddress::BYTES as u64),
        ("sizeof(struct vhost_memory_region)", MemoryRegion::BYTES as u64),
        ("offsetof(struct vhost_memory, regions)", MemoryTableHeader::BYTES as u64),
    ];
    expected.extend(
        field_offsets!(VringState, "struct vhost_vring_state", { index: "index", num: "num", }),
    );
    expected.extend(field_offsets!(VringAddress, "struct vhost_vring_addr", {
        index: "index",
        flags: "flags",
        descriptor: "desc_user_addr",
        used: "used_user_addr",
        available: "avail_user_addr",
        log: "log_guest_addr",
    }));
    expected
        .extend(field_offsets!(MemoryTableHeader, "struct vhost_memory", { regions: "nregions", }));
    expected.extend(field_offsets!(MemoryRegion, "struct vhost_memory_region", {
        guest_address: "guest_phys_addr",
        len_bytes: "memory_size",
        user_address: "userspace_addr",
        file_offset_bytes: "flags_padding",
    }));
    assert_matches(&["linux/vhost_types.h"], &expected);
}
