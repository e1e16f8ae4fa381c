//! Where a ring is and where it stands.

use sidecore_memory::UserAddress;
use sidecore_spec_virtio::packed::WRAP;

/// Which of virtio's two ring formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingFormat {
    /// Descriptor table, available ring, used ring (2.7).
    Split,
    /// One ring of descriptors and two event structures (2.8).
    Packed,
}

/// The addresses of a ring's three areas, in the address space of the users of the memory, and the
/// negotiated features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// The format.
    pub format: RingFormat,
    /// Entries: a power of two for split rings.
    pub size: u16,
    /// Descriptor table, or the packed ring.
    pub descriptor_area: UserAddress,
    /// Available ring, or the driver event suppression structure.
    pub driver_area: UserAddress,
    /// Used ring, or the device event suppression structure.
    pub device_area: UserAddress,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
}

/// Where the device stands in a ring: what stopping one gives back and starting one takes.
///
/// For a split ring only `next_avail` matters at the start: the used index is read from the ring.
/// In both fields of a packed ring, bit 15 is the wrap counter and the rest is the position
/// (vhost-user specification, "Ring states": VHOST_USER_SET_VRING_BASE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingState {
    /// The next available entry that the device will take.
    pub next_avail: u16,
    /// The next used entry that it will write.
    pub next_used: u16,
}

impl RingState {
    /// The start of a fresh ring.
    #[must_use]
    pub const fn fresh(format: RingFormat) -> Self {
        match format {
            RingFormat::Split => Self { next_avail: 0, next_used: 0 },
            // Both wrap counters start at 1 (virtio 1.2, 2.8.1).
            RingFormat::Packed => Self { next_avail: WRAP, next_used: WRAP },
        }
    }

    /// The 32 bits that vhost-user carries for this state.
    #[must_use]
    pub fn to_vring_base(self, format: RingFormat) -> u32 {
        match format {
            RingFormat::Split => u32::from(self.next_avail),
            RingFormat::Packed => u32::from(self.next_avail) | (u32::from(self.next_used) << 16),
        }
    }

    /// The state that vhost-user's 32 bits mean.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // taking the two halves apart
    pub fn from_vring_base(base: u32, format: RingFormat) -> Self {
        let low = (base & 0xffff) as u16;
        match format {
            RingFormat::Split => Self { next_avail: low, next_used: low },
            RingFormat::Packed => Self { next_avail: low, next_used: (base >> 16) as u16 },
        }
    }
}
