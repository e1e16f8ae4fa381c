//! A hostile disk under a store of volumes.
//!
//! The input makes a store by a few operations, changes bytes of its metadata or writes nodes of
//! its own, opens the result, and continues with operations, in any order. With `cfg(fuzzing)` the
//! volume crate does not compare checksums, so that changed metadata can be read without new
//! checksums.
//!
//! Invariants for any disk: no panic, no more reads than the disk has nodes, and no mapping of a
//! healthy volume that differs from the result of a second reader of the format (`reader.rs`).
//! Invariants for a store that opens without damage: all operations leave it consistent, no data
//! that a power cut could bring back is overwritten, and committed data is there when the store is
//! opened again.
#![no_main]

mod disk;
mod mutate;
mod reader;
mod rules;
mod world;

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::Input;

fuzz_target!(|input: &[u8]| world::run(Input::new(input)));
