//! The table of guest memory regions, and address translation.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::span::Span;
use crate::window::Window;

/// The most regions in a table: QEMU's limit of memory slots for one vhost-user device with
/// `CONFIGURE_MEM_SLOTS`.
pub const MAX_REGIONS: usize = 509;

/// An address in the guest's physical address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddress(pub u64);

/// An address in the VMM's own address space, by which vhost-user names rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserAddress(pub u64);

/// One region of guest memory, as described by a VMM.
#[derive(Debug)]
pub struct RegionSpec {
    /// The region's start in the guest's physical address space.
    pub guest_address: GuestAddress,
    /// The region's start in the VMM's address space.
    pub user_address: UserAddress,
    /// The region's size in bytes.
    pub len_bytes: u64,
    /// The region's file: a memfd, or a file on tmpfs or hugetlbfs.
    pub file: OwnedFd,
    /// The region's start in the file, in bytes.
    pub file_offset_bytes: u64,
}

/// Why a memory table or an address was rejected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The region's size is zero.
    #[error("a memory region of size zero")]
    EmptyRegion,
    /// The region runs past the end of an address space.
    #[error("memory region of {len_bytes:#x} bytes at {start:#x} runs past the address space")]
    RegionOverflow {
        /// First address.
        start: u64,
        /// Size in bytes.
        len_bytes: u64,
    },
    /// Two regions share a guest or a user address.
    #[error("memory regions overlap at {start:#x}")]
    RegionOverlap {
        /// First address of the second of the two.
        start: u64,
    },
    /// More regions than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} memory regions")]
    TooManyRegions,
    /// A region to be removed does not exist.
    #[error("no memory region of {len_bytes:#x} bytes at guest address {start:#x}")]
    NoSuchRegion {
        /// Guest address.
        start: u64,
        /// Size in bytes.
        len_bytes: u64,
    },
    /// The file is on a filesystem that could block us, or is no file.
    #[error(
        "what is behind a memory region is no memory file; share a memfd (memory-backend-memfd), \
         or a file on tmpfs or hugetlbfs"
    )]
    NotMemoryFile,
    /// The file is smaller than the region claims.
    #[error(
        "the file behind a memory region has {file_bytes:#x} bytes, the region needs \
         {needed_bytes:#x}"
    )]
    FileTooSmall {
        /// The size of the file.
        file_bytes: u64,
        /// The region's end in the file.
        needed_bytes: u64,
    },
    /// The kernel failed to map the region.
    #[error("cannot map a memory region: {0}")]
    Map(std::io::Error),
    /// An address range outside every region.
    #[error("{len_bytes:#x} bytes at {start:#x} are outside guest memory")]
    OutOfRange {
        /// First address.
        start: u64,
        /// Size in bytes.
        len_bytes: u64,
    },
    /// An address without the alignment that its use requires.
    #[error("address {start:#x} is not aligned to {align_bytes} bytes")]
    Misaligned {
        /// The address.
        start: u64,
        /// The alignment.
        align_bytes: usize,
    },
    /// A scatter-gather list exceeds its limit.
    #[error("a request of more than {max_segments} segments")]
    TooManySegments {
        /// The limit.
        max_segments: usize,
    },
}

#[derive(Clone, Debug)]
struct Region {
    guest_base: u64,
    len_bytes: u64,
    /// The address of the region's first byte in this process.
    host_base: NonNull<u8>,
    user_base: u64,
    /// The page size of the file.
    page_bytes: u64,
    mapping: Arc<Mapping>,
}

#[derive(Debug)]
struct Table {
    /// Sorted by `guest_base`, disjoint.
    regions: Box<[Region]>,
}

// SAFETY: `host_base` points into `mapping`, which is Send and Sync and lives as long as the
// region.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// The region of the last translation: each queue keeps its own, because a guest's requests mostly
/// stay in one region (FAST'12, 5.2, replaced the lookup altogether: the layout is static).
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionHint(usize);

/// The mapped guest memory at one moment. Cloning counts a reference; the memory stays mapped while
/// any clone lives. Dropping the last clone does not wait for the memory to be unmapped: see
/// [`reaper`](crate::reaper).
#[derive(Clone, Debug)]
pub struct GuestMemory(Arc<Table>);

