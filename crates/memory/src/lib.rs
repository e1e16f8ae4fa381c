//! Memory that a sidecore shares with a peer it does not trust.
//!
//! Four things live here, and everything `unsafe` about them stays here:
//!
//! * [`GuestMemory`]: the regions of a guest's RAM that are mapped into this process. The table is
//!   immutable; changing it makes a new table. A clone is a reference count.
//! * [`Segments`]: the scatter-gather list of one request, translated. It holds on to the table it
//!   was translated against, so that the memory under a request in flight cannot be unmapped,
//!   whatever the VMM does meanwhile. The list is reused from request to request: binding it to the
//!   table it is bound to already costs one comparison.
//! * [`Arena`]: memory of our own (a RAM disk, a bounce pool), on huge pages where there are any.
//! * [`SharedPages`]: memory of our own that a peer maps (doorbells).
//!
//! The peer may write to shared memory at any moment. Nothing here therefore ever makes a Rust
//! reference to it: scalars are read once, volatile, and bulk data is copied by code the compiler
//! cannot see through ([`copy`]).
//!
//! The peer's memory is in files of the kernel's own, on tmpfs or hugetlbfs. Any other file is
//! refused: to look at it, or at a page of it, could make us wait for whoever serves its
//! filesystem.
//!
//! To give a peer's memory back to the kernel can take seconds. So nobody does that when he lets go
//! of it, but a thread of its own; see [`reaper`].
//!
//! A peer may also truncate the file behind its memory, which turns our next access into SIGBUS;
//! see [`sigbus`].
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

mod arena;
pub mod copy;
mod mapping;
pub mod reaper;
mod segments;
mod shared_pages;
pub mod sigbus;
mod table;
mod window;

pub use arena::{Arena, PageKind, Part};
pub use reaper::MemoryFile;
pub use segments::{Segment, Segments};
pub use shared_pages::SharedPages;
pub use table::{GuestAddress, GuestMemory, MAX_REGIONS, MemoryError, RegionHint, RegionSpec, UserAddress};
pub use window::Window;
