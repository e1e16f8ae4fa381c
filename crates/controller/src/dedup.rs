//! Deduplication in the background (thesis 6.3): equal blocks are found, compared, and become one.
//!
//! # A run
//!
//! ```text
//!   scan ──► match ──► guard ──► compare ──► remap
//!     ▲        │  no equal blocks   │ they differ │
//!     └────────┴────────────────────┴─────────────┘
//! ```
//!
//! A run reads each block of its volumes once and keeps fingerprints in bounded memory
//! ([`fingerprints`]). A fingerprint that is there already is a hint, no more. The two places are
//! guarded, so that guests' writes to them go to fresh blocks from then on; when earlier writes
//! have ended, the bytes are read again and compared, while guests go on. Then, under the lock of
//! the hypervisor side, the mappings are looked at again: a write that came between has changed one
//! of them, and wins. Otherwise, all mappings of the one block are changed to the other, and the
//! block is free when that is durable.
//!
//! # Owners
//!
//! Whether a block is shared can be felt: the first write to it takes longer. So blocks become one
//! within a family only, a volume with its snapshots and clones, unless the operator allows more
//! ([`families`]).
//!
//! Nothing of a run is on the disk: a run that ends early is started again, and finds less to do.

mod chunk;
mod compare;
mod families;
mod fingerprints;
mod job;
mod pace;
mod plan;
mod remap;
mod run;
mod seen;

use std::time::Duration;

pub(crate) use job::Jobs;
pub use run::{DedupRun, DedupStep};

use sidecore_telemetry::schemars::JsonSchema;
use sidecore_telemetry::serde::{Deserialize, Serialize};

use crate::{Controller, ControllerError};

/// The rate of a run for which none is given, in bytes a second.
pub const DEFAULT_DEDUP_BYTES_PER_S: u64 = 128 << 20;

/// The volumes of a run, and its manner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DedupOptions {
    /// The volumes, each with its whole family; none for all.
    pub volumes: Vec<String>,
    /// Blocks of different families become one as well.
    pub across: bool,
    /// Nothing is changed.
    pub dry_run: bool,
    /// The bytes that are read in a second, at most, while guests make few requests.
    pub bytes_per_s: u64,
}

impl Default for DedupOptions {
    fn default() -> Self {
        Self {
            volumes: Vec::new(),
            across: false,
            dry_run: false,
            bytes_per_s: DEFAULT_DEDUP_BYTES_PER_S,
        }
    }
}

/// The bytes that a run has dealt with so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(crate = "sidecore_telemetry::serde")]
#[schemars(crate = "sidecore_telemetry::schemars")]
pub struct DedupCounts {
    /// Mapped bytes of all volumes of the run, when it began.
    pub total_bytes: u64,
    /// Of those, the bytes that the run has passed.
    pub passed_bytes: u64,
    /// Bytes read from the store, also to compare them.
    pub read_bytes: u64,
    /// Bytes of blocks that became free, or in a dry run would.
    pub saved_bytes: u64,
    /// Of those, the bytes of blocks of zeros, which became holes.
    pub zero_bytes: u64,
    /// Runs of blocks that were remapped.
    pub remaps: u64,
    /// Equal bytes that were left because requests to them were in flight or came between.
    pub busy_bytes: u64,
    /// Equal bytes that were left because volumes outside of the run, or many snapshots, have them
    /// too.
    pub kept_bytes: u64,
    /// Bytes that could not be read, and were left.
    pub unreadable_bytes: u64,
    /// Volumes that could not be read, and were left.
    pub skipped_volumes: u64,
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DedupState {
    /// The run goes on.
    Running,
    /// All volumes were looked at.
    Done,
    /// The operator, or the end of the controller, has stopped the run.
    Stopped,
    /// The run has ended early, for this reason.
    Failed(String),
}

/// A run, the present or the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DedupReport {
    /// The run's options.
    pub options: DedupOptions,
    /// The run's state.
    pub state: DedupState,
    /// Whether the run reads more slowly at present because guests make requests.
    pub yields: bool,
    /// The time that the run has taken.
    pub took: Duration,
    /// The run's counts.
    pub counts: DedupCounts,
}

impl Controller {
    /// Starts a run in the background. One run at a time.
    ///
    /// # Errors
    /// A run is in progress, a volume does not exist, or the store takes no changes.
    pub fn start_dedup(&self, options: &DedupOptions) -> Result<DedupReport, ControllerError> {
        self.unless_down(|| self.dedup_jobs.start(&self.hypervisor, self.store(), options))
    }

    /// The run in progress, or the last one since the controller was opened.
    #[must_use]
    pub fn dedup(&self) -> Option<DedupReport> {
        self.dedup_jobs.report()
    }

    /// Stops the run in progress and waits for its end. Changes made so far stay.
    #[must_use]
    pub fn stop_dedup(&self) -> Option<DedupReport> {
        self.dedup_jobs.stop()
    }

    /// A run whose steps the caller takes with [`step_dedup`](Self::step_dedup): for simulations.
    /// The key makes the fingerprints unpredictable.
    ///
    /// # Errors
    /// As [`start_dedup`](Self::start_dedup).
    pub fn begin_dedup(
        &self,
        options: &DedupOptions,
        key: u64,
    ) -> Result<DedupRun, ControllerError> {
        DedupRun::new(&self.hypervisor, options, key)
    }

    /// Takes a step of a run.
    ///
    /// # Errors
    /// The run cannot go on.
    pub fn step_dedup(
        &self,
        run: &mut DedupRun,
        disk: &mut dyn sidecore_volume::Disk,
    ) -> Result<DedupStep, ControllerError> {
        run.step(&self.hypervisor, disk)
    }

    /// Ends a run early.
    pub fn end_dedup(&self, run: &mut DedupRun) {
        run.give_up(&self.hypervisor);
    }
}
