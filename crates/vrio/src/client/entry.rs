//! Requests between their acceptance and their end.

use crate::Request;

/// Where a request comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Origin {
    /// Nowhere: the entry is blank.
    #[default]
    None,
    /// The caller.
    Guest {
        /// The caller's name for it.
        tag: u64,
    },
    /// The replay log.
    Replay,
    /// The engine, because the replay log is full, has a write that is not to be replayed, or
    /// those of a user that begins or is gone.
    OwnFlush,
}

/// A request that was accepted and has not ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) origin: Origin,
    /// The device's index.
    pub(super) device: usize,
    pub(super) request: Request,
    /// Its place in the order of acceptance.
    pub(super) order: u64,
    /// Its slot, while it has one.
    pub(super) slot: Option<u16>,
    /// The entry that it waits for, and that one's order.
    pub(super) behind: Option<(u16, u64)>,
    /// The request was counted as held back.
    pub(super) was_held_back: bool,
    /// Its record in the replay log.
    pub(super) record: Option<u16>,
    /// For a flush: it covers the writes that were answered before this position.
    pub(super) covers: u64,
}
