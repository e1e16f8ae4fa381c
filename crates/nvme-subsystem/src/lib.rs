//! NVM subsystems: namespace management, namespace attachment and secondary controllers (NVMe base
//! 2.0, 8.11 and 8.26), as the host of a physical function sees and uses them.
//!
//! Namespace 1 of the physical function is the whole store. The allocated namespaces are the
//! volumes and snapshots on the store; the secondary controllers are the virtual functions that
//! were configured to serve one of its volumes. To its own host, each function is alone in a
//! subsystem; the numbers here are those of the physical function:
//!
//! - A namespace's number is 2 or more. Volume `ns-N` has the number N if that is free; others have
//!   the lowest that are free, in the order in which they were made. A number stays for as long as
//!   the volume lives and the daemon runs.
//! - A secondary controller's number (CNTLID) is 1 or more. It stays with the device's name for as
//!   long as the daemon runs.
//! - [`SubsystemState`] takes both to the next daemon, for a host that stays connected.
//!
//! Queries are answered from a table that is made anew after each change of volumes or functions,
//! so that no function waits with its lock held. Changes are carried out one after the other by a
//! thread of the subsystem, through the [`VolumeService`] of the program that runs the functions.
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

mod names;
mod service;
mod state;
mod subsystem;
mod table;

pub use names::{NamespaceIds, identity};
pub use service::{Function, Store, Volume, VolumeService};
pub use state::{FunctionState, Numbers, SubsystemState, restore};
pub use subsystem::{Subsystem, Subsystems};
