//! Feature bits that belong to no device type (chapter 6).

/// VIRTIO_F_INDIRECT_DESC: a descriptor may name a table of descriptors.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX: each side names the index at which it wants a notification.
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_VERSION_1: not a legacy device.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED: the packed ring format.
pub const RING_PACKED: u64 = 1 << 34;
