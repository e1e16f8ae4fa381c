//! The counters of a link.

use sidecore_telemetry::counters;

counters! {
    /// The counters of a link. Its sidecore alone writes them, any thread may read them.
    pub struct LinkStats;

    /// The counters of a link at one moment, or the sum over several links.
    pub struct LinkCounts;

    /// Frames received.
    pub received: Counter = "received_frames_total",
    /// Bytes received, without the headers of the medium.
    pub received_bytes: Counter = "received_bytes_total",
    /// Frames given to the medium.
    pub sent: Counter = "sent_frames_total",
    /// Bytes given to the medium, without its headers.
    pub sent_bytes: Counter = "sent_bytes_total",
    /// Batches received: frames per batch is how well system calls and cache misses are shared.
    pub received_batches: Counter = "received_batches_total",
    /// Batches sent.
    pub sent_batches: Counter = "sent_batches_total",
    /// Times that the medium took no more frames for now, and was asked again later.
    pub congestions: Counter = "congestions_total",
    /// Frames copied once more, because they were sent in another order than their buffers.
    pub late_copies: Counter = "late_copies_total",
    /// Frames sent in packets of several, which a `packet` link with segmentation offload makes.
    pub offloaded: Counter = "offloaded_frames_total",
    /// Packets of several frames that the interface refused: their frames were sent one by one.
    pub offload_refusals: Counter = "offload_refusals_total",
    /// Notifications sent to a sleeping peer.
    pub wakes: Counter = "wakes_total",
    /// Times that the kernel found no free receive buffer on an `xdp` link. With zero copy the card
    /// drops frames then, which it counts itself (`ethtool -S`).
    pub starvations: Counter = "starvations_total",
    /// Received frames dropped because no receive buffer was free.
    pub dropped_full: Counter = "dropped_full_total",
    /// Received frames dropped because they are longer than a receive buffer.
    pub dropped_truncated: Counter = "dropped_truncated_total",
    /// Received frames dropped because they belong to another VLAN or protocol.
    pub dropped_foreign: Counter = "dropped_foreign_total",
    /// Received frames dropped because their description makes no sense.
    pub dropped_malformed: Counter = "dropped_malformed_total",
    /// Frames to send that were dropped for their size or destination: empty, longer than the link
    /// carries, or addressed in terms of another medium.
    pub dropped_unsendable: Counter = "dropped_unsendable_total",
    /// Frames to send that the kernel refused, or that a closed link could not send.
    pub dropped_refused: Counter = "dropped_refused_total",
    /// Clients of a memory link that were refused, or disconnected because they broke a rule.
    pub refused_clients: Counter = "refused_clients_total",
}

impl LinkCounts {
    /// Frames that were to be received or sent and were dropped, for whatever reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        let reasons = [
            self.dropped_full,
            self.dropped_truncated,
            self.dropped_foreign,
            self.dropped_malformed,
            self.dropped_unsendable,
            self.dropped_refused,
        ];
        reasons.into_iter().fold(0, u64::saturating_add)
    }
}