impl GuestMemory {
    /// Memory without regions.
    #[must_use]
    pub fn empty() -> Self {
        Self(Arc::new(Table { regions: Box::new([]) }))
    }

    /// Maps all of `specs`.
    ///
    /// # Errors
    /// Regions that overlap, overflow, are empty or cannot be mapped; files that are not in memory,
    /// or smaller than their region.
    pub fn map(specs: Vec<RegionSpec>) -> Result<Self, MemoryError> {
        let regions = specs.into_iter().map(Region::map).collect::<Result<Vec<_>, _>>()?;
        Self::from_regions(regions)
    }

    /// Maps `len_bytes` that the kernel shares with this process through `file` from `offset_bytes`
    /// on, such as the rings of a packet socket. Both addresses of the memory begin at zero.
    ///
    /// # Errors
    /// The kernel does not map the file in this size, or `len_bytes` is zero.
    pub fn map_kernel_rings(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> Result<Self, MemoryError> {
        // The file is this process's own, so it is neither checked nor asked for its size.
        let mapping = Mapping::kernel(file, offset_bytes, len_bytes).map_err(MemoryError::Map)?;
        Self::from_regions(vec![Region {
            guest_base: 0,
            len_bytes: len_bytes as u64,
            host_base: mapping.base(),
            user_base: 0,
            page_bytes: sidecore_units::PAGE_BYTES,
            mapping,
        }])
    }

    /// This table with one more region; mapped regions stay mapped.
    ///
    /// # Errors
    /// As [`GuestMemory::map`].
    pub fn with_region(&self, spec: RegionSpec) -> Result<Self, MemoryError> {
        let mut regions = self.0.regions.to_vec();
        regions.push(Region::map(spec)?);
        Self::from_regions(regions)
    }

    /// This table and all regions of `other`, which are mapped already, from `base` on in both
    /// address spaces.
    ///
    /// # Errors
    /// As [`GuestMemory::map`], of regions that overlap, overflow, or are too many.
    pub fn with_memory(&self, base: u64, other: &Self) -> Result<Self, MemoryError> {
        let mut regions = self.0.regions.to_vec();
        for region in &other.0.regions {
            let moved = |start: u64| {
                let len_bytes = region.len_bytes;
                let overflow = || MemoryError::RegionOverflow { start, len_bytes };
                let moved = start.checked_add(base).ok_or_else(overflow)?;
                moved.checked_add(region.len_bytes).map(|_| moved).ok_or_else(overflow)
            };
            regions.push(Region {
                guest_base: moved(region.guest_base)?,
                user_base: moved(region.user_base)?,
                ..region.clone()
            });
        }
        Self::from_regions(regions)
    }

    /// This table without the region of these three values.
    ///
    /// # Errors
    /// [`MemoryError::NoSuchRegion`].
    pub fn without_region(
        &self,
        guest_address: GuestAddress,
        user_address: UserAddress,
        len_bytes: u64,
    ) -> Result<Self, MemoryError> {
        let mut regions = self.0.regions.to_vec();
        let before = regions.len();
        regions.retain(|region| {
            region.guest_base != guest_address.0
                || region.user_base != user_address.0
                || region.len_bytes != len_bytes
        });
        if regions.len() == before {
            return Err(MemoryError::NoSuchRegion { start: guest_address.0, len_bytes });
        }
        Self::from_regions(regions)
    }

    fn from_regions(mut regions: Vec<Region>) -> Result<Self, MemoryError> {
        if regions.len() > MAX_REGIONS {
            return Err(MemoryError::TooManyRegions);
        }
        check_disjoint(&mut regions, |region| region.user_base)?;
        check_disjoint(&mut regions, |region| region.guest_base)?;
        Ok(Self(Arc::new(Table { regions: regions.into() })))
    }

    /// Whether `other` is the very same table.
    #[must_use]
    #[inline]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The number of regions.
    #[must_use]
    pub fn region_count(&self) -> usize {
        self.0.regions.len()
    }

    /// Bytes of guest memory mapped.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.0.regions.iter().fold(0, |sum: u64, region| sum.saturating_add(region.len_bytes))
    }

