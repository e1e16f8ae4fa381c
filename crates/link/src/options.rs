//! The options of a link, and the properties that it grants.

use std::io;

use crate::LinkAddress;

/// The paper's jumbo frames (vRIO, section 4.3).
pub const DEFAULT_FRAME_BYTES: usize = 8_100;
/// No link carries shorter frames: IPv6 asks as much of every wire.
pub const FRAME_BYTES_MIN: usize = 1_232;
/// No link carries longer frames.
pub const FRAME_BYTES_MAX: usize = 1 << 17;
/// The most bytes of a header in front of a payload.
pub const HEADER_BYTES_MAX: usize = 512;
/// The most frames of a ring.
pub const RING_FRAMES_MAX: usize = 1 << 15;

/// [`Properties::batch_frames`] of links whose sends are system calls.
pub(crate) const SEND_BATCH: usize = 32;

/// Offset in a frame of the byte that names the receiver's link queue (docs/vrio.md, Header).
pub const QUEUE_AT: usize = 27;
/// The most queues of a link.
pub const QUEUES_MAX: usize = 255;

const PAGE_BYTES: usize = sidecore_units::PAGE_BYTES as usize;
const SECTOR_BYTES: usize = sidecore_units::SECTOR_BYTES as usize;

/// The options of every link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// The longest frame wanted, without the headers of the medium. The medium may grant less.
    pub frame_bytes: usize,
    /// From a frame's first byte to its payload: the link places frames such that payloads are
    /// aligned in memory.
    pub header_bytes: usize,
    /// Frames that can be received and not yet given back: a power of two.
    pub receive_frames: usize,
    /// Frames that can be on the way out: a power of two.
    pub transmit_frames: usize,
}

impl LinkOptions {
    /// Jumbo frames with headers of this size, and rings that hold 1024 and 512 of them.
    #[must_use]
    pub const fn new(header_bytes: usize) -> Self {
        Self {
            frame_bytes: DEFAULT_FRAME_BYTES,
            header_bytes,
            receive_frames: 1024,
            transmit_frames: 512,
        }
    }

    /// Whether a link can be made of these.
    ///
    /// # Errors
    /// [`LinkError::Option`] names the first that is out of range.
    pub fn check(&self) -> Result<(), LinkError> {
        let ranges = [
            ("frame_bytes", self.frame_bytes, FRAME_BYTES_MIN, FRAME_BYTES_MAX, false),
            ("header_bytes", self.header_bytes, 0, HEADER_BYTES_MAX, false),
            ("receive_frames", self.receive_frames, 2, RING_FRAMES_MAX, true),
            ("transmit_frames", self.transmit_frames, 2, RING_FRAMES_MAX, true),
        ];
        for (name, value, min, max, power_of_two) in ranges {
            if !(min..=max).contains(&value) || (power_of_two && !value.is_power_of_two()) {
                return Err(LinkError::Option { name, value, min, max, power_of_two });
            }
        }
        Ok(())
    }
}

/// One of the queues of a link, each of which is polled by a sidecore of its own. A frame arrives
/// at the queue that its byte at [`QUEUE_AT`] names, modulo the number of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkQueue {
    /// The number of this queue.
    pub index: u8,
    /// The number of queues.
    pub count: u8,
}

impl LinkQueue {
    /// The only queue of a link.
    pub const ONLY: Self = Self { index: 0, count: 1 };

    /// The queues of a link that has `count`.
    ///
    /// # Errors
    /// There would be none, or more than a link can have.
    pub fn all(count: usize) -> Result<impl Iterator<Item = Self>, LinkError> {
        let wrong = LinkError::Option {
            name: "queues",
            value: count,
            min: 1,
            max: QUEUES_MAX,
            power_of_two: false,
        };
        match u8::try_from(count) {
            Ok(count) if count > 0 => Ok((0..count).map(move |index| Self { index, count })),
            _ => Err(wrong),
        }
    }
}

/// The properties of an open link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The link's own address.
    pub address: LinkAddress,
    /// The longest frame that it carries, without the headers of the medium.
    pub frame_bytes: usize,
    /// As in [`LinkOptions::header_bytes`].
    pub header_bytes: usize,
    /// The alignment in memory of the byte after the header: a page if a page of payload fits into
    /// a frame, else a sector. A frame in several pieces keeps it for its first one only.
    pub payload_align_bytes: usize,
    /// Receive buffers.
    pub receive_frames: usize,
    /// Transmit buffers.
    pub transmit_frames: usize,
    /// Whether receive buffers are filled in their order alone: then a frame that is kept for a
    /// whole round of the ring stops reception, and a slow consumer copies instead of keeping.
    pub fills_in_order: bool,
    /// Frames to give to a send: many where a send is a system call, few where its cost is small,
    /// because the receiver begins with the first ones while the sender makes the next.
    pub batch_frames: usize,
    /// The mode of operation that the kernel granted, for reports.
    pub mode: &'static str,
}

