//! A firewall for one port of a switch: rules in order, and a table of connections.
//!
//! All decisions are made on the private copy of a frame's head. Rules without `ct state` need no
//! table; with it, connections of TCP, UDP and ICMP echo are tracked, and so are other protocols by
//! their addresses. The table belongs to one port: no other port can fill it.
//!
//! # Fragments and headers
//!
//! A frame whose IP and transport headers are not whole within the copy is dropped. Later fragments
//! have no ports: with tracking they share the verdict of the first one, which has to pass before
//! them; without it, rules with ports do not match them. Fragments of TCP that could overwrite the
//! header of the first one are dropped (RFC 1858, RFC 3128).
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

mod classes;
mod connection;
mod counts;
mod firewall;
mod packet;
mod parse;
mod rule;
mod snapshot;
#[cfg(test)]
mod tests;
mod tracker;

pub use counts::{FirewallStats, RuleCounts, RuleStats, TableCounts, TableStats};
pub use firewall::Firewall;
pub use rule::{RULE_BYTES_MAX, RULES_MAX, RuleError, Rules};
pub use snapshot::{SNAPSHOT_MAX, Snapshot, SnapshotError};
pub use tracker::{CONNECTIONS_MAX, CONNECTIONS_MIN};
