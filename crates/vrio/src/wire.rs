//! The wire format, byte by byte as in docs/vrio.md.
//!
//! A frame is a header, a body if it carries a request, an answer or a packet, a payload, and the
//! seal's tag. Links put their own headers in front, and padding behind. Numbers are little-endian.
//! Reserved bytes are sent as zeros and not looked at.

mod control;
mod data;
mod packet;

pub use control::{
    Attach, DEVICE_NAME_BYTES, DeviceEntry, Ending, FEATURES, Greeting, Hello, List,
    MAX_BLOCK_BYTES, Ping, Pong, SERIAL_BYTES, Welcome, device_flag, ending, feature,
};
pub use data::{AnswerBody, PartHeader, RequestBody, answer_state, request_flag, status};
pub use packet::{MAX_PACKET_BYTES, NicEntry, PacketBody};

use sidecore_units::{codes, layout};

use crate::Reason;

/// The ethertype of a frame: the first of the two that IEEE Std 802 leaves to local experiments.
pub const ETHERTYPE: u16 = 0x88b5;
/// The UDP port of an IOhost, unless it is configured otherwise.
pub const UDP_PORT: u16 = ETHERTYPE;
/// The version of this format.
pub const VERSION: u8 = 1;
/// No session has smaller frames: they fit into UDP over IPv6 on Ethernet without jumbo frames.
pub const MIN_FRAME_BYTES: u32 = 1_452;
/// The paper's jumbo frames (4.3).
pub const DEFAULT_FRAME_BYTES: u32 = 8_100;
/// No session has larger frames.
pub const MAX_FRAME_BYTES: u32 = 65_000;
/// Most bytes of data in a request: in the smallest frames that is as many segments as there may
/// be, so that each request fits into each session. It is the paper's largest message, too (4.3).
pub const MAX_REQUEST_BYTES: u32 = 64 << 10;
/// Size of the body of a request and of an answer.
pub const BODY_BYTES: usize = 52;
/// From the first byte of a frame that carries data to its payload. With an Ethernet header in
/// front it is 96 bytes, so that a link can align payloads by its headroom.
pub const DATA_HEADER_BYTES: usize = FrameHeader::BYTES + BODY_BYTES;

/// From the first byte of a part of a BUNDLE to the part's payload.
pub const PART_HEADER_BYTES: usize = PartHeader::BYTES + BODY_BYTES;

/// Offset in a frame of the phase of its key: see [`FrameHeader::phase`].
pub const PHASE_AT: usize = 26;
/// Offset in a frame of the receiver's link queue: see [`FrameHeader::queue`].
pub const QUEUE_AT: usize = 27;

codes! {
    /// The kinds of frames.
    pub enum Kind: u8, "vRIO ", "kind" {
        Request = 1 "REQUEST",
        Answer = 2 "ANSWER",
        Busy = 3 "BUSY",
        Hello = 4 "HELLO",
        Challenge = 5 "CHALLENGE",
        Welcome = 6 "WELCOME",
        List = 7 "LIST",
        Device = 8 "DEVICE",
        Attach = 9 "ATTACH",
        Attached = 10 "ATTACHED",
        Ping = 11 "PING",
        Pong = 12 "PONG",
        Ending = 13 "ENDING",
        Bundle = 14 "BUNDLE",
        Packet = 15 "PACKET",
    }
}

impl Kind {
    /// Whether a body stands between header and payload.
    #[must_use]
    pub const fn has_body(self) -> bool {
        matches!(self, Self::Request | Self::Answer | Self::Busy | Self::Packet)
    }

    /// Bytes in front of the payload.
    #[must_use]
    pub const fn header_bytes(self) -> usize {
        if self.has_body() { DATA_HEADER_BYTES } else { FrameHeader::BYTES }
    }

    /// Whether frames of this kind are outside of a session: their session and counter are zero.
    #[must_use]
    pub const fn is_handshake(self) -> bool {
        matches!(self, Self::Hello | Self::Challenge | Self::Welcome)
    }
}

layout! {
    /// The header of each frame.
    pub struct FrameHeader: 30 {
        /// [`VERSION`].
        pub version: u8 = 0,
        /// See [`Kind`].
        pub kind: u8 = 1,
        /// The session, as the IOhost has named it; 0 in a handshake.
        pub session: u64 = 2,
        /// The number of the frame among those of its sender in the session, from 1.
        pub counter: u64 = 10,
        /// The incarnation of the IOhost that the session is with; 0 in HELLO.
        pub incarnation: u64 = 18,
        /// The phase of the sender's key, which the seal gives it.
        pub phase: u8 = 26,
        /// The receiver's link queue that owns the session, so that a filter in front of the queues
        /// can tell.
        pub queue: u8 = 27,
        /// Bytes behind the header and the body, without the tag.
        pub payload_bytes: u16 = 28,
    }
}

