//! Every fault of a configuration is found, placed and explained. The table of faults is the
//! specification.

mod faults;
mod manual;
mod mirrors;
mod network;
mod remote;
mod stages;
mod ublk;

use std::path::Path;

use sidecore_control::{Config, Depth, Problems, offline};
use tempfile::TempDir;

use faults::FAULTS;
use mirrors::MIRRORS;

/// A configuration without faults, to put faults into.
const GOOD: &str = r#"
control_socket = "control.sock"
[[sidecore]]
name = "sc0"
[[sidecore]]
name = "sc1"
spin_us = 7
[[store]]
name = "mem"
type = "ram"
size = "1MiB"
[[store]]
name = "disk"
type = "file"
path = "disk.img"
[[device]]
name = "vd0"
store = "mem"
socket = "vd0.sock"
sidecore = "sc0"
"#;

/// Controllers and their functions without faults, to add to it.
const CONTROLLERS: &str = r#"
[[controller]]
name = "usual"
store = "disk"
[[store]]
name = "m"
type = "ram"
size = "1MiB"
[[controller]]
name = "own"
store = "m"
format = "blank"
block_size = "4KiB"
label = "the fast one"
btlb = 0
tree_memory = "8MiB"
commit_interval_ms = 100
warn_used_percent = 95
physical_function = true
[[store]]
name = "v"
type = "volume"
controller = "own"
volume = "v"
size = "10GiB"
quota = "1GiB"
weight = 300
read_iops = 1000
write_bps = "100MiB"
write_bps_burst = "1MiB"
[[store]]
name = "p"
type = "pf"
controller = "own"
"#;

/// Makes a directory with the files of the configurations.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in [("disk.img", 1 << 20), ("empty.img", 0), ("odd.img", 1000)] {
        std::fs::File::create(directory.path().join(name)).unwrap().set_len(bytes).unwrap();
    }
    offline::format(
        &directory.path().join("disk.img"),
        &offline::FormatSpec::default(),
        offline::GiveUp::Nothing,
    )
    .unwrap();
    std::fs::File::create(directory.path().join("blank.img")).unwrap().set_len(1 << 20).unwrap();
    std::fs::write(directory.path().join("used.img"), vec![1; 1 << 20]).unwrap();
    std::os::unix::fs::symlink("disk.img", directory.path().join("alias.img")).unwrap();
    directory
}

fn parse(directory: &Path, text: &str, depth: Depth) -> Result<Config, Problems> {
    Config::parse(&directory.join("disks.toml"), text, depth)
}

#[test]
fn each_fault_is_found_at_its_place_and_nothing_else_is() {
    let directory = directory();
    let offset = GOOD.matches('\n').count();
    for (name, added, place, fragments) in FAULTS.iter().chain(MIRRORS) {
        let problems = match parse(directory.path(), &format!("{GOOD}{added}"), Depth::Machine) {
            Ok(_) => panic!("{name}: not found"),
            Err(problems) => problems,
        };
        let text = problems.to_string();
        let (line, column) = place.split_once(':').unwrap();
        let line = line.parse::<usize>().unwrap() + offset;
        let last = text.lines().last().unwrap();
        assert!(
            last.contains(&format!("disks.toml:{line}:{column}")),
            "{name}: not at {place} (line {line}): {text}"
        );
        for fragment in *fragments {
            assert!(text.contains(fragment), "{name}: no word of {fragment}: {text}");
        }
        // Each store of a circle reports it; every other fault is reported once.
        let expected = if *name == "stores in a circle" { 2 } else { 1 };
        assert_eq!(problems.list.len(), expected, "{name}: {text}");
    }
}

