//! What the simulations' tests have in common.

use std::fmt::Debug;
use std::ops::Range;

use sidecore_sim::Violation;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text}")))
}

/// The seeds that are asked for, or so many.
pub fn seeds(count: u64) -> Range<u64> {
    match (number("SIDECORE_SEED"), number("SIDECORE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, wanted) => 0..wanted.unwrap_or(count),
    }
}

/// Some of the first `seeds` histories notices `bug`, and it is the bug that is noticed.
// Each test file is a crate of its own and uses its part of this.
#[allow(dead_code)]
pub fn assert_noticed<T: Debug>(
    bug: impl Debug,
    seeds: u64,
    with: &dyn Fn(u64) -> Result<T, Box<Violation>>,
    without: &dyn Fn(u64) -> Result<T, Box<Violation>>,
) {
    let noticed = (0..seeds).find_map(|seed| with(seed).err());
    let noticed = noticed.unwrap_or_else(|| panic!("{bug:?}, and nobody notices in {seeds} histories"));
    println!("{bug:?}: {noticed}");
    let without = without(noticed.seed);
    assert!(without.is_ok(), "what was noticed is not {bug:?}: {without:?}");
}
