//! Payloads: fixed structures in the machine's own byte order, some with data behind them.

use crate::command::Command;
use crate::data::Data;
use crate::message::{ACCESS_BYTES, MAX_AREAS};
use crate::vfio;

/// Bytes of a region's info, without capabilities.
pub(crate) const REGION_INFO_BYTES: u32 = 32;
/// The sparse-mmap capability's header and counts; each area has 16 bytes more.
const SPARSE_HEADER_BYTES: u32 = 16;
const SPARSE_AREA_BYTES: u32 = 16;
/// Bytes of a SET_IRQS before its data.
pub(crate) const IRQ_SET_BYTES: u32 = 20;
/// Bytes of a DMA_MAP.
pub(crate) const DMA_MAP_BYTES: u32 = 32;
/// Bytes of a DMA_UNMAP, and of its reply.
pub(crate) const DMA_UNMAP_BYTES: u32 = 24;
/// Bytes of a DEVICE_GET_INFO and of a DEVICE_GET_IRQ_INFO, and of their replies.
pub(crate) const INFO_BYTES: u32 = 16;

/// A version and what its sender says of itself, as JSON with a final NUL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Has to be the same at both ends.
    pub major: u16,
    /// The smaller one counts.
    pub minor: u16,
    /// The JSON, its NUL included; may be empty.
    pub data: Vec<u8>,
}

/// Memory that the device may access; its file comes beside the message, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: u32,
    /// `vfio::DMA_MAP_FLAG_*`.
    pub flags: u32,
    /// Where in the file it begins.
    pub offset_bytes: u64,
    /// Its first address.
    pub address: u64,
    /// Its size.
    pub len_bytes: u64,
}

/// Memory that the device may not access any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaUnmap {
    /// Room for the reply, which is this structure again.
    pub argsz: u32,
    /// `vfio::DMA_UNMAP_FLAG_*`.
    pub flags: u32,
    /// Its first address.
    pub address: u64,
    /// Its size.
    pub len_bytes: u64,
}

/// What the device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Room for the reply; in the reply, what it needs.
    pub argsz: u32,
    /// `vfio::DEVICE_FLAGS_*`.
    pub flags: u32,
    /// How many regions there are.
    pub regions: u32,
    /// How many kinds of interrupts there are.
    pub irqs: u32,
}

/// A part of a region that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseArea {
    /// Where in the region it begins; in the file, that much behind the region's offset.
    pub offset_bytes: u64,
    /// Its size.
    pub len_bytes: u64,
}

/// What a region is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Room for the reply; in the reply, what all of it needs.
    pub argsz: u32,
    /// `vfio::REGION_INFO_FLAG_*`.
    pub flags: u32,
    /// Which region.
    pub index: u32,
    /// Its size.
    pub len_bytes: u64,
    /// Where in the file the region would begin.
    pub offset_bytes: u64,
    /// What can be mapped: the sparse-mmap capability, if it is not empty.
    pub areas: Vec<SparseArea>,
}

impl RegionInfo {
    /// Bytes of the structure with this many areas.
    pub(crate) fn bytes_with(areas: usize) -> u32 {
        let areas = u32::try_from(areas).unwrap_or(u32::MAX);
        if areas == 0 {
            REGION_INFO_BYTES
        } else {
            areas.saturating_mul(SPARSE_AREA_BYTES).saturating_add(REGION_INFO_BYTES + SPARSE_HEADER_BYTES)
        }
    }
}

/// What a kind of interrupts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Room for the reply; in the reply, what it needs.
    pub argsz: u32,
    /// `vfio::IRQ_INFO_*`.
    pub flags: u32,
    /// Which kind.
    pub index: u32,
    /// How many of the kind there are.
    pub count: u32,
}

/// What becomes of interrupts; their eventfds come beside the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqSet {
    /// Size of the payload.
    pub argsz: u32,
    /// One of `vfio::IRQ_SET_DATA_*` and one of `vfio::IRQ_SET_ACTION_*`.
    pub flags: u32,
    /// Which kind.
    pub index: u32,
    /// The first of them.
    pub start: u32,
    /// How many.
    pub count: u32,
    /// A truth value for each, with `IRQ_SET_DATA_BOOL`; there may be more behind it.
    pub data: Vec<u8>,
}

