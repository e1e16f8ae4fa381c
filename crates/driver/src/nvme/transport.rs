//! The device at the other end: its regions, its interrupts, and the memory that it may reach.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::wire::{MAX_FILES, MAX_POKE_BYTES, RawMessage, Request, Wire, access};
use crate::error::ClientError;

/// Regions of a PCI device, by VFIO's numbers.
pub mod region {
    /// Base address register 0: the controller's properties and doorbells.
    pub const BAR0: u32 = 0;
    /// Base address register 4: where this project's functions have their MSI-X table.
    pub const BAR4: u32 = 4;
    /// The configuration space.
    pub const CONFIG: u32 = 7;
}

/// Flags of DEVICE_SET_IRQS, and the kinds of interrupts, by VFIO's numbers.
pub mod set_irqs {
    /// For all interrupts named.
    pub const DATA_NONE: u32 = 1 << 0;
    /// For those whose byte is not 0.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// An eventfd for each.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Mask them.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Unmask them.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Say what they signal, or signal them now.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// The kind of interrupts that MSI is.
    pub const MSI: u32 = 1;
    /// The kind of interrupts that MSI-X is.
    pub const MSIX: u32 = 2;
}

const VERSION_MAJOR: u16 = 0;
const VERSION_MINOR: u16 = 1;
const CAPABILITIES: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}\0";

/// DMA_MAP: the device may read and write.
const DMA_READ_WRITE: u32 = 0b11;
const REGION_MMAP: u32 = 1 << 2;
const REGION_CAPS: u32 = 1 << 3;
const CAP_SPARSE_MMAP: u16 = 1;

const REGION_INFO_BYTES: usize = 32;
/// Room for a list of mappable areas.
const REGION_INFO_ROOM_BYTES: u32 = 4096;
/// Most that one region access moves: less than what any server takes.
const MAX_ACCESS_BYTES: usize = 4096;

/// What the device says of itself.
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

/// What the device says of one of its regions.
#[derive(Debug)]
pub struct RegionInfo {
    /// Bit 0: readable. Bit 1: writable. Bit 2: can be mapped.
    pub flags: u32,
    /// Its size; zero if there is none.
    pub len_bytes: u64,
    /// Where in the file it begins.
    pub offset_bytes: u64,
    /// What of it can be mapped.
    pub areas: Vec<MappableArea>,
    /// The file, if anything can be mapped.
    pub file: Option<OwnedFd>,
}

/// What the device says of one kind of its interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Bit 0: they signal eventfds.
    pub flags: u32,
    /// How many there are.
    pub count: u32,
}

