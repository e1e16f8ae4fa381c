//! Ports of a switch to the rest of the network: interfaces of this host's kernel.
//!
//! * [`TapQueue`]: a TAP interface, behind which is the kernel itself.
//! * [`PacketQueue`]: an Ethernet interface, behind which is a network.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod looks;
mod monitor;
mod packet;
mod room;
mod tap;

pub use monitor::{EthernetMonitor, InterfaceMonitor, InterfaceState};
pub use packet::PacketQueue;
pub use tap::{TapOptions, TapQueue};
