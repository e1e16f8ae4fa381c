//! The options of a controller and of its functions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sidecore_volume::{FormatOptions, LogMemory, LogPlace, Owner};

use crate::Limits;

/// The most virtual functions of a controller; the prototype of the thesis had 64.
pub const FUNCTIONS_MAX: usize = 1024;

/// The weight of a function for which none is configured.
pub const DEFAULT_WEIGHT: u32 = 100;

/// The used share of a store, in percent, from which on it is nearly full if none is configured.
pub const DEFAULT_WARN_USED_PERCENT: u8 = 80;

/// The greatest weight.
pub const WEIGHT_MAX: u32 = 1000;

/// The options of a controller.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// The number of extents in each sidecore's BTLB; 0 turns it off.
    pub btlb_entries: usize,
    /// The memory limit of all extent trees, in bytes. Beyond it, parts of trees are pruned.
    pub tree_memory_bytes: u64,
    /// The layout to format a blank store with; `None` leaves the store alone.
    pub format: Option<FormatOptions>,
    /// The longest time that a metadata change which no guest flushes stays in memory only.
    pub commit_interval: Duration,
    /// The used share of the store, in percent, from which on it is reported as nearly full; 100 is
    /// never.
    pub warn_used_percent: u8,
    /// How answered changes of the mappings survive the death of the process.
    pub answered: Answered,
    /// The ownership of a store that several hosts reach.
    pub ownership: Option<Ownership>,
}

/// The epoch in which this process serves a store, and the end of that.
#[derive(Clone)]
pub struct Ownership {
    /// The owner, which the superblock names.
    pub owner: Owner,
    /// Called when a commit finds that another program has written to the store, before any request
    /// is answered after that. It should end the process at once: the other program may be the
    /// store's owner now, and errors would be answers.
    pub lost: Arc<dyn Fn(&str) + Send + Sync>,
}

impl fmt::Debug for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ownership").field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// How mappings of completed requests that no commit has made durable yet survive the death of this
/// process, if its guests live on.
#[derive(Clone, Debug, Default)]
pub enum Answered {
    /// Not at all: the store's contents die with the process.
    #[default]
    WithTheStore,
    /// In a log in this memory, for the store at this place.
    InLog(Arc<dyn LogMemory>, LogPlace),
    /// On the store: each change is answered when it is durable, together with others. The field is
    /// the boot ID, by which the loss of an earlier process's log is noticed.
    WhenDurable([u8; 16]),
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            btlb_entries: sidecore_extent::DEFAULT_BTLB_ENTRIES,
            tree_memory_bytes: 64 << 20,
            format: None,
            commit_interval: Duration::from_secs(5),
            warn_used_percent: DEFAULT_WARN_USED_PERCENT,
            answered: Answered::default(),
            ownership: None,
        }
    }
}

/// The options of a virtual function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionOptions {
    /// The volume's name.
    pub volume: String,
    /// The function's weight among all functions: 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// The function's rate limits.
    pub limits: Limits,
    /// Whether the guest may only read. A snapshot is read-only anyway.
    pub read_only: bool,
}

impl FunctionOptions {
    /// An unlimited function of `volume` with the usual weight.
    #[must_use]
    pub fn new(volume: impl Into<String>) -> Self {
        Self {
            volume: volume.into(),
            weight: DEFAULT_WEIGHT,
            limits: Limits::default(),
            read_only: false,
        }
    }
}
