//! The activity of a controller, for its SMART / Health Information log page (NVMe base 2.0,
//! 5.16.1.3).

use serde::{Deserialize, Serialize};

/// Counts since the function was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Bytes that the host has read, and compared or verified.
    pub read_bytes: u64,
    /// Bytes that the host has written.
    pub written_bytes: u64,
    /// Commands that read, or compared.
    pub read_commands: u64,
    /// Commands that wrote.
    pub write_commands: u64,
    /// How long at least one command was in flight, in minutes.
    pub busy_minutes: u64,
    /// Unrecovered errors of the store.
    pub media_errors: u64,
}

impl Activity {
    /// The sum of both.
    pub(crate) const fn with(self, other: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_add(other.read_bytes),
            written_bytes: self.written_bytes.saturating_add(other.written_bytes),
            read_commands: self.read_commands.saturating_add(other.read_commands),
            write_commands: self.write_commands.saturating_add(other.write_commands),
            busy_minutes: self.busy_minutes.saturating_add(other.busy_minutes),
            media_errors: self.media_errors.saturating_add(other.media_errors),
        }
    }
}

/// The source of the activity. Called with the controller's lock held; must not wait.
pub trait Statistics: Send + Sync {
    /// The activity since the function was made.
    fn activity(&self) -> Activity;
}

impl<F: Fn() -> Activity + Send + Sync> Statistics for F {
    fn activity(&self) -> Activity {
        self()
    }
}
