//! NVMe: the controller model, its queues, and the PCI function that it is.
//!
//! [`PciFunction`] is the seam to the transport, [`QueueHost`] the one to the sidecores that poll
//! the queues. The controller itself runs where the transport calls it; its I/O queues are
//! [`Pollable`](sidecore_reactor::Pollable)s on sidecores, one for each completion queue with the
//! submission queues that complete into it.
//!
//! The guest is hostile. Its memory and registers are read once and checked. An error that has a
//! status in the specification gets that status; an error that the specification calls fatal makes
//! this controller fatal (CSTS.CFS), and no other.
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

mod admin;
mod bytes;
mod command;
mod controller;
mod done;
mod handover;
mod host;
mod identity;
mod inbox;
pub mod io;
mod manager;
mod namespace;
mod pci;
mod pointer;
mod registers;
mod statistics;
mod status;
mod worker;

pub use admin::errors::ErrorLog;
pub use command::{Command, Fuse, PointerKind};
pub use done::Done;
pub use handover::{
    CompletionQueueState, EntryState, FunctionState, HandOver, HandedOver, PositionState,
    QueuesState, SubmissionQueueState, TakeOverError,
};
pub use host::{CompletionQueueSetup, QueueHost, StartError, SubmissionQueueSetup};
pub use identity::Identity;
pub use inbox::QueueEvent;
pub use manager::{
    AllocatedNamespace, CreateNamespace, FlexibleResources, ManageError, Manager, Reply, Resource,
    SecondaryController,
};
pub use namespace::Namespace;
pub use pci::{
    AccessError, BarInfo, FunctionSetup, Interrupts, MAX_QUEUE_PAIRS, MappableArea, NvmeFunction,
    PciFunction, Region,
};
pub use pointer::{MAX_TRANSFER_BYTES, MAX_TRANSFER_PAGES_LOG2};
pub use statistics::{Activity, Statistics};
pub use status::Status;
pub use worker::ControllerWorker;
