//! The payloads of control messages. Bytes behind a structure are padding, up to the payload's end.

use sidecore_units::layout;

/// Longest name of a device; shorter ones are padded with zeros.
pub const DEVICE_NAME_BYTES: usize = 64;
/// Longest serial number, as in virtio's GET_ID (1.2, 5.2.6).
pub const SERIAL_BYTES: usize = sidecore_spec_virtio::blk::ID_BYTES;

/// Values of [`Ending::code`].
pub mod ending {
    /// The receiver has asked for the end, or the sender ends in order.
    pub const CLOSED: u16 = 1;
    /// The IOhost knows no such session: it was started again, or has given the session up.
    pub const UNKNOWN_SESSION: u16 = 2;
    /// The IOhost knows no such client, or no more.
    pub const UNKNOWN_CLIENT: u16 = 3;
    /// The versions have none in common.
    pub const VERSION: u16 = 4;
    /// A device of the session has another epoch, so that the session is over.
    pub const EPOCH: u16 = 5;
}

/// Bits of [`DeviceEntry::flags`].
pub mod device_flag {
    /// There is such a device. All else is zero without this.
    pub const PRESENT: u32 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u32 = 2;
    /// An answered write may be lost until a flush is answered.
    pub const VOLATILE_CACHE: u32 = 4;
    /// Discards do something.
    pub const DISCARD: u32 = 8;
    /// Blocks that a discard covered read as zeros.
    pub const DISCARD_ZEROES: u32 = 16;
    /// Writes of zeros are supported.
    pub const WRITE_ZEROES: u32 = 32;
    /// The device is a NIC: the entry is a [`NicEntry`](crate::wire::NicEntry). Only in
    /// sessions with [`PACKETS`](super::feature::PACKETS).
    pub const NIC: u32 = 64;
    /// Frames may pass the NIC.
    pub const LINK_UP: u32 = 128;
}

/// Bits of [`Hello::features`] and [`Welcome::features`].
pub mod feature {
    /// Several requests or answers may share a frame, a BUNDLE.
    pub const BUNDLES: u64 = 1;
    /// There are NICs in the list of devices, and PACKETs for them.
    pub const PACKETS: u64 = 2;
}

/// The features that this code knows. Both sides name theirs, and a session has those that both
/// know.
pub const FEATURES: u64 = feature::BUNDLES | feature::PACKETS;

layout! {
    /// The clear part of HELLO and WELCOME, in front of the message of the
    /// [handshake](crate::handshake); the whole of a CHALLENGE, which has no message.
    ///
    /// HELLO and WELCOME are padded to the size of frames that is wanted, so that the path is known
    /// to carry such frames both ways. A HELLO that has not the right cookie is challenged: the
    /// client repeats it with the cookie, which shows that it is there now, at its address, and
    /// that the HELLO is not an old one.
    pub struct Greeting: 40 {
        /// As in the [`Hello`].
        pub life: u64 = 0,
        /// As in the [`Hello`]; not 0.
        pub number: u64 = 8,
        /// When the CHALLENGE was sent, by the IOhost's clock; 0 before there was one.
        pub challenged_ns: u64 = 16,
        /// From the CHALLENGE; 0 before there was one.
        pub cookie: u64 = 24,
        /// See [`code`](crate::handshake::code).
        pub handshake: u8 = 32,
        /// The client's link queue that answers go to, as in the [`Hello`].
        pub queue: u8 = 33,
        /// Size of the handshake's message.
        pub message_bytes: u16 = 34,
    }
}

layout! {
    /// HELLO: a client wants a session.
    pub struct Hello: 64 {
        /// The client's name, and zeros behind it.
        pub client: [u8; 16] = 0,
        /// A random number of this start of the client.
        pub life: u64 = 16,
        /// The number of the session that is wanted, among those of this life: it rises.
        pub number: u64 = 24,
        /// See [`FEATURES`].
        pub features: u64 = 32,
        /// The size of frames that is wanted, from the frame header to the tag.
        pub frame_bytes: u32 = 40,
        /// Frames that the client's receive ring holds for this session.
        pub receive_frames: u32 = 44,
        /// Slots that the client can use.
        pub slots: u16 = 48,
        /// The client's link queue that the session belongs to, for
        /// [`FrameHeader::queue`](super::FrameHeader::queue).
        pub queue: u8 = 50,
        /// The oldest version that the client knows.
        pub version_min: u8 = 51,
        /// The newest version that the client knows.
        pub version_max: u8 = 52,
        /// As in the clear part: a message that was recorded cannot be sent with another cookie.
        pub cookie: u64 = 56,
    }
}

layout! {
    /// WELCOME: the session.
    pub struct Welcome: 64 {
        /// As in the HELLO.
        pub life: u64 = 0,
        /// As in the HELLO.
        pub number: u64 = 8,
        /// The session's name in each further frame; not 0.
        pub session: u64 = 16,
        /// As in the header.
        pub incarnation: u64 = 24,
        /// Features that both know.
        pub features: u64 = 32,
        /// The size of frames, not above the wanted one.
        pub frame_bytes: u32 = 40,
        /// The version of the client's list of devices.
        pub devices_version: u32 = 44,
        /// Slots of the session.
        pub slots: u16 = 48,
        /// The slots that the client may use now; see [`AnswerBody`](super::AnswerBody).
        pub slot_limit: u16 = 50,
        /// The version of the session.
        pub version: u8 = 52,
        /// The IOhost's link queue that the session belongs to, for
        /// [`FrameHeader::queue`](super::FrameHeader::queue).
        pub queue: u8 = 53,
    }
}

