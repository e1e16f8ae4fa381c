//! Network frames: the seam between stations and the switch, and the switch.
//!
//! # Architecture
//!
//! A station (the NIC of a guest, an uplink, a TAP) is a *port* of the switch and reaches it
//! through one or several [`PortQueue`]s. A queue lends the frames that its station sends, where
//! they are, in the station's memory, and buffers for frames to the station. The switch copies each
//! frame once, out of the one memory into the other.
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

mod address;
mod announcement;
mod bytes;
mod config;
#[cfg(feature = "contract")]
pub mod contract;
mod deliver;
mod floods;
mod flow;
mod frames;
mod guard;
mod head;
mod held;
mod offload;
mod plain;
mod port;
mod ports;
mod stage;
mod stages;
mod stats;
mod switch;
mod table;
mod trace;
mod unit;

pub use address::{MacAddress, NotAMacAddress};
pub use config::{
    DEFAULT_VLAN, FloodLimit, Guard, Ipv6Network, PORT_QUEUES_MAX, PORTS_MAX, PortConfig, PortKind,
    QUEUES_MAX, SwitchError, SwitchOptions, VLAN_MAX, VlanSet, Vlans,
};
pub use frames::{BATCH, FRAMES_MAX, Frames};
pub use head::HEAD_BYTES;
pub use held::{Harm, HeldFrames};
pub use plain::PlainFlow;
pub use port::{Loan, NoBuffers, Offloads, PortQueue, Properties, QueueState};
pub use ports::{PortId, QueueId};
pub use stage::{DropCause, Dropped, FrameStage, StageFrame, StagePlace, StageRun, Verdict, Way};
pub use stages::StageFailure;
pub use stats::{DropReason, PortCounts, PortStats};
pub use switch::{StationEntry, Switch, SwitchEvent, WAIT_TURNS};
pub use trace::{DropTrace, DroppedFrame, TRACES_MAX, TraceId};
pub use unit::SwitchUnit;
