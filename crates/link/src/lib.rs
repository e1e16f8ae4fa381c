//! Frames to and from a wire: the seam between the remote channel and its media, and the links.
//!
//! # Architecture
//!
//! A [`Link`] belongs to one sidecore, which polls it, arms it before it sleeps and is woken by its
//! descriptor. Frames travel in batches, in vectors that the caller owns and reuses; dynamic
//! dispatch is paid once a batch. The bytes stay where they are: in the link's memory, which lends
//! a received [`Frame`] and an empty transmit [`Buffer`] and gets both back.
//!
//! | link | wire | peers |
//! | --- | --- | --- |
//! | [`PacketLink`] | an Ethernet interface, through the rings of a packet socket | any station |
//! | [`XdpLink`] | an Ethernet interface, through AF_XDP | any station |
//! | [`UdpLink`] | a UDP port | any host |
//! | [`MemoryLink`] | rings in memory that two processes share | up to 200 clients, or one IOhost |
//! | [`SimulatedLink`] | a [`Network`] with faults that follow from a seed | any station |
//!
//! [`open()`] opens all queues of a link from a description. A frame names the receiver's queue in
//! its header, at [`QUEUE_AT`].
//!
//! # Alignment
//!
//! A link is told how long the headers are that its frames begin with
//! ([`LinkOptions::header_bytes`]) and leaves so much room in front of each frame that the payload
//! behind the header begins a page (a sector, where a page does not fit into a frame). So whole
//! blocks of payload can be given to a store, or be filled by it, with no edges to copy.
//!
//! # Hostile peers
//!
//! A peer of a [`MemoryLink`] can write to the memory of frames at any time. Frames are therefore
//! read by copies ([`Pieces::read`]) or given to stores as scatter-gather lists
//! ([`Pieces::push_to`]), as guest memory is, and are never a Rust slice. Each word of a shared
//! ring is read once and checked. What makes no sense closes that link and no other.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod address;
mod description;
mod frame;
mod interface;
mod link;
mod memory;
mod options;
mod packet;
mod simulated;
mod stats;
mod udp;
mod xdp;

pub use address::{EthernetAddress, LinkAddress, NotAnAddress};
pub use description::{LinkDescription, Medium, open};
pub use frame::{Buffer, Frame, PIECES_MAX, Piece, Pieces, dropped_frames};
pub use link::{Link, LinkState};
pub use memory::{CLIENTS_MAX, MemoryEnd, MemoryLink, MemoryOptions};
pub use options::{
    DEFAULT_FRAME_BYTES, FRAME_BYTES_MAX, FRAME_BYTES_MIN, HEADER_BYTES_MAX, LinkError,
    LinkOptions, LinkQueue, Properties, QUEUE_AT, QUEUES_MAX, RING_FRAMES_MAX,
};
pub use packet::{
    Contents, FAKE_HEADER_BYTES, FakeHeader, OFFLOAD_BYTES_MAX, PacketLink, PacketOptions,
};
pub use sidecore_linux::XdpMode;
pub use simulated::{Faults, Network, NetworkCounts, SimulatedLink};
pub use stats::{LinkCounts, LinkStats};
pub use udp::{UdpLink, UdpOptions};
pub use xdp::{XdpLink, XdpOptions};
