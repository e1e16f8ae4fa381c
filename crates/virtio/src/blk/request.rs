//! From a descriptor chain to a block request (virtio 1.2, 5.2.6).
//!
//! The framing is the driver's choice (2.7.4.2): the header is the first 16 readable bytes and the
//! status the last writable one, however they are cut into buffers.
//!
//! Errors of a driver fall into two classes. An error that has a status in the specification gets
//! that status ([`Verdict::Done`]). An error that no driver may make is a [`RequestError`], and
//! breaks the device.

use sidecore_block::{BlockRequest, BoundsError, Geometry, Operation};
use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, RegionHint};
use sidecore_ring::{Chain, Descriptor};
use sidecore_spec_virtio::blk::{
    ID_BYTES, Range, RequestHeader, UNMAP, feature, request_type, status,
};
use sidecore_units::{SECTOR_BYTES, Sector};

use super::config::MAX_CLEAR_BYTES;

/// The status byte (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// VIRTIO_BLK_S_OK.
    Ok = status::OK,
    /// VIRTIO_BLK_S_IOERR.
    IoError = status::IOERR,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported = status::UNSUPP,
}

/// A request that no driver may make.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is no writable byte for the status.
    #[error("a request without room for its status")]
    NoStatus,
    /// Fewer than 16 readable bytes.
    #[error("a request whose header has {len_bytes} bytes, not {}", RequestHeader::BYTES)]
    ShortHeader {
        /// Readable bytes there are.
        len_bytes: u64,
    },
    /// A request that only reads the disk carries data for it.
    #[error("readable data in a request of type {kind}, which takes none")]
    UnexpectedReadable {
        /// The request's type.
        kind: u32,
    },
    /// A request that returns no data has room for some.
    #[error("writable data in a request of type {kind}, which returns none")]
    UnexpectedWritable {
        /// The request's type.
        kind: u32,
    },
    /// It ends behind the end of the disk.
    #[error(transparent)]
    PastEnd(BoundsError),
    /// A segment is larger than `size_max`.
    #[error("a segment of {len_bytes} bytes, size_max is {size_max_bytes}")]
    SegmentTooLarge {
        /// The segment's size.
        len_bytes: u32,
        /// The limit.
        size_max_bytes: u32,
    },
    /// A buffer is outside of guest memory, or there are too many.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The properties of the device that a queue needs to parse a request.
#[derive(Clone, Debug)]
pub struct RequestRules {
    /// The store's, read-only if either side is.
    pub geometry: Geometry,
    /// The feature bits that the driver accepted.
    pub features: u64,
    /// Largest segment, if VIRTIO_BLK_F_SIZE_MAX was accepted.
    pub size_max_bytes: Option<u32>,
    /// The answer to GET_ID, padded with zeros.
    pub id: [u8; ID_BYTES],
}

/// The way in which a request continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The block request is filled in and goes to the store.
    Submit,
    /// It is answered at once: status, and bytes written before the status.
    Done(Status, u32),
}

/// A parsed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The way in which it continues.
    pub verdict: Verdict,
    /// Where its status byte goes.
    pub status: GuestAddress,
}

const REJECTED: Verdict = Verdict::Done(Status::IoError, 0);
const UNSUPPORTED: Verdict = Verdict::Done(Status::Unsupported, 0);

