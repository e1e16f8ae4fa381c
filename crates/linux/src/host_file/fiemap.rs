//! Reading the map of a file's blocks from its filesystem: FIEMAP
//! (Documentation/filesystems/fiemap.rst in the kernel's source).

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::ioctl::{Opcode, Updater, opcode};
use sidecore_units::SECTOR_BYTES;

use super::ExtentFlaw;
use super::extent::{HostExtent, push};

/// The number of extents that one call requests: 28 KiB.
const BATCH: usize = 512;

/// Writes data that is only in memory first (`FIEMAP_FLAG_SYNC`).
const SYNC: u32 = 1;

/// `FIEMAP_EXTENT_*`.
mod flag {
    pub const LAST: u32 = 1;
    pub const UNKNOWN: u32 = 1 << 1;
    pub const DELALLOC: u32 = 1 << 2;
    pub const ENCODED: u32 = 1 << 3;
    pub const DATA_ENCRYPTED: u32 = 1 << 7;
    pub const NOT_ALIGNED: u32 = 1 << 8;
    pub const DATA_INLINE: u32 = 1 << 9;
    pub const DATA_TAIL: u32 = 1 << 10;
    pub const UNWRITTEN: u32 = 1 << 11;
    pub const MERGED: u32 = 1 << 12;
    pub const SHARED: u32 = 1 << 13;
}

/// `struct fiemap`, without the extents that follow it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
}

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Raw {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct Call {
    header: Header,
    extents: [Raw; BATCH],
}

const _: () = assert!(size_of::<Header>() == 32 && size_of::<Raw>() == 56);

const FS_IOC_FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);

/// The reason why a map cannot be read.
#[derive(Debug)]
pub(super) enum MapError {
    Kernel(io::Error),
    Flaw { offset_bytes: u64, flaw: ExtentFlaw },
}

/// Appends the extents of `range` (bytes of the file) that hold data, in order, cut to the range,
/// adjacent ones merged. An extent that is allocated but not written reads as zeros in the file,
/// and as another file's old data on the device: it is left out, as a hole is.
///
/// All extents must be within a device of `device_bytes`.
pub(super) fn written_extents(
    file: BorrowedFd<'_>,
    range: Range<u64>,
    device_bytes: u64,
    extents: &mut Vec<HostExtent>,
) -> Result<(), MapError> {
    let first = extents.len();
    let mut call = Box::new(Call { header: Header::default(), extents: [Raw::default(); BATCH] });
    let mut at = range.start;
    let mut flags = SYNC;
    while at < range.end {
        call.header = Header {
            start: at,
            length: range.end - at,
            flags,
            count: BATCH as u32,
            ..Header::default()
        };
        // SAFETY: the kernel reads the header and writes it and at most `count` extents, for which
        // the structure has space behind it.
        unsafe { rustix::ioctl::ioctl(file, Updater::<{ FS_IOC_FIEMAP }, Call>::new(&mut call)) }
            .map_err(|error| MapError::Kernel(error.into()))?;
        flags = 0;
        let mapped = call.extents.iter().take(call.header.mapped as usize);
        if mapped.len() == 0 {
            break;
        }
        for raw in mapped {
            let flawed = |flaw| MapError::Flaw { offset_bytes: raw.logical.max(range.start), flaw };
            let end = raw.logical.checked_add(raw.length).filter(|end| *end > at);
            let end = end.ok_or_else(|| flawed(ExtentFlaw::OutOfOrder))?;
            // The first extent may begin before the requested range, every other one only after the
            // end of the previous one.
            let start = raw.logical.max(range.start);
            if start < at {
                return Err(flawed(ExtentFlaw::OutOfOrder));
            }
            judge(raw, device_bytes).map_err(flawed)?;
            at = end;
            if start < range.end && raw.flags & flag::UNWRITTEN == 0 {
                push(
                    extents,
                    first,
                    HostExtent {
                        logical_bytes: start,
                        physical_bytes: raw.physical + (start - raw.logical),
                        len_bytes: end.min(range.end) - start,
                    },
                );
            }
            if raw.flags & flag::LAST != 0 {
                at = range.end;
            }
        }
    }
    Ok(())
}

