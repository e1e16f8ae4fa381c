//! The client's DMA maps.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use sidecore_memory::{
    GuestAddress, GuestMemory, MAX_REGIONS, MemoryFile, RegionSpec, UserAddress,
};
use sidecore_peer::{ExportFds, FdPlace, ResumeError, ResumeFds};

use crate::body::{DMA_MAP_BYTES, DMA_UNMAP_BYTES};
use crate::message::{DmaMap, DmaUnmap};
use crate::refusal::Refusal;
use sidecore_spec_nvme::vfio;

/// The largest number of maps (`max_dma_maps`).
pub(crate) const MAX_MAPS: usize = MAX_REGIONS;
/// The page size of maps (`pgsizes`).
pub(crate) const PAGE_BYTES: u64 = sidecore_units::PAGE_BYTES;

/// The maps of one client: those in its memory, and those that are only recorded so that they can
/// be unmapped.
///
/// There is one address space: guest address, user address and the map's address are the same.
///
/// A map is memory only if it has a file, and the device may read and write it. QEMU sends other
/// maps too: ROMs, which have no file; their shadows, which are read-only; and this server's own
/// mapped doorbells, which are memory for the guest. None of these is a place for a driver's data.
/// Read-only memory, which a guest could not have written, would need another kind of region.
#[derive(Debug)]
pub(crate) struct DmaTable {
    maps: BTreeMap<u64, Map>,
    memory: GuestMemory,
}

#[derive(Debug)]
struct Map {
    len_bytes: u64,
    /// The map's file and the offset in it, if the map is memory: for an export.
    file: Option<(MemoryFile, u64)>,
}

/// A map in a snapshot. Its file is there if the map is memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct MapState {
    address: u64,
    len_bytes: u64,
    file: Option<(FdPlace, u64)>,
}

impl DmaTable {
    pub(crate) fn new() -> Self {
        Self { maps: BTreeMap::new(), memory: GuestMemory::empty() }
    }

    /// Adds a map. Returns the new memory, if it has changed.
    ///
    /// The given descriptor may be the last one of a large file. So the table keeps it during the
    /// checks and the mapping: on success and on error, the last close is not made here.
    pub(crate) fn map(
        &mut self,
        map: &DmaMap,
        file: Option<MemoryFile>,
    ) -> Result<Option<GuestMemory>, Refusal> {
        let DmaMap { argsz, flags, offset_bytes, address, len_bytes } = *map;
        if argsz < DMA_MAP_BYTES {
            return Err(Refusal::ShortArgsz { argsz, needed: DMA_MAP_BYTES });
        }
        let access = vfio::DMA_MAP_FLAG_READ | vfio::DMA_MAP_FLAG_WRITE;
        let wants_file = flags & vfio::DMA_MAP_FLAG_MMAP != 0;
        if flags & !(access | vfio::DMA_MAP_FLAG_MMAP) != 0
            || flags & access == 0
            || (wants_file && file.is_none())
        {
            return Err(Refusal::BadFlags { flags });
        }
        self.check_place(address, len_bytes)?;
        if self.maps.len() >= MAX_MAPS {
            return Err(Refusal::TooManyMaps { max_maps: MAX_MAPS });
        }
        let kept = file.filter(|_| flags & access == access).map(|file| (file, offset_bytes));
        if let Some((file, _)) = &kept {
            let file = file.as_fd().try_clone_to_owned().map_err(Refusal::Descriptor)?;
            let (guest_address, user_address) = (GuestAddress(address), UserAddress(address));
            let file_offset_bytes = offset_bytes;
            let spec =
                RegionSpec { guest_address, user_address, len_bytes, file, file_offset_bytes };
            self.memory = self.memory.with_region(spec)?;
        } else {
            tracing::debug!(address, len_bytes, flags, "recorded a map that is not memory");
        }
        let is_memory = kept.is_some();
        self.maps.insert(address, Map { len_bytes, file: kept });
        Ok(is_memory.then(|| self.memory.clone()))
    }

