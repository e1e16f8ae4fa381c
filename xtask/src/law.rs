//! The law of the crates: which may hold `unsafe`, which must not be able to panic, and that all
//! share one set of lints.
//!
//! The compiler enforces each attribute; this check enforces that the attributes are there.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::tidy;
use crate::workspace::{Package, Workspace};

/// The rooms that may hold `unsafe`. A fifth one is a decision to record under docs/decisions.
const UNSAFE_ROOMS: &[&str] = &["memory", "ring", "linux", "verify/alloc"];

/// The rooms that read input from a guest, a VMM or an operator.
const PEER_FACING: &[&str] = &[
    "keys",
    "memory",
    "spec-nvme",
    "spec-virtio",
    "ring",
    "block",
    "luks",
    "schedule",
    "extent",
    "volume",
    "controller",
    "mirror",
    "vrio",
    "trust",
    "virtio",
    "nvme-subsystem",
    "nvme",
    "socket",
    "peer",
    "link",
    "net",
    "uplink",
    "wire-faults",
    "recording",
    "spool",
    "remote",
    "ownership",
    "offload",
    "ublk",
    "cluster",
    "vhost-user",
    "vfio-user",
    "control",
    "bin/sidecore-guest-tune",
];

/// The rooms of stages, through which a guest's requests pass, begin so.
const STAGES: &str = "stage-";

/// Every crate root outside the unsafe rooms has this line.
const FORBID_UNSAFE: &str = "#![forbid(unsafe_code)]";

/// Every crate root in the peer-facing rooms has this line: no input may make their code panic.
/// Their unit tests may panic.
const PEER_LAW: &str = "#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, \
                        clippy::panic, clippy::indexing_slicing, clippy::arithmetic_side_effects, \
                        clippy::todo, clippy::unimplemented))]";

/// Fails unless every package keeps the law, and names each one that does not.
pub fn check(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for package in &workspace.packages {
        broken.extend(check_package(workspace, package)?);
    }
    // The fuzz targets are a separate workspace. Their crate roots cannot forbid `unsafe`, because
    // the macro of libfuzzer-sys expands to it.
    broken.extend(stray_unsafe(workspace, &workspace.root.join("verify/fuzz/src"))?);
    if !broken.is_empty() {
        bail!("{}", broken.join("\n  "));
    }
    Ok(())
}

fn check_package(workspace: &Workspace, package: &Package) -> Result<Vec<String>> {
    let room = workspace.room(package.directory());
    let mut broken = Vec::new();
    if !shares_lints(&read(&package.manifest)?)? {
        broken.push(format!(
            "{}: add `[lints]` with `workspace = true`",
            tidy::show(&package.manifest, workspace)
        ));
    }
    for target in package.targets.iter().filter(|target| target.ships()) {
        let source = read(&target.source)?;
        let file = tidy::show(&target.source, workspace);
        broken
            .extend(wrong_header(&room, &source).into_iter().map(|what| format!("{file}: {what}")));
    }
    if !UNSAFE_ROOMS.contains(&room.as_str()) {
        // The attribute covers the code that ships; this check covers tests, examples and build
        // scripts.
        broken.extend(stray_unsafe(workspace, package.directory())?);
    }
    Ok(broken)
}

/// The lines in this directory that use `unsafe`, as complaints.
fn stray_unsafe(workspace: &Workspace, directory: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in tidy::rust_files(directory)? {
        let name = tidy::show(&file, workspace);
        let lines = unsafe_lines(&read(&file)?);
        found.extend(
            lines.iter().map(|line| {
                format!("{name}:{line}: `unsafe` belongs in {}", UNSAFE_ROOMS.join(", "))
            }),
        );
    }
    Ok(found)
}

