//! Payloads: fixed structures in the machine's byte order, some of them followed by data.

use sidecore_spec_nvme::vfio;
use sidecore_spec_nvme::vfio_user::{
    AccessHeader, Command, IrqSetHeader, RegionInfoHeader, SparseHeader, VersionHeader,
};
pub use sidecore_spec_nvme::vfio_user::{DeviceInfo, DmaMap, DmaUnmap, IrqInfo, SparseArea};

use crate::data::Data;
use crate::message::MAX_AREAS;

/// The size of a region's info without capabilities.
pub(crate) const REGION_INFO_BYTES: u32 = RegionInfoHeader::BYTES as u32;
/// The size of a SET_IRQS before its data.
pub(crate) const IRQ_SET_BYTES: u32 = IrqSetHeader::BYTES as u32;
/// The size of a DMA_MAP.
pub(crate) const DMA_MAP_BYTES: u32 = DmaMap::BYTES as u32;
/// The size of a DMA_UNMAP, and of its reply.
pub(crate) const DMA_UNMAP_BYTES: u32 = DmaUnmap::BYTES as u32;
/// The size of a DEVICE_GET_INFO and of a DEVICE_GET_IRQ_INFO, and of their replies.
pub(crate) const INFO_BYTES: u32 = DeviceInfo::BYTES as u32;

/// A version and its sender's capabilities, as JSON with a final NUL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Both ends need the same major version.
    pub major: u16,
    /// Both ends use the smaller minor version.
    pub minor: u16,
    /// The JSON, its NUL included; may be empty.
    pub data: Vec<u8>,
}

/// The payload of DEVICE_GET_REGION_INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// In a command, the space for the reply; in a reply, the size that the complete reply needs.
    pub argsz: u32,
    /// `vfio::REGION_INFO_FLAG_*`.
    pub flags: u32,
    /// The region's number, `vfio::PCI_*_REGION_INDEX`.
    pub index: u32,
    /// The region's size; zero if the device does not have the region.
    pub len_bytes: u64,
    /// The file's offset that belongs to the region's first byte.
    pub offset_bytes: u64,
    /// The mappable areas (the sparse-mmap capability); empty without the capability.
    pub areas: Vec<SparseArea>,
}

impl RegionInfo {
    /// The size of the structure with `areas` areas.
    pub(crate) fn bytes_with(areas: usize) -> u32 {
        let capability = match areas {
            0 => 0,
            areas => areas.saturating_mul(SparseArea::BYTES).saturating_add(SparseHeader::BYTES),
        };
        u32::try_from(capability.saturating_add(RegionInfoHeader::BYTES)).unwrap_or(u32::MAX)
    }
}

/// The payload of DEVICE_SET_IRQS. Its eventfds come beside the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqSet {
    /// The size of the payload.
    pub argsz: u32,
    /// One of `vfio::IRQ_SET_DATA_*` and one of `vfio::IRQ_SET_ACTION_*`.
    pub flags: u32,
    /// The kind of interrupts, `vfio::PCI_*_IRQ_INDEX`.
    pub index: u32,
    /// The first interrupt of the range.
    pub start: u32,
    /// The number of interrupts in the range.
    pub count: u32,
    /// A truth value for each, with `IRQ_SET_DATA_BOOL`; more bytes may follow.
    pub data: Vec<u8>,
}

/// The payload of REGION_READ and REGION_WRITE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionAccess {
    /// The first byte, from the region's start.
    pub offset_bytes: u64,
    /// The region's number, `vfio::PCI_*_REGION_INDEX`.
    pub region: u32,
    /// The number of bytes.
    pub count: u32,
    /// The bytes to write, or the bytes read; otherwise empty.
    pub data: Data,
}

/// A message's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// No payload, as of DEVICE_RESET.
    Empty,
    /// The payload of VERSION.
    Version(Version),
    /// The payload of DMA_MAP.
    DmaMap(DmaMap),
    /// The payload of DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// The payload of DEVICE_GET_INFO.
    DeviceInfo(DeviceInfo),
    /// The payload of DEVICE_GET_REGION_INFO.
    RegionInfo(RegionInfo),
    /// The payload of DEVICE_GET_IRQ_INFO.
    IrqInfo(IrqInfo),
    /// The payload of DEVICE_SET_IRQS.
    IrqSet(IrqSet),
    /// The payload of REGION_READ and REGION_WRITE.
    RegionAccess(RegionAccess),
    /// The uninterpreted payload of a command that is not served.
    Other(Vec<u8>),
    /// A payload without its command's structure, by its size in bytes.
    Malformed(usize),
}

