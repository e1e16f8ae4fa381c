//! How the memory of a channel is divided, and the two messages before it.

use sidecore_memory::{GuestMemory, UserAddress, Words};
use std::sync::atomic::AtomicU64;

use super::ring::Cursor;
use crate::options::SlotShape;
use crate::{LinkError, LinkOptions};

const PAGE_BYTES: usize = sidecore_units::PAGE_BYTES as usize;
const MAGIC: u64 = u64::from_le_bytes(*b"sclink\0\0");
const VERSION: u32 = 2;

sidecore_units::layout! {
    /// The first message of a connection: a client asks for a link.
    pub struct Ask: 32 {
        /// Tells it from the messages of other protocols.
        pub magic: u64 = 0,
        /// Of the messages, and of the memory.
        pub version: u32 = 8,
        /// As in the client's options, and so are the other three.
        pub frame_bytes: u32 = 12,
        pub header_bytes: u32 = 16,
        pub receive_frames: u32 = 20,
        pub transmit_frames: u32 = 24,
    }
}

sidecore_units::layout! {
    /// The IOhost's answer. The memory, the client's eventfd and the IOhost's come with it, unless
    /// it is a refusal.
    pub struct Answer: 16 {
        pub magic: u64 = 0,
        pub version: u32 = 8,
        /// A [`Refusal`], or zero.
        pub refusal: u32 = 12,
    }
}

/// Why an IOhost gives a client no link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Version,
    Headers,
    FrameBytes,
    Frames,
    User,
    Clients,
    Memory,
}

impl Refusal {
    const ALL: [Self; 7] = [
        Self::Version,
        Self::Headers,
        Self::FrameBytes,
        Self::Frames,
        Self::User,
        Self::Clients,
        Self::Memory,
    ];

    /// For the state of the client's link.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Version => "the IOhost's link has another version: run the same release on both",
            Self::Headers => "the IOhost's frames have other headers: run the same release on both",
            Self::FrameBytes => "frame_bytes is more than the IOhost's link has",
            Self::Frames => "the rings hold more frames than the IOhost's link permits",
            Self::User => "the IOhost does not permit this user: see the users of its link",
            Self::Clients => "the IOhost's link has as many clients as it permits",
            Self::Memory => "the IOhost has no memory or no descriptors for another client",
        }
    }

    fn number(self) -> u32 {
        let index = Self::ALL.iter().position(|refusal| *refusal == self);
        index.and_then(|index| u32::try_from(index).ok()).map_or(0, |index| index.saturating_add(1))
    }
}

fn as_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Ask {
    /// The message of a client with these options, which are in range.
    pub fn of(options: &LinkOptions) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            frame_bytes: as_u32(options.frame_bytes),
            header_bytes: as_u32(options.header_bytes),
            receive_frames: as_u32(options.receive_frames),
            transmit_frames: as_u32(options.transmit_frames),
        }
    }

    /// The largest options that an IOhost with the options `own` grants. Its larger ring counts for
    /// both, so that two ends with the same options fit.
    pub fn largest(own: &LinkOptions) -> LinkOptions {
        let frames = own.receive_frames.max(own.transmit_frames);
        LinkOptions { receive_frames: frames, transmit_frames: frames, ..*own }
    }

    /// The client's options, if an IOhost with the options `own` grants them.
    pub fn options(&self, own: &LinkOptions) -> Result<LinkOptions, Refusal> {
        if self.magic != MAGIC || self.version != VERSION {
            return Err(Refusal::Version);
        }
        let number = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        let options = LinkOptions {
            frame_bytes: number(self.frame_bytes),
            header_bytes: number(self.header_bytes),
            receive_frames: number(self.receive_frames),
            transmit_frames: number(self.transmit_frames),
        };
        if options.header_bytes != own.header_bytes {
            return Err(Refusal::Headers);
        }
        if options.frame_bytes > own.frame_bytes {
            return Err(Refusal::FrameBytes);
        }
        let largest = Self::largest(own);
        let fits = options.receive_frames <= largest.receive_frames
            && options.transmit_frames <= largest.transmit_frames;
        if !fits || options.check().is_err() {
            return Err(Refusal::Frames);
        }
        Ok(options)
    }
}

impl Answer {
    pub fn of(refusal: Option<Refusal>) -> Self {
        Self { magic: MAGIC, version: VERSION, refusal: refusal.map_or(0, Refusal::number) }
    }

    /// The reason why there is no link, if there is none.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.magic != MAGIC {
            return Err("another program answers at the socket");
        }
        if self.version != VERSION {
            return Err(Refusal::Version.text());
        }
        let Some(index) = self.refusal.checked_sub(1) else {
            return Ok(());
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        Err(Refusal::ALL.get(index).map_or("the IOhost refuses the link", |known| known.text()))
    }
}

/// One direction: two rings, and the slots whose numbers travel in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Direction {
    pub slots: usize,
    /// Frames on their way.
    filled_at: usize,
    /// Slots on their way back.
    returned_at: usize,
    /// The frame in the first slot.
    first_frame_at: u32,
    slot_bytes: u32,
}

impl Direction {
    /// Where the frame in a slot begins; in range for every slot, see [`Layout::new`].
    #[inline]
    pub fn frame_at(&self, slot: u16) -> u32 {
        u32::from(slot).wrapping_mul(self.slot_bytes).wrapping_add(self.first_frame_at)
    }

    pub fn filled(&self, memory: &GuestMemory) -> Result<Cursor, LinkError> {
        self.ring(memory, self.filled_at)
    }

    pub fn returned(&self, memory: &GuestMemory) -> Result<Cursor, LinkError> {
        self.ring(memory, self.returned_at)
    }