    /// The size of the smallest pages, by the files of the regions: memory is contiguous in units
    /// of this size.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.0
            .regions
            .iter()
            .map(|region| region.page_bytes)
            .min()
            .unwrap_or(sidecore_units::PAGE_BYTES)
    }

    /// Each region's first host address and size, for registering them with the kernel as fixed I/O
    /// buffers.
    pub fn host_ranges(&self) -> impl Iterator<Item = (*mut u8, u64)> + '_ {
        self.0.regions.iter().map(|region| (region.host_base.as_ptr(), region.len_bytes))
    }

    /// The first guest address behind all regions; 0 without regions.
    #[must_use]
    pub fn end_address(&self) -> GuestAddress {
        let last = self.0.regions.last();
        GuestAddress(last.map_or(0, |region| region.guest_base.saturating_add(region.len_bytes)))
    }

    /// The guest's address of a byte that is mapped at `host`.
    pub(crate) fn guest_address_of(&self, host: NonNull<u8>) -> Option<GuestAddress> {
        self.0.regions.iter().find_map(|region| {
            let offset = host.addr().get().checked_sub(region.host_base.addr().get())? as u64;
            (offset < region.len_bytes)
                .then(|| GuestAddress(region.guest_base.saturating_add(offset)))
        })
    }

    /// Whether the peer has truncated a file of this memory. The lost memory then reads as zeros.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// The bytes at `address` that are in one region, at most `len_bytes`, as a pointer in this
    /// process and a count; `None` outside of guest memory.
    #[inline]
    pub(crate) fn locate(
        &self,
        address: GuestAddress,
        len_bytes: u64,
        hint: &mut RegionHint,
    ) -> Option<(NonNull<u8>, u64)> {
        let regions = &self.0.regions;
        if let Some(hit) = regions.get(hint.0).and_then(|region| region.slice(address, len_bytes)) {
            return Some(hit);
        }
        let index =
            regions.partition_point(|region| region.guest_base <= address.0).checked_sub(1)?;
        hint.0 = index;
        regions.get(index)?.slice(address, len_bytes)
    }

    /// The `len_bytes` at `address`, if all of them are in one region.
    #[inline]
    #[must_use]
    pub fn span(
        &self,
        address: GuestAddress,
        len_bytes: usize,
        hint: &mut RegionHint,
    ) -> Option<Span<'_>> {
        let (host, count) = self.locate(address, len_bytes as u64, hint)?;
        // SAFETY: `locate` returned `count` mapped bytes at `host`, and the table is borrowed.
        (count == len_bytes as u64).then(|| unsafe { Span::new(host, len_bytes) })
    }

    /// Reads `N` bytes once.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    #[inline]
    pub fn read_array<const N: usize>(
        &self,
        address: GuestAddress,
        hint: &mut RegionHint,
    ) -> Result<[u8; N], MemoryError> {
        let mut bytes = [0; N];
        self.read_slice(address, &mut bytes, hint)?;
        Ok(bytes)
    }

    /// Reads `bytes.len()` bytes once, across regions if necessary.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; `bytes` is then partly written.
    #[inline]
    pub fn read_slice(
        &self,
        address: GuestAddress,
        bytes: &mut [u8],
        hint: &mut RegionHint,
    ) -> Result<(), MemoryError> {
        let total = bytes.len();
        self.for_each_run(address, total, hint, |done, host, count| {
            if let Some(to) = bytes.get_mut(done..) {
                let count = count.min(to.len());
                // SAFETY: `locate` returned `count` mapped bytes at `host`, and `to` is a distinct
                // local buffer of at least that size.
                unsafe { copy_bytes(to.as_mut_ptr(), host.as_ptr(), count) };
            }
        })
    }

    /// Writes `bytes` to guest memory.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; part of `bytes` may then be written.
    #[inline]
    pub fn write_slice(
        &self,
        address: GuestAddress,
        bytes: &[u8],
        hint: &mut RegionHint,
    ) -> Result<(), MemoryError> {
        self.for_each_run(address, bytes.len(), hint, |done, host, count| {
            if let Some(from) = bytes.get(done..) {
                let count = count.min(from.len());
                // SAFETY: as in `read_slice`.
                unsafe { copy_bytes(host.as_ptr(), from.as_ptr(), count) };
            }
        })
    }

    /// Asks the CPU to fetch the cache line at `address` for writing, if it is guest memory at all.
    /// A hint: no memory is accessed.
    #[inline]
    pub fn prefetch_for_write(&self, address: GuestAddress, hint: &mut RegionHint) {
        if let Some((host, _)) = self.locate(address, 1, hint) {
            crate::copy::prefetch_for_write(host.as_ptr());
        }
    }

    #[inline]
    fn for_each_run(
        &self,
        address: GuestAddress,
        total: usize,
        hint: &mut RegionHint,
        mut visit: impl FnMut(usize, NonNull<u8>, usize),
    ) -> Result<(), MemoryError> {
        let mut done = 0_usize;
        while done < total {
            let out_of_range =
                || MemoryError::OutOfRange { start: address.0, len_bytes: total as u64 };
            let at = address.0.checked_add(done as u64).ok_or_else(out_of_range)?;
            let rest = total.saturating_sub(done);
            let (host, count) =
                self.locate(GuestAddress(at), rest as u64, hint).ok_or_else(out_of_range)?;
            let count = usize::try_from(count).map_err(|_| out_of_range())?;
            visit(done, host, count);
            done = done.saturating_add(count);
        }
        Ok(())
    }

    /// A window of `len_bytes` at an address of the VMM, all in one region: the place of a ring.
    ///
    /// # Errors
    /// The range is outside of memory, across regions, or not aligned to `align_bytes`.
    pub fn window(
        &self,
        address: UserAddress,
        len_bytes: usize,
        align_bytes: usize,
    ) -> Result<Window, MemoryError> {
        self.window_by(address.0, len_bytes, align_bytes, |region| region.user_base)
    }

    /// As [`GuestMemory::window`], at a guest address: the place of a queue of a PCI device.
    ///
    /// # Errors
    /// The range is outside of memory, across regions, or not aligned to `align_bytes`.
    pub fn guest_window(
        &self,
        address: GuestAddress,
        len_bytes: usize,
        align_bytes: usize,
    ) -> Result<Window, MemoryError> {
        self.window_by(address.0, len_bytes, align_bytes, |region| region.guest_base)
    }

    fn window_by(
        &self,
        start: u64,
        len_bytes: usize,
        align_bytes: usize,
        base: impl Fn(&Region) -> u64,
    ) -> Result<Window, MemoryError> {
        let out_of_range = MemoryError::OutOfRange { start, len_bytes: len_bytes as u64 };
        let Some(host) = self.0.regions.iter().find_map(|region| {
            let offset = start.checked_sub(base(region))?;
            let rest = region.len_bytes.checked_sub(offset)?;
            if rest < len_bytes as u64 {
                return None;
            }
            region.host_at(offset)
        }) else {
            return Err(out_of_range);
        };
        if !host.addr().get().is_multiple_of(align_bytes.max(1)) {
            return Err(MemoryError::Misaligned { start, align_bytes });
        }
        Ok(Window::new(self.clone(), host, len_bytes))
    }
}

