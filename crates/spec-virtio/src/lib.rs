//! Numbers and layouts of virtio 1.2 and of vhost-user, shared by devices, drivers and tests.
//!
//! Nothing here acts: constants, and the encoding of structures with fixed fields. Clauses in the
//! documentation are those of virtio 1.2, except in [`vhost_user`]. A wrong number here is wrong on
//! both sides of a connection and thus not found by running them against each other, so the tests
//! compare each with the kernel's headers, or with the specification's tables.
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

pub mod blk;
pub mod descriptor;
pub mod feature;
pub mod net;
pub mod packed;
pub mod split;
pub mod status;
#[cfg(target_endian = "little")]
pub mod vhost_user;

/// Most entries of a queue, in both formats (2.7 and 2.8).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// Offset of the configuration space in the registers of virtio-mmio (4.2.2).
pub const MMIO_CONFIG_OFFSET: u32 = 0x100;
