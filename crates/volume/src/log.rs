//! The log of the open transaction: mappings that were answered and that no commit has made durable
//! yet.
//!
//! Between two commits a store's mappings change in memory only. A power cut ends the guests as
//! well, so that a guest can rely on nothing but its flushes. But if the *process* dies, its guests
//! live on, connect to the next one, and expect to find everything that was answered. So each
//! change is also an entry in a log, in memory that outlives the process, and the next process
//! *replays* the log before it serves a guest.
//!
//! # The rules
//!
//! * Room is reserved before a change begins: [`Volumes::allocate`] reserves entries for the
//!   [`link`](crate::Volumes::link) of its grant. A change that has begun never waits for room.
//! * An entry is *published* by the store to the tail, after the change succeeded in memory and
//!   before the operation returns. The caller holds its lock over that, and answers only
//!   afterwards.
//! * Each entry carries the generation whose commit will make it durable. When that commit is
//!   durable the entry is dropped.
//! * The header names the superblock that the entries build on, and, while a commit is in flight,
//!   the superblock that this commit writes. If a store has neither superblock, another program has
//!   changed the store.
//! * Operations on the catalogue are not logged: their callers wait for a commit before they
//!   answer.
//!
//! # Replay
//!
//! `volumes/recover.rs`. All blocks that entries name are taken out of the free space first,
//! because a commit of the replay writes nodes to free blocks. Then the entries of one generation
//! are applied and committed as this generation, and then those of the next: if the replay dies in
//! between, the next replay finds the generation on the disk and skips its entries.
//!
//! # Format
//!
//! Byte by byte in `docs/volume-format.md`, "The log of the open transaction".
//!
//! [`Volumes::allocate`]: crate::Volumes::allocate

mod entry;
mod header;
mod memory;
mod writer;

pub(crate) use entry::{Change, Entry};
pub(crate) use header::{Found, SuperblockId, look};
pub use header::{LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogPlace, MIN_LOG_BYTES};
pub use memory::{HeapMemory, LogMemory, Survives};
pub(crate) use writer::Log;
