//! Reports of switches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_net::PortCounts;

/// A switch, with its ports and the addresses that it knows.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SwitchReport {
    /// Its name in the configuration.
    pub name: String,
    /// The sidecore that serves it.
    pub sidecore: String,
    /// Its ports.
    pub ports: Vec<PortReport>,
    /// The addresses that it knows, by VLAN.
    pub stations: Vec<StationReport>,
}

/// A port of a switch.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct PortReport {
    /// The device.
    pub name: String,
    /// Whether frames pass: the guest's driver has started its queues, or the interface is up.
    pub is_up: bool,
    /// Whether the port is blocked for a while because of a loop.
    pub is_blocked: bool,
    /// Its counters: *in* is from the guest, *out* is to it, as RFC 2863 has them for a switch.
    pub counters: PortCounts,
}

/// An address that a switch knows.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct StationReport {
    /// The Ethernet address.
    pub mac: String,
    /// Its VLAN.
    pub vlan: u16,
    /// The port that it is on.
    pub port: String,
    /// Whether the configuration has it. Others were learnt, and are forgotten after a silence.
    pub is_fixed: bool,
    /// The seconds since its last frame.
    pub silent_s: u64,
}
