//! From a checked spec to a running graph: stores opened, sidecores polling, devices served.
//!
//! # Architecture
//!
//! [`Assembly::start`] takes a [`Spec`](spec::Spec), plain data, and makes what it names: a store for each name that a
//! device leads to, a pinned thread with a reactor for each sidecore, and for each device a front end (virtio-blk or NVMe)
//! with its transport (vhost-user or vfio-user) on its socket. A device's queues are spread over the sidecores that it
//! names; a queue is started when the guest's driver starts it, and until then costs nothing but its counters.
//!
//! A store may be owned by a controller, which divides it into volumes; a virtual function of it is a store like any
//! other. Devices come and go while the assembly runs ([`Assembly::add_device`], [`Assembly::remove_device`]), and volumes
//! are managed through a [`ControllerHandle`], or by the host of an NVMe function in front of the controller's physical
//! function, with NVMe's commands.
//!
//! Each of these changes is planned before it is applied: the plan is a pure function of the parts
//! that run and of the specification that is wanted.
//!
//! # Threads
//!
//! The sidecores' threads do I/O and nothing else. The servers' threads follow their VMMs; starting and stopping a
//! queue crosses from them to a sidecore by mail and waits for the acknowledgement. Whoever asks for a
//! [`report`] reads counters and crosses over nowhere. Controllers have threads of their own, for what their functions
//! miss and for commits; whoever manages volumes waits for those. One that an NVMe host manages has a thread that waits
//! for it.
//!
//! # The next process
//!
//! A VMM that speaks vfio-user connects once. [`Assembly::hand_over`] ends in order but leaves such connections open, each a
//! [`LeftDevice`], and [`Assembly::take_over`] in another process goes on with them: the guest notices a pause.
//!
//! # Errors
//!
//! Starting is all or nothing, and so is each change afterwards ([`AssemblyError`], [`OperationError`]). A device that its
//! guest or its store breaks stops alone, and its report says why.
#![forbid(unsafe_code)]

mod access;
mod assembly;
mod controllers;
mod convert;
mod core_watch;
mod crash_log;
mod disk;
mod error;
mod flush;
mod front_end;
mod graph;
mod host;
mod left;
pub mod machine;
pub mod offline;
mod operation;
mod plan;
pub mod report;
mod served;
pub mod spec;
mod stores;
mod volume_service;
mod wanted;

pub use access::AccountError;
pub use assembly::Assembly;
pub use controllers::{BlocksOf, ControllerHandle};
pub use error::AssemblyError;
pub use left::LeftDevice;
pub use operation::{ErrorKind, OperationError};
pub use plan::dry_run;
