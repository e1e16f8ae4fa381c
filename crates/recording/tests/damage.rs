//! Recordings come back as they were written, and damage is found at its place.

use sidecore_recording::{
    DATA_MAX, DataMode, EndReason, FRAME_BYTES, Fault, HEADER_BYTES, Header, Outcome, Reader,
    Record, RecordingError, Request, RequestKind, checksum,
};

fn header() -> Header {
    Header {
        data: DataMode::Full,
        capacity_bytes: 1 << 30,
        block_bytes: 512,
        started_unix_ns: 1_700_000_000_000_000_000,
        name: "pool/db@db".to_owned(),
    }
}

fn request(kind: RequestKind) -> Request {
    Request {
        kind,
        queue: 3,
        write_through: false,
        outcome: Outcome::Ok,
        errno: 0,
        checksum: None,
        arrival_ns: 5_000,
        latency_ns: 77,
        offset_bytes: 4096,
        len_bytes: 512,
    }
}

/// Records of all types, with their data.
fn records() -> Vec<(Record, Vec<u8>)> {
    let data = vec![0xa5; 512];
    let sum = Some(checksum(&data));
    let write = Request { checksum: sum, write_through: true, ..request(RequestKind::Write) };
    let read = Request { checksum: Some(9), arrival_ns: 1, ..request(RequestKind::Read) };
    let flush = Request { offset_bytes: 0, len_bytes: 0, ..request(RequestKind::Flush) };
    let failed = Request { outcome: Outcome::Io, errno: 28, ..request(RequestKind::Discard) };
    let zeroes = request(RequestKind::WriteZeroesUnmap);
    let requests = [(write, data), (read, vec![]), (flush, vec![]), (failed, vec![])];
    let mut records: Vec<(Record, Vec<u8>)> =
        requests.into_iter().map(|(request, data)| (Record::Request(request), data)).collect();
    records.push((Record::Gap { queue: 3, at_ns: 6_000, requests: 17 }, vec![]));
    records.push((Record::Request(zeroes), vec![]));
    let end = Record::End { reason: EndReason::Limit, requests: 5, dropped: 17 };
    records.push((end, vec![]));
    records
}

fn file(records: &[(Record, Vec<u8>)]) -> Vec<u8> {
    let mut file = header().encode().to_vec();
    records.iter().for_each(|(record, data)| record.append_to(&mut file, data));
    file
}

/// All records in front of a fault, and the fault.
fn read(file: &[u8]) -> (Vec<(Record, Vec<u8>)>, Option<RecordingError>) {
    let mut read = Vec::new();
    let mut reader = match Reader::new(file) {
        Ok(reader) => reader,
        Err(error) => return (read, Some(error)),
    };
    loop {
        match reader.read() {
            Ok(Some(record)) => read.push((record, reader.data().to_vec())),
            Ok(None) => return (read, None),
            Err(error) => {
                assert!(reader.read().unwrap().is_none(), "nothing comes behind a fault");
                return (read, Some(error));
            }
        }
    }
}

#[test]
fn a_recording_comes_back_as_it_was_written() {
    let file = file(&records());
    let mut reader = Reader::new(file.as_slice()).unwrap();
    assert_eq!(reader.header(), &header());
    assert_eq!(reader.at_bytes(), HEADER_BYTES as u64);
    reader.read().unwrap();
    assert_eq!(reader.at_bytes(), (HEADER_BYTES + FRAME_BYTES + 56 + 512) as u64);
    let (read, fault) = read(&file);
    assert!(fault.is_none(), "{fault:?}");
    assert_eq!(read, records());
}

#[test]
fn a_name_is_cut_off_between_its_characters() {
    let name = format!("{}ä", "x".repeat(63));
    let encoded = Header { name, ..header() }.encode();
    let reader = Reader::new(encoded.as_slice()).unwrap();
    assert_eq!(reader.header().name, "x".repeat(63));
}