/// The attributes that this crate root lacks or must not have, as complaints.
fn wrong_header(room: &str, source: &str) -> Vec<String> {
    let rules = [
        (FORBID_UNSAFE, !UNSAFE_ROOMS.contains(&room), "UNSAFE_ROOMS"),
        (PEER_LAW, PEER_FACING.contains(&room) || room.starts_with(STAGES), "PEER_FACING"),
    ];
    let mut wrong = Vec::new();
    for (line, wanted, list) in rules {
        match (wanted, has_attribute(source, line)) {
            (true, false) => wrong.push(format!("add the line\n    {line}")),
            (false, true) => {
                wrong.push(format!("has `{line}`, but {list} in xtask/src/law.rs says otherwise"))
            }
            _ => {}
        }
    }
    wrong
}

/// Whether the attribute is there, in any layout of its line.
fn has_attribute(source: &str, attribute: &str) -> bool {
    let code: String = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    squeeze(&code).contains(&squeeze(attribute))
}

fn squeeze(code: &str) -> String {
    code.split_whitespace().collect::<String>().replace(",)", ")")
}

/// Whether the manifest takes the workspace's lints.
fn shares_lints(manifest: &str) -> Result<bool> {
    let manifest: toml::Table = manifest.parse().context("a manifest is not TOML")?;
    let shares = manifest
        .get("lints")
        .and_then(|lints| lints.get("workspace"))
        .and_then(toml::Value::as_bool);
    Ok(shares == Some(true))
}

/// The numbers of the lines where `unsafe` is used as a keyword.
fn unsafe_lines(source: &str) -> Vec<usize> {
    let uses = [
        "unsafe {",
        "unsafe fn ",
        "unsafe impl",
        "unsafe extern",
        "unsafe trait ",
        "#[unsafe(",
        "#![allow(unsafe",
    ];
    let code = |line: &str| line.split("//").next().unwrap_or("").trim_start().to_owned();
    // A use inside a string literal follows a quote; code never does.
    let starts =
        |line: &str, word: &str| line.match_indices(word).any(|(at, _)| !line[..at].contains('"'));
    let lines = source.lines().enumerate();
    lines
        .filter(|(_, line)| uses.iter().any(|word| starts(&code(line), word)))
        .map(|(index, _)| index + 1)
        .collect()
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_safe_room_forbids_unsafe() {
        assert!(wrong_header("units", "#![forbid(unsafe_code)]\n").is_empty());
        let wrong = wrong_header("units", "//! Units.\n");
        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].contains(FORBID_UNSAFE));
    }

    #[test]
    fn a_comment_is_not_an_attribute() {
        assert_eq!(wrong_header("units", "// #![forbid(unsafe_code)]\n").len(), 1);
    }

    #[test]
    fn a_peer_facing_room_carries_the_whole_line() {
        assert!(wrong_header("ring", PEER_LAW).is_empty());
        assert_eq!(
            wrong_header("ring", "#![cfg_attr(not(test), deny(clippy::unwrap_used))]").len(),
            1
        );
        assert_eq!(wrong_header("virtio", "").len(), 2);
    }

    #[test]
    fn rustfmt_may_break_the_line() {
        let broken = PEER_LAW
            .replace("deny(", "deny(\n        ")
            .replace("unimplemented)", "unimplemented,\n    )");
        assert!(wrong_header("memory", &broken).is_empty());
    }

    #[test]
    fn the_lists_and_the_lines_agree_in_both_directions() {
        assert_eq!(wrong_header("memory", &format!("{FORBID_UNSAFE}\n{PEER_LAW}")).len(), 1);
        assert_eq!(wrong_header("units", &format!("{FORBID_UNSAFE}\n{PEER_LAW}")).len(), 1);
    }

    #[test]
    fn unsafe_in_a_test_is_found_by_its_line() {
        let source = "fn f() {\n    unsafe { g() }\n}\n// unsafe { comment }\n\
                      let s = \"unsafe { string }\";\n";
        assert_eq!(unsafe_lines(source), [2]);
    }

    #[test]
    fn a_manifest_must_take_the_workspaces_lints() {
        assert!(shares_lints("[lints]\nworkspace = true\n").unwrap());
        assert!(!shares_lints("[package]\nname = \"x\"\n").unwrap());
        assert!(!shares_lints("[lints]\nworkspace = false\n").unwrap());
    }
}
