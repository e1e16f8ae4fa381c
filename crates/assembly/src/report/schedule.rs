//! Reports of schedules of snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A schedule of snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ScheduleReport {
    /// The schedule's name in the configuration.
    pub name: String,
    /// The controller whose volumes are meant; `None` for those of all.
    pub controller: Option<String>,
    /// The patterns for the names of volumes.
    pub patterns: Vec<String>,
    /// The rules, as in `24 hourly, 7 daily`.
    pub keep: String,
    /// The time of the next snapshots in seconds since 1970.
    pub next_unix_s: u64,
    /// The last time that all of its volumes were found to have their snapshots, in seconds since
    /// 1970: they are looked at every minute. `None` if that was never so in this daemon, or if a
    /// controller of theirs is not open.
    pub last_success_unix_s: Option<u64>,
    /// Snapshots that were made since the daemon started.
    pub made: u64,
    /// Snapshots that expired and were deleted since then.
    pub deleted: u64,
    /// Failures since then.
    pub failures: u64,
    /// The reason why it has nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Its volumes, by their names.
    pub volumes: Vec<ScheduledVolumeReport>,
}

/// A volume of a schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ScheduledVolumeReport {
    /// The name of the volume.
    pub volume: String,
    /// The name of its controller.
    pub controller: String,
    /// Its snapshots that schedules have made.
    pub snapshots: u64,
    /// The time of the newest one in seconds since 1970.
    pub newest_unix_s: Option<u64>,
    /// Whether the volume was as in its newest snapshot when another one was due, so that none was
    /// made.
    pub unchanged: bool,
    /// Snapshots from later than now: the clock was ahead when they were made, or is behind. They
    /// are left alone and not counted until their time has come.
    pub later: u64,
    /// Why the last attempt failed; it is repeated every minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Expired snapshots that are kept, because something needs them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<HeldReport>,
}

/// An expired snapshot that is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct HeldReport {
    /// The name of the snapshot.
    pub snapshot: String,
    /// The reason.
    pub reason: String,
}
