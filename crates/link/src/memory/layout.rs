//! How the memory of a link is divided, and how the IOhost tells its client.

use sidecore_memory::{GuestMemory, UserAddress, Words};
use std::sync::atomic::AtomicU64;

use super::ring::Cursor;
use crate::options::SlotShape;
use crate::{LinkError, LinkOptions};

const PAGE_BYTES: usize = sidecore_units::PAGE_BYTES as usize;
const MAGIC: u64 = u64::from_le_bytes(*b"sclink\0\0");
const VERSION: u32 = 1;

sidecore_units::layout! {
    /// The message that comes with the three descriptors of a link.
    pub struct Offer: 32 {
        /// Tells it from the messages of other protocols.
        pub magic: u64 = 0,
        /// Of this message, and of the memory.
        pub version: u32 = 8,
        /// As in the options.
        pub frame_bytes: u32 = 12,
        /// As in the options.
        pub header_bytes: u32 = 16,
        /// Slots for frames to the client.
        pub to_client: u32 = 20,
        /// Slots for frames to the IOhost.
        pub to_host: u32 = 24,
    }
}

/// Size of the message that offers a link.
pub const OFFER_BYTES: usize = Offer::BYTES;

impl Offer {
    /// The offer of an IOhost with these options, which are in range.
    pub fn of(options: &LinkOptions) -> Self {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Self {
            magic: MAGIC,
            version: VERSION,
            frame_bytes: number(options.frame_bytes),
            header_bytes: number(options.header_bytes),
            to_client: number(options.transmit_frames),
            to_host: number(options.receive_frames),
        }
    }

    /// The options of the client that takes this offer.
    ///
    /// # Errors
    /// It is no such message, of another version, or its numbers are out of range.
    pub fn client_options(&self) -> Result<LinkOptions, LinkError> {
        if self.magic != MAGIC {
            return Err(LinkError::Offer("it is of another protocol"));
        }
        if self.version != VERSION {
            return Err(LinkError::Offer(
                "it is of another version: run the same release on both sides",
            ));
        }
        let number = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        let options = LinkOptions {
            frame_bytes: number(self.frame_bytes),
            header_bytes: number(self.header_bytes),
            receive_frames: number(self.to_client),
            transmit_frames: number(self.to_host),
        };
        options.check()?;
        Ok(options)
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
    slots_at: usize,
    shape: SlotShape,
}

impl Direction {
    /// Where the frame in a slot begins; in range for every slot, see [`Layout::new`].
    pub fn frame_at(&self, slot: u16) -> u32 {
        let at =
            usize::from(slot).saturating_mul(self.shape.slot_bytes).saturating_add(self.slots_at);
        u32::try_from(at.saturating_add(self.shape.frame_at)).unwrap_or(u32::MAX)
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

/// Where everything is in a link's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub to_client: Direction,
    pub to_host: Direction,
    pub shape: SlotShape,
    pub len_bytes: usize,
}

/// In the first page: whether the IOhost sleeps, and on another line whether the client does.
pub(super) const HOST_SLEEPS: usize = 0;
pub(super) const CLIENT_SLEEPS: usize = 16;

impl Layout {
    /// The layout of an offer's numbers, which are in range.
    pub fn new(options: &LinkOptions, to_client: usize, to_host: usize) -> Result<Self, LinkError> {
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
            slots_at: take(slots.saturating_mul(shape.slot_bytes)),
            shape,
        };
        let (to_client, to_host) = (direction(to_client), direction(to_host));
        if u32::try_from(end).is_err() {
            return Err(LinkError::TooMuchMemory { bytes: end });
        }
        Ok(Self { to_client, to_host, shape, len_bytes: end })
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
    fn an_offer_says_what_the_client_needs() {
        let options =
            LinkOptions { receive_frames: 8, transmit_frames: 16, ..LinkOptions::new(82) };
        let offer = Offer::decode(&Offer::of(&options).encode());
        let client = offer.client_options().unwrap();
        assert_eq!(client, LinkOptions { receive_frames: 16, transmit_frames: 8, ..options });
        for (change, why) in [
            (Offer { magic: 1, ..offer }, "another protocol"),
            (Offer { version: 2, ..offer }, "another version"),
            (Offer { frame_bytes: 0, ..offer }, "frame_bytes = 0"),
            (Offer { header_bytes: u32::MAX, ..offer }, "header_bytes"),
            (Offer { to_client: 3, ..offer }, "receive_frames = 3"),
            (Offer { to_host: 1 << 20, ..offer }, "transmit_frames"),
        ] {
            let error = change.client_options().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn rings_and_slots_do_not_overlap() {
        let options = LinkOptions::new(82);
        let layout = Layout::new(&options, 512, 1024).unwrap();
        let mut ranges = vec![(0, PAGE_BYTES)];
        for direction in [layout.to_client, layout.to_host] {
            ranges.push((direction.filled_at, direction.slots * 8));
            ranges.push((direction.returned_at, direction.slots * 8));
            ranges.push((direction.slots_at, direction.slots * layout.shape.slot_bytes));
            let last = direction.frame_at(direction.slots as u16 - 1) as usize;
            assert!(
                last + options.frame_bytes
                    <= direction.slots_at + direction.slots * layout.shape.slot_bytes
            );
            assert_eq!((direction.frame_at(1) as usize + 82) % 4096, 0);
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{ranges:?}");
        assert!(ranges.last().is_some_and(|(at, len)| at + len <= layout.len_bytes));
    }

    #[test]
    fn more_memory_than_a_frame_can_name_is_refused() {
        let options = LinkOptions { frame_bytes: 1 << 17, ..LinkOptions::new(0) };
        assert!(matches!(
            Layout::new(&options, 1 << 15, 1 << 15),
            Err(LinkError::TooMuchMemory { .. })
        ));
    }
}
