//! What people and programs see of a daemon: its configuration file, its control API, its metrics.
//!
//! # Configuration
//!
//! [`Config::load`] reads one TOML file and checks it to the end, first the text and then what it asks of the machine,
//! without starting or changing anything. It answers with what an assembly runs, or with every problem there is, each
//! with its place and its remedy.
//!
//! # Control API
//!
//! [`Api`] serves HTTP over a Unix socket: `/v1/devices`, `/v1/sidecores`, `/v1/stats` and `/v1/controllers` in JSON and
//! `/metrics` for Prometheus. It reads counters that the sidecores write without being asked, so that asking costs them
//! nothing; devices are added and removed, and volumes managed, while they work.
//! [`Client`] is the other side. Both hide the async runtime that they use, which is the only one in the project.
//!
//! # Errors
//!
//! The configuration was written by people in a hurry, so nothing in it may panic the daemon, and every message says
//! what to do.
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

mod api;
mod client;
pub mod config;
mod metrics;
mod source;

pub use api::{
    Api, BindError, Controllers, CreateVolume, Devices, ExtentsQuery, MetricsQuery, Named, NewDevice, Place, Prune,
    Quota, Resize, Share, Sidecores, Socket, Volumes,
};
pub use client::{Client, ClientError};
pub use config::{Config, Depth, Problem, Problems};
/// What is done to a store while no daemon has it.
pub use sidecore_assembly::offline;
/// What a running assembly says about itself: the JSON of the API.
pub use sidecore_assembly::report;
pub use source::Source;
