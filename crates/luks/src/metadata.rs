//! The JSON area (specification, 3): as it is written. 64-bit numbers are texts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Metadata {
    pub(crate) keyslots: BTreeMap<String, Keyslot>,
    #[serde(default)]
    pub(crate) tokens: BTreeMap<String, serde_json::Value>,
    pub(crate) segments: BTreeMap<String, SegmentEntry>,
    pub(crate) digests: BTreeMap<String, Digest>,
    pub(crate) config: Config,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "type")]
pub(crate) enum Keyslot {
    #[serde(rename = "luks2")]
    Luks2(KeyslotEntry),
    /// Of another program, or of a re-encryption that the requirements name.
    #[serde(other)]
    Other,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct KeyslotEntry {
    pub(crate) key_size: u32,
    /// 0 is never tried, 2 is tried first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<u32>,
    pub(crate) af: Splitter,
    pub(crate) area: Area,
    pub(crate) kdf: KdfEntry,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Splitter {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) stripes: u32,
    pub(crate) hash: String,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Area {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(with = "decimal")]
    pub(crate) offset: u64,
    #[serde(with = "decimal")]
    pub(crate) size: u64,
    pub(crate) encryption: String,
    pub(crate) key_size: u32,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum KdfEntry {
    Argon2i { time: u32, memory: u32, cpus: u32, salt: String },
    Argon2id { time: u32, memory: u32, cpus: u32, salt: String },
    Pbkdf2 { hash: String, iterations: u32, salt: String },
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SegmentEntry {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(with = "decimal")]
    pub(crate) offset: u64,
    /// A number, or `dynamic`: to the end of the device.
    pub(crate) size: String,
    #[serde(default)]
    pub(crate) iv_tweak: Option<String>,
    #[serde(default)]
    pub(crate) encryption: Option<String>,
    #[serde(default)]
    pub(crate) sector_size: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) integrity: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) flags: Vec<String>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Digest {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) keyslots: Vec<String>,
    pub(crate) segments: Vec<String>,
    pub(crate) hash: String,
    pub(crate) iterations: u32,
    pub(crate) salt: String,
    pub(crate) digest: String,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Config {
    #[serde(with = "decimal")]
    pub(crate) json_size: u64,
    #[serde(with = "decimal")]
    pub(crate) keyslots_size: u64,
    #[serde(default, skip_serializing_if = "Requirements::is_empty")]
    pub(crate) requirements: Requirements,
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Requirements {
    #[serde(default)]
    pub(crate) mandatory: Vec<String>,
}

impl Requirements {
    fn is_empty(&self) -> bool {
        self.mandatory.is_empty()
    }
}

mod decimal {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(|_| de::Error::custom(format!("\"{text}\" is no 64-bit number")))
    }
}