#[test]
fn a_file_that_is_cut_off_yields_all_records_before() {
    let all = records();
    let whole = file(&all);
    let ends: Vec<usize> = (0..=all.len()).map(|count| file(&all[..count]).len()).collect();
    for len in 0..whole.len() {
        let (read, fault) = read(&whole[..len]);
        let count = ends.iter().filter(|end| **end <= len).count().saturating_sub(1);
        assert_eq!(read, all[..count], "{len} bytes");
        let fault = fault.unwrap();
        if len >= 8 {
            assert!(matches!(fault.fault, Fault::CutOff), "{len} bytes: {fault}");
            let at = if len < HEADER_BYTES { 0 } else { ends[count] };
            assert_eq!(fault.at_bytes, at as u64, "{len} bytes");
        }
    }
}

#[test]
fn each_flipped_bit_is_found_and_the_records_before_are_read() {
    let all = records();
    let whole = file(&all);
    let ends: Vec<usize> = (0..=all.len()).map(|count| file(&all[..count]).len()).collect();
    for bit in 0..whole.len() * 8 {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let (read, fault) = read(&damaged);
        let count = ends.iter().filter(|end| **end <= bit / 8).count().saturating_sub(1);
        assert_eq!(read, all[..count], "bit {bit}");
        assert!(fault.is_some(), "bit {bit}");
    }
}

/// A file with one record of this body, whose frame is right.
fn framed(body: &[u8]) -> Vec<u8> {
    let mut file = header().encode().to_vec();
    file.extend((body.len() as u32).to_le_bytes());
    file.extend(checksum(body).to_le_bytes());
    file.extend(body);
    file
}

#[test]
fn values_that_no_writer_writes_are_refused() {
    let body = |record: &Record, data: &[u8]| {
        let mut bytes = Vec::new();
        record.append_to(&mut bytes, data);
        bytes.split_off(FRAME_BYTES)
    };
    let write = Request { checksum: Some(checksum(&[7; 512])), ..request(RequestKind::Write) };
    let good = body(&Record::Request(write), &[7; 512]);
    assert_eq!(read(&framed(&good)).0.len(), 1);
    let refused = |place: usize, value: u8| {
        let mut body = good.clone();
        body[place] = value;
        match read(&framed(&body)) {
            (none, Some(error)) if none.is_empty() => error.to_string(),
            other => panic!("byte {place}: {other:?}"),
        }
    };
    for (place, value, why) in [
        (0, 9, "\"type\""),
        (1, 6, "\"kind\""),
        (1, 0, "\"data\""),
        (2, 8, "\"flags\""),
        (2, 2, "\"data\""),
        (3, 8, "\"outcome\""),
        (6, 1, "\"queue\""),
        (8, 5, "\"error number\""),
        (12, 1, "length"),
        (16, good[16] ^ 1, "\"checksum\""),
        (48, 1, "\"data\""),
    ] {
        let error = refused(place, value);
        assert!(error.contains(why) && error.contains("at byte 128"), "byte {place}: {error}");
    }
    let far = Request { offset_bytes: u64::MAX, ..request(RequestKind::Read) };
    let (none, error) = read(&framed(&body(&Record::Request(far), &[])));
    assert!(none.is_empty() && error.unwrap().to_string().contains("\"range\""));
    let mut gap = body(&Record::Gap { queue: 1, at_ns: 2, requests: 3 }, &[]);
    gap.push(0);
    assert!(matches!(read(&framed(&gap)).1.unwrap().fault, Fault::Length));
}

#[test]
fn other_files_and_versions_are_named() {
    let said = |file: &[u8]| Reader::new(file).err().unwrap().to_string();
    assert!(said(b"").contains("no recording"));
    assert!(said(&[0x7f; 500]).contains("no recording"));
    let mut next = header().encode();
    next[8] = 2;
    assert!(said(&next).contains("version 2"));
    let mut behind = file(&records());
    behind.push(0);
    let (read, fault) = read(&behind);
    assert_eq!(read.len(), records().len() - 1);
    assert!(matches!(fault.unwrap().fault, Fault::Behind));
}

#[test]
fn a_length_alone_takes_no_memory() {
    let mut file = header().encode().to_vec();
    file.extend((DATA_MAX as u32).to_le_bytes());
    file.extend([0; 8]);
    assert!(matches!(read(&file).1.unwrap().fault, Fault::CutOff));
    let mut file = header().encode().to_vec();
    file.extend(u32::MAX.to_le_bytes());
    file.extend([0; 8]);
    assert!(matches!(read(&file).1.unwrap().fault, Fault::Length));
}
