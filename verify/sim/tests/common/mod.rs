//! Seeds and assertions that the simulations' tests share.

use std::fmt::Debug;
use std::ops::Range;

use sidecore_sim::Violation;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text}")))
}

/// The seeds from the environment, else the first `count`.
pub fn seeds(count: u64) -> Range<u64> {
    match (number("SIDECORE_SEED"), number("SIDECORE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, wanted) => 0..wanted.unwrap_or(count),
    }
}

/// Asserts for each bug that one of the first `seeds` histories fails with it, and does not fail
/// without.
// Each test file is a crate, and some do not use this.
#[allow(dead_code)]
pub fn assert_noticed<B: Copy + Debug, T: Debug>(
    bugs: &[B],
    seeds: u64,
    run: &dyn Fn(u64, Option<B>) -> Result<T, Box<Violation>>,
) {
    for bug in bugs {
        let noticed = (0..seeds).find_map(|seed| run(seed, Some(*bug)).err());
        let noticed =
            noticed.unwrap_or_else(|| panic!("{bug:?} is not noticed in {seeds} histories"));
        println!("{bug:?}: {noticed}");
        let without = run(noticed.seed, None);
        assert!(without.is_ok(), "another fault than {bug:?} was noticed: {without:?}");
    }
}
