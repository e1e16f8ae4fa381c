//! What a controller has done so far, for its SMART / Health Information log page (NVMe base 2.0, 5.16.1.3).

/// Counts since the function was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// Who counts it. Asked with the controller's lock held; must not wait.
pub trait Statistics: Send + Sync {
    /// What has been done so far.
    fn activity(&self) -> Activity;
}

impl<F: Fn() -> Activity + Send + Sync> Statistics for F {
    fn activity(&self) -> Activity {
        self()
    }
}