/// Checks that the bytes on the device belong to the file alone.
fn judge(raw: &Raw, device_bytes: u64) -> Result<(), ExtentFlaw> {
    // In this order, because several flags come together, and the first says most.
    let flaws = [
        (flag::DATA_INLINE | flag::DATA_TAIL, ExtentFlaw::Inline),
        (flag::DATA_ENCRYPTED | flag::ENCODED, ExtentFlaw::Encoded),
        (flag::DELALLOC, ExtentFlaw::Delayed),
        (flag::SHARED, ExtentFlaw::Shared),
        (flag::NOT_ALIGNED, ExtentFlaw::NotAligned),
        (flag::UNKNOWN, ExtentFlaw::Unknown),
    ];
    if let Some((_, flaw)) = flaws.into_iter().find(|(flags, _)| raw.flags & flags != 0) {
        return Err(flaw);
    }
    match raw.flags & !(flag::LAST | flag::MERGED | flag::UNWRITTEN) {
        0 => {}
        unknown => return Err(ExtentFlaw::UnknownFlags(unknown)),
    }
    // The superblock's place belongs to no file.
    if raw.physical == 0 {
        return Err(ExtentFlaw::Unknown);
    }
    // No filesystem has smaller blocks.
    if !(raw.logical | raw.physical | raw.length).is_multiple_of(SECTOR_BYTES) {
        return Err(ExtentFlaw::NotAligned);
    }
    match raw.physical.checked_add(raw.length) {
        Some(end) if end <= device_bytes => Ok(()),
        _ => Err(ExtentFlaw::OutsideDevice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(logical: u64, physical: u64, length: u64, flags: u32) -> Raw {
        Raw { logical, physical, length, flags, ..Raw::default() }
    }

    #[test]
    fn only_plain_extents_are_good() {
        for flags in [0, flag::LAST, flag::MERGED, flag::UNWRITTEN, flag::UNWRITTEN | flag::LAST] {
            assert_eq!(judge(&raw(0, 4096, 4096, flags), 8192), Ok(()));
        }
        for (flags, flaw) in [
            (flag::SHARED, ExtentFlaw::Shared),
            (flag::DELALLOC | flag::UNKNOWN, ExtentFlaw::Delayed),
            (flag::DATA_INLINE | flag::NOT_ALIGNED, ExtentFlaw::Inline),
            (flag::DATA_TAIL | flag::NOT_ALIGNED, ExtentFlaw::Inline),
            (flag::ENCODED, ExtentFlaw::Encoded),
            (flag::DATA_ENCRYPTED | flag::ENCODED, ExtentFlaw::Encoded),
            (flag::NOT_ALIGNED, ExtentFlaw::NotAligned),
            (flag::UNKNOWN, ExtentFlaw::Unknown),
            (flag::UNWRITTEN | flag::SHARED, ExtentFlaw::Shared),
            (1 << 31, ExtentFlaw::UnknownFlags(1 << 31)),
        ] {
            assert_eq!(judge(&raw(0, 4096, 4096, flags | flag::LAST), 8192), Err(flaw));
        }
    }

    #[test]
    fn an_extent_lies_on_the_device() {
        assert_eq!(judge(&raw(0, 0, 4096, 0), 8192), Err(ExtentFlaw::Unknown));
        assert_eq!(judge(&raw(0, 4096, 4608, 0), 8192), Err(ExtentFlaw::OutsideDevice));
        assert_eq!(judge(&raw(0, u64::MAX - 511, 4096, 0), 8192), Err(ExtentFlaw::OutsideDevice));
        for odd in [raw(1, 4096, 4096, 0), raw(0, 4097, 4096, 0), raw(0, 4096, 4095, 0)] {
            assert_eq!(judge(&odd, 16384), Err(ExtentFlaw::NotAligned));
        }
    }
}
