//! A hostile configuration file.
//!
//! Any text is refused, with at most a hundred problems that each have a place in it and a message,
//! or it is a specification with a plan that starts every sidecore and device once. Neither looks
//! at the machine.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sidecore_control::{Config, Depth};

/// Relative paths start from its directory.
const FILE: &str = "/etc/sidecore/disks.toml";

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let problems = match Config::parse(Path::new(FILE), text, Depth::Text) {
        Ok(config) => return check_plan(&config),
        Err(problems) => problems,
    };
    assert!((1..=100).contains(&problems.list.len()), "{} problems", problems.list.len());
    let lines: Vec<&str> = text.split('\n').collect();
    for problem in &problems.list {
        let (line, column) =
            problem.place.unwrap_or_else(|| panic!("no place: {}", problem.message));
        let characters = lines[line - 1].chars().count();
        assert!((1..=characters + 1).contains(&column), "{line}:{column}: {}", problem.message);
        assert!(!problem.message.is_empty() && !problem.message.contains('\n'), "{line}:{column}");
    }
    assert_eq!(problems.to_string().lines().count(), problems.list.len());
});

fn check_plan(config: &Config) {
    let plan =
        config.plan().unwrap_or_else(|error| panic!("accepted, and cannot be planned: {error}"));
    let sidecores = config
        .spec
        .sidecores
        .iter()
        .map(|sidecore| format!("start sidecore \"{}\"", sidecore.name));
    let devices =
        config.spec.devices.iter().map(|device| format!("start device \"{}\"", device.name));
    for start in sidecores.chain(devices) {
        assert_eq!(plan.iter().filter(|action| **action == start).count(), 1, "{start}: {plan:?}");
    }
}