/// Why a link cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// An option is out of range.
    #[error(
        "{name} = {value}: use {} from {min} to {max}",
        if *power_of_two { "a power of two" } else { "a number" }
    )]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The smallest value.
        min: usize,
        /// The largest value.
        max: usize,
        /// Whether only powers of two are values.
        power_of_two: bool,
    },
    /// The slots for frames are more memory than a link can have.
    #[error("the rings need {bytes} bytes, a link has 4 GiB at most: use fewer or shorter frames")]
    TooMuchMemory {
        /// Size of all slots.
        bytes: usize,
    },
    /// There is no such interface.
    #[error(
        "there is no Ethernet interface `{interface}` in this network namespace ({error}): \
         `ip link` lists those that there are"
    )]
    NoInterface {
        /// The name.
        interface: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// The process lacks a capability.
    #[error(
        "cannot {step} without {capabilities}: run as root, or give the daemon's unit \
         AmbientCapabilities={capabilities}"
    )]
    Capability {
        /// The step, as in "cannot ...".
        step: &'static str,
        /// All capabilities that the link needs.
        capabilities: &'static str,
    },
    /// The wire carries shorter frames than the protocol needs.
    #[error(
        "{interface} has an MTU of {mtu_bytes}, and the link needs {needed_bytes}: \
         `ip link set dev {interface} mtu {wanted_bytes}`"
    )]
    ShortFrames {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu_bytes: usize,
        /// The smallest MTU that will do.
        needed_bytes: usize,
        /// The MTU for frames as long as the options want them.
        wanted_bytes: usize,
    },
    /// The interface has fewer queues than the link.
    #[error(
        "{interface} has {has} receive queues, and the link {wanted}: `ethtool --set-channels \
         {interface} combined {wanted}`, or give the link {has} sidecores"
    )]
    Queues {
        /// The interface.
        interface: String,
        /// Its queues.
        has: usize,
        /// Those of the link.
        wanted: usize,
    },
    /// AF_XDP is not to be had.
    #[error("no AF_XDP on {interface}: {error} ({remedy})")]
    Xdp {
        /// The interface.
        interface: String,
        /// The kernel's error.
        error: io::Error,
        /// A way to have it, or another link.
        remedy: &'static str,
    },
    /// The socket of an IOhost's end.
    #[error(transparent)]
    Socket(#[from] sidecore_socket::ServerError),
    /// The kernel refused a step.
    #[error("cannot {step}: {error}")]
    Kernel {
        /// The step, as in "cannot ...".
        step: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The peer's offer breaks a rule.
    #[error("the peer's offer of a link is refused: {0}")]
    Offer(&'static str),
}

impl LinkError {
    /// Makes an error of the kernel's in this step.
    pub(crate) fn kernel<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Kernel { step, error: error.into() }
    }
}

/// How frames lie in slots of one size: the first byte behind the header is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotShape {
    /// From the start of a slot to the frame in it.
    pub frame_at: usize,
    /// Size of a slot.
    pub slot_bytes: usize,
    pub payload_align_bytes: usize,
}

impl SlotShape {
    /// The shape for frames as asked for, behind `lead_bytes` for the headers of medium and ring.
    pub fn new(options: &LinkOptions, lead_bytes: usize) -> Self {
        let payload_bytes = options.frame_bytes.saturating_sub(options.header_bytes);
        let align = if payload_bytes >= PAGE_BYTES { PAGE_BYTES } else { SECTOR_BYTES };
        // The sum of three numbers that are at most 2^17.
        let payload_at = lead_bytes.saturating_add(options.header_bytes).next_multiple_of(align);
        let frame_at = payload_at.saturating_sub(options.header_bytes);
        let slot_bytes = frame_at.saturating_add(options.frame_bytes).next_multiple_of(align);
        Self { frame_at, slot_bytes, payload_align_bytes: align }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_has_a_range() {
        let good = LinkOptions::new(82);
        assert!(good.check().is_ok());
        let text = |options: LinkOptions| options.check().unwrap_err().to_string();
        assert_eq!(
            text(LinkOptions { frame_bytes: 1_231, ..good }),
            "frame_bytes = 1231: use a number from 1232 to 131072"
        );
        assert!(text(LinkOptions { frame_bytes: 1 << 18, ..good }).starts_with("frame_bytes"));
        assert!(text(LinkOptions { header_bytes: 513, ..good }).starts_with("header_bytes"));
        assert_eq!(
            text(LinkOptions { receive_frames: 1000, ..good }),
            "receive_frames = 1000: use a power of two from 2 to 32768"
        );
        for transmit_frames in [0, 1, 3, 1 << 16] {
            assert!(text(LinkOptions { transmit_frames, ..good }).starts_with("transmit_frames"));
        }
    }

    #[test]
    fn a_link_has_as_many_queues_as_a_byte_can_count() {
        for count in [1, 2, QUEUES_MAX] {
            let all: Vec<_> = LinkQueue::all(count).unwrap().collect();
            assert_eq!((all.len(), all[0].index), (count, 0));
            assert!(all.iter().all(|queue| usize::from(queue.count) == count));
        }
        assert_eq!(LinkQueue::all(1).unwrap().next(), Some(LinkQueue::ONLY));
        for count in [0, QUEUES_MAX + 1] {
            let error = LinkQueue::all(count).map(drop).unwrap_err().to_string();
            assert_eq!(error, format!("queues = {count}: use a number from 1 to 255"));
        }
    }

    #[test]
    fn payloads_are_aligned_behind_any_header() {
        for (frame_bytes, align) in
            [(1_452, 512), (4_096, 512), (4_178, 4096), (8_100, 4096), (9_000, 4096)]
        {
            for header_bytes in [0, 82, 130] {
                let options = LinkOptions { frame_bytes, header_bytes, ..LinkOptions::new(0) };
                let shape = SlotShape::new(&options, 94);
                let align = if frame_bytes - header_bytes < 4096 { 512 } else { align.max(4096) };
                assert_eq!(shape.payload_align_bytes, align);
                assert_eq!((shape.frame_at + header_bytes) % align, 0);
                assert!(shape.frame_at >= 94 && shape.frame_at < 94 + align);
                assert!(
                    shape.slot_bytes >= shape.frame_at + frame_bytes
                        && shape.slot_bytes.is_multiple_of(align)
                );
            }
        }
        // The paper's jumbo frames take three pages: the end of one, and two whole ones.
        assert_eq!(SlotShape::new(&LinkOptions::new(82), 94).slot_bytes, 3 * 4096);
    }
}
