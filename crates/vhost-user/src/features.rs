//! vhost-user's own feature bits.

/// VHOST_USER_F_PROTOCOL_FEATURES, vhost-user's bit among the virtio features:
/// protocol features exist, and once it is accepted rings start disabled.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// VHOST_USER_PROTOCOL_F_MQ: the front end may ask how many queues there are.
pub const PROTOCOL_MQ: u64 = 1 << 0;
/// VHOST_USER_PROTOCOL_F_REPLY_ACK: any request may ask for an acknowledgement.
pub const PROTOCOL_REPLY_ACK: u64 = 1 << 3;
/// VHOST_USER_PROTOCOL_F_BACKEND_REQ: the back end may send requests of its own,
/// on a socket that the front end hands over.
pub const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
/// VHOST_USER_PROTOCOL_F_CONFIG: the back end serves the configuration space.
pub const PROTOCOL_CONFIG: u64 = 1 << 9;
/// VHOST_USER_PROTOCOL_F_RESET_DEVICE: the back end can be reset.
pub const PROTOCOL_RESET_DEVICE: u64 = 1 << 13;
/// VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS: memory regions come and go one by
/// one.
pub const PROTOCOL_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// VHOST_USER_PROTOCOL_F_STATUS: the front end passes the device status on.
pub const PROTOCOL_STATUS: u64 = 1 << 16;

/// The protocol features that a [`Session`](crate::Session) offers.
pub const OFFERED_PROTOCOL: u64 = PROTOCOL_MQ
    | PROTOCOL_REPLY_ACK
    | PROTOCOL_BACKEND_REQ
    | PROTOCOL_CONFIG
    | PROTOCOL_RESET_DEVICE
    | PROTOCOL_CONFIGURE_MEM_SLOTS
    | PROTOCOL_STATUS;
