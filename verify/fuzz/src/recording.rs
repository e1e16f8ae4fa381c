//! A hostile recording: the reader yields records, which are written as they were read, and then a
//! fault or the end.
//!
//! The first byte decides. If it is even, the rest is a file. Otherwise, the rest is bodies of
//! records, a length of one byte in front of each, which get right frames behind a right header: so
//! inputs get past the checksums.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_recording::{HEADER_BYTES, Header, Reader, Record, checksum};

fuzz_target!(|input: &[u8]| {
    let Some((setup, rest)) = input.split_first() else { return };
    if setup & 1 == 0 { check(rest) } else { check(&file_of(rest)) }
});

/// A file with these bodies.
fn file_of(mut bodies: &[u8]) -> Vec<u8> {
    let header = Header { capacity_bytes: 1 << 20, block_bytes: 512, ..Header::default() };
    let mut file = header.encode().to_vec();
    while let Some((len, rest)) = bodies.split_first() {
        let (body, rest) = rest.split_at(rest.len().min(usize::from(*len)));
        file.extend((body.len() as u32).to_le_bytes());
        file.extend(checksum(body).to_le_bytes());
        file.extend(body);
        bodies = rest;
    }
    file
}

fn check(file: &[u8]) {
    let mut reader = match Reader::new(file) {
        Ok(reader) => reader,
        Err(error) => return assert!(error.to_string().len() < 300, "{error}"),
    };
    let mut again = reader.header().encode().to_vec();
    assert_eq!(again, file[..HEADER_BYTES]);
    let mut has_end = false;
    loop {
        match reader.read() {
            Ok(Some(record)) => {
                assert!(!has_end, "a record behind the end");
                has_end = matches!(record, Record::End { .. });
                record.append_to(&mut again, reader.data());
                assert_eq!(reader.at_bytes(), again.len() as u64);
                assert_eq!(again, file[..again.len()]);
            }
            Ok(None) => {
                assert!(has_end && again.len() == file.len());
                return;
            }
            Err(error) => {
                assert!(!has_end && error.to_string().len() < 300, "{error}");
                assert_eq!(error.at_bytes, again.len() as u64);
                assert!(matches!(reader.read(), Ok(None)), "a record behind a fault");
                return;
            }
        }
    }
}
