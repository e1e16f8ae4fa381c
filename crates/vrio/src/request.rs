//! Requests, as both engines know them.

use sidecore_block::{BlockError, Operation};
use sidecore_spec_virtio::blk::{Range, RequestHeader, UNMAP, request_type};
use sidecore_units::{SECTOR_BYTES, Sector};

use crate::wire::{DeviceEntry, MAX_REQUEST_BYTES, RequestBody, device_flag, request_flag, status};

/// A request to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The kind of the request.
    pub operation: Operation,
    /// First byte in the device.
    pub offset_bytes: u64,
    /// Bytes of the device that it concerns; 0 for a flush.
    pub len_bytes: u64,
    /// Whether a write is durable before it is answered ("force unit access").
    pub fua: bool,
}

impl Request {
    /// A flush.
    pub const FLUSH: Self =
        Self { operation: Operation::Flush, offset_bytes: 0, len_bytes: 0, fua: false };

    /// Whether the request has data that goes to the IOhost.
    pub(crate) const fn has_payload(&self) -> bool {
        self.operation.is_write()
    }

    /// Size of the data that goes with it in either direction.
    pub(crate) fn data_bytes(&self) -> u32 {
        match self.operation {
            // A larger one is refused before.
            Operation::Read | Operation::Write => u32::try_from(self.len_bytes).unwrap_or(u32::MAX),
            Operation::Flush => 0,
            Operation::Discard | Operation::WriteZeroes { .. } => Range::BYTES as u32,
        }
    }

    /// Whether both concern a byte.
    pub(crate) const fn overlaps(&self, other: &Self) -> bool {
        self.offset_bytes < other.offset_bytes.saturating_add(other.len_bytes)
            && other.offset_bytes < self.offset_bytes.saturating_add(self.len_bytes)
    }

    /// Whether `device` can carry it out.
    ///
    /// # Errors
    /// The device is read-only or does not support it, or the range is outside, misaligned or too
    /// large.
    pub(crate) fn check(&self, device: &DeviceEntry) -> Result<(), BlockError> {
        if self.operation.is_write() && device.has(device_flag::READ_ONLY) {
            return Err(BlockError::ReadOnly);
        }
        let is_supported = match self.operation {
            Operation::Read | Operation::Write => true,
            Operation::Flush => return Ok(()),
            Operation::Discard => device.has(device_flag::DISCARD),
            Operation::WriteZeroes { .. } => device.has(device_flag::WRITE_ZEROES),
        };
        if !is_supported {
            return Err(BlockError::Unsupported);
        }
        let end = self.offset_bytes.checked_add(self.len_bytes);
        let is_inside = self.len_bytes > 0 && end.is_some_and(|end| end <= device.capacity_bytes);
        let mask = u64::from(device.block_bytes).wrapping_sub(1);
        let is_aligned = (self.offset_bytes | self.len_bytes) & mask == 0;
        let most_bytes = match self.operation {
            Operation::Read | Operation::Write => u64::from(MAX_REQUEST_BYTES),
            _ => u64::from(u32::MAX).saturating_mul(SECTOR_BYTES),
        };
        if is_inside && is_aligned && self.len_bytes <= most_bytes {
            Ok(())
        } else {
            Err(BlockError::OutOfBounds)
        }
    }

    /// virtio's header of the request.
    pub(crate) const fn header(&self) -> RequestHeader {
        let sector = self.offset_bytes / SECTOR_BYTES;
        match self.operation {
            Operation::Read => RequestHeader { kind: request_type::IN, sector },
            Operation::Write => RequestHeader { kind: request_type::OUT, sector },
            Operation::Flush => RequestHeader { kind: request_type::FLUSH, sector: 0 },
            // Their range is in the data.
            Operation::Discard => RequestHeader { kind: request_type::DISCARD, sector: 0 },
            Operation::WriteZeroes { .. } => {
                RequestHeader { kind: request_type::WRITE_ZEROES, sector: 0 }
            }
        }
    }

