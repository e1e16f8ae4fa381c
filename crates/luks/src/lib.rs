//! Encrypted disks: AES-256-XTS, and the headers of LUKS2 that hold its key.
//!
//! A LUKS2 header has two copies of its metadata, and key slots: each is the volume key, encrypted
//! with a key that a passphrase gives. [`Header::read`] takes the newer undamaged copy,
//! [`Header::unlock`] tries the slots, and [`Xts`] encrypts sectors with the key. [`NewHeader`]
//! makes a header with one slot.
//!
//! Sources: *LUKS2 On-Disk Format Specification*, version 1.1.3 (M. Broz, 2022); *TKS1: An
//! anti-forensic, two level, and iterated key setup scheme* (C. Fruhwirth, 2004); IEEE Std
//! 1619-2018; RFC 9106; RFC 8018.
//!
//! A header is hostile input: sizes, counts and costs have limits, and nothing in it panics.
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

mod binary;
mod error;
mod file;
mod format;
mod header;
mod kdf;
mod metadata;
mod split;
mod xts;

pub use error::{FileFault, LuksError};
pub use file::{open_header, read_key_file, write_header};
pub use format::NewHeader;
pub use header::{Header, Segment, Source, VolumeKey};
pub use kdf::{Kdf, MAX_MEMORY_KIB};
pub use xts::{KEY_BYTES, RaggedData, SectorSize, Tweaks, Xts};
