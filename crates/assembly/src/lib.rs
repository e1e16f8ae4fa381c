//! From a checked specification to a running graph of stores, sidecores and devices.
//!
//! # Architecture
//!
//! [`Assembly::start`] takes a [`Spec`](spec::Spec), which is plain data, and starts its parts:
//! each store that a device leads to, a pinned thread with a reactor for each sidecore, and for
//! each device a front end (virtio-blk or NVMe) with its transport (vhost-user or vfio-user) on a
//! socket. The device's queues are spread over its sidecores. The guest's driver starts a queue;
//! before that the queue costs its counters only.
//!
//! A controller owns a store and divides it into volumes. A device uses a virtual function of the
//! controller like any other store. Devices are added and removed while the assembly runs
//! ([`Assembly::add_device`], [`Assembly::remove_device`]). Volumes are managed through a
//! [`ControllerHandle`], or with NVMe's commands by the host of an NVMe function in front of the
//! controller's physical function.
//!
//! Each change is planned before it is applied: the plan is a pure function of the running parts
//! and of the specification that is wanted.
//!
//! # Threads
//!
//! Sidecores' threads do I/O only. The socket service's threads serve the VMMs; to start or stop a
//! queue they send mail to its sidecore and wait for the acknowledgement. A [`report`] is read from
//! counters and sends no mail. Controllers have threads of their own for misses and commits, and
//! every method that manages volumes waits for them. A controller that an NVMe host manages has one
//! more thread, which waits in the host's place.
//!
//! # The next process
//!
//! Some VMMs cannot connect again. So [`Assembly::hand_over`] ends an assembly in order and exports
//! the VMMs' connections, each as a [`LeftDevice`]. [`Assembly::take_over`] resumes them in another
//! process: the guest notices a pause.
//!
//! # Errors
//!
//! A start succeeds whole or leaves nothing behind, and so does each later change
//! ([`AssemblyError`], [`OperationError`]). A device that its guest or its store breaks stops
//! alone, and its report has the reason.
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
mod mirrors;
pub mod offline;
mod operation;
mod plan;
mod recordings;
mod remote;
pub mod report;
mod schedules;
mod served;
pub mod spec;
mod stores;
mod swap;
mod switches;
mod volume_service;
mod wanted;

pub use access::AccountError;
pub use assembly::Assembly;
pub use controllers::{BlocksOf, ControllerHandle};
pub use disk::AddedStage;
pub use error::AssemblyError;
pub use left::LeftDevice;
pub use operation::{ErrorKind, OperationError};
pub use plan::dry_run;
pub use remote::GivenUp;
pub use sidecore_controller::{DEFAULT_DEDUP_BYTES_PER_S, DedupOptions};
pub use sidecore_stage_capture::SNAPLEN_MAX;
pub use switches::{Capture, Trace};
