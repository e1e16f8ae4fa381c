//! A hostile disk under a store of volumes.
//!
//! The input makes a store by a few operations, changes bytes of its metadata or writes nodes of its own, opens what
//! that has become, and goes on with operations, in any order. With `cfg(fuzzing)` the volume crate does not compare
//! checksums, so that nothing has to be sealed again to be read.
//!
//! What must hold of any disk: no panic, no more reads than the disk has nodes, and no mapping of a healthy volume that
//! another reader of the format, in here, would not give. Of a store that is opened without a complaint: that it stays
//! consistent whatever is done with it, that nothing which a power cut could bring back is overwritten, and that what was
//! committed is there when it is opened again.
#![no_main]

mod disk;
mod mutate;
mod reader;
mod rules;
mod world;

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::Input;

fuzz_target!(|input: &[u8]| world::run(Input::new(input)));
