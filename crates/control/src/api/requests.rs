//! What clients ask for: the bodies of requests, as they are in JSON.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Makes a volume: `POST /v1/controllers/{controller}/volumes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// Its size as guests see it, in bytes.
    pub size_bytes: u64,
    /// The most that it may refer to, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
}

/// The name of a snapshot or clone, or a volume's new one: `POST` to `.../snapshot`, `.../clone`
/// and `.../rename`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// The name.
    pub name: String,
}

/// A volume's new size: `POST .../resize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// In bytes.
    pub size_bytes: u64,
}

/// A volume's new quota: `POST .../quota`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    /// In bytes; `null` for none.
    pub quota_bytes: Option<u64>,
}

/// Which part of a volume's mapping: the query of `GET .../extents`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtentsQuery {
    /// The first block.
    #[serde(default)]
    pub from: u64,
    /// The most extents to answer with, 1 to 65536.
    #[serde(default = "ExtentsQuery::usual_max")]
    pub max: usize,
}

/// How much `GET /metrics` tells: its query.
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
    /// Of this volume only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
}

/// Lets equal blocks be one: `POST /v1/controllers/{controller}/share`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The blocks that stay.
    pub from: Place,
    /// The blocks that are given up for them.
    pub to: Place,
    /// How many.
    pub count: u64,
}

/// A block of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The volume.
    pub volume: String,
    /// Its block.
    pub first: u64,
}

impl ExtentsQuery {
    /// The most that may be asked for at once.
    pub const MAX: usize = 65_536;

    fn usual_max() -> usize {
        1000
    }
}
