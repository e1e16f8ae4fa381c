//! The counters of a sidecore's loop.

use sidecore_telemetry::counters;

counters! {
    /// Counters that the reactor alone writes and any thread may read.
    pub struct ReactorStats;

    /// The counters of a reactor at one moment.
    pub struct ReactorCounts;

    /// Rounds of the polling loop.
    pub turns: Counter = "turns_total",
    /// Rounds in which something was done.
    pub busy_turns: Counter = "busy_turns_total",
    /// Time of rounds in which something was done; a round counts when it ends.
    pub busy_ns: Counter = "busy_seconds_total",
    /// Times that the sidecore went to sleep.
    pub sleeps: Counter = "sleeps_total",
    /// Time slept; a sleep counts when it ends.
    pub asleep_ns: Counter = "asleep_seconds_total",
    /// Sleeps that a notification ended which a queue or a link had asked for: a guest's kick, a
    /// frame, a completion of the kernel. Timers and the control path do not count.
    pub wakeups: Counter = "wakeups_total",
    /// Checks of the wake-ups of armed queues while others were awake.
    pub wakeup_checks: Counter = "wakeup_checks_total",
    /// Times that the sidecore yielded its core for up to 50 µs, because a request had waited for a
    /// millisecond for the kernel or for another thread.
    pub yields: Counter = "yields_total",
    /// Messages from the control path: queues started, stopped, changed.
    pub messages: Counter = "messages_total",
    /// Queues that it polls right now.
    pub queues: Gauge = "queues",
}
