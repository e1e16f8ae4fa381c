//! The device at the other end: its regions, its interrupts, and the memory that it may reach.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sidecore_spec_nvme::vfio;
use sidecore_spec_nvme::vfio_user::{
    CapabilityHeader, Command, DmaMap, DmaUnmap, IrqSetHeader, RegionInfoHeader, SparseArea,
    SparseHeader, VERSION_MAJOR, VERSION_MINOR, VersionHeader,
};
use sidecore_spec_nvme::vfio_user::{DeviceInfo as DeviceInfoBody, IrqInfo as IrqInfoBody};

use super::wire::{MAX_FILES, MAX_POKE_BYTES, RawMessage, Wire, access};
use crate::error::ClientError;

const CAPABILITIES: &[u8] =
    b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}\0";

/// Room for a list of mappable areas.
const REGION_INFO_ROOM_BYTES: u32 = 4096;
/// Most that one region access moves: less than what any server takes.
const MAX_ACCESS_BYTES: usize = 4096;

/// The device's answer to `VFIO_USER_DEVICE_GET_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Bit 0: it can be reset. Bit 1: it is a PCI device.
    pub flags: u32,
    /// How many regions it has.
    pub regions: u32,
    /// How many kinds of interrupts it has.
    pub irqs: u32,
}

/// A part of a region that can be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappableArea {
    /// Where in the region it begins.
    pub offset_bytes: u64,
    /// Its size.
    pub len_bytes: u64,
}

/// The device's description of one of its regions.
#[derive(Debug)]
pub struct RegionInfo {
    /// Bit 0: readable. Bit 1: writable. Bit 2: can be mapped.
    pub flags: u32,
    /// Its size; zero if there is none.
    pub len_bytes: u64,
    /// Where in the file it begins.
    pub offset_bytes: u64,
    /// The areas that can be mapped.
    pub areas: Vec<MappableArea>,
    /// The file, if anything can be mapped.
    pub file: Option<OwnedFd>,
}

/// The device's description of one kind of its interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Bit 0: they signal eventfds.
    pub flags: u32,
    /// How many there are.
    pub count: u32,
}

/// A connection to a vfio-user device. Clones are the same connection; each call locks it until the
/// reply is there.
#[derive(Clone, Debug)]
pub struct Transport {
    wire: Arc<Mutex<Wire>>,
    version: (u16, u16),
    capabilities: Arc<str>,
}

impl Transport {
    /// Connects and negotiates the version, 0.1 or less.
    ///
    /// # Errors
    /// There is no listener at `socket`, or the listener speaks another version.
    pub fn connect(socket: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        Self::negotiate(Wire::connect(socket.as_ref(), timeout)?)
    }

    /// Connects and says nothing: the version is the caller's to negotiate, with
    /// [`Transport::send_raw`].
    ///
    /// # Errors
    /// There is no listener at `socket`.
    pub fn connect_raw(socket: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let wire = Wire::connect(socket.as_ref(), timeout)?;
        Ok(Self { wire: Arc::new(Mutex::new(wire)), version: (0, 0), capabilities: "".into() })
    }

    pub(crate) fn negotiate(mut wire: Wire) -> Result<Self, ClientError> {
        let header = VersionHeader { major: VERSION_MAJOR, minor: VERSION_MINOR }.encode();
        let reply = wire.call(Command::Version, &[&header, CAPABILITIES].concat(), &[])?;
        let Some((header, json)) = reply.body.split_first_chunk() else {
            return Err(wrong(Command::Version, "too short"));
        };
        let header = VersionHeader::decode(header);
        let version = (header.major, header.minor);
        if version.0 != VERSION_MAJOR || version.1 > VERSION_MINOR {
            return Err(wrong(Command::Version, &format!("version {}.{}", version.0, version.1)));
        }
        let json = json.strip_suffix(&[0]).unwrap_or(json);
        let capabilities =
            std::str::from_utf8(json).map_err(|_| wrong(Command::Version, "not UTF-8"))?.into();
        Ok(Self { wire: Arc::new(Mutex::new(wire)), version, capabilities })
    }

