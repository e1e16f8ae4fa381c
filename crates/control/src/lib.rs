//! The daemon's interfaces to people and programs: the configuration file, the control API, the
//! metrics.
//!
//! # Configuration
//!
//! [`Config::load`] reads one TOML file and checks all of it, first the text and then its demands
//! on the machine, without starting or changing anything. The result is an assembly's
//! specification, or all problems, each with its place and its remedy.
//!
//! # Control API
//!
//! [`Api`] serves HTTP over a Unix socket: `/v1/devices`, `/v1/sidecores`, `/v1/stats` and
//! `/v1/controllers` in JSON and `/metrics` for Prometheus. The API reads counters that the
//! sidecores write in any case, so that a request costs the sidecores nothing. Devices are added
//! and removed, and volumes managed, while the others are served. [`Client`] is the other side.
//! Both hide their async runtime, which is the only one in the project.
//!
//! # Errors
//!
//! People write the configuration in a hurry, so no content of it may panic the daemon, and every
//! message names the remedy.
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
    Api, BindError, CaptureQuery, Controllers, CreateVolume, Dedup, Devices, ExtentsQuery,
    Invitation, LimitsOfPort, MetricsQuery, Mirrors, Named, NewClient, NewDevice, NewIohost,
    NewLeg, NewLink, NewSchedule, NewSchedules, NewServe, NewStage, Permission, Place, PortFaults,
    PortRules, Prune, Quota, RepairOfLeg, Resize, Schedules, Share, Sidecores, Socket, ToLink,
    TraceQuery, Volumes,
};
pub use client::{Client, ClientError};
pub use config::{Config, Depth, Problem, Problems};
/// Operations on a store that no daemon has opened.
pub use sidecore_assembly::offline;
/// The reports of a running assembly: the JSON of the API.
pub use sidecore_assembly::report;
/// The kinds of parts that [`Client::add_part`] adds.
pub use sidecore_assembly::spec::RemoteKind;
pub use source::Source;
