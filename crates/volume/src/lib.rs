//! The controller's root filesystem (thesis 5.2): volumes on a disk.
//!
//! A *volume* maps virtual blocks to blocks of the disk, by extents. It has a size, and blocks
//! where something was written (thesis 5.3: allocation is delayed). Snapshots and clones share what
//! they have in common. The maps are in trees on the disk that are never changed in place, so that
//! each commit leads from one consistent state to the next, and a power cut to one of the two.
//! Guests' data passes by this crate: it only says where it goes.
//!
//! Pure code: the disk is an argument ([`Disk`]), and so is the time.
//!
//! # A write to a hole, from start to end
//!
//! ```
//! # use sidecore_volume::{Disk, FormatOptions, NewVolume, VolumeError, Volumes, format};
//! # use sidecore_extent::BlockRange;
//! # use sidecore_units::Vlba;
//! # struct Ram(Vec<u8>);
//! # impl Disk for Ram {
//! #     fn size_bytes(&self) -> u64 { self.0.len() as u64 }
//! #     fn read(&mut self, at: u64, buffer: &mut [u8]) -> std::io::Result<()> {
//! #         buffer.copy_from_slice(&self.0[at as usize..][..buffer.len()]);
//! #         Ok(())
//! #     }
//! #     fn write(&mut self, at: u64, data: &[u8]) -> std::io::Result<()> {
//! #         self.0[at as usize..][..data.len()].copy_from_slice(data);
//! #         Ok(())
//! #     }
//! #     fn flush(&mut self) -> std::io::Result<()> { Ok(()) }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let mut disk = Ram(vec![0; 4 << 20]);
//! format(&mut disk, &FormatOptions::default())?;
//! let mut volumes = Volumes::open(&mut disk)?;
//! let new = NewVolume { name: "root.img".to_owned(), blocks: 1 << 20, quota_blocks: None };
//! let id = volumes.create(&new, 1_700_000_000)?;
//!
//! // A guest writes where nothing is mapped. It gets blocks, of its own ...
//! let grant = volumes.allocate(&mut disk, id, BlockRange { first: Vlba(100), count: 8 })?;
//! // ... the caller writes the data to these blocks, and then they are mapped.
//! volumes.link(&mut disk, grant)?;
//!
//! // The guest flushes: a commit makes it durable.
//! if let Some(commit) = volumes.begin_commit() {
//!     let written = commit.write(&mut disk); // without a lock on `volumes`
//!     let freed = volumes.end_commit(commit, written);
//!     volumes.reuse(freed); // when no request to these blocks is left
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Where to read
//!
//! * `volumes/`: the operations;
//! * `forest.rs` and `forest/`: trees that are changed by shadowing;
//! * `allocator.rs`: the use of every block, and why freed blocks have to wait;
//! * `commit.rs`: the order of writes, and what a power cut leaves;
//! * `owner.rs`: the tripwire for a second program on the disk;
//! * `log.rs` and `volumes/recover.rs`: what the death of the process leaves;
//! * `walk.rs`, `open.rs`, `check.rs`: looking at everything;
//! * `guard.rs` and `volumes/remap.rs`: equal blocks become one;
//! * `doubt.rs`, `repair.rs`: the knowledge left by damaged metadata, and the parts that are kept;
//! * `node.rs`, `record.rs`, `superblock.rs`: the format, byte by byte in `docs/volume-format.md`.
//!
//! # The disk is hostile
//!
//! The disk may be damaged, or made by an attacker. No contents panic this crate or make it
//! allocate without bound, and every mapping that it returns has been verified by a checksum and
//! checked by its fields. For a fuzz target: [`Volumes::open`] and [`Volumes::check`] on any bytes;
//! under `cfg(fuzzing)` checksums are not compared.
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

mod allocator;
mod bytes;
mod check;
mod claims;
mod commit;
mod disk;
mod doubt;
mod error;
mod forest;
mod format;
mod free;
mod geometry;
mod grant;
mod guard;
mod info;
mod limits;
mod lingering;
mod log;
mod node;
mod nodes;
mod open;
mod owner;
mod ranges;
mod record;
mod repair;
mod report;
mod shares;
mod superblock;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod usage;
mod volumes;
mod walk;
mod windows;

pub use commit::{Commit, CommitError, Freed};
pub use disk::Disk;
pub use error::{Damage, FormatError, OpenError, Place, RepairError, VolumeError};
pub use format::{Content, FormatOptions, format, probe};
pub use grant::{Grant, Mapped, PhysicalRange};
pub use info::{NewVolume, Space, VolumeId, VolumeInfo, VolumeState};
pub use limits::*;
pub use log::{
    HeapMemory, LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogMemory, LogPlace, MIN_LOG_BYTES, Survives,
};
pub use open::{in_use_under, probe_size};
pub use owner::Owner;
pub use repair::{Loss, Repair, Rivals, plan_repair};
pub use report::{Problem, Report};
pub use usage::{Durable, Usage};
pub use volumes::{OpenOptions, Recovery, Volumes};
