//! The bodies and queries of clients' requests, as in JSON.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_assembly::SNAPLEN_MAX;

/// Makes a volume: `POST /v1/controllers/{controller}/volumes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// The volume's name.
    pub name: String,
    /// The volume's size for guests, in bytes.
    pub size_bytes: u64,
    /// The largest number of bytes that the volume may refer to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
}

/// The name of a snapshot or clone, or a volume's new one: `POST` to `.../snapshot`,
/// `.../clone` and `.../rename`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// The name of the snapshot or clone, or the volume's new name.
    pub name: String,
}

/// A volume's new size: `POST .../resize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// The new size, in bytes.
    pub size_bytes: u64,
}

/// A volume's new quota: `POST .../quota`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// The new quota, in bytes; `null` for no quota.
    pub quota_bytes: Option<u64>,
}

/// A part of a volume's mapping: the query of `GET .../extents`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtentsQuery {
    /// The first block.
    #[serde(default)]
    pub from: u64,
    /// The largest number of extents in the answer, 1 to 65536.
    #[serde(default = "ExtentsQuery::usual_max")]
    pub max: usize,
}

/// The limits of a capture: the query of `GET /v1/ports/{port}/capture`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureQuery {
    /// The largest number of bytes of a frame, 1 to 65553, which is all of each.
    #[serde(default = "CaptureQuery::whole_frames")]
    pub snaplen: u32,
    /// The number of frames after which the capture ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// The seconds after which the capture ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

impl CaptureQuery {
    const fn whole_frames() -> u32 {
        SNAPLEN_MAX
    }

    pub(crate) fn text(&self) -> String {
        let limits = [limit("count", self.count), limit("seconds", self.seconds)].concat();
        format!("?{limits}snaplen={}", self.snaplen)
    }
}

impl Default for CaptureQuery {
    fn default() -> Self {
        Self { snaplen: SNAPLEN_MAX, count: None, seconds: None }
    }
}

/// The limits of a trace: the query of `GET /v1/ports/{port}/trace`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceQuery {
    /// The number of dropped frames after which the trace ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// The seconds after which the trace ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

impl TraceQuery {
    pub(crate) fn text(&self) -> String {
        format!("?{}", [limit("count", self.count), limit("seconds", self.seconds)].concat())
    }
}

/// A parameter of a query, if it is set, with a separator behind it.
fn limit(name: &str, limit: Option<u64>) -> String {
    limit.map(|limit| format!("{name}={limit}&")).unwrap_or_default()
}

/// The query of `GET /metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsQuery {
    /// 1 for the metrics of each queue as well.
    #[serde(default)]
    pub per_queue: u8,
}

/// Drops extent trees from memory: `POST /v1/controllers/{controller}/prune`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prune {
    /// Drop the extent trees of this volume only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
}

/// Maps equal blocks to the same place in the store: `POST /v1/controllers/{controller}/share`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The blocks that stay.
    pub from: Place,
    /// The blocks that are freed, and mapped to the blocks of `from`.
    pub to: Place,
    /// The number of blocks.
    pub count: u64,
}

/// A block of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The volume's name.
    pub volume: String,
    /// The first block of the range.
    pub first: u64,
}

impl ExtentsQuery {
    /// The largest number of extents in one answer.
    pub const MAX: usize = 65_536;

    fn usual_max() -> usize {
        1000
    }
}
