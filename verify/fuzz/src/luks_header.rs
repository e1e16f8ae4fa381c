//! A hostile LUKS2 header: it is refused with a short text that a log can show, or it describes
//! whole sectors. Its slots are tried if it asks for little work.
//!
//! The input is a setup (1 byte), a number of changes (1 byte), the changes to the binary headers
//! (a place of 1 byte and a byte each), and the text of the JSON area. The target writes the
//! checksums, so that inputs get past them.
#![no_main]

use std::cell::Cell;
use std::io;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use sidecore_luks::{Header, Kdf, NewHeader, SectorSize, Source};

const COPY_BYTES: usize = 0x4000;
const BINARY_BYTES: usize = 4096;
const PASSPHRASE: &[u8] = b"a passphrase";
/// Offsets of the fields of a binary header, which the changes are about.
const FIELDS: [usize; 16] = [0, 5, 6, 7, 8, 14, 15, 16, 23, 72, 77, 168, 170, 256, 262, 263];
const CHECKSUM: usize = 448;
const CHECKSUM_BYTES: usize = 64;
/// Both copies of the largest size, and the binary headers that are looked for.
const MAX_READ_BYTES: u64 = (2 * (4 << 20)) + (9 << 20);
/// The most text of an error.
const MAX_TEXT_BYTES: usize = 1500;
/// The most work of a slot or a digest, in passes, KiB, lanes or repetitions.
const MAX_COST: u64 = 1024;

/// A header on a disk, which counts the bytes that are read.
struct Disk<'a> {
    bytes: &'a [u8],
    read_bytes: Cell<u64>,
}

impl Source for Disk<'_> {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.read_bytes.set(self.read_bytes.get() + to.len() as u64);
        self.bytes.read_at(offset, to)
    }
}

thread_local! {
    /// A header that opens, with its slot.
    static HONEST: Vec<u8> = {
        let kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };
        NewHeader { sector: SectorSize::SMALLEST, kdf }.make(PASSPHRASE).expect("a header")
    };
}

/// Puts a text into both copies of a header, unless it is empty. It ends where the copy does.
fn put_text(disk: &mut [u8], text: &[u8]) {
    if text.is_empty() {
        return;
    }
    for copy in disk.chunks_mut(COPY_BYTES).take(2) {
        let area = &mut copy[BINARY_BYTES..];
        area.fill(0);
        let end = text.len().min(area.len());
        area[..end].copy_from_slice(&text[..end]);
    }
}

/// Writes the checksum of a copy, which has the size that the copy names.
fn put_checksum(disk: &mut [u8], offset: usize) {
    let named = disk[offset + 8..].first_chunk().copied().map_or(0, u64::from_be_bytes);
    let end = usize::try_from(named).ok().and_then(|size| offset.checked_add(size));
    let Some(copy) = end.and_then(|end| disk.get_mut(offset..end)) else { return };
    let Some(field) = copy.get_mut(CHECKSUM..CHECKSUM + CHECKSUM_BYTES) else { return };
    field.fill(0);
    let sum = Sha256::digest(&*copy);
    copy[CHECKSUM..CHECKSUM + sum.len()].copy_from_slice(&sum);
}

/// Whether all costs in the text are small. Numbers in other places count, too: the text need not
/// be as a header's.
fn is_cheap(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.iter().all(|(name, value)| {
            let is_cost = ["time", "memory", "cpus", "iterations"].contains(&name.as_str());
            let is_small = value.as_u64().is_none_or(|cost| cost <= MAX_COST);
            (!is_cost || is_small) && is_cheap(value)
        }),
        Value::Array(values) => values.iter().all(is_cheap),
        _ => true,
    }
}

/// Whether slots may be tried: the text that counts is one of the two.
fn may_unlock(disk: &[u8]) -> bool {
    disk.chunks(COPY_BYTES).take(2).all(|copy| {
        let text = copy.get(BINARY_BYTES..).unwrap_or_default();
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        serde_json::from_slice(text).is_ok_and(|value| is_cheap(&value))
    })
}

fn check_text(text: &str) {
    assert!(text.len() <= MAX_TEXT_BYTES, "{} bytes of text", text.len());
    assert!(!text.contains(char::is_control), "{text:?}");
}

fuzz_target!(|input: &[u8]| {
    let Some(([setup, changes], rest)) = input.split_first_chunk() else { return };
    let (changes, text) = rest.split_at(rest.len().min(usize::from(*changes % 16) * 2));
    let mut disk = HONEST.with(Clone::clone);
    put_text(&mut disk, text);
    for change in changes.chunks_exact(2) {
        let copy = usize::from(change[0] >> 7) * COPY_BYTES;
        disk[copy + FIELDS[usize::from(change[0]) % FIELDS.len()]] = change[1];
    }
    let is_intact = changes.is_empty() && text.is_empty() && setup & 7 == 0;
    // The second first: the first may be said to contain it.
    for (flag, offset) in [(2, COPY_BYTES), (1, 0)] {
        if setup & flag == 0 {
            put_checksum(&mut disk, offset);
        }
    }
    if setup & 4 != 0 {
        disk.truncate(usize::from(setup >> 3) * (3 * COPY_BYTES / 32));
    }
    let source = Disk { bytes: &disk, read_bytes: Cell::new(0) };
    let header = Header::read(&source);
    assert!(source.read_bytes.get() <= MAX_READ_BYTES, "{} bytes", source.read_bytes.get());
    let header = match header {
        Ok(header) => header,
        Err(error) => {
            assert!(!is_intact, "{error}");
            check_text(&error.to_string());
            return;
        }
    };
    check_text(header.uuid());
    let segment = header.segment();
    let mask = u64::from(segment.sector.bytes()) - 1;
    assert_eq!((segment.offset_bytes | segment.len_bytes.unwrap_or(0)) & mask, 0, "{segment:?}");
    assert_ne!(segment.len_bytes, Some(0));
    assert!(!is_intact || !header.is_damaged());
    if may_unlock(&disk) {
        match header.unlock(&source, PASSPHRASE) {
            Ok(_) => {}
            Err(error) => {
                assert!(!is_intact, "{error}");
                check_text(&error.to_string());
            }
        }
    }
});