impl Region {
    fn map(spec: RegionSpec) -> Result<Self, MemoryError> {
        let len_bytes = spec.len_bytes;
        if len_bytes == 0 {
            return Err(MemoryError::EmptyRegion);
        }
        for start in [spec.guest_address.0, spec.user_address.0, spec.file_offset_bytes] {
            if start.checked_add(len_bytes).is_none() {
                return Err(MemoryError::RegionOverflow { start, len_bytes });
            }
        }
        check_in_memory(&spec.file)?;
        let stat = rustix::fs::fstat(&spec.file).map_err(|error| MemoryError::Map(error.into()))?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let needed_bytes = spec.file_offset_bytes.saturating_add(len_bytes);
        if file_bytes < needed_bytes {
            return Err(MemoryError::FileTooSmall { file_bytes, needed_bytes });
        }
        // hugetlbfs reports its page size as the block size, and maps only whole pages.
        let page = u64::try_from(stat.st_blksize).unwrap_or(0).max(sidecore_units::PAGE_BYTES);
        let page = if page.is_power_of_two() { page } else { sidecore_units::PAGE_BYTES };
        let lead = spec.file_offset_bytes & page.wrapping_sub(1);
        let overflow = MemoryError::RegionOverflow { start: spec.file_offset_bytes, len_bytes };
        let map_bytes = len_bytes
            .checked_add(lead)
            .and_then(|len| len.checked_next_multiple_of(page))
            .and_then(|len| usize::try_from(len).ok());
        let (Some(map_bytes), Ok(lead_bytes)) = (map_bytes, usize::try_from(lead)) else {
            return Err(overflow);
        };
        let mapping = Mapping::shared(
            spec.file.as_fd(),
            spec.file_offset_bytes.wrapping_sub(lead),
            map_bytes,
        )
        .map_err(MemoryError::Map)?;
        // SAFETY: `lead_bytes` is smaller than a page, and the mapping is at least `lead_bytes +
        // len_bytes` long.
        let host_base = unsafe { mapping.base().add(lead_bytes) };
        Ok(Self {
            guest_base: spec.guest_address.0,
            len_bytes,
            host_base,
            user_base: spec.user_address.0,
            page_bytes: page,
            mapping,
        })
    }

