//! From a seed to a history.

use sidecore_ownership::Rule;

use super::world::World;
use crate::many::Total;
use crate::violation::{Violation, no_panic};

/// The manner of histories.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seconds of simulated time until everything heals.
    pub seconds: u64,
    /// A rule that all daemons neglect.
    pub neglect: Option<Rule>,
}

impl Default for Options {
    fn default() -> Self {
        Self { seconds: 40, neglect: None }
    }
}

/// The counts of histories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests that were answered to the client.
    pub answered: u64,
    /// Openings of the store.
    pub openings: u64,
    /// Planned hand-overs.
    pub hand_overs: u64,
    /// Processes that were paused, or killed.
    pub pauses: u64,
    /// See `pauses`.
    pub deaths: u64,
    /// Fences that succeeded, and that failed or hung.
    pub fences: u64,
    /// See `fences`.
    pub failed_fences: u64,
    /// Renewals by a leader that was deposed.
    pub deposed_renewals: u64,
    /// Leases that etcd revoked before their end.
    pub early_ends: u64,
    /// Restores of etcd from a backup.
    pub restores: u64,
    /// Times that a store was refused.
    pub refusals: u64,
    /// Leases that ended between a check and the request or answer that depended on it.
    pub ends_after_check: u64,
    /// Requests sent to another candidate while the store had them from the last one.
    pub resent_in_flight: u64,
    /// Requests of a dead or fenced process that were in flight.
    pub orphans: u64,
    /// Answers that came when the daemon had given up its call.
    pub late_answers: u64,
    /// Records that were on their way when a fence ended their daemon, which had lost the key.
    pub cut_records: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.answered += other.answered;
        self.openings += other.openings;
        self.hand_overs += other.hand_overs;
        self.pauses += other.pauses;
        self.deaths += other.deaths;
        self.fences += other.fences;
        self.failed_fences += other.failed_fences;
        self.deposed_renewals += other.deposed_renewals;
        self.early_ends += other.early_ends;
        self.restores += other.restores;
        self.refusals += other.refusals;
        self.ends_after_check += other.ends_after_check;
        self.resent_in_flight += other.resent_in_flight;
        self.orphans += other.orphans;
        self.late_answers += other.late_answers;
        self.cut_records += other.cut_records;
    }
}

/// Runs the history of a seed.
///
/// # Errors
/// The property that does not hold, with the last steps.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let attempt = |tells| {
        let mut world = World::new(seed, options, tells);
        let result = no_panic(|| world.run());
        (result, world)
    };
    let (result, world) = attempt(false);
    if result.is_ok() {
        return Ok(world.outcome);
    }
    // Again, with a trace, which takes longer than the steps.
    let (result, world) = attempt(true);
    let what = result.err().unwrap_or_else(|| "the second run does not fail".to_owned());
    let at = world.trace.last().map_or(0, |(at, _)| *at);
    let when = format!("at {at} ms");
    Err(Violation::new((seed, 0), when, what, &world.trace, at + 1))
}
