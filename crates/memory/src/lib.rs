//! Memory that a sidecore shares with an untrusted peer.
//!
//! This crate has seven types, and contains everything `unsafe` about them:
//!
//! * [`GuestMemory`]: the regions of a guest's RAM that are mapped into this process. The table is
//!   immutable; a change makes a new table. A clone is a reference count.
//! * [`Segments`]: the scatter-gather list of one request, translated. The list keeps a reference
//!   to the table that it was translated with, so that the memory under a request in flight cannot
//!   be unmapped by anything that the VMM does. The list is reused from request to request: binding
//!   it to the same table again costs one comparison.
//! * [`Span`]: a contiguous piece of a table, borrowed for a copy.
//! * [`Arena`]: this process's own memory (a RAM disk, a bounce pool), on huge pages if possible.
//! * [`SharedPages`]: this process's own memory that a peer maps (doorbells).
//! * [`Words`]: atomics at a place in such memory, of which rings are made.
//! * [`DirtyLog`]: the peer's log of the pages that were written, while its guest migrates.
//!
//! The peer may write to shared memory at any moment. Therefore this crate never makes a Rust
//! reference to shared memory: scalars are read once, volatile, and bulk data is copied by code
//! that is opaque to the compiler ([`copy`]).
//!
//! The peer's memory is in files of the kernel's own, on tmpfs or hugetlbfs. Any other file is
//! rejected: access to the file, or to a page of it, could wait for the program that serves its
//! filesystem.
//!
//! Freeing a peer's memory in the kernel can take seconds. So the thread that drops the last
//! reference does not do it, but a background thread; see [`reaper`].
//!
//! A peer may also truncate the file behind its memory, which turns the next access into SIGBUS;
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
mod dirty_log;
mod mapping;
pub mod reaper;
mod segments;
mod shared_pages;
pub mod sigbus;
mod span;
mod table;
mod window;
mod words;

pub use arena::{Arena, PageKind, Part};
pub use dirty_log::{DirtyLog, LOG_PAGE_BYTES};
pub use reaper::MemoryFile;
pub use segments::{Segment, Segments};
pub use shared_pages::SharedPages;
pub use span::Span;
pub use table::{
    GuestAddress, GuestMemory, MAX_REGIONS, MemoryError, RegionHint, RegionSpec, UserAddress,
};
pub use window::Window;
pub use words::{Word, Words};