impl Body {
    /// Reads a payload. A payload without its command's structure is [`Body::Malformed`]: the
    /// stream is still in step, so the command can be refused. Any bytes may follow a command's
    /// structure: a client that reuses its buffer for the reply sends all of the buffer, as `argsz`
    /// says.
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
                let header = VersionHeader { major: version.major, minor: version.minor };
                to.extend_from_slice(&header.encode());
                to.extend_from_slice(&version.data);
            }
            Self::DmaMap(map) => to.extend_from_slice(&map.encode()),
            Self::DmaUnmap(unmap) => to.extend_from_slice(&unmap.encode()),
            Self::DeviceInfo(info) => to.extend_from_slice(&info.encode()),
            Self::RegionInfo(info) => write_region_info(info, to),
            Self::IrqInfo(info) => to.extend_from_slice(&info.encode()),
            Self::IrqSet(set) => {
                let IrqSet { argsz, flags, index, start, count, ref data } = *set;
                to.extend_from_slice(&IrqSetHeader { argsz, flags, index, start, count }.encode());
                to.extend_from_slice(data);
            }
            Self::RegionAccess(access) => {
                let RegionAccess { offset_bytes, region, count, ref data } = *access;
                to.extend_from_slice(&AccessHeader { offset_bytes, region, count }.encode());
                to.extend_from_slice(data.as_slice());
            }
            Self::Other(bytes) => to.extend_from_slice(bytes),
        }
    }

    /// The payload's size, known before the payload is written.
    pub(crate) fn len_bytes(&self) -> usize {
        match self {
            Self::Empty | Self::Malformed(_) => 0,
            Self::Version(version) => version.data.len().saturating_add(VersionHeader::BYTES),
            Self::DmaMap(_) => DmaMap::BYTES,
            Self::DmaUnmap(_) => DmaUnmap::BYTES,
            Self::DeviceInfo(_) => DeviceInfo::BYTES,
            Self::IrqInfo(_) => IrqInfo::BYTES,
            Self::RegionInfo(info) => RegionInfo::bytes_with(info.areas.len()) as usize,
            Self::IrqSet(set) => set.data.len().saturating_add(IrqSetHeader::BYTES),
            Self::RegionAccess(access) => {
                access.data.as_slice().len().saturating_add(AccessHeader::BYTES)
            }
            Self::Other(bytes) => bytes.len(),
        }
    }
}

fn write_region_info(info: &RegionInfo, to: &mut Vec<u8>) {
    let RegionInfo { argsz, flags, index, len_bytes, offset_bytes, ref areas } = *info;
    let capability_offset = if areas.is_empty() { 0 } else { REGION_INFO_BYTES };
    let header =
        RegionInfoHeader { argsz, flags, index, capability_offset, len_bytes, offset_bytes };
    to.extend_from_slice(&header.encode());
    if areas.is_empty() {
        return;
    }
    let header = SparseHeader {
        id: vfio::REGION_INFO_CAP_SPARSE_MMAP,
        version: 1,
        next: 0,
        areas: u32::try_from(areas.len()).unwrap_or(u32::MAX),
    };
    to.extend_from_slice(&header.encode());
    areas.iter().for_each(|area| to.extend_from_slice(&area.encode()));
}

/// Takes structures from the front of a payload; `None` at a premature end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn body(&mut self, command: Command, reply: bool) -> Option<Body> {
        Some(match command {
            Command::Version => {
                let VersionHeader { major, minor } = VersionHeader::decode(self.take()?);
                Body::Version(Version { major, minor, data: self.rest().to_vec() })
            }
            Command::DmaMap if !reply => Body::DmaMap(DmaMap::decode(self.take()?)),
            Command::DmaUnmap => Body::DmaUnmap(DmaUnmap::decode(self.take()?)),
            Command::DeviceGetInfo => Body::DeviceInfo(DeviceInfo::decode(self.take()?)),
            Command::DeviceGetRegionInfo => Body::RegionInfo(self.region_info(reply)?),
            Command::DeviceGetIrqInfo => Body::IrqInfo(IrqInfo::decode(self.take()?)),
            Command::DeviceSetIrqs if !reply => {
                let IrqSetHeader { argsz, flags, index, start, count } =
                    IrqSetHeader::decode(self.take()?);
                Body::IrqSet(IrqSet {
                    argsz,
                    flags,
                    index,
                    start,
                    count,
                    data: self.rest().to_vec(),
                })
            }
            Command::RegionRead => self.access(reply)?,
            Command::RegionWrite => self.access(!reply)?,
            Command::DmaMap | Command::DeviceSetIrqs | Command::DeviceReset => Body::Empty,
            _ => Body::Other(self.rest().to_vec()),
        })
    }

    /// Reads an access. The data is the rest of the payload, and has the length in `count`.
    fn access(&mut self, with_data: bool) -> Option<Body> {
        let AccessHeader { offset_bytes, region, count } = AccessHeader::decode(self.take()?);
        let data = if with_data { Data::from(self.rest()) } else { Data::empty() };
        let fits = !with_data || usize::try_from(count) == Ok(data.as_slice().len());
        fits.then_some(Body::RegionAccess(RegionAccess { offset_bytes, region, count, data }))
    }

    fn region_info(&mut self, reply: bool) -> Option<RegionInfo> {
        let RegionInfoHeader { argsz, flags, index, len_bytes, offset_bytes, .. } =
            RegionInfoHeader::decode(self.take()?);
        let areas = if reply && !self.0.is_empty() { self.areas()? } else { Vec::new() };
        Some(RegionInfo { argsz, flags, index, len_bytes, offset_bytes, areas })
    }

    /// Reads the only known capability, directly behind the structure.
    fn areas(&mut self) -> Option<Vec<SparseArea>> {
        let SparseHeader { id, version, next, areas } = SparseHeader::decode(self.take()?);
        let known = id == vfio::REGION_INFO_CAP_SPARSE_MMAP && version == 1 && next == 0;
        let count =
            usize::try_from(areas).ok().filter(|count| known && (1..=MAX_AREAS).contains(count))?;
        (0..count).map(|_| Some(SparseArea::decode(self.take()?))).collect()
    }

    fn take<const N: usize>(&mut self) -> Option<&[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(bytes)
    }

    fn rest(&mut self) -> &[u8] {
        std::mem::take(&mut self.0)
    }
}
