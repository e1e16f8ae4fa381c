//! Reports of switches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_net::PortCounts;
use sidecore_stage_capture::CaptureCounts;
use sidecore_stage_firewall::{RuleCounts, TableCounts};
use sidecore_stage_wire::WireCounts;

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

/// A stage of a port that has panicked.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StageFailureReport {
    /// Which: `wire`, `limit`, `firewall`, `capture`.
    pub stage: String,
    /// The message of its panic.
    pub message: String,
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
    /// Whether another port of its team carries the frames, and this one stands by for it.
    #[serde(default)]
    pub is_standby: bool,
    /// The stage that has panicked. The port drops all frames until the stage is set anew or taken
    /// away; it goes on without a `capture`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<StageFailureReport>,
    /// Its counters: *in* is from the guest, *out* is to it, as RFC 2863 has them for a switch.
    pub counters: PortCounts,
    /// Its firewall, if it has rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firewall: Option<FirewallReport>,
    /// Its rate limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<String>,
    /// Its wire, if it was made a bad one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire: Option<WireReport>,
    /// The capture of its frames, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture: Option<CaptureReport>,
}

/// A capture of the frames of a port.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CaptureReport {
    /// Its counters.
    pub counters: CaptureCounts,
}

/// A bad wire.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct WireReport {
    /// Its faults, as they were set.
    pub faults: String,
    /// The fates of frames since then.
    pub counters: WireCounts,
}

/// The firewall of a port.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct FirewallReport {
    /// Its rules, in their order.
    pub rules: Vec<RuleReport>,
    /// The counters of frames that no rule matches, which pass.
    pub unmatched: RuleCounts,
    /// The counters of the connections, zeros if no rule asks for a state.
    pub table: TableCounts,
}

/// A rule of a firewall.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RuleReport {
    /// The rule.
    pub text: String,
    /// Its counters, since it was set.
    pub counters: RuleCounts,
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