impl RequestRules {
    /// Parses `chain` into `request`.
    ///
    /// # Errors
    /// The driver is broken: see [`RequestError`].
    #[inline]
    pub fn parse(
        &self,
        memory: &GuestMemory,
        chain: &Chain,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Parsed, RequestError> {
        let readable = Bytes::new(chain.readable());
        let writable = Bytes::new(chain.writable());
        let Some((result, status)) = writable.split_last_byte() else {
            return Err(RequestError::NoStatus);
        };
        let verdict = self.judge(memory, (readable, result), hint, request)?;
        Ok(Parsed { verdict, status })
    }

    /// Parses a request whose status byte is set aside: `result` is what the driver wants written.
    #[inline]
    fn judge(
        &self,
        memory: &GuestMemory,
        (readable, result): (Bytes<'_>, Bytes<'_>),
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, RequestError> {
        let (header, payload) = split_header(memory, readable, hint)?;
        let RequestHeader { kind, sector } = RequestHeader::decode(&header);
        let sector = Sector(sector);
        match kind {
            request_type::IN => {
                if !payload.is_empty() {
                    return Err(RequestError::UnexpectedReadable { kind });
                }
                request.operation = Operation::Read;
                self.transfer(memory, sector, result, hint, request)
            }
            request_type::OUT => {
                if !result.is_empty() {
                    return Err(RequestError::UnexpectedWritable { kind });
                }
                request.operation = Operation::Write;
                self.transfer(memory, sector, payload, hint, request)
            }
            request_type::FLUSH => {
                if !result.is_empty() {
                    return Err(RequestError::UnexpectedWritable { kind });
                }
                request.operation = Operation::Flush;
                request.offset_bytes = 0;
                request.len_bytes = 0;
                request.segments.clear();
                Ok(Verdict::Submit)
            }
            request_type::GET_ID => self.get_id(memory, result, hint),
            request_type::DISCARD | request_type::WRITE_ZEROES => {
                if !result.is_empty() {
                    return Err(RequestError::UnexpectedWritable { kind });
                }
                self.clear(memory, kind, payload, hint, request)
            }
            _ => Ok(UNSUPPORTED),
        }
    }

    /// A read or a write: the data in `bytes`, from `sector`.
    #[inline]
    fn transfer(
        &self,
        memory: &GuestMemory,
        sector: Sector,
        bytes: Bytes<'_>,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, RequestError> {
        request.segments.bind(memory);
        for descriptor in bytes.descriptors() {
            if let Some(size_max_bytes) = self.size_max_bytes
                && descriptor.len_bytes > size_max_bytes
            {
                return Err(RequestError::SegmentTooLarge {
                    len_bytes: descriptor.len_bytes,
                    size_max_bytes,
                });
            }
            request.segments.push(descriptor.address, u64::from(descriptor.len_bytes), hint)?;
        }
        let len_bytes = request.segments.len_bytes();
        // A sector whose byte offset does not fit is past any end.
        let offset_bytes = sector.offset_bytes().unwrap_or(u64::MAX << 9);
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        match self.geometry.check(offset_bytes, len_bytes) {
            Ok(()) => {}
            Err(error @ BoundsError::PastEnd { .. }) => return Err(RequestError::PastEnd(error)),
            Err(BoundsError::Misaligned { .. }) => return Ok(REJECTED),
        }
        // 5.2.6.2: a write to a read-only device fails.
        let refused = request.operation == Operation::Write && self.geometry.read_only;
        if len_bytes == 0 || refused {
            return Ok(REJECTED);
        }
        Ok(Verdict::Submit)
    }

    fn get_id(
        &self,
        memory: &GuestMemory,
        result: Bytes<'_>,
        hint: &mut RegionHint,
    ) -> Result<Verdict, RequestError> {
        if result.len_bytes() < ID_BYTES as u64 {
            return Ok(REJECTED);
        }
        let mut rest = self.id.as_slice();
        for descriptor in result.descriptors() {
            let count = rest.len().min(descriptor.len_bytes as usize);
            let Some((now, later)) = rest.split_at_checked(count) else {
                break;
            };
            memory.write_slice(descriptor.address, now, hint)?;
            rest = later;
        }
        Ok(Verdict::Done(Status::Ok, ID_BYTES as u32))
    }

    /// Discard or write zeroes, of one segment (5.2.6: `max_discard_seg` and
    /// `max_write_zeroes_seg` are one).
    fn clear(
        &self,
        memory: &GuestMemory,
        kind: u32,
        payload: Bytes<'_>,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, RequestError> {
        let discard = kind == request_type::DISCARD;
        let bit = if discard { feature::DISCARD } else { feature::WRITE_ZEROES };
        if self.features & bit == 0 {
            return Ok(UNSUPPORTED);
        }
        if payload.len_bytes() != Range::BYTES as u64 {
            return Ok(REJECTED);
        }
        let (range, _) = split_header(memory, payload, hint)?;
        let Range { sector, sectors, flags } = Range::decode(&range);
        // 5.2.6.2: unknown flags, and unmap in a discard, are unsupported.
        if flags & !UNMAP != 0 || (discard && flags != 0) {
            return Ok(UNSUPPORTED);
        }
        let offset_bytes = Sector(sector).offset_bytes().unwrap_or(u64::MAX << 9);
        let len_bytes = u64::from(sectors).saturating_mul(SECTOR_BYTES);
        match self.geometry.check(offset_bytes, len_bytes) {
            Ok(()) => {}
            Err(error @ BoundsError::PastEnd { .. }) => return Err(RequestError::PastEnd(error)),
            Err(BoundsError::Misaligned { .. }) => return Ok(REJECTED),
        }
        if len_bytes == 0 || len_bytes > MAX_CLEAR_BYTES || self.geometry.read_only {
            return Ok(REJECTED);
        }
        request.operation = if discard {
            Operation::Discard
        } else {
            Operation::WriteZeroes { may_unmap: flags & UNMAP != 0 }
        };
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        request.segments.clear();
        Ok(Verdict::Submit)
    }
}

/// Takes the first 16 bytes off `bytes`: a [`RequestHeader`] or a [`Range`].
#[inline(always)] // the bytes stay in registers
fn split_header<'a>(
    memory: &GuestMemory,
    bytes: Bytes<'a>,
    hint: &mut RegionHint,
) -> Result<([u8; RequestHeader::BYTES], Bytes<'a>), RequestError> {
    let header = match bytes.first() {
        Some(first) if first.len_bytes as usize >= RequestHeader::BYTES => {
            memory.read_array(first.address, hint)?
        }
        _ => gather_header(memory, bytes, hint)?,
    };
    Ok((header, bytes.skip(RequestHeader::BYTES as u64)))
}

/// The first 16 bytes, cut up by the driver.
#[cold]
fn gather_header(
    memory: &GuestMemory,
    bytes: Bytes<'_>,
    hint: &mut RegionHint,
) -> Result<[u8; RequestHeader::BYTES], RequestError> {
    let mut header = [0_u8; RequestHeader::BYTES];
    let mut filled = 0_usize;
    for descriptor in bytes.descriptors() {
        let room = header.get_mut(filled..).unwrap_or(&mut []);
        let count = room.len().min(descriptor.len_bytes as usize);
        let Some(place) = room.get_mut(..count) else {
            break;
        };
        memory.read_slice(descriptor.address, place, hint)?;
        filled = filled.saturating_add(count);
    }
    if filled < RequestHeader::BYTES {
        return Err(RequestError::ShortHeader { len_bytes: filled as u64 });
    }
    Ok(header)
}

/// A run of bytes over several descriptors, without what was cut off at its ends.
#[derive(Clone, Copy, Debug)]
struct Bytes<'a> {
    descriptors: &'a [Descriptor],
    /// Bytes cut off the first descriptor; less than its size.
    skip: u32,
    /// Bytes cut off the last descriptor; less than its size.
    drop: u32,
}