/// A frame whose header made sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The decoded header.
    pub header: FrameHeader,
    /// See [`FrameHeader::kind`].
    pub kind: Kind,
    /// Header and body: the associated data of the seal.
    pub head: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Takes the first bytes of a frame apart: [`DATA_HEADER_BYTES`] of them, or all if there are
    /// fewer.
    ///
    /// # Errors
    /// The frame is too short for its header, or of another version or an unknown kind.
    pub fn parse(first: &'a [u8]) -> Result<Self, Reason> {
        let header = FrameHeader::decode(first.first_chunk().ok_or(Reason::Truncated)?);
        if header.version != VERSION {
            return Err(Reason::Version);
        }
        let kind = Kind::from_code(header.kind);
        if matches!(kind, Kind::Unknown(_)) {
            return Err(Reason::Kind);
        }
        let head = first.get(..kind.header_bytes()).ok_or(Reason::Truncated)?;
        Ok(Self { header, kind, head })
    }

    /// Size of the payload, without the tag.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.header.payload_bytes.into()
    }

    /// Whether `frame_bytes` hold the frame with a tag of `tag_bytes`; more are padding.
    ///
    /// # Errors
    /// They do not.
    pub fn check_size(&self, frame_bytes: usize, tag_bytes: usize) -> Result<(), Reason> {
        let all = self.head.len().saturating_add(self.payload_bytes()).saturating_add(tag_bytes);
        if all <= frame_bytes { Ok(()) } else { Err(Reason::Truncated) }
    }

    /// The body; zeros if the kind has none.
    #[must_use]
    #[inline]
    pub fn body(&self) -> &'a [u8; BODY_BYTES] {
        let body = self.head.get(FrameHeader::BYTES..).and_then(|body| body.first_chunk());
        body.unwrap_or(&[0; BODY_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let payload_bytes = u16::try_from(payload.len()).unwrap();
        let header = FrameHeader {
            version: VERSION,
            kind: kind.code(),
            payload_bytes,
            ..FrameHeader::default()
        };
        let mut frame = header.encode().to_vec();
        frame.resize(kind.header_bytes(), 0);
        frame.extend(payload);
        frame
    }

    #[test]
    fn payloads_are_aligned_behind_an_ethernet_header() {
        assert_eq!((14 + DATA_HEADER_BYTES) % 32, 0);
        assert_eq!(RequestBody::BYTES, BODY_BYTES);
        assert_eq!(AnswerBody::BYTES, BODY_BYTES);
    }

    #[test]
    fn a_frame_comes_apart_and_padding_is_left_out() {
        let mut bytes = frame(Kind::Request, b"payload and a tag");
        bytes[28] = 11;
        bytes.extend([0xee; 20]);
        let parsed = Frame::parse(&bytes).unwrap();
        assert_eq!((parsed.kind, parsed.payload_bytes()), (Kind::Request, 11));
        assert_eq!(parsed.head.len(), DATA_HEADER_BYTES);
        assert_eq!(parsed.check_size(bytes.len(), 6), Ok(()));
        assert_eq!(parsed.check_size(DATA_HEADER_BYTES + 17, 6), Ok(()));
        assert_eq!(parsed.check_size(DATA_HEADER_BYTES + 16, 6), Err(Reason::Truncated));
    }

    #[test]
    fn a_frame_cut_anywhere_is_truncated() {
        let bytes = frame(Kind::Answer, &[7; 40]);
        let check = |len: usize, tag_bytes| {
            let first = &bytes[..len.min(DATA_HEADER_BYTES)];
            Frame::parse(first).and_then(|frame| frame.check_size(len, tag_bytes))
        };
        for len in 0..bytes.len() {
            assert_eq!(check(len, 0), Err(Reason::Truncated), "{len} bytes");
        }
        assert_eq!(check(bytes.len(), 0), Ok(()));
        assert_eq!(check(bytes.len(), 1), Err(Reason::Truncated), "the tag is missing");
    }

    #[test]
    fn foreign_versions_and_unknown_kinds_have_reasons_of_their_own() {
        let mut bytes = frame(Kind::Ping, &[]);
        bytes[0] = 2;
        assert_eq!(Frame::parse(&bytes), Err(Reason::Version));
        bytes[0] = VERSION;
        bytes[1] = 200;
        assert_eq!(Frame::parse(&bytes), Err(Reason::Kind));
    }
}
