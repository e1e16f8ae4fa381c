//! The manual and the parser agree.

use std::path::Path;

use sidecore_control::Depth;
use sidecore_control::config::keys::{self, FrontEndSpec, Key, LinkKind, StageSpec, StoreKind};

use crate::parse;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");

/// The line before a table has the table's name.
const BEGIN: &str = "<!-- keys: ";
const BEGIN_END: &str = " -->\n";
const END: &str = "<!-- end of keys -->\n";

/// If `cargo xtask keys` sets this variable, the file is written.
const WRITE: &str = "SIDECORE_WRITE_DOCS";

fn keys_of(table: &str) -> Vec<&'static Key> {
    let front_end = FrontEndSpec::KINDS.iter().find(|(word, _)| *word == table);
    if let Some(word) = table.strip_prefix("link type ") {
        return LinkKind::keys(word).iter().collect();
    }
    match (table, table.strip_prefix("type ")) {
        (_, Some(word)) => StoreKind::keys(word).iter().collect(),
        ("control", _) => keys::CONTROL.iter().collect(),
        ("sidecore", _) => keys::SIDECORE.iter().collect(),
        ("store", _) => keys::STORE.iter().collect(),
        ("link", _) => keys::link().collect(),
        ("switch", _) => keys::switch().collect(),
        ("client", _) => keys::client().collect(),
        ("iohost", _) => keys::IOHOST.iter().collect(),
        ("serve", _) => keys::SERVE.iter().collect(),
        ("schedule", _) => keys::SCHEDULE.iter().collect(),
        ("controller", _) => keys::controller().collect(),
        ("device", _) => keys::device().collect(),
        _ => front_end.unwrap_or_else(|| panic!("there are no keys of {table}")).1.iter().collect(),
    }
}

fn table(keys: &[(&str, &str, &str)]) -> String {
    let mut text = "| key | default | meaning |\n| --- | --- | --- |\n".to_owned();
    for (name, default, meaning) in keys {
        let gap = if default.is_empty() { "" } else { " " };
        text += &format!("| `{name}` |{gap}{default} | {meaning} |\n");
    }
    text
}

fn table_of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> String {
    table(&keys.into_iter().map(|key| (key.name, key.default, key.meaning)).collect::<Vec<_>>())
}

/// The type of a stage.
fn stage_type() -> String {
    let words: Vec<String> =
        StageSpec::VARIANTS.iter().map(|stage| format!("`{}`", stage.word)).collect();
    let (last, others) = words.split_last().unwrap();
    let meaning = format!("{} or {last}; the other keys depend on it", others.join(", "));
    let threads = &keys::STAGE_THREADS;
    table(&[("type", "required", &meaning), (threads.name, threads.default, threads.meaning)])
}

/// The keys that a stage has beside those of all stages.
fn own_keys(stage: &keys::Variant) -> Vec<&'static Key> {
    stage.keys.iter().filter(|key| key.name != keys::STAGE_THREADS.name).collect()
}

/// A chapter for each stage.
fn stages() -> String {
    let chapter = |stage: &keys::Variant| {
        let own = own_keys(stage);
        let table = if own.is_empty() { String::new() } else { format!("\n{}", table_of(own)) };
        format!("### type = \"{}\"\n\n{}\n{table}", stage.word, stage.meaning)
    };
    StageSpec::VARIANTS.iter().map(chapter).collect::<Vec<_>>().join("\n")
}

/// The manual with its tables as they should be.
fn rewritten(manual: &str) -> String {
    let mut text = String::new();
    let mut rest = manual;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) =
            after.split_once(BEGIN_END).expect("the line before a table has an end");
        let (_, after) = after.split_once(END).expect("a table has an end");
        text += &format!("{before}{BEGIN}{name}{BEGIN_END}");
        text += &match name {
            "stage type" => stage_type(),
            "stages" => stages(),
            _ => table_of(keys_of(name)),
        };
        text += END;
        rest = after;
    }
    text + rest
}