#[test]
fn all_faults_are_reported_at_once_in_the_order_of_the_file() {
    let directory = directory();
    let text = "[[device]]\nname = \"x\"\nstore = \"nowhere\"\nsocket = \"/no/such/x.sock\"\n\
                queues = 0\n\
                qeues = 1\n";
    let problems = parse(directory.path(), text, Depth::Machine).unwrap_err();
    let lines: Vec<usize> =
        problems.list.iter().filter_map(|problem| Some(problem.place?.0)).collect();
    // The directory of the default control socket may exist or not.
    let lines: Vec<usize> = lines.into_iter().filter(|line| *line > 1).collect();
    assert_eq!(lines, [3, 4, 5, 6], "{problems}");
    assert!(problems.to_string().contains("add a section [[sidecore]]"), "{problems}");
}

#[test]
fn the_good_configuration_is_accepted_and_has_the_right_values() {
    use sidecore_assembly::spec::{FrontEndSpec, IdleMode, Nanos, VirtioBlkSpec};
    let directory = directory();
    let more = "[[device]]\nname = \"vd1\"\nstore = \"disk\"\nsocket = \"vd1.sock\"\nqueues = 3\n\
        [[device]]\nname = \"vd2\"\nstore = \"disk\"\nread_only = true\nsocket = \"vd2.sock\"\n";
    let config = parse(directory.path(), &format!("{GOOD}{more}"), Depth::Machine).unwrap();
    assert_eq!(config.control_socket, directory.path().join("control.sock"));
    let devices = &config.spec.devices;
    assert_eq!(devices[0].sidecores, ["sc0"]);
    assert_eq!(devices[0].idle, IdleMode::Adaptive { spin: Nanos::from_micros(50) });
    assert_eq!(devices[0].queues, 1);
    assert_eq!(devices[0].front_end, FrontEndSpec::VirtioBlk(VirtioBlkSpec::default()));
    // Devices without named sidecores go to the sidecore with the fewest queues, and spin as it is
    // configured.
    assert_eq!(devices[1].sidecores, ["sc1"]);
    assert_eq!(devices[1].idle, IdleMode::Adaptive { spin: Nanos::from_micros(7) });
    assert_eq!(devices[2].sidecores, ["sc0"]);
}

