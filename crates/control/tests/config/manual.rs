//! The manual and the parser agree.

use std::path::Path;

use sidecore_control::Depth;

use crate::parse;

/// The keys that a section may have, as a misfit of a key makes it tell.
fn known_keys(section: &str) -> Vec<String> {
    let problems =
        parse(Path::new("/"), &format!("{section}\nxxxxxxxxxxxx = 1\n"), Depth::Text).unwrap_err().to_string();
    let (_, list) = problems.split_once("known here: ").unwrap_or_else(|| panic!("{problems}"));
    list.lines().next().unwrap().split(", ").map(str::to_owned).collect()
}

#[test]
fn the_manual_lists_the_keys_that_there_are_and_its_example_is_good() {
    let manual = include_str!("../../../../docs/config.md");
    for (heading, section) in [
        ("## [[sidecore]]", "[[sidecore]]"),
        ("### type = \"null\"", "[[store]]\ntype = \"null\""),
        ("### type = \"ram\"", "[[store]]\ntype = \"ram\""),
        ("### type = \"file\"", "[[store]]\ntype = \"file\""),
        ("### type = \"store\"", "[[store]]\ntype = \"store\""),
        ("### type = \"delay\"", "[[store]]\n[[store.stage]]\ntype = \"delay\""),
        ("### type = \"fault\"", "[[store]]\n[[store.stage]]\ntype = \"fault\""),
        ("### type = \"volume\"", "[[store]]\ntype = \"volume\""),
        ("### type = \"pf\"", "[[store]]\ntype = \"pf\""),
        ("## [[controller]]", "[[controller]]"),
        ("## [[device]]", "[[device]]"),
    ] {
        let (_, chapter) = manual.split_once(&format!("{heading}\n")).unwrap();
        let chapter = chapter.split("\n##").next().unwrap();
        let mut listed: Vec<&str> =
            chapter.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        match section {
            _ if section.contains("[[store.stage]]") => listed.push("type"),
            _ if heading.starts_with("###") => listed.extend(["name", "type", "stage"]),
            _ => {}
        }
        let mut known = known_keys(section);
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known, "{heading}");
    }
    let example = manual.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
    let config = parse(Path::new("/"), example, Depth::Text).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(config.spec.devices.len(), 2);
}
