//! ublk: block devices of this host's kernel, `/dev/ublkbN`, whose requests this process serves
//! (Documentation/block/ublk.rst of the kernel).
//!
//! [`UblkControl`] makes, starts, recovers and removes devices. A [`UblkQueue`] takes the requests
//! of one queue of a device, and completes them.

mod control;
mod memory;
mod partitions;
mod queue;
mod wire;

pub use control::{UblkControl, UblkError, ublk_numbers};
pub use memory::{prepare_ublk_memory, ublk_memory_prepared};
pub use partitions::UblkPartitions;
pub use queue::{IoResult, UblkQueue, open_ublk_device};
pub use wire::{IoDescriptor, UblkInfo, UblkParameters, UblkState, ublk_flag};
