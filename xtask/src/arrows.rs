//! The dependencies that each room may have. This table alone decides; ARCHITECTURE.md shows a
//! copy.

use std::fmt::Write as _;

use anyhow::{Result, bail};

use crate::workspace::Workspace;

/// The rooms that a room may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Uses {
    /// These rooms.
    Only(&'static [&'static str]),
    /// Any room, because the room is at the end of the arrows: no room that ships depends on it.
    Anything,
}
use Uses::{Anything, Only};

/// The rooms, each below all rooms that it may use. Tests (dev-dependencies) are free.
const ARROWS: &[(&str, Uses)] = &[
    ("units", Only(&[])),
    ("keys", Only(&[])),
    ("schedule", Only(&[])),
    ("telemetry", Only(&["units"])),
    ("wire-faults", Only(&["units"])),
    ("spool", Only(&[])),
    ("recording", Only(&[])),
    ("spec-nvme", Only(&["units"])),
    ("spec-virtio", Only(&["units"])),
    ("memory", Only(&["units"])),
    ("ring", Only(&["spec-nvme", "spec-virtio", "memory", "units"])),
    ("reactor", Only(&["telemetry", "units"])),
    ("block", Only(&["keys", "memory", "reactor", "telemetry", "units"])),
    ("luks", Only(&[])),
    ("stage-delay", Only(&["block", "keys", "memory", "reactor", "units"])),
    ("stage-encrypt", Only(&["luks", "block", "keys", "memory", "reactor", "units"])),
    ("stage-fault", Only(&["block", "keys", "reactor", "units"])),
    ("stage-integrity", Only(&["block", "keys", "memory", "reactor", "units"])),
    ("stage-meter", Only(&["block", "keys", "memory", "reactor", "units"])),
    ("stage-read-only", Only(&["block", "keys", "reactor"])),
    ("stage-record", Only(&["recording", "spool", "block", "keys", "memory", "reactor", "units"])),
    ("extent", Only(&["telemetry", "units"])),
    ("volume", Only(&["extent", "units"])),
    ("mirror", Only(&["block", "memory", "reactor", "units"])),
    ("controller", Only(&["volume", "extent", "block", "memory", "reactor", "telemetry", "units"])),
    ("net", Only(&["spec-virtio", "memory", "reactor", "telemetry", "units"])),
    ("stage-capture", Only(&["net", "spool", "telemetry", "units"])),
    ("stage-firewall", Only(&["net", "telemetry", "units"])),
    ("stage-limit", Only(&["net", "block", "keys", "units"])),
    ("stage-wire", Only(&["net", "wire-faults", "telemetry", "units"])),
    ("vrio", Only(&["spec-virtio", "block", "telemetry", "units"])),
    ("trust", Only(&["vrio"])),
    ("virtio", Only(&["spec-virtio", "ring", "block", "net", "memory", "reactor", "units"])),
    (
        "nvme",
        Only(&["spec-nvme", "keys", "ring", "block", "memory", "reactor", "telemetry", "units"]),
    ),
    ("nvme-subsystem", Only(&["nvme"])),
    ("socket", Only(&[])),
    ("peer", Only(&["socket"])),
    ("vhost-user", Only(&["spec-virtio", "peer", "socket", "virtio", "ring", "memory", "units"])),
    ("vfio-user", Only(&["spec-nvme", "peer", "socket", "nvme", "memory", "units"])),
    ("linux", Only(&["reactor", "block", "memory", "units"])),
    ("link", Only(&["linux", "socket", "wire-faults", "memory", "reactor", "telemetry", "units"])),
    ("uplink", Only(&["linux", "net", "spec-virtio", "memory", "reactor", "units"])),
    ("ublk", Only(&["linux", "block", "memory", "reactor", "units"])),
    (
        "remote",
        Only(&[
            "vrio",
            "link",
            "net",
            "spec-virtio",
            "block",
            "memory",
            "reactor",
            "telemetry",
            "units",
        ]),
    ),
    ("plan", Only(&["remote"])),
    ("ownership", Only(&["units"])),
    ("cluster", Only(&["ownership", "linux", "units"])),
    ("sidecore", Only(&["linux", "reactor", "units"])),
    ("offload", Only(&["sidecore", "linux", "block", "ring", "memory", "reactor", "units"])),
    (
        "assembly",
        Only(&[
            "sidecore",
            "offload",
            "remote",
            "ublk",
            "uplink",
            "trust",
            "link",
            "vrio",
            "linux",
            "mirror",
            "controller",
            "volume",
            "schedule",
            "extent",
            "vhost-user",
            "vfio-user",
            "peer",
            "virtio",
            "nvme",
            "nvme-subsystem",
            "stage-capture",
            "stage-delay",
            "stage-encrypt",
            "stage-fault",
            "stage-firewall",
            "stage-integrity",
            "stage-limit",
            "stage-meter",
            "stage-wire",
            "stage-read-only",
            "stage-record",
            "block",
            "net",
            "reactor",
            "ring",
            "memory",
            "telemetry",
            "keys",
            "units",
        ]),
    ),
    ("control", Only(&["assembly", "socket", "telemetry"])),
    ("driver", Only(&["spec-nvme", "spec-virtio", "ring", "memory", "units"])),
    ("bin/sidecored", Only(&["control", "assembly", "linux", "socket"])),
    (
        "bin/sidecore",
        Only(&[
            "control",
            "cluster",
            "ownership",
            "driver",
            "linux",
            "luks",
            "plan",
            "recording",
            "stage-integrity",
            "units",
        ]),
    ),
    ("bin/sidecore-guest-tune", Only(&[])),
    ("verify/alloc", Only(&[])),
    ("verify/skip", Only(&[])),
    ("verify/fuse", Only(&["verify/skip"])),
    ("verify/kit", Only(&["driver", "verify/skip", "units"])),
    ("verify/block-contract", Only(&["block", "reactor", "memory", "units"])),
    ("verify/link-contract", Only(&["link", "reactor", "telemetry", "units"])),
    ("verify/guest", Anything),
    ("verify/sim", Anything),
    ("verify/wire", Anything),
    ("bench", Anything),
    ("xtask", Only(&["verify/guest"])),
];

