//! A hostile header of a store with checksums: it is refused, or its sizes are such as this program
//! writes.
//!
//! The input is the fields. The target writes the magic number, the version and the checksum, so
//! that inputs get past them.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    assert_ne!(
        sidecore_stage_integrity::decodes(input),
        Some(false),
        "it is not written as it was read"
    );
});
