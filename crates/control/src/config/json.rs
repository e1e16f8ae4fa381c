//! Devices, links, clients and IOhosts in the control API's JSON: the parser, the keys and the
//! rules are those of the file.

use std::fmt::Write as _;

use serde_json::{Map, Value};
use sidecore_assembly::spec::{
    DeviceSpec, FrontEndSpec, RemoteKind, RemotePart, ScheduleSpec, StageSpec, StoreSpec,
};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::draft;
use super::keys::STAGE;
use super::problem::Collector;
use super::section::Section;

/// Makes the device that `keys` describe, and its store if they have a `volume` or a `remote`.
///
/// # Errors
/// All problems of the device.
pub(crate) fn device(
    mut keys: Map<String, Value>,
) -> Result<(DeviceSpec, Option<StoreSpec>), String> {
    drop_empty(&mut keys);
    let part = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = part(keys.get("name"));
    if let Some(Value::Object(remote)) = keys.get_mut("remote") {
        // The store's own name is not that of a device.
        remote.entry("device").or_insert_with(|| name.clone().into());
    }
    let of = |table: &str, key| part(keys.get(table).and_then(|table| table.get(key)));
    // Names in the configuration have no slash.
    let store = match keys.contains_key("remote") {
        true => format!("{}/{}@{name}", of("remote", "iohost"), of("remote", "device")),
        false => format!("{}/{}@{name}", of("volume", "controller"), of("volume", "volume")),
    };
    let stores = ["store", "volume", "remote"];
    let is_nic = keys
        .get("front_end")
        .and_then(Value::as_str)
        .is_some_and(|word| FrontEndSpec::from_word(word).switch().is_some());
    let has_one = is_nic || stores.iter().filter(|key| keys.contains_key(**key)).count() == 1;
    keys.entry("name").or_insert(name.into());
    if !is_nic {
        keys.entry("store").or_insert_with(|| store.clone().into());
    }
    read(&keys, |table, problems| {
        let mut section = Section::open("device", table, 0..0, problems);
        if !has_one {
            section.complain(0..0, "a device has either a `store`, a `volume` or a `remote`");
        }
        let (volume, remote) = (section.table("volume"), section.table("remote"));
        let device = draft::device(&mut section);
        section.finish();
        let inline = match (volume, remote) {
            (Some(volume), _) => existing_volume(store, volume, problems),
            (None, Some(remote)) => inline_store(store, ("remote", remote), &[], problems),
            (None, None) => None,
        };
        (device, inline)
    })
}

/// Makes the stage that `keys` describe.
///
/// # Errors
/// All problems of the stage.
pub(crate) fn stage(mut keys: Map<String, Value>) -> Result<StageSpec, String> {
    drop_empty(&mut keys);
    let list = Value::Array(vec![Value::Object(keys)]);
    let keys = Map::from_iter([(STAGE.name.to_owned(), list)]);
    let stages = read(&keys, |table, problems| {
        // A recording has a name in the daemon's directory of them.
        problems.takes_names = true;
        let mut section = Section::new(table, 0..0, "the device", problems);
        let stages = StageSpec::list(&section.all([&STAGE]));
        section.finish();
        stages
    })?;
    stages.into_iter().next().ok_or_else(|| "a stage has a `type`".to_owned())
}

/// Makes the schedule that `keys` describe.
///
/// # Errors
/// All problems of the schedule.
pub(crate) fn schedule(mut keys: Map<String, Value>) -> Result<ScheduleSpec, String> {
    keys.retain(|_, value| !value.is_null());
    let schedule = read(&keys, |table, problems| {
        draft::schedule(Section::open("schedule", table, 0..0, problems)).spec
    })?;
    schedule.ok_or_else(|| "a schedule has `volumes` and `keep`".to_owned())
}

/// Makes the link, client or IOhost that `keys` describe.
///
/// # Errors
/// All problems of the part.
pub(crate) fn remote_part(
    kind: RemoteKind,
    mut keys: Map<String, Value>,
) -> Result<RemotePart, String> {
    drop_empty(&mut keys);
    read(&keys, |table, problems| {
        let section = Section::open(kind.word(), table, 0..0, problems);
        match kind {
            RemoteKind::Link => RemotePart::Link(draft::link(section).spec),
            RemoteKind::Client => RemotePart::Client(draft::client(section).spec),
            RemoteKind::Iohost => RemotePart::Iohost(draft::iohost(section).spec),
            RemoteKind::Serve => RemotePart::Serve(draft::serve(section).spec),
        }
    })
}

/// Drops nulls and empty lists, which say as much as a missing key.
fn drop_empty(keys: &mut Map<String, Value>) {
    keys.retain(|_, value| {
        !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty())
    });
}

/// Reads a table with these keys.
fn read<T>(
    keys: &Map<String, Value>,
    read: impl FnOnce(&DeTable<'_>, &mut Collector<'_>) -> T,
) -> Result<T, String> {
    let text = toml(keys);
    let (document, errors) = DeTable::parse_recoverable(&text);
    if let Some(error) = errors.first() {
        return Err(format!("the request makes no sense: {}", error.message()));
    }
    let mut problems = Collector::of_text(&text);
    let part = read(document.get_ref(), &mut problems);
    let messages = |problem: super::Problem| problem.message;
    problems.finish().map_err(|problems| {
        problems.list.into_iter().map(messages).collect::<Vec<_>>().join("; ")
    })?;
    Ok(part)
}

/// A virtual function of a volume that was made before, and the stages in front of it.
fn existing_volume(
    name: String,
    volume: &Spanned<DeValue<'_>>,
    problems: &mut Collector<'_>,
) -> Option<StoreSpec> {
    let of_the_volume = [
        ("size", "`size` belongs to the request that makes the volume; leave it out"),
        ("quota", "`quota` belongs to the request that makes the volume; leave it out"),
    ];
    inline_store(name, ("volume", volume), &of_the_volume, problems)
}

/// A store of this type with the stages in front of it. Some keys are refused, with a reason.
fn inline_store(
    name: String,
    (word, table): (&str, &Spanned<DeValue<'_>>),
    refused: &[(&str, &str)],
    problems: &mut Collector<'_>,
) -> Option<StoreSpec> {
    let mut section = Section::new(table.get_ref().as_table()?, table.span(), word, problems);
    let kind = draft::bottom(&mut section, word);
    let stages = StageSpec::list(&section.all([&STAGE]));
    for (key, message) in refused {
        if section.has(key) {
            section.complain(0..0, *message);
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
