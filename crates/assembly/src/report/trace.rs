//! Reports of frames that switches drop.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_net::MacAddress;
use sidecore_stage_capture::Flow;

/// The way of a frame through a port, in the words of rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DropWay {
    /// From the guest.
    #[default]
    From,
    /// To it.
    To,
}

/// Frames of one flow that a port has dropped for one reason, in about a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DropReport {
    /// When the first one was dropped, in nanoseconds since 1970.
    pub first_ns: u64,
    /// When the last one was.
    pub last_ns: u64,
    /// The port that has dropped and counted them.
    pub port: String,
    /// Their way through that port: `from` its guest, or `to` it.
    pub way: DropWay,
    /// The port that they came in by, if the switch knows their sender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sender: Option<String>,
    /// Their VLAN, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Their flow, if they could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<FlowReport>,
    /// Whether they are of several flows, because there were too many to count each.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub others: bool,
    /// The reason, in the words of the port's counters of drops: `rule_out`, for instance.
    pub reason: String,
    /// The number of the firewall's rule that has dropped them, counted from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<u32>,
    /// The rule, unless the rules were replaced meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule_text: Option<String>,
    /// Their number.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames that no report counts, since the last report: there were too many.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes references
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The addresses of a frame.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FlowReport {
    /// The Ethernet address of the sender.
    pub source_mac: String,
    /// That of the receiver.
    pub target_mac: String,
    /// The type of the payload.
    pub ether_type: u16,
    /// Of IP and ARP: the address of the sender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Of IP and ARP: the address of the receiver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Of IP: the number of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// Of TCP, UDP and SCTP: the port of the sender.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_port: Option<u16>,
    /// Of TCP, UDP and SCTP: the port of the receiver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_port: Option<u16>,
}

impl From<&Flow> for FlowReport {
    fn from(flow: &Flow) -> Self {
        Self {
            source_mac: MacAddress(flow.source_mac).to_string(),
            target_mac: MacAddress(flow.target_mac).to_string(),
            ether_type: flow.ether_type,
            source: flow.addresses.map(|(source, _)| source.to_string()),
            target: flow.addresses.map(|(_, target)| target.to_string()),
            protocol: flow.protocol,
            source_port: flow.ports.map(|(source, _)| source),
            target_port: flow.ports.map(|(_, target)| target),
        }
    }
}
