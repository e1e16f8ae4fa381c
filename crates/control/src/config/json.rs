//! A device in the control API's JSON: the parser, the keys and the rules are those of the file.

use std::fmt::Write as _;

use serde_json::{Map, Value};
use sidecore_assembly::spec::{DeviceSpec, StageSpec, StoreSpec};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::draft;
use super::keys::STAGE;
use super::problem::Collector;
use super::section::Section;

/// Makes the device that `keys` describe, and its store if they have a `volume`.
///
/// # Errors
/// All problems of the device.
pub(crate) fn device(
    mut keys: Map<String, Value>,
) -> Result<(DeviceSpec, Option<StoreSpec>), String> {
    keys.retain(|_, value| {
        !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty())
    });
    let part = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let of_volume = |key| part(keys.get("volume").and_then(|volume| volume.get(key)));
    let name = part(keys.get("name"));
    // Names in the configuration have no slash.
    let function = format!("{}/{}@{name}", of_volume("controller"), of_volume("volume"));
    let has_one = keys.contains_key("store") != keys.contains_key("volume");
    keys.entry("name").or_insert(name.into());
    keys.entry("store").or_insert_with(|| function.clone().into());
    let text = toml(&keys);
    let (document, errors) = DeTable::parse_recoverable(&text);
    if let Some(error) = errors.first() {
        return Err(format!("the request makes no sense: {}", error.message()));
    }
    let mut problems = Collector::of_text(&text);
    let mut section = Section::open("device", document.get_ref(), 0..0, &mut problems);
    if !has_one {
        section.complain(0..0, "a device has either a `store` or a `volume`");
    }
    let volume = section.table("volume");
    let device = draft::device(&mut section);
    section.finish();
    let store = volume.and_then(|table| existing_volume(function, table, &mut problems));
    let messages = |problem: super::Problem| problem.message;
    problems.finish().map_err(|problems| {
        problems.list.into_iter().map(messages).collect::<Vec<_>>().join("; ")
    })?;
    Ok((device, store))
}

/// A virtual function of a volume that was made before, and the stages in front of it.
fn existing_volume(
    name: String,
    volume: &Spanned<DeValue<'_>>,
    problems: &mut Collector<'_>,
) -> Option<StoreSpec> {
    let mut section = Section::new(volume.get_ref().as_table()?, volume.span(), "volume", problems);
    let kind = draft::bottom(&mut section, "volume");
    let stages = StageSpec::list(&section.all([&STAGE]));
    for key in ["size", "quota"] {
        if section.has(key) {
            section.complain(
                0..0,
                format!("`{key}` belongs to the request that makes the volume; leave it out"),
            );
        }
    }
    section.finish();
    Some(StoreSpec { stages, ..StoreSpec::new(name, kind?) })
}

/// Writes the same keys and values in TOML.
fn toml(keys: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (key, value) in keys {
        let _ = writeln!(text, "{} = {}", string(key), inline(value));
    }
    text
}

fn inline(value: &Value) -> String {
    let list = |parts: Vec<String>| parts.join(", ");
    match value {
        // No list may have an empty table, so that this is refused as JSON's null is.
        Value::Null => "{}".to_owned(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) => string(text),
        Value::Array(values) => format!("[{}]", list(values.iter().map(inline).collect())),
        Value::Object(keys) => {
            let given = keys.iter().filter(|(_, value)| !value.is_null());
            format!(
                "{{{}}}",
                list(
                    given
                        .map(|(key, value)| format!("{} = {}", string(key), inline(value)))
                        .collect()
                )
            )
        }
    }
}

/// JSON's escapes are valid in TOML, which needs one more.
fn string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
