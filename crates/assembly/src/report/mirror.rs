//! Reports of mirrors.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A mirror in use.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct MirrorReport {
    /// The name of its store.
    pub name: String,
    /// The state.
    pub state: MirrorState,
    /// Why its requests wait, or why it is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The numbers of the legs that an operator may permit it to go on without, now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub asks_without: Vec<usize>,
    /// The number of times that its legs in sync were others.
    pub epoch: u64,
    /// The number of the leg that is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<usize>,
    /// Decides whether half of the legs goes on: `none` or `operator`.
    pub witness: String,
    /// The size in bytes.
    pub capacity_bytes: u64,
    /// The unit in bytes in which legs are compared and copied.
    pub region_bytes: u64,
    /// Regions in which legs may differ.
    pub dirty_regions: u64,
    /// The most bytes a second that are copied.
    pub copy_bps: u64,
    /// Bytes copied to legs since it was opened.
    pub copied_bytes: u64,
    /// Failures of legs since then.
    pub leg_failures: u64,
    /// Reads since then that one leg has failed and another one answered.
    pub retried_reads: u64,
    /// The stores in the order of the configuration, and the legs that none of these is.
    pub legs: Vec<LegReport>,
}

/// The state of a mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MirrorState {
    /// Its stores are being opened.
    #[default]
    Opening,
    /// Requests are carried out.
    Running,
    /// Requests wait.
    Waiting,
    /// It cannot be opened.
    Refused,
}

impl MirrorState {
    /// The word for it in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Refused => "refused",
        }
    }
}

/// A leg of a mirror, or a store that is to be one.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct LegReport {
    /// The number of the leg; `None` of a store that is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg: Option<usize>,
    /// The name of the store; `None` of a leg that is in none of the configured ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The state.
    pub state: LegWord,
    /// Why the leg has failed, or why the store is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes that are still to be copied to it.
    pub to_copy_bytes: u64,
}

/// The state of a leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LegWord {
    /// It has all answered writes.
    InSync,
    /// It is being copied to.
    Copying,
    /// It has missed writes, and waits for another copy.
    Behind,
    /// It has failed, and is used again when it is attached.
    Failed,
    /// Its store is not there.
    Missing,
    /// The store is no leg of the mirror.
    #[default]
    Out,
}

impl LegWord {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::InSync, Self::Copying, Self::Behind, Self::Failed, Self::Missing, Self::Out];

    /// The word for it in JSON.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::InSync => "in-sync",
            Self::Copying => "copying",
            Self::Behind => "behind",
            Self::Failed => "failed",
            Self::Missing => "missing",
            Self::Out => "out",
        }
    }
}
