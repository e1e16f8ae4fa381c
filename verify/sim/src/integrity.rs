//! A store with checksums, whose power is cut after every write and flush, and that loses writes.
//!
//! # Real and simulated parts
//!
//! The stage with its channels is the production code. Simulated are time, the store below it, and
//! guests on two queues.
//!
//! # A history
//!
//! A seed gives the size of blocks and the length of the journal. Guests write, read, zero and
//! flush, overlap their writes, and change the memory of a write in flight. Requests of the store
//! fail. The daemon dies, and opens the store again while the power stays on. Or the guests are
//! killed, their requests in flight fail, and the stage opens the store again for the next ones:
//! all blocks are read then, and those that are torn are bad, and no others. Or a flush fails, the
//! guests are paused and go on, and no flush succeeds. The store records every write and flush.
//!
//! Then the power is cut: after every event of the recording, the stage is opened on what the store
//! may have kept, and all of it is read. A block that has the bytes of one write is read, and no
//! older one than a flush has covered. A block that has the bytes of two is bad. At some cuts a
//! block is put back to what it was before a flush, as if the store had lost a write: it is bad.
//!
//! # Tests of the checks
//!
//! A run can neglect one [`Rule`]; tests assert that each one is noticed.

mod check;
mod world;

use sidecore_stage_integrity::Rule;

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
    /// Blocks that a power cut had torn.
    pub torn: u64,
    /// Writes that the store had lost behind a flush.
    pub lost: u64,
    /// Daemons that died.
    pub deaths: u64,
    /// Times that the guests were killed, and the daemon lived on.
    pub kills: u64,
    /// Guests' requests that succeeded.
    pub requests: u64,
    /// Guests' requests that failed.
    pub failures: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.cut_points += other.cut_points;
        self.torn += other.torn;
        self.lost += other.lost;
        self.deaths += other.deaths;
        self.kills += other.kills;
        self.requests += other.requests;
        self.failures += other.failures;
    }
}

/// Runs the history of `seed`, with a power cut after every write and flush.
///
/// # Errors
/// A check that failed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let mut history = History::new(seed);
    for run in 0..options.runs {
        if let Err(what) = no_panic(|| history.run(options)) {
            let when = format!("checksums, {}", history.describe());
            return Err(Violation::new((seed, run), when, what, &history.trace, usize::MAX));
        }
    }
    Ok(history.outcome)
}