/// A connection to a vfio-user device. Clones are the same connection; each call locks it until the reply is there.
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
    /// Nobody listens at `socket`, or what does speaks another version.
    pub fn connect(socket: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        Self::negotiate(Wire::connect(socket.as_ref(), timeout)?)
    }

    /// Connects and says nothing: the version is the caller's to negotiate, with [`Transport::send_raw`].
    ///
    /// # Errors
    /// Nobody listens at `socket`.
    pub fn connect_raw(socket: impl AsRef<Path>, timeout: Duration) -> Result<Self, ClientError> {
        let wire = Wire::connect(socket.as_ref(), timeout)?;
        Ok(Self { wire: Arc::new(Mutex::new(wire)), version: (0, 0), capabilities: "".into() })
    }

    pub(crate) fn negotiate(mut wire: Wire) -> Result<Self, ClientError> {
        let mut body = Vec::with_capacity(4 + CAPABILITIES.len());
        body.extend_from_slice(&VERSION_MAJOR.to_le_bytes());
        body.extend_from_slice(&VERSION_MINOR.to_le_bytes());
        body.extend_from_slice(CAPABILITIES);
        let reply = wire.call(Request::VERSION, &body, &[])?;
        let [a, b, c, d, json @ ..] = &reply.body[..] else {
            return Err(wrong(Request::VERSION, "too short"));
        };
        let version = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
        if version.0 != VERSION_MAJOR || version.1 > VERSION_MINOR {
            return Err(wrong(Request::VERSION, &format!("version {}.{}", version.0, version.1)));
        }
        let json = json.strip_suffix(&[0]).unwrap_or(json);
        let capabilities = std::str::from_utf8(json).map_err(|_| wrong(Request::VERSION, "not UTF-8"))?.into();
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
        let request = Request::DEVICE_GET_INFO;
        let [_, flags, regions, irqs] = self.ask(request, [16, 0, 0, 0])?;
        Ok(DeviceInfo { flags, regions, irqs })
    }

    /// DEVICE_GET_IRQ_INFO.
    ///
    /// # Errors
    /// The socket, or there are no such interrupts.
    pub fn irq_info(&self, index: u32) -> Result<IrqInfo, ClientError> {
        let [_, flags, _, count] = self.ask(Request::DEVICE_GET_IRQ_INFO, [16, 0, index, 0])?;
        Ok(IrqInfo { flags, count })
    }

    /// DEVICE_GET_REGION_INFO.
    ///
    /// # Errors
    /// The socket, there is no such region, or its description makes no sense.
    pub fn region_info(&self, index: u32) -> Result<RegionInfo, ClientError> {
        let request = Request::DEVICE_GET_REGION_INFO;
        let mut body = [0; REGION_INFO_BYTES];
        body[0..4].copy_from_slice(&REGION_INFO_ROOM_BYTES.to_le_bytes());
        body[8..12].copy_from_slice(&index.to_le_bytes());
        let reply = self.lock().call(request, &body, &[])?;
        let body = &reply.body[..];
        if body.len() < REGION_INFO_BYTES {
            return Err(wrong(request, "too short"));
        }
        let flags = u32_at(body, 4).unwrap_or(0);
        let (len_bytes, offset_bytes) = (u64_at(body, 16).unwrap_or(0), u64_at(body, 24).unwrap_or(0));
        let file = reply.files.into_iter().next();
        let areas = if flags & REGION_CAPS != 0 { sparse_areas(body)? } else { Vec::new() };
        let inside = |area: &MappableArea| {
            area.offset_bytes.checked_add(area.len_bytes).is_some_and(|end| end <= len_bytes) && area.len_bytes > 0
        };
        if !areas.iter().all(inside) {
            return Err(wrong(request, "a mappable area outside of its region"));
        }
        let whole = MappableArea { offset_bytes: 0, len_bytes };
        let areas = match (flags & REGION_MMAP != 0 && file.is_some(), areas.is_empty()) {
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
    pub fn region_read(&self, region: u32, offset_bytes: u64, to: &mut [u8]) -> Result<(), ClientError> {
        let request = Request::REGION_READ;
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
    pub fn region_write(&self, region: u32, offset_bytes: u64, from: &[u8]) -> Result<(), ClientError> {
        if from.len() <= MAX_POKE_BYTES {
            return self.poke(region, offset_bytes, from, false);
        }
        if from.len() > MAX_ACCESS_BYTES {
            return Err(ClientError::Options(format!("{} bytes in one region access", from.len())));
        }
        let body = [&access(offset_bytes, region, from.len())[..], from].concat();
        self.lock().call(Request::REGION_WRITE, &body, &[]).map(drop)
    }

    /// Writes at most eight bytes, allocating nothing; a posted write has no reply.
    pub(crate) fn poke(&self, region: u32, offset_bytes: u64, from: &[u8], posted: bool) -> Result<(), ClientError> {
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
        let mut body = [0; 32];
        body[0..4].copy_from_slice(&32_u32.to_le_bytes());
        body[4..8].copy_from_slice(&DMA_READ_WRITE.to_le_bytes());
        body[8..16].copy_from_slice(&file_offset_bytes.to_le_bytes());
        body[16..24].copy_from_slice(&address.to_le_bytes());
        body[24..32].copy_from_slice(&len_bytes.to_le_bytes());
        self.lock().call(Request::DMA_MAP, &body, &[file]).map(drop)
    }

    /// Takes the memory at `address` away from the device; nothing of the device reaches it when this returns.
    ///
    /// # Errors
    /// The socket, or nothing is mapped so.
    pub fn dma_unmap(&self, address: u64, len_bytes: u64) -> Result<(), ClientError> {
        let mut body = [0; 24];
        body[0..4].copy_from_slice(&24_u32.to_le_bytes());
        body[8..16].copy_from_slice(&address.to_le_bytes());
        body[16..24].copy_from_slice(&len_bytes.to_le_bytes());
        self.lock().call(Request::DMA_UNMAP, &body, &[]).map(drop)
    }

    /// What the interrupt vectors from `first` on signal, which are of kind `index`: of MSI-X or of MSI.
    ///
    /// # Errors
    /// The socket, or there are no such vectors.
    pub fn set_vectors(&self, index: u32, first: u32, events: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        for (start, events) in (first..).step_by(MAX_FILES).zip(events.chunks(MAX_FILES)) {
            let count = u32::try_from(events.len()).unwrap_or(0);
            self.set_irqs(
                set_irqs::DATA_EVENTFD | set_irqs::ACTION_TRIGGER,
                index,
                start..start.saturating_add(count),
                &[],
                events,
            )?;
        }
        Ok(())
    }

    /// DEVICE_SET_IRQS for interrupts `range` of kind `index`, with any [flags](set_irqs).
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
        let argsz = u32::try_from(20 + data.len()).unwrap_or(u32::MAX);
        let words = [argsz, flags, index, range.start, range.end.saturating_sub(range.start)];
        let body = [&words.map(u32::to_le_bytes).concat()[..], data].concat();
        self.lock().call(Request::DEVICE_SET_IRQS, &body, events).map(drop)
    }

    /// DEVICE_RESET.
    ///
    /// # Errors
    /// The socket, or the device refuses.
    pub fn reset(&self) -> Result<(), ClientError> {
        self.lock().call(Request::DEVICE_RESET, &[], &[]).map(drop)
    }

    /// Sends any bytes with any descriptors: for tests that attack a server. The replies are the caller's, too.
    ///
    /// # Errors
    /// The socket.
    pub fn send_raw(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.lock().send_raw(bytes, files)
    }

    /// Receives the next message, whatever it is.
    ///
    /// # Errors
    /// The socket, among that [`ClientError::HungUp`] and [`ClientError::Timeout`]; a message of an impossible size.
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

    /// A question and an answer of four words.
    fn ask(&self, request: Request, words: [u32; 4]) -> Result<[u32; 4], ClientError> {
        let reply = self.lock().call(request, &words.map(u32::to_le_bytes).concat(), &[])?;
        let word = |index: usize| u32_at(&reply.body, index * 4).ok_or_else(|| wrong(request, "too short"));
        Ok([word(0)?, word(1)?, word(2)?, word(3)?])
    }

    /// Nothing panics half-way through a message.
    fn lock(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Walks the capabilities behind a region's description.
fn sparse_areas(body: &[u8]) -> Result<Vec<MappableArea>, ClientError> {
    let short = || wrong(Request::DEVICE_GET_REGION_INFO, "its capabilities run past its end");
    let mut at = u32_at(body, 12).unwrap_or(0) as usize;
    let mut areas = Vec::new();
    // Each capability has 8 bytes at least: a list that goes in circles is longer than the message.
    for _ in 0..body.len() / 8 {
        if at == 0 {
            break;
        }
        let id = u32_at(body, at).ok_or_else(short)? & 0xffff;
        let next = u32_at(body, at + 4).ok_or_else(short)?;
        if id == u32::from(CAP_SPARSE_MMAP) {
            let count = u32_at(body, at + 8).ok_or_else(short)? as usize;
            for index in 0..count {
                let area = at + 16 + index * 16;
                let offset_bytes = u64_at(body, area).ok_or_else(short)?;
                let len_bytes = u64_at(body, area + 8).ok_or_else(short)?;
                areas.push(MappableArea { offset_bytes, len_bytes });
            }
        }
        at = next as usize;
    }
    Ok(areas)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.first_chunk().copied().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at.checked_add(8)?)?.first_chunk().copied().map(u64::from_le_bytes)
}

fn wrong(request: Request, why: &str) -> ClientError {
    ClientError::Answer { request: request.1, why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappable_areas_are_found_behind_other_capabilities() {
        let mut body = vec![0; 32];
        body[12] = 32;
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        body.extend(words(&[9, 48, 0, 0]));
        body.extend(words(&[1 | 1 << 16, 0, 2, 0]));
        body.extend(words(&[0x2000, 0, 0x1000, 0, 0x8000, 1, 0x4000, 0]));
        let area = |offset_bytes, len_bytes| MappableArea { offset_bytes, len_bytes };
        assert_eq!(sparse_areas(&body).unwrap(), [area(0x2000, 0x1000), area(0x1_0000_8000, 0x4000)]);
        body.truncate(90);
        assert!(sparse_areas(&body).is_err(), "cut off");
        body[36] = 32;
        assert!(sparse_areas(&body).unwrap().is_empty(), "a circle ends");
        body[12] = 200;
        assert!(sparse_areas(&body).is_err());
    }
}