    /// The version that is spoken.
    #[must_use]
    pub fn version(&self) -> (u16, u16) {
        self.version
    }

    /// The server's capabilities, in JSON.
    #[must_use]
    pub fn capabilities(&self) -> &str {
        &self.capabilities
    }

    /// DEVICE_GET_INFO.
    ///
    /// # Errors
    /// The socket, or the device refuses.
    pub fn device_info(&self) -> Result<DeviceInfo, ClientError> {
        let request = Command::DeviceGetInfo;
        let body =
            DeviceInfoBody { argsz: DeviceInfoBody::BYTES as u32, ..DeviceInfoBody::default() };
        let DeviceInfoBody { flags, regions, irqs, .. } =
            DeviceInfoBody::decode(&self.ask(request, &body.encode())?);
        Ok(DeviceInfo { flags, regions, irqs })
    }

    /// DEVICE_GET_IRQ_INFO.
    ///
    /// # Errors
    /// The socket, or there are no such interrupts.
    pub fn irq_info(&self, index: u32) -> Result<IrqInfo, ClientError> {
        let body =
            IrqInfoBody { argsz: IrqInfoBody::BYTES as u32, index, ..IrqInfoBody::default() };
        let reply = self.ask(Command::DeviceGetIrqInfo, &body.encode())?;
        let IrqInfoBody { flags, count, .. } = IrqInfoBody::decode(&reply);
        Ok(IrqInfo { flags, count })
    }

    /// DEVICE_GET_REGION_INFO.
    ///
    /// # Errors
    /// The socket, there is no such region, or its description makes no sense.
    pub fn region_info(&self, index: u32) -> Result<RegionInfo, ClientError> {
        let request = Command::DeviceGetRegionInfo;
        let header = RegionInfoHeader {
            argsz: REGION_INFO_ROOM_BYTES,
            index,
            ..RegionInfoHeader::default()
        };
        let reply = self.lock().call(request, &header.encode(), &[])?;
        let body = &reply.body[..];
        let Some(header) = body.first_chunk().map(RegionInfoHeader::decode) else {
            return Err(wrong(request, "too short"));
        };
        let RegionInfoHeader { flags, len_bytes, offset_bytes, .. } = header;
        let file = reply.files.into_iter().next();
        let areas = if flags & vfio::REGION_INFO_FLAG_CAPS != 0 {
            sparse_areas(body, header.capability_offset)?
        } else {
            Vec::new()
        };
        let inside = |area: &MappableArea| {
            area.offset_bytes.checked_add(area.len_bytes).is_some_and(|end| end <= len_bytes)
                && area.len_bytes > 0
        };
        if !areas.iter().all(inside) {
            return Err(wrong(request, "a mappable area outside of its region"));
        }
        let whole = MappableArea { offset_bytes: 0, len_bytes };
        let areas =
            match (flags & vfio::REGION_INFO_FLAG_MMAP != 0 && file.is_some(), areas.is_empty()) {
                (false, _) => Vec::new(),
                (true, true) => vec![whole],
                (true, false) => areas,
            };
        Ok(RegionInfo { flags, len_bytes, offset_bytes, areas, file })
    }

    /// Reads `to.len()` bytes of a region in one access.
    ///
    /// # Errors
    /// The socket, the device refuses, or it is more than 4 KiB.
    pub fn region_read(
        &self,
        region: u32,
        offset_bytes: u64,
        to: &mut [u8],
    ) -> Result<(), ClientError> {
        let request = Command::RegionRead;
        if to.len() > MAX_ACCESS_BYTES {
            return Err(ClientError::Options(format!("{} bytes in one region access", to.len())));
        }
        let head = access(offset_bytes, region, to.len());
        let reply = self.lock().call(request, &head, &[])?;
        match reply.body.get(head.len()..) {
            Some(data) if data.len() == to.len() => to.copy_from_slice(data),
            _ => return Err(wrong(request, &format!("{} bytes", reply.body.len()))),
        }
        Ok(())
    }

