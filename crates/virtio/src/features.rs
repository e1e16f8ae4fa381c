//! Feature bits that are not a device type's own (virtio 1.2, chapter 6).

/// VIRTIO_F_INDIRECT_DESC: chains may live in a table of their own.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX: notifications are asked for by index.
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1: not a legacy device.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED: the packed ring format.
pub const RING_PACKED: u64 = 1 << 34;