    /// The data of a discard or a write of zeros.
    pub(crate) fn range(&self) -> Range {
        let unmaps = matches!(self.operation, Operation::WriteZeroes { may_unmap: true });
        let sectors = u32::try_from(self.len_bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        Range {
            sector: self.offset_bytes / SECTOR_BYTES,
            sectors,
            flags: if unmaps { UNMAP } else { 0 },
        }
    }

    /// The request that a client asks for; of a discard or a write of zeros without its range.
    ///
    /// # Errors
    /// The kind is unknown, or the offset is out of bounds.
    pub(crate) fn parse(body: &RequestBody) -> Result<Self, BlockError> {
        let operation = match body.header.kind {
            request_type::IN => Operation::Read,
            request_type::OUT => Operation::Write,
            request_type::FLUSH => Operation::Flush,
            request_type::DISCARD => Operation::Discard,
            request_type::WRITE_ZEROES => Operation::WriteZeroes { may_unmap: false },
            _ => return Err(BlockError::Unsupported),
        };
        let offset_bytes =
            Sector(body.header.sector).offset_bytes().ok_or(BlockError::OutOfBounds)?;
        let fua = body.flags & request_flag::FUA != 0;
        let plain = Self { operation, offset_bytes, len_bytes: 0, fua };
        match operation {
            Operation::Read | Operation::Write => {
                Ok(Self { len_bytes: body.len_bytes.into(), ..plain })
            }
            Operation::Flush => Ok(Self::FLUSH),
            _ if body.len_bytes == Range::BYTES as u32 => Ok(plain),
            _ => Err(BlockError::OutOfBounds),
        }
    }

    /// The same request with the range that came as its data.
    ///
    /// # Errors
    /// The range is out of bounds.
    pub(crate) fn with_range(self, range: &Range) -> Result<Self, BlockError> {
        let offset_bytes = Sector(range.sector).offset_bytes().ok_or(BlockError::OutOfBounds)?;
        let len_bytes = u64::from(range.sectors).saturating_mul(SECTOR_BYTES);
        let operation = match self.operation {
            Operation::WriteZeroes { .. } => {
                Operation::WriteZeroes { may_unmap: range.flags & UNMAP != 0 }
            }
            other => other,
        };
        Ok(Self { operation, offset_bytes, len_bytes, fua: self.fua })
    }
}

/// The status that says so on the wire.
pub(crate) const fn status_of(result: Result<(), BlockError>) -> u8 {
    match result {
        Ok(()) => status::OK,
        Err(BlockError::NoSpace) => status::NO_SPACE,
        Err(BlockError::Unsupported) => status::UNSUPP,
        Err(BlockError::ReadOnly) => status::READ_ONLY,
        Err(BlockError::OutOfBounds) => status::OUT_OF_BOUNDS,
        Err(_) => status::IOERR,
    }
}

/// The result that a status on the wire says.
pub(crate) const fn result_of(status: u8) -> Result<(), BlockError> {
    match status {
        status::OK => Ok(()),
        status::NO_SPACE => Err(BlockError::NoSpace),
        status::UNSUPP => Err(BlockError::Unsupported),
        status::READ_ONLY => Err(BlockError::ReadOnly),
        status::OUT_OF_BOUNDS => Err(BlockError::OutOfBounds),
        _ => Err(BlockError::EIO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceEntry = DeviceEntry {
        device: 0,
        index: 0,
        count: 1,
        version: 1,
        flags: device_flag::PRESENT | device_flag::DISCARD | device_flag::WRITE_ZEROES,
        epoch: 0,
        capacity_bytes: 1 << 20,
        block_bytes: 4096,
        physical_block_bytes: 4096,
        name: [0; 64],
        serial: [0; 20],
    };

    fn request(operation: Operation, offset_bytes: u64, len_bytes: u64) -> Request {
        Request { operation, offset_bytes, len_bytes, fua: false }
    }

    fn on_the_wire(request: &Request) -> Result<Request, BlockError> {
        let flags = if request.fua { request_flag::FUA } else { 0 };
        let body = RequestBody {
            header: request.header(),
            len_bytes: request.data_bytes(),
            flags,
            ..RequestBody::default()
        };
        let parsed = Request::parse(&body)?;
        match parsed.operation {
            Operation::Discard | Operation::WriteZeroes { .. } => {
                parsed.with_range(&request.range())
            }
            _ => Ok(parsed),
        }
    }

    #[test]
    fn every_request_survives_the_wire() {
        let zeroes = |may_unmap| Operation::WriteZeroes { may_unmap };
        for operation in
            [Operation::Read, Operation::Write, Operation::Discard, zeroes(false), zeroes(true)]
        {
            let request = request(operation, 8192, 4096);
            assert_eq!(on_the_wire(&request), Ok(request));
        }
        let durable = Request { fua: true, ..request(Operation::Write, 0, 512) };
        assert_eq!(on_the_wire(&durable), Ok(durable));
        assert_eq!(on_the_wire(&Request::FLUSH), Ok(Request::FLUSH));
    }

    #[test]
    fn a_request_outside_of_its_device_is_refused() {
        let check = |operation, offset, len| request(operation, offset, len).check(&DEVICE);
        assert_eq!(check(Operation::Read, 0, 65_536), Ok(()));
        assert_eq!(check(Operation::Read, (1 << 20) - 4096, 4096), Ok(()));
        for (offset, len) in
            [(0, 0), (512, 4096), (0, 512), (1 << 20, 4096), (0, 131_072), (u64::MAX - 4095, 4096)]
        {
            assert_eq!(
                check(Operation::Write, offset, len),
                Err(BlockError::OutOfBounds),
                "{len} at {offset}"
            );
        }
        assert_eq!(check(Operation::Discard, 0, 1 << 20), Ok(()));
        assert_eq!(check(Operation::Flush, 77, 77), Ok(()));
        let read_only =
            DeviceEntry { flags: device_flag::PRESENT | device_flag::READ_ONLY, ..DEVICE };
        assert_eq!(request(Operation::Write, 0, 4096).check(&read_only), Err(BlockError::ReadOnly));
        let plain = DeviceEntry { flags: device_flag::PRESENT, ..DEVICE };
        assert_eq!(
            request(Operation::Discard, 0, 4096).check(&plain),
            Err(BlockError::Unsupported)
        );
    }

    #[test]
    fn neighbours_do_not_overlap() {
        let at = |offset, len| request(Operation::Write, offset, len);
        assert!(at(0, 4096).overlaps(&at(4095, 1)));
        assert!(!at(0, 4096).overlaps(&at(4096, 4096)));
        assert!(!at(4096, 4096).overlaps(&at(0, 4096)));
        assert!(!Request::FLUSH.overlaps(&at(0, 4096)));
    }

    #[test]
    fn a_status_means_the_same_on_both_sides() {
        use BlockError::{NoSpace, OutOfBounds, ReadOnly, Unsupported};
        for result in [
            Ok(()),
            Err(NoSpace),
            Err(Unsupported),
            Err(ReadOnly),
            Err(OutOfBounds),
            Err(BlockError::EIO),
        ] {
            assert_eq!(result_of(status_of(result)), result);
        }
        assert_eq!(result_of(99), Err(BlockError::EIO));
    }
}