    /// Writes all of `from` to a region in one access.
    ///
    /// # Errors
    /// As [`Transport::region_read`].
    pub fn region_write(
        &self,
        region: u32,
        offset_bytes: u64,
        from: &[u8],
    ) -> Result<(), ClientError> {
        if from.len() <= MAX_POKE_BYTES {
            return self.poke(region, offset_bytes, from, false);
        }
        if from.len() > MAX_ACCESS_BYTES {
            return Err(ClientError::Options(format!("{} bytes in one region access", from.len())));
        }
        let body = [&access(offset_bytes, region, from.len())[..], from].concat();
        self.lock().call(Command::RegionWrite, &body, &[]).map(drop)
    }

    /// Writes at most eight bytes, allocating nothing; a posted write has no reply.
    pub(crate) fn poke(
        &self,
        region: u32,
        offset_bytes: u64,
        from: &[u8],
        posted: bool,
    ) -> Result<(), ClientError> {
        self.lock().poke(region, offset_bytes, from, posted)
    }

    /// Lets the device reach `len_bytes` of `file` from `file_offset_bytes` on, at `address`.
    ///
    /// # Errors
    /// The socket, or the device refuses.
    pub fn dma_map(
        &self,
        address: u64,
        len_bytes: u64,
        file: BorrowedFd<'_>,
        file_offset_bytes: u64,
    ) -> Result<(), ClientError> {
        let map = DmaMap {
            argsz: DmaMap::BYTES as u32,
            flags: vfio::DMA_MAP_FLAG_READ | vfio::DMA_MAP_FLAG_WRITE,
            offset_bytes: file_offset_bytes,
            address,
            len_bytes,
        };
        self.lock().call(Command::DmaMap, &map.encode(), &[file]).map(drop)
    }

    /// Takes the memory at `address` away from the device; nothing of the device reaches it when
    /// this returns.
    ///
    /// # Errors
    /// The socket, or nothing is mapped so.
    pub fn dma_unmap(&self, address: u64, len_bytes: u64) -> Result<(), ClientError> {
        let unmap = DmaUnmap { argsz: DmaUnmap::BYTES as u32, flags: 0, address, len_bytes };
        self.lock().call(Command::DmaUnmap, &unmap.encode(), &[]).map(drop)
    }

    /// Sets the events that the interrupt vectors from `first` on signal, which are of kind
    /// `index`: of MSI-X or of MSI.
    ///
    /// # Errors
    /// The socket, or there are no such vectors.
    pub fn set_vectors(
        &self,
        index: u32,
        first: u32,
        events: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        for (start, events) in (first..).step_by(MAX_FILES).zip(events.chunks(MAX_FILES)) {
            let count = u32::try_from(events.len()).unwrap_or(0);
            self.set_irqs(
                vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER,
                index,
                start..start.saturating_add(count),
                &[],
                events,
            )?;
        }
        Ok(())
    }

    /// DEVICE_SET_IRQS for interrupts `range` of kind `index`, with any flags `vfio::IRQ_SET_*`.
    ///
    /// # Errors
    /// The socket, or the device refuses.
    pub fn set_irqs(
        &self,
        flags: u32,
        index: u32,
        range: std::ops::Range<u32>,
        data: &[u8],
        events: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let argsz = u32::try_from(IrqSetHeader::BYTES + data.len()).unwrap_or(u32::MAX);
        let count = range.end.saturating_sub(range.start);
        let header = IrqSetHeader { argsz, flags, index, start: range.start, count };
        let body = [&header.encode(), data].concat();
        self.lock().call(Command::DeviceSetIrqs, &body, events).map(drop)
    }

