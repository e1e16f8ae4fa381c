//! The reason of the last disconnect, for reports.

use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime};

/// The end of a connection that the client did not end in order.
#[derive(Clone, Debug)]
pub struct Disconnect {
    /// The client's error, or the server's reason to close the connection.
    pub reason: String,
    /// Wall-clock time, for reports.
    pub at: SystemTime,
    /// Monotonic time, for comparisons.
    pub instant: Instant,
}

/// The last [`Disconnect`] of a socket, for reports from other threads.
#[derive(Debug, Default)]
pub struct LastDisconnect(Mutex<Option<Disconnect>>);

impl LastDisconnect {
    /// Records that a client was disconnected just now.
    pub fn set(&self, reason: String) {
        let disconnect = Disconnect { reason, at: SystemTime::now(), instant: Instant::now() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(disconnect);
    }

    /// Returns the last disconnect, if there was one.
    pub fn get(&self) -> Option<Disconnect> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