/// ARCHITECTURE.md shows the table between these lines.
const MARKERS: (&str, &str) = ("<!-- arrows: cargo xtask arrows -->\n", "<!-- end of arrows -->");

/// Fails unless every dependency follows an arrow, and names each one that does not.
pub fn check(workspace: &Workspace) -> Result<()> {
    let mut broken = wrong_rooms(workspace);
    broken.extend(wrong_arrows(&edges(workspace)));
    if let Ok(page) = std::fs::read_to_string(workspace.root.join("ARCHITECTURE.md")) {
        broken.extend(stale_page(&page));
    }
    if !broken.is_empty() {
        bail!("{}", broken.join("\n  "));
    }
    Ok(())
}

/// The map of the rooms and the table, in Markdown.
pub fn as_markdown() -> String {
    let mut page = map();
    page.push_str("\n| room | may depend on |\n| --- | --- |\n");
    for (room, uses) in ARROWS {
        let uses = match uses {
            Only([]) => "nothing".to_owned(),
            Only(rooms) => rooms.join(", "),
            Anything => "anything".to_owned(),
        };
        let _ = writeln!(page, "| {room} | {uses} |");
    }
    page
}

/// The map of the rooms that ship, as a Mermaid diagram: a room stands above the rooms that it
/// uses. An arrow that follows from two others is left out.
fn map() -> String {
    let mut map = String::from("```mermaid\nflowchart TD\n");
    for (room, uses) in ARROWS.iter().rev() {
        let Only(used) = uses else { continue };
        if !ships(room) {
            continue;
        }
        let _ = writeln!(map, "    {}[{room}]", room.replace('/', "-"));
        let implied = |to: &str| used.iter().any(|between| *between != to && reaches(between, to));
        for to in used.iter().filter(|to| !implied(to)) {
            let _ = writeln!(map, "    {} --> {}", room.replace('/', "-"), to.replace('/', "-"));
        }
    }
    map.push_str("```\n");
    map
}

fn ships(room: &str) -> bool {
    !room.starts_with("verify/") && room != "xtask"
}

/// Whether a path of arrows leads from one room to the other.
fn reaches(from: &str, to: &str) -> bool {
    match row(from) {
        Some(Only(rooms)) => rooms.iter().any(|next| *next == to || reaches(next, to)),
        _ => false,
    }
}

/// The normal and build dependencies between packages, as (from, to): those of the code that ships
/// or runs at build time.
fn edges(workspace: &Workspace) -> Vec<(String, String)> {
    let mut edges = Vec::new();
    for package in &workspace.packages {
        for dependency in package.dependencies.iter().filter(|d| d.kind.as_deref() != Some("dev")) {
            if let Some(path) = &dependency.path {
                edges.push((workspace.room(package.directory()), workspace.room(path)));
            }
        }
    }
    edges
}

/// Rooms without a row, and rows without a room.
fn wrong_rooms(workspace: &Workspace) -> Vec<String> {
    let rooms: Vec<String> =
        workspace.packages.iter().map(|p| workspace.room(p.directory())).collect();
    let unlisted = rooms.iter().filter(|room| row(room).is_none()).map(|room| {
        format!("{room} has no row in xtask/src/arrows.rs: add one that says what it may depend on")
    });
    let vanished =
        ARROWS.iter().filter(|(room, _)| !rooms.iter().any(|r| r == room)).map(|(room, _)| {
            format!("{room} has a row in xtask/src/arrows.rs but does not exist: remove the row")
        });
    unlisted.chain(vanished).collect()
}

