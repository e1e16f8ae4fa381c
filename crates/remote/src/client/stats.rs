//! The counters of a client's session.

use sidecore_telemetry::counters;

counters! {
    /// The counters of a session beside its engine's. Its sidecore alone writes them, any thread
    /// may read them.
    pub struct SessionStats;

    /// The counters of a session at one moment, or the sum over several sessions.
    pub struct SessionCounts;

    /// Requests taken from queues of the session's sidecore.
    pub local_requests: Counter = "local_requests_total",
    /// Requests taken from queues of other sidecores.
    pub handed_over: Counter = "handed_over_requests_total",
    /// Requests that were sent in several parts.
    pub splits: Counter = "splits_total",
    /// Sleeping sidecores that were woken for a completed request.
    pub wakes: Counter = "wakes_total",
    /// Times that a device began to wait.
    pub device_waits: Counter = "device_waits_total",
    /// Devices that wait at this moment.
    pub waiting_devices: Gauge = "waiting_devices",
    /// Requests that are not answered at this moment.
    pub in_flight: Gauge = "in_flight_requests",
}