#[test]
fn the_tables_of_the_manual_are_those_of_the_keys() {
    let manual = std::fs::read_to_string(FILE).unwrap();
    let right = rewritten(&manual);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(FILE, right).unwrap();
        return;
    }
    assert_eq!(right.matches(BEGIN).count(), 25 + FrontEndSpec::KINDS.len());
    assert!(manual == right, "run `cargo xtask keys`: docs/config.md is not as the keys are");
}

/// Returns the valid keys of a section, from the message about an unknown key.
fn known_keys(section: &str) -> Vec<String> {
    let problems = parse(Path::new("/"), &format!("{section}\nxxxxxxxxxxxx = 1\n"), Depth::Text)
        .unwrap_err()
        .to_string();
    let (_, list) = problems.split_once("known here: ").unwrap_or_else(|| panic!("{problems}"));
    list.lines().next().unwrap().split(", ").map(str::to_owned).collect()
}

#[test]
fn the_manual_lists_the_keys_that_there_are_and_its_example_is_good() {
    let manual = std::fs::read_to_string(FILE).unwrap();
    let stage = |stage: &keys::Variant| {
        let heading = format!("### type = \"{}\"", stage.word);
        (heading, format!("[[store]]\n[[store.stage]]\ntype = \"{}\"", stage.word))
    };
    let stages: Vec<(String, String)> = StageSpec::VARIANTS.iter().map(stage).collect();
    let stages = stages.iter().map(|(heading, section)| (heading.as_str(), section.as_str()));
    for (heading, section) in [
        ("## [[sidecore]]", "[[sidecore]]"),
        ("### type = \"null\"", "[[store]]\ntype = \"null\""),
        ("### type = \"ram\"", "[[store]]\ntype = \"ram\""),
        ("### type = \"file\"", "[[store]]\ntype = \"file\""),
        ("### type = \"store\"", "[[store]]\ntype = \"store\""),
        ("### type = \"volume\"", "[[store]]\ntype = \"volume\""),
        ("### type = \"pf\"", "[[store]]\ntype = \"pf\""),
        ("### type = \"remote\"", "[[store]]\ntype = \"remote\""),
        ("### type = \"mirror\"", "[[store]]\ntype = \"mirror\""),
        ("## [[controller]]", "[[controller]]"),
        ("## [[schedule]]", "[[schedule]]"),
        ("### type = \"packet\"", "[[link]]\ntype = \"packet\""),
        ("### type = \"xdp\"", "[[link]]\ntype = \"xdp\""),
        ("### type = \"udp\"", "[[link]]\ntype = \"udp\""),
        ("### type = \"memory\"", "[[link]]\ntype = \"memory\""),
        ("## [[client]]", "[[client]]"),
        ("## [[iohost]]", "[[iohost]]"),
        ("### front_end = \"virtio-blk\"", "[[device]]"),
        ("### front_end = \"nvme\"", "[[device]]\nfront_end = \"nvme\""),
        ("### front_end = \"vrio\"", "[[device]]\nfront_end = \"vrio\""),
    ]
    .into_iter()
    .chain(stages)
    {
        let (_, chapter) = manual.split_once(&format!("{heading}\n")).unwrap();
        let chapter = chapter.split("\n##").next().unwrap();
        let mut listed: Vec<&str> = chapter
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .collect();
        match section {
            _ if section.contains("[[store.stage]]") => {
                listed.extend(["type", keys::STAGE_THREADS.name]);
            }
            _ if section.contains("[[device]]") => {
                listed.extend(keys::device().map(|key| key.name))
            }
            _ if section.contains("[[link]]") => listed.extend(keys::link().map(|key| key.name)),
            _ if heading.starts_with("###") => listed.extend(["name", "type", "stage"]),
            _ => {}
        }
        let mut known = known_keys(section);
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known, "{heading}");
    }
    let example = manual.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
    let config =
        parse(Path::new("/"), example, Depth::Text).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(config.spec.devices.len(), 2);
}