    /// Where a ring begins, for tests that write to it.
    #[cfg(test)]
    pub fn ring_at(&self, returned: bool) -> usize {
        if returned { self.returned_at } else { self.filled_at }
    }

    fn ring(&self, memory: &GuestMemory, at: usize) -> Result<Cursor, LinkError> {
        Ok(Cursor::new(words(memory, at, self.slots)?))
    }
}

/// Where everything is in a channel's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub to_client: Direction,
    pub to_host: Direction,
    pub len_bytes: usize,
}

/// In the first page: whether the IOhost sleeps, and on another line whether the client does.
pub(super) const HOST_SLEEPS: usize = 0;
pub(super) const CLIENT_SLEEPS: usize = 16;

impl Layout {
    /// The layout for a client's options, which are in range.
    pub fn new(options: &LinkOptions) -> Result<Self, LinkError> {
        let (to_client, to_host) = (options.receive_frames, options.transmit_frames);
        let shape = SlotShape::new(options, 0);
        let mut end = PAGE_BYTES;
        let mut take = |len_bytes: usize| {
            let at = end;
            end = end.saturating_add(len_bytes.next_multiple_of(PAGE_BYTES));
            at
        };
        let mut direction = |slots: usize| Direction {
            slots,
            filled_at: take(slots.saturating_mul(size_of::<u64>())),
            returned_at: take(slots.saturating_mul(size_of::<u64>())),
            first_frame_at: as_u32(
                take(slots.saturating_mul(shape.slot_bytes)).saturating_add(shape.frame_at),
            ),
            slot_bytes: as_u32(shape.slot_bytes),
        };
        let (to_client, to_host) = (direction(to_client), direction(to_host));
        if u32::try_from(end).is_err() {
            return Err(LinkError::TooMuchMemory { bytes: end });
        }
        Ok(Self { to_client, to_host, len_bytes: end })
    }
}

/// `count` words at this place of a link's memory.
pub(super) fn words(
    memory: &GuestMemory,
    at: usize,
    count: usize,
) -> Result<Words<AtomicU64>, LinkError> {
    Words::new(memory, UserAddress(at as u64), count, size_of::<u64>()).map_err(|error| {
        LinkError::Kernel {
            step: "find a ring in shared memory",
            error: std::io::Error::other(error),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iohost_grants_what_its_own_options_hold() {
        let client = LinkOptions { receive_frames: 8, transmit_frames: 16, ..LinkOptions::new(82) };
        let own = LinkOptions { receive_frames: 16, transmit_frames: 8, ..client };
        let ask = Ask::decode(&Ask::of(&client).encode());
        assert_eq!(ask.options(&own), Ok(client));
        assert_eq!(Ask::of(&own).options(&own), Ok(own), "two ends with the same options fit");
        for (change, refusal) in [
            (Ask { magic: 1, ..ask }, Refusal::Version),
            (Ask { version: 9, ..ask }, Refusal::Version),
            (Ask { header_bytes: 81, ..ask }, Refusal::Headers),
            (Ask { frame_bytes: 8_101, ..ask }, Refusal::FrameBytes),
            (Ask { frame_bytes: 0, ..ask }, Refusal::Frames),
            (Ask { receive_frames: 32, ..ask }, Refusal::Frames),
            (Ask { transmit_frames: 32, ..ask }, Refusal::Frames),
            (Ask { receive_frames: 3, ..ask }, Refusal::Frames),
            (Ask { transmit_frames: u32::MAX, ..ask }, Refusal::Frames),
        ] {
            assert_eq!(change.options(&own), Err(refusal), "{change:?}");
        }
    }

    #[test]
    fn an_answer_is_a_link_or_a_reason() {
        assert_eq!(Answer::of(None).check(), Ok(()));
        for refusal in Refusal::ALL {
            let answer = Answer::decode(&Answer::of(Some(refusal)).encode());
            assert_eq!(answer.check(), Err(refusal.text()));
        }
        let good = Answer::of(None);
        assert!(Answer { magic: 0, ..good }.check().unwrap_err().contains("another program"));
        assert!(Answer { version: 1, ..good }.check().unwrap_err().contains("another version"));
        assert!(Answer { refusal: 99, ..good }.check().unwrap_err().contains("refuses"));
    }

    #[test]
    fn rings_and_slots_do_not_overlap() {
        let options =
            LinkOptions { receive_frames: 512, transmit_frames: 1024, ..LinkOptions::new(82) };
        let layout = Layout::new(&options).unwrap();
        let mut ranges = vec![(0, PAGE_BYTES)];
        for direction in [layout.to_client, layout.to_host] {
            ranges.push((direction.filled_at, direction.slots * 8));
            ranges.push((direction.returned_at, direction.slots * 8));
            let (shape, first) = (SlotShape::new(&options, 0), direction.frame_at(0) as usize);
            let (slots_at, len) = (first - shape.frame_at, direction.slots * shape.slot_bytes);
            ranges.push((slots_at, len));
            let last = direction.frame_at(direction.slots as u16 - 1) as usize;
            assert!(last + options.frame_bytes <= slots_at + len);
            assert_eq!((direction.frame_at(1) as usize + 82) % 4096, 0);
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{ranges:?}");
        assert!(ranges.last().is_some_and(|(at, len)| at + len <= layout.len_bytes));
    }

    #[test]
    fn more_memory_than_a_frame_can_name_is_refused() {
        let options = LinkOptions {
            frame_bytes: 1 << 17,
            receive_frames: 1 << 15,
            transmit_frames: 1 << 15,
            ..LinkOptions::new(0)
        };
        assert!(matches!(Layout::new(&options), Err(LinkError::TooMuchMemory { .. })));
    }
}