fn wrong_arrows(edges: &[(String, String)]) -> Vec<String> {
    let wrong = edges.iter().filter(|(from, to)| match row(from) {
        // A room without a row is reported once, as such.
        None | Some(Anything) => false,
        Some(Only(rooms)) => !rooms.contains(&to.as_str()),
    });
    wrong
        .map(|(from, to)| {
            format!(
                "{from} depends on {to}, and there is no such arrow: move the code, or (a decision \
                 to record under docs/decisions) draw the arrow in xtask/src/arrows.rs"
            )
        })
        .collect()
}

/// Complains if the page shows a table, and the table is not this one.
fn stale_page(page: &str) -> Option<String> {
    let (_, rest) = page.split_once(MARKERS.0)?;
    let shown = rest.split_once(MARKERS.1).map_or("", |(shown, _)| shown);
    (shown.trim() != as_markdown().trim()).then(|| {
        "ARCHITECTURE.md shows another table of arrows than xtask/src/arrows.rs: paste what `cargo \
         xtask arrows` prints"
            .to_owned()
    })
}

fn row(room: &str) -> Option<Uses> {
    ARROWS.iter().find(|(name, _)| *name == room).map(|(_, uses)| *uses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Dependency, Package};

    fn edge(from: &str, to: &str) -> (String, String) {
        (from.to_owned(), to.to_owned())
    }

    fn workspace(packages: Vec<Package>) -> Workspace {
        Workspace { root: "/src".into(), target: "/src/target".into(), packages }
    }

    fn package(directory: &str, uses: &[(&str, Option<&str>)]) -> Package {
        let dependency = |(path, kind): &(&str, Option<&str>)| Dependency {
            kind: kind.map(str::to_owned),
            path: Some(format!("/src/{path}").into()),
            features: Vec::new(),
        };
        Package {
            name: directory.replace('/', "-"),
            manifest: format!("/src/{directory}/Cargo.toml").into(),
            targets: Vec::new(),
            dependencies: uses.iter().map(dependency).collect(),
        }
    }

    #[test]
    fn an_arrow_that_the_table_has_is_fine() {
        assert!(wrong_arrows(&[edge("ring", "memory"), edge("bench", "control")]).is_empty());
    }

    #[test]
    fn a_dependency_without_an_arrow_is_reported_with_both_ends() {
        let wrong = wrong_arrows(&[edge("memory", "ring"), edge("ring", "memory")]);
        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].contains("memory depends on ring"), "{}", wrong[0]);
    }

    #[test]
    fn code_that_ships_may_not_use_a_test_tool() {
        assert_eq!(
            wrong_arrows(&[edge("assembly", "verify/guest"), edge("ring", "verify/alloc")]).len(),
            2
        );
    }

    #[test]
    fn a_manifest_with_a_wrong_arrow_fails_the_whole_check() {
        let wrong = workspace(vec![package("crates/units", &[("crates/ring", None)])]);
        assert!(check(&wrong).unwrap_err().to_string().contains("units depends on ring"));
    }

    #[test]
    fn tests_are_free_and_build_scripts_are_not() {
        let edges = edges(&workspace(vec![package(
            "crates/units",
            &[("crates/ring", Some("dev")), ("crates/block", Some("build"))],
        )]));
        assert_eq!(edges, [edge("units", "block")]);
    }

    #[test]
    fn a_room_without_a_row_and_a_row_without_a_room_are_reported() {
        let wrong = wrong_rooms(&workspace(vec![package("crates/attic", &[])]));
        assert!(wrong[0].contains("attic has no row"), "{}", wrong[0]);
        assert!(wrong.iter().any(|w| w.contains("units has a row")), "{wrong:?}");
    }

    #[test]
    fn every_arrow_points_up_the_table_so_there_are_no_cycles() {
        for (index, (room, uses)) in ARROWS.iter().enumerate() {
            if let Only(rooms) = uses {
                for used in *rooms {
                    let above = ARROWS[..index].iter().any(|(name, _)| name == used);
                    assert!(above, "{room} uses {used}, which is not above it");
                }
            }
        }
    }

    #[test]
    fn the_map_leaves_out_implied_arrows() {
        assert!(reaches("virtio", "units") && !reaches("units", "virtio"));
        let map = map();
        assert!(map.contains("    ring --> memory\n"), "{map}");
        assert!(!map.contains("    ring --> units\n"), "by way of memory: {map}");
        assert!(!map.contains("verify"), "{map}");
    }

    #[test]
    fn the_page_must_show_this_table() {
        let page = |table: &str| format!("# Rooms\n{}{table}{}\n", MARKERS.0, MARKERS.1);
        assert_eq!(stale_page(&page(&as_markdown())), None);
        assert!(stale_page(&page("| room |")).is_some());
        assert_eq!(stale_page("no table yet"), None);
    }
}
