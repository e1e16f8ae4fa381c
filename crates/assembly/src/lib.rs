//! From a checked spec to a running graph: stores opened, sidecores polling, devices served.
//!
//! # Architecture
//!
//! [`Assembly::start`] takes a [`Spec`](spec::Spec), plain data, and makes what it names: a store for each name that a
//! device leads to, a pinned thread with a reactor for each sidecore, and for each device a vhost-user server on its
//! socket. A device's queues are spread over the sidecores that it names; a queue is started when the guest's driver
//! starts it, and until then costs nothing but its counters.
//!
//! # Threads
//!
//! The sidecores' threads do I/O and nothing else. The servers' threads follow their VMMs; starting and stopping a
//! queue crosses from them to a sidecore by mail and waits for the acknowledgement. Whoever asks for a
//! [`report`] reads counters and crosses over nowhere.
//!
//! # Errors
//!
//! Starting is all or nothing ([`AssemblyError`]). Afterwards a device that its guest or its store breaks stops alone,
//! and its report says why.
#![forbid(unsafe_code)]

mod assembly;
mod error;
pub mod machine;
pub mod report;
mod served;
mod sidecore;
pub mod spec;
mod stores;

pub use assembly::Assembly;
pub use error::AssemblyError;
