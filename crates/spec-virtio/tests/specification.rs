//! Numbers for which the machine has no headers, typed from the tables of the specifications.
#![forbid(unsafe_code)]

use sidecore_spec_virtio::net::{self, Config};
use sidecore_spec_virtio::vhost_user::{
    BACKEND_CONFIG_CHANGE, ConfigHeader, FLAGS_NEED_REPLY, FLAGS_REPLY, FLAGS_VERSION,
    FLAGS_VERSION_MASK, MemoryRegion, MessageHeader, NO_FD, PROTOCOL_FEATURES, Request,
    SingleMemoryRegion, protocol,
};
use sidecore_spec_virtio::{MAX_QUEUE_SIZE, packed, split};

/// vhost-user, "Front-end message types": each title and the `:id:` below it.
const FRONT_END_MESSAGES: &[(&str, u32)] = &[
    ("GET_FEATURES", 1),
    ("SET_FEATURES", 2),
    ("SET_OWNER", 3),
    ("RESET_OWNER", 4),
    ("SET_MEM_TABLE", 5),
    ("SET_LOG_BASE", 6),
    ("SET_LOG_FD", 7),
    ("SET_VRING_NUM", 8),
    ("SET_VRING_ADDR", 9),
    ("SET_VRING_BASE", 10),
    ("GET_VRING_BASE", 11),
    ("SET_VRING_KICK", 12),
    ("SET_VRING_CALL", 13),
    ("SET_VRING_ERR", 14),
    ("GET_PROTOCOL_FEATURES", 15),
    ("SET_PROTOCOL_FEATURES", 16),
    ("GET_QUEUE_NUM", 17),
    ("SET_VRING_ENABLE", 18),
    ("SEND_RARP", 19),
    ("NET_SET_MTU", 20),
    ("SET_BACKEND_REQ_FD", 21),
    ("IOTLB_MSG", 22),
    ("SET_VRING_ENDIAN", 23),
    ("GET_CONFIG", 24),
    ("SET_CONFIG", 25),
    ("CREATE_CRYPTO_SESSION", 26),
    ("CLOSE_CRYPTO_SESSION", 27),
    ("POSTCOPY_ADVISE", 28),
    ("POSTCOPY_LISTEN", 29),
    ("POSTCOPY_END", 30),
    ("GET_INFLIGHT_FD", 31),
    ("SET_INFLIGHT_FD", 32),
    ("GPU_SET_SOCKET", 33),
    ("RESET_DEVICE", 34),
    ("VRING_KICK", 35),
    ("GET_MAX_MEM_SLOTS", 36),
    ("ADD_MEM_REG", 37),
    ("REM_MEM_REG", 38),
    ("SET_STATUS", 39),
    ("GET_STATUS", 40),
    ("GET_SHARED_OBJECT", 41),
    ("SET_DEVICE_STATE_FD", 42),
    ("CHECK_DEVICE_STATE", 43),
    ("GET_SHMEM_CONFIG", 44),
];

#[test]
fn messages_of_vhost_user() {
    for (name, code) in FRONT_END_MESSAGES {
        let request = Request::from_code(*code);
        assert_eq!((request.name(), request.code()), (*name, *code));
    }
    let unnamed = FRONT_END_MESSAGES.len() as u32 + 1;
    for code in [0, unnamed, u32::MAX] {
        assert_eq!(Request::from_code(code), Request::Unknown(code));
    }
    // "Back-end message types".
    assert_eq!(BACKEND_CONFIG_CHANGE, 2);
}

/// vhost-user, "Protocol features", and bit 30 of the virtio features ("Feature bits").
#[test]
fn features_of_vhost_user() {
    assert_eq!(PROTOCOL_FEATURES, 0x4000_0000);
    assert_eq!(protocol::MQ, 0x1);
    assert_eq!(protocol::RARP, 0x4);
    assert_eq!(protocol::REPLY_ACK, 0x8);
    assert_eq!(protocol::NET_MTU, 0x10);
    assert_eq!(protocol::BACKEND_REQ, 0x20);
    assert_eq!(protocol::CONFIG, 0x200);
    assert_eq!(protocol::RESET_DEVICE, 0x2000);
    assert_eq!(protocol::CONFIGURE_MEM_SLOTS, 0x8000);
    assert_eq!(protocol::STATUS, 0x1_0000);
}

/// vhost-user, "Header" and "Payload": the pictures give each field's place and width.
#[test]
fn layouts_of_vhost_user() {
    let flags = FLAGS_VERSION | FLAGS_REPLY | FLAGS_NEED_REPLY;
    let header = MessageHeader { request: 24, flags, payload_bytes: 0x102 };
    assert_eq!(header.encode(), [24, 0, 0, 0, 0b1101, 0, 0, 0, 2, 1, 0, 0]);
    assert_eq!(FLAGS_VERSION_MASK, 0b11);
    assert_eq!(NO_FD, 0x100);

    let config = ConfigHeader { offset_bytes: 1, size_bytes: 2, flags: 3 };
    assert_eq!(config.encode(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);

    let region =
        MemoryRegion { guest_address: 1, len_bytes: 2, user_address: 3, file_offset_bytes: 4 };
    let single = SingleMemoryRegion { region }.encode();
    assert_eq!(
        (single[..8].to_vec(), single[8..].to_vec()),
        (vec![0; 8], region.encode().to_vec())
    );
}

/// virtio 1.2, 2.7, 2.8 and 2.8.14.
#[test]
fn limits_of_virtqueues() {
    assert_eq!(u32::from(MAX_QUEUE_SIZE), 1 << 15);
    assert_eq!((packed::EVENT_ALIGN_BYTES, packed::EVENT_FLAGS_MASK), (4, 0b11));
}

/// A descriptor's second word, from the structures in virtio 1.2, 2.7.5 and 2.8.13: `le32 len; le16
/// flags; le16 next;` and `le32 len; le16 id; le16 flags;`.
#[test]
fn the_second_word_of_a_descriptor() {
    let word = u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]);
    let tail = split::Tail { len_bytes: 0x0403_0201, flags: 0x0605, next: 0x0807 };
    assert_eq!((split::Tail::from_word(word), tail.to_word()), (tail, word));
    let tail = packed::Tail { len_bytes: 0x0403_0201, id: 0x0605, flags: 0x0807 };
    assert_eq!((packed::Tail::from_word(word), tail.to_word()), (tail, word));
}

/// virtio 1.3, 5.1.3 and 5.1.6: UDP segmentation, which older headers lack.
#[test]
fn udp_segmentation() {
    let bits = [net::feature::GUEST_USO4, net::feature::GUEST_USO6, net::feature::HOST_USO];
    assert_eq!(bits.map(u64::trailing_zeros), [54, 55, 56]);
    assert_eq!(net::gso::UDP_L4, 5);
}

/// virtio 1.2, 5.1.2 and 5.1.4: receiveq1 is 0, transmitq1 is 1; `u8 mac[6]` comes first.
#[test]
fn queues_and_the_address_of_a_network_device() {
    assert_eq!([0, 1, 2, 3].map(net::is_receive), [true, false, true, false]);
    let mac = [2, 0, 0, 0, 0, 7];
    assert_eq!(Config { mac, ..Config::default() }.encode()[..6], mac);
}
