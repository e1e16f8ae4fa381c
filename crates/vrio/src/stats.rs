//! Counters of a session, and the reasons for which frames are dropped.

use sidecore_telemetry::counters;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $field:ident $metric:literal,)+) => {
        /// Why a frame was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Reason {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];
        }

        counters! {
            /// The counters of an engine. Its sidecore alone writes them, any thread may read them.
            pub struct VrioStats;

            /// The counters at one moment, or the sum over several engines.
            pub struct VrioCounts;

            /// Frames that arrived, dropped ones included.
            pub frames_received: Counter = "received_frames_total",
            /// Frames that were sent.
            pub frames_sent: Counter = "sent_frames_total",
            /// Requests that ended, at a client, or were given to the store, at an IOhost.
            pub requests: Counter = "requests_total",
            /// Attempts after the first one of requests that the IOhost had not acknowledged.
            pub retransmissions: Counter = "retransmissions_total",
            /// Attempts after the first one of requests that the IOhost had acknowledged.
            pub asks: Counter = "asks_total",
            /// Requests that were acknowledged before they were answered.
            pub acknowledged: Counter = "acknowledged_total",
            /// Requests that were held back behind an unanswered write.
            pub held_back: Counter = "held_back_total",
            /// Writes that were sent again to another incarnation or epoch.
            pub replayed: Counter = "replayed_total",
            /// Answered writes that no flush covers and that were not sent again, because their
            /// user was gone.
            pub abandoned: Counter = "abandoned_writes_total",
            /// Flushes that the client sent by itself: to have room in its replay log, or for a
            /// user that begins or is gone.
            pub own_flushes: Counter = "own_flushes_total",
            /// Requests that failed because the IOhost was away for too long.
            pub timed_out: Counter = "timed_out_total",
            /// Packets of NICs that were sent.
            pub packets_sent: Counter = "sent_packets_total",
            /// Packets of NICs that have arrived whole.
            pub packets_received: Counter = "received_packets_total",
            /// Packets of NICs given up: not all of their segments came in a millisecond, or before
            /// a later packet was whole.
            pub packets_incomplete: Counter = "incomplete_packets_total",
            /// Packets of NICs that were not sent, or not to the end: their session was over, or
            /// the peer did not have the NIC.
            pub packets_unsent: Counter = "unsent_packets_total",
            /// Sessions that began.
            pub sessions: Counter = "sessions_total",
            $($(#[doc = $doc])+ pub $field: Counter = $metric,)+
        }

        impl VrioStats {
            /// Counts a dropped frame.
            #[cold]
            pub fn count_drop(&self, reason: Reason) {
                match reason {
                    $(Reason::$variant => self.$field.add(1),)+
                }
            }
        }

        impl VrioCounts {
            /// Frames that were dropped for this reason.
            #[must_use]
            pub fn dropped(&self, reason: Reason) -> u64 {
                match reason {
                    $(Reason::$variant => self.$field,)+
                }
            }
        }
    };
}

reasons! {
    /// Dropped: shorter than the frame says.
    Truncated = dropped_truncated "dropped_truncated_total",
    /// Dropped: of another version.
    Version = dropped_version "dropped_version_total",
    /// Dropped: of an unknown kind, or one that only the receiver sends.
    Kind = dropped_kind "dropped_kind_total",
    /// Dropped: of another session, or of none.
    Session = dropped_session "dropped_session_total",
    /// Dropped: of another incarnation of the IOhost.
    Incarnation = dropped_incarnation "dropped_incarnation_total",
    /// Dropped: seen before, or too old to say.
    Replayed = dropped_replayed "dropped_replayed_total",
    /// Dropped: the seal is broken.
    Seal = dropped_seal "dropped_seal_total",
    /// Dropped: a control message that makes no sense.
    Malformed = dropped_malformed "dropped_malformed_total",
    /// Dropped: of another epoch of the device.
    Epoch = dropped_epoch "dropped_epoch_total",
    /// Dropped: for a device that is not attached.
    Device = dropped_device "dropped_device_total",
    /// Dropped: for a slot that does not exist, has an unanswered request, or may not be used now.
    Slot = dropped_slot "dropped_slot_total",
    /// Dropped: for an earlier request of its slot, or one out of order.
    Sequence = dropped_sequence "dropped_sequence_total",
    /// Dropped: of an earlier attempt.
    Attempt = dropped_attempt "dropped_attempt_total",
    /// Dropped: a segment that is no part of its request, or of a request that was another one.
    Segment = dropped_segment "dropped_segment_total",
    /// Dropped: a segment that has arrived already.
    Duplicate = dropped_duplicate "dropped_duplicate_total",
    /// Dropped: an answer that was not asked for.
    Unasked = dropped_unasked "dropped_unasked_total",
    /// Dropped: from a client that may have no session here.
    Client = dropped_client "dropped_client_total",
    /// Dropped: from another station than the IOhost.
    Peer = dropped_peer "dropped_peer_total",
    /// Dropped: a segment of a packet that was delivered or given up.
    Late = dropped_late "dropped_late_total",
    /// Dropped: a segment of a packet that no buffer was free for.
    Buffers = dropped_buffers "dropped_buffers_total",
    /// Dropped: a HELLO that the IOhost has no time for.
    Handshakes = dropped_handshakes "dropped_handshakes_total",
}

#[cfg(test)]
mod tests {
    use sidecore_telemetry::CounterSet;

    use super::*;

    #[test]
    fn each_reason_has_a_counter_of_its_own() {
        for reason in Reason::ALL {
            let stats = VrioStats::default();
            stats.count_drop(*reason);
            let counts = stats.counts();
            let dropped: Vec<_> =
                Reason::ALL.iter().filter(|other| counts.dropped(**other) == 1).collect();
            assert_eq!(dropped, [reason]);
        }
    }
}
