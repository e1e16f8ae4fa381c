//! What a sidecore counts about itself.

use sidecore_telemetry::Counter;

/// Counters that the reactor alone writes and anybody may read.
#[derive(Debug, Default)]
pub struct ReactorStats {
    /// Turns taken.
    pub turns: Counter,
    /// Turns in which something was done.
    pub busy_turns: Counter,
    /// Nanoseconds that those turns took. A turn is counted when it ends.
    pub busy_ns: Counter,
    /// Times that the sidecore went to sleep.
    pub sleeps: Counter,
    /// Nanoseconds spent asleep.
    pub asleep_ns: Counter,
    /// Looks at the wake-ups of armed pollables while others were awake.
    pub glances: Counter,
    /// Times that the sidecore gave way to the kernel, or to another thread, because a
    /// request waited for it.
    pub yields: Counter,
    /// Messages delivered.
    pub mails: Counter,
}
