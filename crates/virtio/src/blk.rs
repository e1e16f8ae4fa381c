//! virtio-blk (virtio 1.2, 5.2).
//!
//! [`BlkDevice`] is what all of a disk's queues and its control path share;
//! [`BlkQueue`] is one queue on its sidecore, from the ring to the store and
//! back. [`request`] is the parser in between.

mod config;
mod device;
mod log;
mod queue;
pub mod request;

pub use config::BlkOptions;
pub use device::BlkDevice;
pub use log::Log;
pub use queue::{BlkQueue, StopReply};
