//! The headers of packets of several frames, as anyone on the Ethernet can make them: what is
//! accepted has a payload that is there, and at most 64 frames; and it is written as it was read.
//!
//! The input is the bytes behind the headers that the slot has (2, big-endian) and the headers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_link::{FAKE_HEADER_BYTES, FakeHeader, OFFLOAD_BYTES_MAX};

const PORT: u16 = 0x88b5;

fuzz_target!(|data: &[u8]| {
    let Some((after, headers)) = data.split_first_chunk() else { return };
    let after_bytes = usize::from(u16::from_be_bytes(*after));
    let mut header = [0; FAKE_HEADER_BYTES];
    header.iter_mut().zip(headers).for_each(|(place, byte)| *place = *byte);
    let Some((fake, payload_bytes)) = FakeHeader::decode(&header, after_bytes, PORT) else {
        return;
    };
    assert!((1..=after_bytes).contains(&payload_bytes));
    assert!(payload_bytes.div_ceil(fake.segment_bytes.into()) <= 64);
    let Some(written) = fake.encode(payload_bytes) else {
        assert!(payload_bytes > OFFLOAD_BYTES_MAX);
        return;
    };
    assert_eq!(FakeHeader::decode(&written, after_bytes, PORT), Some((fake, payload_bytes)));
});