#[test]
fn a_function_has_msi_x_unless_msi_is_configured() {
    use sidecore_assembly::spec::{FrontEndSpec, Interrupts};
    let directory = directory();
    let device = |rest: &str| {
        let function = format!(
            "[[device]]\nname = \"x\"\nfront_end = \"nvme\"\nstore = \"mem\"\nsocket = \"x.sock\"\n\
             read_only = true\n{rest}"
        );
        let config = parse(directory.path(), &format!("{GOOD}{function}"), Depth::Text).unwrap();
        match &config.spec.devices.last().unwrap().front_end {
            FrontEndSpec::Nvme(own) => own.interrupts,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((device(""), device("interrupts = \"msi\"\n")), (Interrupts::MsiX, Interrupts::Msi));
}

#[test]
fn controllers_and_volumes_have_the_right_values() {
    use sidecore_assembly::spec::{FormatSpec, LimitSpec, LimitsSpec, StoreKind};
    let directory = directory();
    let config = parse(directory.path(), &format!("{GOOD}{CONTROLLERS}"), Depth::Machine).unwrap();
    let [usual, own] = &config.spec.controllers[..] else { panic!("{config:?}") };
    assert_eq!(
        (usual.format.clone(), usual.btlb_entries, usual.tree_memory_bytes),
        (None, 8, 64 << 20)
    );
    assert_eq!((usual.commit_interval.as_millis(), usual.physical_function), (5000, false));
    assert_eq!((usual.warn_used_percent, own.warn_used_percent), (80, 95));
    assert_eq!(
        own.format,
        Some(FormatSpec { block_bytes: 4096, label: "the fast one".to_owned() })
    );
    assert_eq!(
        (own.btlb_entries, own.commit_interval.as_millis(), own.physical_function),
        (0, 100, true)
    );
    let StoreKind::Volume(volume) = &config.spec.stores[3].kind else { panic!("{config:?}") };
    assert_eq!(
        (volume.size_bytes, volume.quota_bytes, volume.weight),
        (Some(10 << 30), Some(1 << 30), 300)
    );
    let limits = LimitsSpec {
        read_iops: Some(LimitSpec { per_s: 1000, burst: 1000 }),
        write_bps: Some(LimitSpec { per_s: 100 << 20, burst: 1 << 20 }),
        ..LimitsSpec::default()
    };
    assert_eq!(volume.limits, limits);
}

#[test]
fn the_text_can_be_checked_without_the_machine() {
    let nowhere = Path::new("/no/such");
    assert!(parse(nowhere, GOOD, Depth::Machine).is_err());
    assert!(parse(nowhere, GOOD, Depth::Text).is_ok());
}

#[test]
fn a_busy_file_is_reported() {
    let directory = directory();
    let options = sidecore_assembly::spec::FileOptions::new(directory.path().join("disk.img"));
    let config = parse(directory.path(), GOOD, Depth::Machine).unwrap();
    let assembly = {
        let mut spec = config.spec;
        spec.devices[0].store = "disk".to_owned();
        sidecore_assembly::Assembly::start(&spec).unwrap()
    };
    let problems = parse(directory.path(), GOOD, Depth::Machine).unwrap_err().to_string();
    assert!(problems.contains(&format!("{} is in use", options.path.display())), "{problems}");
    assert!(problems.contains("a program is serving"), "{problems}");
    drop(assembly);
    assert!(parse(directory.path(), GOOD, Depth::Machine).is_ok());
}

#[test]
fn checking_leaves_no_trace() {
    let directory = directory();
    let list = || {
        let mut names: Vec<_> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        names
    };
    let before = list();
    let config = directory.path().join("disks.toml");
    assert!(
        Config::load(&config, Depth::Machine)
            .unwrap_err()
            .to_string()
            .contains("there is no such file")
    );
    parse(directory.path(), GOOD, Depth::Machine).unwrap();
    assert_eq!(list(), before);
}

#[test]
fn other_files_are_refused_and_never_panic() {
    let directory = directory();
    let file = directory.path().join("big.toml");
    std::fs::write(&file, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(Config::load(&file, Depth::Text).unwrap_err().to_string().contains("larger than 1MiB"));
    std::fs::write(&file, [0xff, 0xfe]).unwrap();
    assert!(Config::load(&file, Depth::Text).unwrap_err().to_string().contains("cannot be read"));
    assert!(Config::load(directory.path(), Depth::Text).is_err());
    // Every prefix of good configurations, every byte of them replaced, and some nonsense.
    for good in [GOOD, CONTROLLERS] {
        for end in 0..good.len() {
            let _ = parse(directory.path(), &good[..end], Depth::Text);
            for byte in ["\"", "[", "=", "\u{e9}"] {
                let text = format!("{}{byte}{}", &good[..end], &good[end + 1..]);
                let _ = parse(directory.path(), &text, Depth::Text);
            }
        }
    }
    // Places where a check of one section by another would take for ever.
    let sections = |section: &dyn Fn(usize) -> String| (0..8_000).map(section).collect::<String>();
    let deep = sections(&|n| {
        format!("[[store]]\nname = \"s{n}\"\ntype = \"store\"\nstore = \"s{}\"\n", n + 1)
    });
    let unknown = sections(&|n| {
        format!(
            "[[store]]\nname = \"s{n}\"\ntype = \"store\"\nstore = \"a-store-that-there-is-not\"\n"
        )
    });
    for text in [
        deep.as_str(),
        &unknown,
        "device = [1, 2]",
        "device = [[]]",
        "store = [{}]",
        &"[".repeat(100_000),
        &"a.".repeat(50_000),
        &"[[device]]\n".repeat(90_000),
    ] {
        let problems = parse(directory.path(), text, Depth::Text).unwrap_err();
        assert!(problems.list.len() <= 100);
    }
}
