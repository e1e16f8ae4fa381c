//! Descriptors of the kernel, and results for it.

use sidecore_block::{BlockError, BlockRequest, Geometry, Operation};
use sidecore_linux::IoDescriptor;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 2;
const DISCARD: u32 = 3;
const WRITE_ZEROES: u32 = 5;

/// The write is durable when it completes (`UBLK_IO_F_FUA`).
const FUA: u32 = 1 << 13;
/// Zeros keep their blocks (`UBLK_IO_F_NOUNMAP`).
const NO_UNMAP: u32 = 1 << 15;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EOPNOTSUPP: i32 = 95;

const SECTOR_BYTES: u64 = 512;

/// A request of the kernel that a store can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    pub operation: Operation,
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// Whether a write is durable when it completes.
    pub fua: bool,
}

/// Checks a request of the kernel. `buffer_bytes` bounds reads and writes.
///
/// # Errors
/// The result for the kernel, a negative errno.
pub(crate) fn parse(
    descriptor: IoDescriptor,
    geometry: &Geometry,
    buffer_bytes: u64,
) -> Result<Parsed, i32> {
    let IoDescriptor { operation_and_flags, sectors, start_sector, .. } = descriptor;
    let operation = match operation_and_flags & 0xff {
        READ => Operation::Read,
        WRITE => Operation::Write,
        FLUSH => Operation::Flush,
        DISCARD => Operation::Discard,
        WRITE_ZEROES => Operation::WriteZeroes { may_unmap: operation_and_flags & NO_UNMAP == 0 },
        _ => return Err(-EOPNOTSUPP),
    };
    let fua = operation_and_flags & FUA != 0 && operation.is_write();
    if operation == Operation::Flush {
        return Ok(Parsed { operation, offset_bytes: 0, len_bytes: 0, fua: false });
    }
    if geometry.read_only && operation.is_write() {
        return Err(-EROFS);
    }
    let len_bytes = u64::from(sectors).saturating_mul(SECTOR_BYTES);
    let offset_bytes = start_sector.checked_mul(SECTOR_BYTES).ok_or(-EIO)?;
    geometry.check(offset_bytes, len_bytes).map_err(|_| -EIO)?;
    if matches!(operation, Operation::Read | Operation::Write) && len_bytes > buffer_bytes {
        return Err(-EIO);
    }
    Ok(Parsed { operation, offset_bytes, len_bytes, fua })
}

/// The result of a request for the kernel: the bytes done, or a negative errno.
pub(crate) fn result_of(request: &BlockRequest) -> i32 {
    match request.result {
        Ok(()) => match request.operation {
            Operation::Read | Operation::Write => i32::try_from(request.len_bytes).unwrap_or(-EIO),
            _ => 0,
        },
        Err(BlockError::NoSpace) => -ENOSPC,
        Err(BlockError::Unsupported) => -EOPNOTSUPP,
        Err(BlockError::ReadOnly) => -EROFS,
        // The kernel shows other numbers as EIO, and some as errors that it repeats by itself.
        Err(_) => -EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry::new(1 << 20, 4096);

    fn descriptor(operation_and_flags: u32, start_sector: u64, sectors: u32) -> IoDescriptor {
        IoDescriptor { operation_and_flags, sectors, start_sector, address: 0 }
    }

    #[test]
    fn each_operation_of_the_kernel_has_one_of_the_store() {
        let parsed = |word| parse(descriptor(word, 8, 16), &GEOMETRY, 1 << 16).unwrap();
        for (word, operation, fua) in [
            (READ, Operation::Read, false),
            (READ | FUA, Operation::Read, false),
            (WRITE, Operation::Write, false),
            (WRITE | FUA | 1 << 8, Operation::Write, true),
            (DISCARD, Operation::Discard, false),
            (WRITE_ZEROES, Operation::WriteZeroes { may_unmap: true }, false),
            (WRITE_ZEROES | NO_UNMAP | FUA, Operation::WriteZeroes { may_unmap: false }, true),
        ] {
            let expected = Parsed { operation, offset_bytes: 4096, len_bytes: 8192, fua };
            assert_eq!(parsed(word), expected);
        }
        let flush = parse(descriptor(FLUSH | FUA, u64::MAX, 7), &GEOMETRY, 0).unwrap();
        assert_eq!((flush.operation, flush.len_bytes, flush.fua), (Operation::Flush, 0, false));
    }

    #[test]
    fn requests_that_no_store_may_see_are_errors() {
        let error = |word, start, sectors| {
            parse(descriptor(word, start, sectors), &GEOMETRY, 65536).unwrap_err()
        };
        // Write same, zone operations, and numbers without a meaning.
        for word in [4, 6, 10, 15, 18, 255] {
            assert_eq!(error(word, 0, 8), -EOPNOTSUPP);
        }
        assert_eq!(error(READ, 2048, 8), -EIO, "past the end");
        assert_eq!(error(READ, 1, 8), -EIO, "not aligned");
        assert_eq!(error(WRITE, u64::MAX, 8), -EIO, "overflows");
        assert_eq!(error(WRITE, 0, 136), -EIO, "larger than a buffer");
        assert!(parse(descriptor(DISCARD, 0, 2048), &GEOMETRY, 65536).is_ok(), "has no data");
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        for word in [WRITE, DISCARD, WRITE_ZEROES] {
            assert_eq!(parse(descriptor(word, 0, 8), &read_only, 65536), Err(-EROFS));
        }
        assert!(parse(descriptor(READ, 0, 8), &read_only, 65536).is_ok());
    }

    #[test]
    fn results_are_bytes_or_errors_of_the_kernel() {
        let mut request = BlockRequest::blank(0);
        request.len_bytes = 8192;
        for (operation, expected) in
            [(Operation::Read, 8192), (Operation::Write, 8192), (Operation::Flush, 0)]
        {
            request.operation = operation;
            assert_eq!(result_of(&request), expected);
        }
        for (error, expected) in [
            (BlockError::NoSpace, -ENOSPC),
            (BlockError::Unsupported, -EOPNOTSUPP),
            (BlockError::ReadOnly, -EROFS),
            (BlockError::Io { errno: 11 }, -EIO),
            (BlockError::OutOfBounds, -EIO),
        ] {
            request.result = Err(error);
            assert_eq!(result_of(&request), expected);
        }
    }
}
