//! The bodies of requests and answers.

use sidecore_spec_virtio::blk::RequestHeader;
use sidecore_units::layout;

/// Flags of a request.
pub mod request_flag {
    /// The write is durable before it is answered.
    pub const FUA: u16 = 1;
    /// The IOhost says at once how far the request is, unless it answers it.
    pub const ASK: u16 = 2;
    /// The write was answered by an earlier incarnation or epoch and is sent again.
    pub const REPLAY: u16 = 4;
}

/// Values of [`AnswerBody::status`]: virtio's (1.2, 5.2.6), and from 0x80 on errors that virtio has
/// no status for.
pub mod status {
    pub use sidecore_spec_virtio::blk::status::{IOERR, OK, UNSUPP};
    /// The store has no space left.
    pub const NO_SPACE: u8 = 0x80;
    /// The device is read-only.
    pub const READ_ONLY: u8 = 0x81;
    /// The range is outside the device, not aligned to its blocks, or too large.
    pub const OUT_OF_BOUNDS: u8 = 0x82;
}

/// Values of [`AnswerBody::state`], in a BUSY.
pub mod answer_state {
    /// Segments are missing.
    pub const ASSEMBLING: u8 = 1;
    /// The store has the request.
    pub const EXECUTING: u8 = 2;
}

layout! {
    /// The body of a REQUEST. All frames of a request have the same one, but for attempt, flags,
    /// offset and wanted segments: the IOhost can begin with any.
    pub struct RequestBody: 52 {
        /// The device's number.
        pub device: u16 = 0,
        /// The slot, from 0.
        pub slot: u16 = 2,
        /// The device's epoch.
        pub epoch: u64 = 4,
        /// The number of the request in its slot, from 1. It wraps.
        pub sequence: u32 = 12,
        /// How often the request has been sent before. It wraps.
        pub attempt: u16 = 16,
        /// See [`request_flag`].
        pub flags: u16 = 18,
        /// Where in the request's data the payload belongs.
        pub offset_bytes: u32 = 20,
        /// Size of the request's data, from or to the client: for a discard or a write of zeros
        /// that of its [`Range`](sidecore_spec_virtio::blk::Range).
        pub len_bytes: u32 = 24,
        /// The segments that a read asks for, a bit each.
        pub wanted: u64 = 28,
        /// virtio_blk's header of the request (1.2, 5.2.6).
        pub header: RequestHeader = 36,
    }
}

layout! {
    /// The body of an ANSWER or a BUSY. The fields up to `attempt` name the request.
    pub struct AnswerBody: 52 {
        /// The device's number.
        pub device: u16 = 0,
        /// The slot.
        pub slot: u16 = 2,
        /// The epoch in which the request was answered.
        pub epoch: u64 = 4,
        /// The number of the request in its slot.
        pub sequence: u32 = 12,
        /// The newest attempt that the IOhost has seen.
        pub attempt: u16 = 16,
        /// Where in the request's data the payload belongs.
        pub offset_bytes: u32 = 20,
        /// Size of the data that a read returns in all frames of all attempts; 0 if it failed.
        pub len_bytes: u32 = 24,
        /// In a BUSY the segments of a write that have not arrived.
        pub segments: u64 = 28,
        /// See [`status`]; 0 in a BUSY.
        pub status: u8 = 36,
        /// See [`answer_state`]; 0 in an ANSWER.
        pub state: u8 = 37,
        /// The client may use the slots below this one.
        pub slot_limit: u16 = 38,
        /// Since the newest frame of this attempt arrived, in nanoseconds.
        pub held_ns: u32 = 40,
        /// The version of the client's list of devices.
        pub devices_version: u32 = 44,
    }
}

layout! {
    /// The first bytes of a part of a BUNDLE. The part's body and payload follow.
    pub struct PartHeader: 4 {
        /// A [`Kind`](super::Kind) with a body.
        pub kind: u8 = 0,
        /// Bytes behind the part's body.
        pub payload_bytes: u16 = 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_at_its_offsets() {
        let body = RequestBody {
            device: 0x0201,
            slot: 0x0403,
            epoch: 0x0c0b_0a09_0807_0605,
            sequence: 0x100f_0e0d,
            attempt: 0x1211,
            flags: 0x1413,
            offset_bytes: 0x1817_1615,
            len_bytes: 0x1c1b_1a19,
            wanted: 0x2423_2221_201f_1e1d,
            header: RequestHeader { kind: 0x2827_2625, sector: 0x3433_3231_302f_2e2d },
        };
        let mut expected: [u8; 52] = std::array::from_fn(|index| index as u8 + 1);
        // virtio's reserved word.
        expected[40..44].fill(0);
        assert_eq!(body.encode(), expected);
    }

    #[test]
    fn an_answer_is_at_its_offsets() {
        let body = AnswerBody {
            device: 0x0201,
            slot: 0x0403,
            epoch: 0x0c0b_0a09_0807_0605,
            sequence: 0x100f_0e0d,
            attempt: 0x1211,
            offset_bytes: 0x1817_1615,
            len_bytes: 0x1c1b_1a19,
            segments: 0x2423_2221_201f_1e1d,
            status: 0x25,
            state: 0x26,
            slot_limit: 0x2827,
            held_ns: 0x2c2b_2a29,
            devices_version: 0x302f_2e2d,
        };
        let mut expected: [u8; 52] = std::array::from_fn(|index| index as u8 + 1);
        expected[18..20].fill(0);
        expected[48..].fill(0);
        assert_eq!(body.encode(), expected);
    }
}