/// An access to a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// First byte.
    pub offset_bytes: u64,
    /// Which region.
    pub region: u32,
    /// How many bytes.
    pub count: u32,
    /// What is written, or was read.
    pub data: Data,
}

/// A message's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// None.
    Empty,
    /// VERSION.
    Version(Version),
    /// DMA_MAP.
    DmaMap(DmaMap),
    /// DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// DEVICE_GET_INFO.
    DeviceInfo(DeviceInfo),
    /// DEVICE_GET_REGION_INFO.
    RegionInfo(RegionInfo),
    /// DEVICE_GET_IRQ_INFO.
    IrqInfo(IrqInfo),
    /// DEVICE_SET_IRQS.
    IrqSet(IrqSet),
    /// REGION_READ and REGION_WRITE.
    RegionAccess(RegionAccess),
    /// The uninterpreted payload of a command that is not served.
    Other(Vec<u8>),
    /// A payload that is not of its command's shape: so many bytes.
    Malformed(usize),
}

impl Body {
    /// Reads a payload. One that is not of the command's shape is [`Body::Malformed`]: the stream is in step, and the
    /// command can be refused. A command's structure may have anything behind it: a client that reuses its buffer for the
    /// reply sends all of it, as `argsz` says.
    pub(crate) fn parse(command: Command, reply: bool, payload: &[u8]) -> Self {
        let mut reader = Reader(payload);
        let body = reader.body(command, reply).filter(|_| !reply || reader.0.is_empty());
        body.unwrap_or(Self::Malformed(payload.len()))
    }

    /// Appends the payload to `to`.
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Empty | Self::Malformed(_) => {}
            Self::Version(version) => {
                to.extend_from_slice(&version.major.to_ne_bytes());
                to.extend_from_slice(&version.minor.to_ne_bytes());
                to.extend_from_slice(&version.data);
            }
            Self::DmaMap(map) => {
                put_u32s(to, &[map.argsz, map.flags]);
                put_u64s(to, &[map.offset_bytes, map.address, map.len_bytes]);
            }
            Self::DmaUnmap(unmap) => {
                put_u32s(to, &[unmap.argsz, unmap.flags]);
                put_u64s(to, &[unmap.address, unmap.len_bytes]);
            }
            Self::DeviceInfo(info) => put_u32s(to, &[info.argsz, info.flags, info.regions, info.irqs]),
            Self::RegionInfo(info) => write_region_info(info, to),
            Self::IrqInfo(info) => put_u32s(to, &[info.argsz, info.flags, info.index, info.count]),
            Self::IrqSet(set) => {
                put_u32s(to, &[set.argsz, set.flags, set.index, set.start, set.count]);
                to.extend_from_slice(&set.data);
            }
            Self::RegionAccess(access) => {
                put_u64s(to, &[access.offset_bytes]);
                put_u32s(to, &[access.region, access.count]);
                to.extend_from_slice(access.data.as_slice());
            }
            Self::Other(bytes) => to.extend_from_slice(bytes),
        }
    }

    /// A payload's size, so that nobody writes it twice to know.
    pub(crate) fn len_bytes(&self) -> usize {
        match self {
            Self::Empty | Self::Malformed(_) => 0,
            Self::Version(version) => version.data.len().saturating_add(4),
            Self::DmaMap(_) => DMA_MAP_BYTES as usize,
            Self::DmaUnmap(_) => DMA_UNMAP_BYTES as usize,
            Self::DeviceInfo(_) | Self::IrqInfo(_) => INFO_BYTES as usize,
            Self::RegionInfo(info) => RegionInfo::bytes_with(info.areas.len()) as usize,
            Self::IrqSet(set) => set.data.len().saturating_add(IRQ_SET_BYTES as usize),
            Self::RegionAccess(access) => access.data.as_slice().len().saturating_add(ACCESS_BYTES),
            Self::Other(bytes) => bytes.len(),
        }
    }
}

fn write_region_info(info: &RegionInfo, to: &mut Vec<u8>) {
    let capability_offset = if info.areas.is_empty() { 0 } else { REGION_INFO_BYTES };
    put_u32s(to, &[info.argsz, info.flags, info.index, capability_offset]);
    put_u64s(to, &[info.len_bytes, info.offset_bytes]);
    if info.areas.is_empty() {
        return;
    }
    to.extend_from_slice(&vfio::REGION_INFO_CAP_SPARSE_MMAP.to_ne_bytes());
    // Version 1, and no capability behind it.
    to.extend_from_slice(&1_u16.to_ne_bytes());
    put_u32s(to, &[0, u32::try_from(info.areas.len()).unwrap_or(u32::MAX), 0]);
    for area in &info.areas {
        put_u64s(to, &[area.offset_bytes, area.len_bytes]);
    }
}