impl<'a> Bytes<'a> {
    #[inline]
    fn new(descriptors: &'a [Descriptor]) -> Self {
        Self { descriptors, skip: 0, drop: 0 }
    }

    fn first(&self) -> Option<&Descriptor> {
        self.descriptors.first()
    }

    fn is_empty(&self) -> bool {
        self.descriptors.is_empty()
    }

    fn len_bytes(&self) -> u64 {
        self.descriptors().fold(0, |sum, part| sum.saturating_add(u64::from(part.len_bytes)))
    }

    /// Cuts the last byte off, and says where it is.
    #[inline]
    fn split_last_byte(self) -> Option<(Self, GuestAddress)> {
        let (last, before) = self.descriptors.split_last()?;
        let end = u64::from(last.len_bytes).checked_sub(1)?;
        // An address that wraps around is in no region: writing there fails.
        let address = GuestAddress(last.address.0.wrapping_add(end));
        let rest = if end == 0 { Self::new(before) } else { Self { drop: 1, ..self } };
        Some((rest, address))
    }

    /// Cuts `count` bytes off the front.
    #[inline]
    fn skip(mut self, mut count: u64) -> Self {
        while let Some((first, rest)) = self.descriptors.split_first() {
            if count < u64::from(first.len_bytes) {
                self.skip = u32::try_from(count).unwrap_or(0);
                break;
            }
            count = count.saturating_sub(u64::from(first.len_bytes));
            self.descriptors = rest;
        }
        self
    }

    /// The descriptors, cut to size.
    #[inline]
    fn descriptors(self) -> impl Iterator<Item = Descriptor> + 'a {
        let last = self.descriptors.len().wrapping_sub(1);
        self.descriptors.iter().enumerate().map(move |(index, part)| {
            let skip = if index == 0 { self.skip } else { 0 };
            let drop = if index == last { self.drop } else { 0 };
            Descriptor {
                address: GuestAddress(part.address.0.wrapping_add(u64::from(skip))),
                len_bytes: part.len_bytes.saturating_sub(skip).saturating_sub(drop),
            }
        })
    }
}