    #[inline]
    fn slice(&self, address: GuestAddress, len_bytes: u64) -> Option<(NonNull<u8>, u64)> {
        let offset = address.0.wrapping_sub(self.guest_base);
        if offset >= self.len_bytes {
            return None;
        }
        let rest = self.len_bytes.wrapping_sub(offset);
        Some((self.host_at(offset)?, len_bytes.min(rest)))
    }

    #[inline]
    fn host_at(&self, offset: u64) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        // SAFETY: both callers have checked that `offset` is inside the region, all of which is
        // mapped.
        Some(unsafe { self.host_base.add(offset) })
    }
}

/// Rejects files that are not in memory, before any other operation on them.
///
/// A filesystem answers in its own time. If a program serves the filesystem (FUSE), then a thread
/// that asks for a size waits for that program, and so does a sidecore for each page that it
/// touches: a peer could stop all the others. A disk's filesystem is only slow. Only tmpfs and
/// hugetlbfs have seals (`fcntl(2)`: `F_GET_SEALS` fails with `EINVAL` elsewhere), and the kernel
/// reads seals without asking the filesystem.
fn check_in_memory(file: &OwnedFd) -> Result<(), MemoryError> {
    rustix::fs::fcntl_get_seals(file).map(|_| ()).map_err(|_| MemoryError::NotMemoryFile)
}

fn check_disjoint(
    regions: &mut [Region],
    start_of: impl Fn(&Region) -> u64,
) -> Result<(), MemoryError> {
    regions.sort_by_key(&start_of);
    for (left, right) in regions.iter().zip(regions.iter().skip(1)) {
        let end = start_of(left).saturating_add(left.len_bytes);
        if end > start_of(right) {
            return Err(MemoryError::RegionOverlap { start: start_of(right) });
        }
    }
    Ok(())
}

/// Copies bytes to or from shared memory: each is read once and written once. Few are copied by
/// volatile accesses, which start at once.
///
/// # Safety
/// Both ranges must be valid for `count` bytes and must not overlap.
#[inline]
unsafe fn copy_bytes(to: *mut u8, from: *const u8, count: usize) {
    if count == 16 && from.addr().is_multiple_of(8) {
        // A request header (virtio 1.2, 5.2.6): two words, not sixteen bytes. SAFETY: the caller's,
        // and the alignment was just checked.
        unsafe {
            let low = from.cast::<u64>().read_volatile();
            let high = from.cast::<u64>().add(1).read_volatile();
            to.cast::<u64>().write_unaligned(low);
            to.cast::<u64>().add(1).write_unaligned(high);
        }
        return;
    }
    if count >= crate::copy::CACHE_LINE_BYTES {
        // SAFETY: the caller's.
        unsafe { crate::copy::copy(to, from, count) };
        return;
    }
    for index in 0..count {
        // SAFETY: the caller's.
        unsafe { to.add(index).write_volatile(from.add(index).read_volatile()) };
    }
}

#[cfg(test)]
mod tests;
