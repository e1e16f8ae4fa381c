//! A stage that encrypts a store with AES-256-XTS, as dm-crypt does, under a header of LUKS2.
//!
//! # Memory
//!
//! A guest can read and change its memory at any time. So a write is copied out of guest memory
//! once, encrypted in private memory, and written from there; a read lands in private memory, is
//! decrypted there, and is copied to the guest. The pages that the store reads and writes hold
//! ciphertext only.
//!
//! # Requests
//!
//! A request with data becomes parts of at most 64 KiB, each with pages of its own. Parts of
//! different requests take turns, and a poll encrypts and decrypts a bounded number of bytes, so
//! that a long request does not keep its neighbours waiting. Requests without data pass.
//!
//! # Zeros
//!
//! Zeros that the store writes by itself are not zeros when they are decrypted. So the stage has no
//! write-zeroes, which front ends do not offer then, and discarded blocks read as any bytes.
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

mod channel;
mod parts;
mod stage;
mod store;

pub use stage::EncryptStage;
pub use store::{EncryptStore, Misfit};
