//! Mirrors whose legs fail, and whose power is cut after every write and flush of a leg.
//!
//! # Real and simulated parts
//!
//! The mirror with its channels and its keeper is the production code. Simulated are time, the
//! legs, the witness, and guests on two queues, which take steps while the keeper waits for a leg.
//!
//! # A history
//!
//! A seed gives the number of legs, their speed, and how often they fail. Guests write, read, zero
//! and flush, overlap their writes, and change the memory of a write in flight. Legs fail and come
//! back, are removed, added and repaired; some are missing at a start. The legs record every write
//! and flush in one order.
//!
//! Then the power is cut: after every event of the recording, the mirror is opened on what each leg
//! may have kept, and read; then all legs are copied to, and compared with what was read. It is
//! also opened with some of its legs, and goes on if the witness permits it: then the others come,
//! and the next run may begin with what these have left. And two daemons have the legs in turn: one
//! loses some, the other one goes on with these, and then they come back.
//!
//! # Tests of the checks
//!
//! A run can neglect one [`Rule`]; tests assert that each one is noticed.

mod check;
pub(crate) mod guest;
pub(crate) mod legs;
pub(crate) mod model;
mod rival;
mod witness;
mod world;

use sidecore_mirror::Rule;

use crate::many::Total;
use crate::violation::{Violation, no_panic};
use world::History;

/// The length of a history.
pub type Options = crate::options::Options<Rule>;

/// The sum of a history's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Positions of the recordings at which the power was cut.
    pub cut_points: u64,
    /// Openings after a cut, with all legs or with some.
    pub openings: u64,
    /// Openings that waited: legs were missing, and nothing permitted to go on.
    pub waits: u64,
    /// Openings with some of the legs that went on.
    pub alone: u64,
    /// Openings by a second daemon that went on with legs which the first one had lost.
    pub seconds: u64,
    /// Guests' requests that succeeded.
    pub requests: u64,
    /// Guests' requests that failed.
    pub failures: u64,
    /// Permissions of operators that were used.
    pub permits: u64,
    /// Legs that failed.
    pub failed_legs: u64,
    /// Legs that were attached to a mirror in use.
    pub attached_legs: u64,
    /// Legs that were added.
    pub added_legs: u64,
    /// Legs that were removed.
    pub removed_legs: u64,
    /// Ranges that were repaired.
    pub repairs: u64,
    /// Regions copied to legs that were behind, in use.
    pub copied_regions: u64,
    /// Mirrors that were closed in good order.
    pub closed: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.cut_points += other.cut_points;
        self.openings += other.openings;
        self.waits += other.waits;
        self.alone += other.alone;
        self.seconds += other.seconds;
        self.requests += other.requests;
        self.failures += other.failures;
        self.permits += other.permits;
        self.failed_legs += other.failed_legs;
        self.attached_legs += other.attached_legs;
        self.added_legs += other.added_legs;
        self.removed_legs += other.removed_legs;
        self.repairs += other.repairs;
        self.copied_regions += other.copied_regions;
        self.closed += other.closed;
    }
}

/// Runs the history of `seed`, with a power cut after every write and flush.
///
/// # Errors
/// A check that failed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let mut history = History::new(seed, options);
    for run in 0..options.runs {
        let result = no_panic(|| history.run(options));
        if let Err(what) = result {
            let trace = history.trace();
            let when = format!("mirror of {}", history.describe());
            return Err(Violation::new((seed, run), when, what, &trace, usize::MAX));
        }
    }
    Ok(history.outcome())
}
