//! From a seed to a history.

use super::Rule;
use super::world::World;
use crate::many::Total;
use crate::violation::{Violation, no_panic};

/// The manner of histories.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seconds of simulated time until everything heals.
    pub seconds: u64,
    /// A rule that is neglected.
    pub neglect: Option<Rule>,
}

impl Default for Options {
    fn default() -> Self {
        Self { seconds: 20, neglect: None }
    }
}

/// The counts of histories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests of guests.
    pub requests: u64,
    /// Openings of the stores.
    pub openings: u64,
    /// Of which so many were by another IOhost than the one before.
    pub failovers: u64,
    /// Planned hand-overs.
    pub hand_overs: u64,
    /// Stops of a supervisor, a daemon or both.
    pub stops: u64,
    /// Deaths of a daemon or its IOhost that were no fence's.
    pub deaths: u64,
    /// Power cuts of the stores.
    pub power_cuts: u64,
    /// Fences that failed.
    pub failed_fences: u64,
    /// Answered writes that were sent again.
    pub replayed: u64,
    /// Sessions on another link than the one before.
    pub link_changes: u64,
    /// Writes that a client sent again to the next owner, and that the stores had from the former
    /// one when it was fenced.
    pub resends_with_overlap: u64,
    /// Writes that a daemon gave the kernel after its lease had ended.
    pub ends_before_write: u64,
    /// Answers of a former owner that came to a client when there was a new one.
    pub late_answers: u64,
    /// Power cuts of the stores while writes that a former owner had answered were in no flush.
    pub cuts_before_flush: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.openings += other.openings;
        self.failovers += other.failovers;
        self.hand_overs += other.hand_overs;
        self.stops += other.stops;
        self.deaths += other.deaths;
        self.power_cuts += other.power_cuts;
        self.failed_fences += other.failed_fences;
        self.replayed += other.replayed;
        self.link_changes += other.link_changes;
        self.resends_with_overlap += other.resends_with_overlap;
        self.ends_before_write += other.ends_before_write;
        self.late_answers += other.late_answers;
        self.cuts_before_flush += other.cuts_before_flush;
    }
}

/// Runs the history of a seed.
///
/// # Errors
/// Something that must not be.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let live = |tells| {
        let mut world = World::new(seed, options, tells);
        (no_panic(|| world.live()), world)
    };
    let (result, world) = live(false);
    if result.is_ok() {
        return Ok(world.outcome());
    }
    // The same again, with a trace.
    let (result, world) = live(true);
    let what = result.err().unwrap_or_else(|| "it is not the same again".to_owned());
    let when = format!("at {} us ({:?})", world.now.0 / 1_000, world.manner());
    Err(Violation::new((seed, 0), when, what, &world.trace, world.trace.len()))
}
