//! What a controller and its functions are made from.

use std::sync::Arc;
use std::time::Duration;

use sidecore_volume::{FormatOptions, LogMemory, LogPlace};

use crate::Limits;

/// The most virtual functions of a controller; the prototype of the thesis had 64.
pub const FUNCTIONS_MAX: usize = 1024;

/// The weight of a function that says nothing about it.
pub const DEFAULT_WEIGHT: u32 = 100;

/// A store is nearly full from here on, if nothing else is said.
pub const DEFAULT_WARN_USED_PERCENT: u8 = 80;

/// The greatest weight.
pub const WEIGHT_MAX: u32 = 1000;

/// How a controller works.
#[derive(Clone, Debug)]
pub struct ControllerOptions {
    /// Extents that each sidecore's BTLB holds; 0 is none.
    pub btlb_entries: usize,
    /// The most memory that all extent trees may take, in bytes. Beyond that, parts
    /// of them are pruned.
    pub tree_memory_bytes: u64,
    /// With what to format the store if it is blank; `None` leaves it alone.
    pub format: Option<FormatOptions>,
    /// How long a change of the metadata that no guest flushes may stay in memory.
    pub commit_interval: Duration,
    /// The share of the store in use from which on it is called nearly full; 100 is
    /// never.
    pub warn_used_percent: u8,
    /// What keeps answered changes of the mappings if the process dies.
    pub answered: Answered,
}

/// What keeps the mappings that guests were answered about, and that no commit
/// has made durable yet, if this process dies and its guests live on.
#[derive(Clone, Debug, Default)]
pub enum Answered {
    /// Nothing: the store dies with the process.
    #[default]
    WithTheStore,
    /// A log in this memory, for the store at this place.
    InLog(Arc<dyn LogMemory>, LogPlace),
    /// The store itself: each change is answered when it is durable, together with
    /// others. This is the boot, by which the log of a process that kept one is
    /// missed.
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
        }
    }
}

/// What a virtual function shows, and how much of the controller it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionOptions {
    /// The volume's name.
    pub volume: String,
    /// Its share, next to others': 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// What it may not exceed.
    pub limits: Limits,
    /// Whether the guest may only read. A snapshot is read-only anyway.
    pub read_only: bool,
}

impl FunctionOptions {
    /// An unlimited function of `volume` with the usual weight.
    #[must_use]
    pub fn new(volume: impl Into<String>) -> Self {
        Self { volume: volume.into(), weight: DEFAULT_WEIGHT, limits: Limits::default(), read_only: false }
    }
}