    /// DEVICE_RESET.
    ///
    /// # Errors
    /// The socket, or the device refuses.
    pub fn reset(&self) -> Result<(), ClientError> {
        self.lock().call(Command::DeviceReset, &[], &[]).map(drop)
    }

    /// Sends any bytes with any descriptors: for tests that attack a server. The replies are the
    /// caller's, too.
    ///
    /// # Errors
    /// The socket.
    pub fn send_raw(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.lock().send_raw(bytes, files)
    }

    /// Receives the next message, whatever it is.
    ///
    /// # Errors
    /// The socket, among that [`ClientError::HungUp`] and [`ClientError::Timeout`]; a message of an
    /// impossible size.
    pub fn receive_raw(&self) -> Result<RawMessage, ClientError> {
        self.lock().receive_raw()
    }

    /// Whether the device has not hung up, as far as the socket knows.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.lock().is_connected()
    }

    /// Ends the connection, for all clones.
    pub fn hang_up(&self) {
        self.lock().hang_up();
    }

    /// A question, and an answer of the same size.
    fn ask<const BYTES: usize>(
        &self,
        request: Command,
        body: &[u8; BYTES],
    ) -> Result<[u8; BYTES], ClientError> {
        let reply = self.lock().call(request, body, &[])?;
        reply.body.first_chunk().copied().ok_or_else(|| wrong(request, "too short"))
    }

    /// Nothing panics half-way through a message.
    fn lock(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Walks the capabilities behind a region's description, the first of which is at `at`.
fn sparse_areas(body: &[u8], at: u32) -> Result<Vec<MappableArea>, ClientError> {
    let mut at = at as usize;
    let mut areas = Vec::new();
    // Each capability has 8 bytes at least: a list that goes in circles is longer than the message.
    for _ in 0..body.len() / 8 {
        if at == 0 {
            break;
        }
        let header = CapabilityHeader::decode(chunk(body, at)?);
        if header.id == vfio::REGION_INFO_CAP_SPARSE_MMAP {
            for index in 0..SparseHeader::decode(chunk(body, at)?).areas as usize {
                let area = SparseArea::decode(chunk(
                    body,
                    at + SparseHeader::BYTES + index * SparseArea::BYTES,
                )?);
                areas.push(MappableArea {
                    offset_bytes: area.offset_bytes,
                    len_bytes: area.len_bytes,
                });
            }
        }
        at = header.next as usize;
    }
    Ok(areas)
}

/// The structure at `at`.
fn chunk<const BYTES: usize>(body: &[u8], at: usize) -> Result<&[u8; BYTES], ClientError> {
    let short = || wrong(Command::DeviceGetRegionInfo, "its capabilities run past its end");
    body.get(at..).and_then(|rest| rest.first_chunk()).ok_or_else(short)
}

fn wrong(request: Command, why: &str) -> ClientError {
    ClientError::Answer { request: request.name(), why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(body: &[u8]) -> u32 {
        RegionInfoHeader::decode(body.first_chunk().unwrap()).capability_offset
    }

    #[test]
    fn mappable_areas_are_found_behind_other_capabilities() {
        let mut body = vec![0; 32];
        body[12] = 32;
        let words =
            |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        body.extend(words(&[9, 48, 0, 0]));
        body.extend(words(&[1 | 1 << 16, 0, 2, 0]));
        body.extend(words(&[0x2000, 0, 0x1000, 0, 0x8000, 1, 0x4000, 0]));
        let area = |offset_bytes, len_bytes| MappableArea { offset_bytes, len_bytes };
        assert_eq!(
            sparse_areas(&body, first(&body)).unwrap(),
            [area(0x2000, 0x1000), area(0x1_0000_8000, 0x4000)]
        );
        body.truncate(90);
        assert!(sparse_areas(&body, first(&body)).is_err(), "cut off");
        body[36] = 32;
        assert!(sparse_areas(&body, first(&body)).unwrap().is_empty(), "a circle ends");
        body[12] = 200;
        assert!(sparse_areas(&body, first(&body)).is_err());
    }
}
