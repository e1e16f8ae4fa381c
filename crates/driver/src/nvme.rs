//! An NVMe controller behind a vfio-user socket.
//!
//! To follow a connection: `wire.rs` has the messages, [`Transport`] the device that they reach
//! (regions, interrupts, DMA), [`NvmeClient`] the controller that the device is (registers, admin
//! queue, identification), and [`NvmeQueue`] its I/O queue pairs, whose requests never touch the
//! socket where the controller lets its doorbells be mapped.

mod admin;
mod bring_up;
mod buffer;
mod client;
mod command;
mod doorbells;
mod identify;
mod loopback;
mod options;
mod plan;
mod queue;
mod raw;
mod registers;
mod status;
mod submit;
mod transport;
mod wire;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use admin::{AdminCompletion, NvmeAdmin};
pub use buffer::DmaBuffer;
pub use client::NvmeClient;
pub use command::NvmeCommand;
pub use identify::{NvmeControllerInfo, NvmeNamespaceInfo};
pub use loopback::NvmeLoopback;
pub use options::{DataPointers, NvmeOptions};
pub use queue::{NvmeCompletion, NvmeQueue};
pub use registers::NvmeCapabilities;
pub use sidecore_spec_nvme::opcode::{admin as admin_opcode, nvm as io_opcode};
pub use sidecore_spec_nvme::{register, vfio};
pub use status::NvmeStatus;
pub use transport::{DeviceInfo, IrqInfo, MappableArea, RegionInfo, Transport};
pub use wire::RawMessage;
