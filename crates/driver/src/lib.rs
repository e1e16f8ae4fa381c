//! User-space guest drivers: a virtio-blk disk or a virtio-net NIC over a vhost-user socket, or an
//! NVMe controller over a vfio-user socket, with no guest, no kernel and no VMM.
//!
//! The benches load a daemon with it, the tests attack one with it, and an application that wants a
//! disk's full speed links it. It works with any vhost-user-blk back end, and negotiates down to
//! what that one has.
//!
//! A [`BlkClient`] is the connection; each of its [`BlkQueue`]s may be used by a thread of its own.
//! A request lives in a [`Slot`], which has a data buffer in memory that the device sees:
//!
//! ```no_run
//! use std::time::Duration;
//! use sidecore_driver::{BlkClient, ClientOptions, Status};
//! use sidecore_units::Sector;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut client = BlkClient::connect("/run/disk.sock", &ClientOptions::default())?;
//! println!("{} sectors", client.config().capacity_sectors);
//! let queue = client.queue(0).ok_or("no queue")?;
//!
//! let slot = queue.take_slot().ok_or("all slots are in use")?;
//! queue.submit_read(slot, Sector(0), 4096)?;
//! queue.publish()?;
//!
//! let mut completions = Vec::new();
//! while queue.poll_completions(&mut completions)? == 0 {
//!     queue.wait(Duration::from_secs(1))?;
//! }
//! assert_eq!(completions[0].status, Status::Ok);
//! let mut block = [0; 4096];
//! queue.read_data(slot, 0, &mut block);
//! queue.release_slot(slot);
//! # Ok(())
//! # }
//! ```
//!
//! A slot whose request has completed may be used for the next one at once; a request of the same
//! shape (direction and length) as the slot's last then rewrites no descriptor.
//!
//! An [`NvmeClient`] and its [`NvmeQueue`]s are used in the same way:
//!
//! ```no_run
//! use std::time::Duration;
//! use sidecore_driver::{NvmeClient, NvmeOptions};
//! use sidecore_units::Sector;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut client = NvmeClient::connect("/run/function.sock", &NvmeOptions::default())?;
//! println!("{} bytes", client.namespace().len_bytes());
//! let queue = client.queue(0).ok_or("no queue")?;
//!
//! let slot = queue.take_slot().ok_or("all slots are in use")?;
//! queue.submit_read(slot, Sector(0), 4096)?;
//! queue.publish()?;
//!
//! let mut completions = Vec::new();
//! while queue.poll_completions(&mut completions)? == 0 {
//!     queue.wait(Duration::from_secs(1))?;
//! }
//! assert!(completions[0].status.is_ok());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod arena;
mod buffers;
mod client;
mod config;
mod config_watch;
mod either;
mod error;
mod event;
mod front_end;
mod loopback;
mod net;
mod nvme;
mod options;
mod queue;
mod request;
mod socket;
mod wire;

pub use client::BlkClient;
pub use config::{BlkConfig, features};
pub use config_watch::ConfigWatch;
pub use either::Queue;
pub use error::ClientError;
pub use loopback::Loopback;
pub use net::{FrameBuffer, NetClient, NetClientOptions, NetQueues};
pub use nvme::{
    AdminCompletion, DataPointers, DeviceInfo, DmaBuffer, IrqInfo, MappableArea, NvmeAdmin,
    NvmeCapabilities, NvmeClient, NvmeCommand, NvmeCompletion, NvmeControllerInfo, NvmeLoopback,
    NvmeNamespaceInfo, NvmeOptions, NvmeQueue, NvmeStatus, RawMessage, RegionInfo, Transport,
    admin_opcode, io_opcode, register, vfio,
};
pub use options::{ClientOptions, Notify};
pub use queue::{BlkQueue, Counters};
pub use request::{Completion, Operation, Piece, Slot, Status};
pub use sidecore_spec_virtio::net::PacketHeader;
pub use sidecore_spec_virtio::vhost_user::protocol;