layout! {
    /// LIST: the client wants an entry of its list of devices.
    pub struct List: 8 {
        /// From 0.
        pub index: u16 = 0,
    }
}

layout! {
    /// ATTACH: the client wants to use a device in this session.
    pub struct Attach: 64 {
        /// The device's name. Numbers of devices are another IOhost's, after it was started again.
        pub name: [u8; DEVICE_NAME_BYTES] = 0,
    }
}

layout! {
    /// DEVICE (to LIST) or ATTACHED (to ATTACH): a device as it is now.
    pub struct DeviceEntry: 136 {
        /// The number that the device has in this session.
        pub device: u16 = 0,
        /// The entry's place in the list.
        pub index: u16 = 2,
        /// How many entries the list has.
        pub count: u16 = 4,
        /// The version of the list: it rises when an entry changes, comes or goes.
        pub version: u32 = 8,
        /// See [`device_flag`].
        pub flags: u32 = 12,
        /// The epoch of the store's owner.
        pub epoch: u64 = 16,
        /// Size of the device.
        pub capacity_bytes: u64 = 24,
        /// The unit of requests.
        pub block_bytes: u32 = 32,
        /// The unit that the medium writes without reading first.
        pub physical_block_bytes: u32 = 36,
        /// UTF-8, padded with zeros.
        pub name: [u8; DEVICE_NAME_BYTES] = 40,
        /// As virtio's GET_ID returns it.
        pub serial: [u8; SERIAL_BYTES] = 104,
    }
}

layout! {
    /// PING: the sender is there, and wants to know the same of the receiver. The PONG has its
    /// size.
    pub struct Ping: 24 {
        /// Comes back.
        pub sent_at: u64 = 0,
        /// The client's smoothed round trip: a request that takes longer is acknowledged.
        pub round_trip_ns: u32 = 8,
    }
}

layout! {
    /// PONG: the answer to a PING.
    pub struct Pong: 24 {
        /// From the PING; 0 if this answers none, but says that a limit or the list has changed.
        pub sent_at: u64 = 0,
        /// From the arrival of the PING to this frame.
        pub held_ns: u32 = 8,
        /// The version of the client's list of devices.
        pub devices_version: u32 = 12,
        /// See [`AnswerBody`](super::AnswerBody).
        pub slot_limit: u16 = 16,
        /// The IOhost acknowledges a request that it has had for this time.
        pub acknowledge_ns: u32 = 20,
    }
}

layout! {
    /// ENDING: the session is over, or there will be none. It is not believed but looked into: the
    /// client says HELLO.
    pub struct Ending: 24 {
        /// As in the HELLO, if that is what it answers.
        pub life: u64 = 0,
        /// As in the HELLO.
        pub number: u64 = 8,
        /// See [`ending`].
        pub code: u16 = 16,
    }
}

impl DeviceEntry {
    /// Whether all `flags` are set.
    #[must_use]
    pub const fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }

    /// Whether a client can use the device: a block size that this format can carry, a physical one
    /// of whole blocks, and a capacity of whole blocks. A hostile IOhost may claim anything.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let Self { block_bytes, physical_block_bytes, .. } = *self;
        self.has(device_flag::PRESENT)
            && !self.has(device_flag::NIC)
            && block_bytes.is_power_of_two()
            && (512..=MAX_BLOCK_BYTES).contains(&block_bytes)
            && physical_block_bytes.is_power_of_two()
            && physical_block_bytes >= block_bytes
            && self.capacity_bytes.is_multiple_of(block_bytes.into())
    }
}

/// The largest block of a device.
pub const MAX_BLOCK_BYTES: u32 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_sound_or_it_is_not() {
        let sound = DeviceEntry {
            flags: device_flag::PRESENT,
            capacity_bytes: 8192,
            block_bytes: 4096,
            physical_block_bytes: 4096,
            ..DeviceEntry::default()
        };
        assert!(sound.is_sound());
        assert!(!DeviceEntry { flags: 0, ..sound }.is_sound());
        assert!(!DeviceEntry { capacity_bytes: 8191, ..sound }.is_sound());
        for block_bytes in [0, 1, 256, 1000, 8192, u32::MAX] {
            assert!(!DeviceEntry { block_bytes, ..sound }.is_sound(), "{block_bytes}");
        }
        for physical_block_bytes in [0, 1, 512, 2048, 4097, 12_288, u32::MAX] {
            let entry = DeviceEntry { physical_block_bytes, ..sound };
            assert!(!entry.is_sound(), "{physical_block_bytes}");
        }
        assert!(DeviceEntry { physical_block_bytes: 16_384, ..sound }.is_sound());
    }

    #[test]
    fn control_messages_have_their_sizes() {
        let sizes = [
            Greeting::BYTES,
            Hello::BYTES,
            Welcome::BYTES,
            Attach::BYTES,
            DeviceEntry::BYTES,
            Ping::BYTES,
            Pong::BYTES,
        ];
        assert_eq!(sizes, [40, 64, 64, 64, 136, 24, 24]);
        let hello = Hello { client: [9; 16], life: 1, slots: 0x0302, ..Hello::default() };
        let bytes = hello.encode();
        assert_eq!(
            (bytes[..17].to_vec(), bytes[48..50].to_vec()),
            ([[9; 16].as_slice(), &[1]].concat(), vec![2, 3])
        );
    }
}
