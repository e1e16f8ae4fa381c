//! Why the last client was disconnected.

use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime};

/// The end of a connection that the client did not end in order.
#[derive(Clone, Debug)]
pub struct Disconnect {
    /// What it did.
    pub reason: String,
    /// When, for people.
    pub at: SystemTime,
    /// When, for comparing.
    pub instant: Instant,
}

/// The last one, kept for whoever asks.
#[derive(Debug, Default)]
pub struct LastDisconnect(Mutex<Option<Disconnect>>);

impl LastDisconnect {
    /// A client was disconnected just now.
    pub fn set(&self, reason: String) {
        let disconnect = Disconnect { reason, at: SystemTime::now(), instant: Instant::now() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(disconnect);
    }

    /// The last one.
    pub fn get(&self) -> Option<Disconnect> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