    /// Exports all maps, and leaves the table empty.
    pub(crate) fn export(&mut self, fds: &mut ExportFds) -> Vec<MapState> {
        self.memory = GuestMemory::empty();
        let export = |(address, map): (u64, Map)| {
            let file =
                map.file.map(|(file, offset_bytes)| (fds.put(file.into_inner()), offset_bytes));
            MapState { address, len_bytes: map.len_bytes, file }
        };
        std::mem::take(&mut self.maps).into_iter().map(export).collect()
    }

    /// Maps the ranges again that another process has exported.
    pub(crate) fn resume(maps: &[MapState], fds: &mut ResumeFds) -> Result<Self, ResumeError> {
        let mut table = Self::new();
        for MapState { address, len_bytes, file } in maps {
            let access = vfio::DMA_MAP_FLAG_READ | vfio::DMA_MAP_FLAG_WRITE;
            let mut map = DmaMap {
                argsz: DMA_MAP_BYTES,
                flags: access,
                offset_bytes: 0,
                address: *address,
                len_bytes: *len_bytes,
            };
            let file = match file {
                None => None,
                Some((place, offset_bytes)) => {
                    map.offset_bytes = *offset_bytes;
                    map.flags |= vfio::DMA_MAP_FLAG_MMAP;
                    Some(MemoryFile::new(fds.take(*place)?))
                }
            };
            table.map(&map, file).map_err(|refusal| {
                ResumeError::Session(format!("its memory cannot be mapped again: {refusal}").into())
            })?;
        }
        Ok(table)
    }

    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Checks that the range is whole pages that end within the address space and overlap no map.
    fn check_place(&self, address: u64, len_bytes: u64) -> Result<(), Refusal> {
        if !address.is_multiple_of(PAGE_BYTES) || !len_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Refusal::Misaligned { address, len_bytes });
        }
        let out_of_range = Refusal::BadRange { start: address, count: len_bytes };
        let end = address.checked_add(len_bytes).filter(|_| len_bytes > 0).ok_or(out_of_range)?;
        // All maps are disjoint: the last one that begins before the end is the last one that ends.
        let before = self.maps.range(..end).next_back();
        match before {
            Some((start, map)) if start.saturating_add(map.len_bytes) > address => {
                Err(Refusal::Mapped { address, len_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Removes one map, or all. Returns the new memory, if it has changed.
    pub(crate) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<Option<GuestMemory>, Refusal> {
        let DmaUnmap { argsz, flags, address, len_bytes } = *unmap;
        if argsz < DMA_UNMAP_BYTES {
            return Err(Refusal::ShortArgsz { argsz, needed: DMA_UNMAP_BYTES });
        }
        match flags {
            0 => self.unmap_one(address, len_bytes),
            vfio::DMA_UNMAP_FLAG_ALL if address == 0 && len_bytes == 0 => Ok(self.unmap_all()),
            vfio::DMA_UNMAP_FLAG_ALL => Err(Refusal::BadRange { start: address, count: len_bytes }),
            _ => Err(Refusal::BadFlags { flags }),
        }
    }

    /// "The address and size of the DMA region being unmapped must match exactly a previous
    /// mapping."
    fn unmap_one(&mut self, address: u64, len_bytes: u64) -> Result<Option<GuestMemory>, Refusal> {
        let Some(map) = self.maps.get(&address).filter(|map| map.len_bytes == len_bytes) else {
            return Err(Refusal::NotMapped { address, len_bytes });
        };
        let is_memory = map.file.is_some();
        if is_memory {
            self.memory = self.memory.without_region(
                GuestAddress(address),
                UserAddress(address),
                len_bytes,
            )?;
        }
        self.maps.remove(&address);
        Ok(is_memory.then(|| self.memory.clone()))
    }

    /// Removes all maps. Returns the empty memory, if it was not empty before.
    pub(crate) fn unmap_all(&mut self) -> Option<GuestMemory> {
        self.maps.clear();
        if self.memory.region_count() == 0 {
            return None;
        }
        self.memory = GuestMemory::empty();
        Some(self.memory.clone())
    }
}
