//! virtio-net (virtio 1.2, 5.1), without its control queue, which a VMM serves itself.
//!
//! [`NetDevice`] is what all queues of a NIC share; a [`NetPair`] is a receive queue and its
//! transmit queue, as a queue of a switch's port.

mod device;
mod half;
mod options;
mod pair;

pub use device::NetDevice;
pub use options::NetOptions;
pub use pair::NetPair;