/// Takes a payload apart from its front; `None` when it ends too soon.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn body(&mut self, command: Command, reply: bool) -> Option<Body> {
        Some(match command {
            Command::Version => {
                Body::Version(Version { major: self.u16()?, minor: self.u16()?, data: self.rest().to_vec() })
            }
            Command::DmaMap if !reply => Body::DmaMap(DmaMap {
                argsz: self.u32()?,
                flags: self.u32()?,
                offset_bytes: self.u64()?,
                address: self.u64()?,
                len_bytes: self.u64()?,
            }),
            Command::DmaUnmap => Body::DmaUnmap(DmaUnmap {
                argsz: self.u32()?,
                flags: self.u32()?,
                address: self.u64()?,
                len_bytes: self.u64()?,
            }),
            Command::DeviceGetInfo => Body::DeviceInfo(DeviceInfo {
                argsz: self.u32()?,
                flags: self.u32()?,
                regions: self.u32()?,
                irqs: self.u32()?,
            }),
            Command::DeviceGetRegionInfo => Body::RegionInfo(self.region_info(reply)?),
            Command::DeviceGetIrqInfo => Body::IrqInfo(IrqInfo {
                argsz: self.u32()?,
                flags: self.u32()?,
                index: self.u32()?,
                count: self.u32()?,
            }),
            Command::DeviceSetIrqs if !reply => Body::IrqSet(IrqSet {
                argsz: self.u32()?,
                flags: self.u32()?,
                index: self.u32()?,
                start: self.u32()?,
                count: self.u32()?,
                data: self.rest().to_vec(),
            }),
            Command::RegionRead => self.access(reply)?,
            Command::RegionWrite => self.access(!reply)?,
            Command::DmaMap | Command::DeviceSetIrqs | Command::DeviceReset => Body::Empty,
            _ => Body::Other(self.rest().to_vec()),
        })
    }

    /// The data is all that is left, and as much as the count says.
    fn access(&mut self, with_data: bool) -> Option<Body> {
        let (offset_bytes, region, count) = (self.u64()?, self.u32()?, self.u32()?);
        let data = if with_data { Data::from(self.rest()) } else { Data::empty() };
        let fits = !with_data || usize::try_from(count) == Ok(data.as_slice().len());
        fits.then_some(Body::RegionAccess(RegionAccess { offset_bytes, region, count, data }))
    }

    fn region_info(&mut self, reply: bool) -> Option<RegionInfo> {
        let (argsz, flags, index, _capability_offset) = (self.u32()?, self.u32()?, self.u32()?, self.u32()?);
        let (len_bytes, offset_bytes) = (self.u64()?, self.u64()?);
        let areas = if reply && !self.0.is_empty() { self.areas()? } else { Vec::new() };
        Some(RegionInfo { argsz, flags, index, len_bytes, offset_bytes, areas })
    }

    /// The one capability that there is, right behind the structure.
    fn areas(&mut self) -> Option<Vec<SparseArea>> {
        let (id, version, next) = (self.u16()?, self.u16()?, self.u32()?);
        let (count, _reserved) = (self.u32()?, self.u32()?);
        let known = id == vfio::REGION_INFO_CAP_SPARSE_MMAP && version == 1 && next == 0;
        let count = usize::try_from(count).ok().filter(|count| known && (1..=MAX_AREAS).contains(count))?;
        let area = |_| Some(SparseArea { offset_bytes: self.u64()?, len_bytes: self.u64()? });
        (0..count).map(area).collect()
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn rest(&mut self) -> &[u8] {
        std::mem::take(&mut self.0)
    }
}

fn put_u32s(to: &mut Vec<u8>, values: &[u32]) {
    values.iter().for_each(|value| to.extend_from_slice(&value.to_ne_bytes()));
}

fn put_u64s(to: &mut Vec<u8>, values: &[u64]) {
    values.iter().for_each(|value| to.extend_from_slice(&value.to_ne_bytes()));
}
