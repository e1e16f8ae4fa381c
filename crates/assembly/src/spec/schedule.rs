//! Schedules of snapshots, and their keys.

use sidecore_keys::{Key, Kind, Value, Values};
use sidecore_schedule::Keep;

use super::rules::{NAME, fits};

/// The keys of a schedule.
pub const SCHEDULE: &[Key] = &[
    NAME,
    Key::new("controller", Kind::Text, "all controllers", "the controller whose volumes are meant"),
    Key::required(
        "volumes",
        Kind::Texts,
        "[\"vm-*\"]",
        "the names of its volumes, in which `*` stands for any characters and `?` for one. The \
         first `[[schedule]]` that fits a volume has it; snapshots are not meant",
    )
    .checked(are_patterns),
    Key::required(
        "keep",
        Kind::Text,
        "\"24 hourly, 7 daily\"",
        "how many snapshots are kept, 1 to 1000 of each: `hourly`, `daily`, `weekly`, `monthly`, \
         `yearly`, or `every 15min` with minutes that divide an hour",
    )
    .checked(is_keep),
];

/// A schedule: the snapshots that are made and kept of certain volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleSpec {
    /// Unique among the schedules.
    pub name: String,
    /// The controller whose volumes are meant; `None` for those of all.
    pub controller: Option<String>,
    /// Patterns for the names of volumes.
    pub volumes: Vec<String>,
    /// The rules.
    pub keep: Keep,
}

impl ScheduleSpec {
    /// The schedule with these values of its keys, if all that are required are there.
    #[must_use]
    pub fn from_values(values: &Values) -> Option<Self> {
        Some(Self {
            name: values.get("name")?,
            controller: values.get("controller"),
            volumes: values.get("volumes")?,
            keep: values.get::<String>("keep")?.parse().ok()?,
        })
    }

    /// Whether it is meant for a volume of this name, on this controller.
    #[must_use]
    pub fn fits(&self, controller: &str, volume: &str) -> bool {
        self.controller.as_deref().is_none_or(|wanted| wanted == controller)
            && self.volumes.iter().any(|pattern| fits(pattern, volume))
    }
}

fn is_keep(key: &str, value: &Value) -> Result<(), String> {
    match value.text().parse::<Keep>() {
        Ok(_) => Ok(()),
        Err(why) => Err(format!("`{key}`: {why}")),
    }
}

fn are_patterns(key: &str, value: &Value) -> Result<(), String> {
    let Value::Texts(patterns) = value else { return Ok(()) };
    if patterns.is_empty() {
        return Err(format!("`{key}` is empty, so no volume is meant; write for instance [\"*\"]"));
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_.*?".contains(c);
    match patterns.iter().find(|pattern| pattern.is_empty() || !pattern.chars().all(is_part)) {
        None => Ok(()),
        Some(pattern) => Err(format!(
            "\"{}\" in `{key}` fits no volume: names have letters, digits, `-`, `_` and `.`, and \
             a pattern also `*` and `?`",
            pattern.escape_debug()
        )),
    }
}
