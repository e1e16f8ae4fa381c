//! The target of a file store: the open file, and its abilities.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use sidecore_block::Geometry;
use sidecore_units::{PAGE_BYTES, SECTOR_BYTES};

use super::claim::{Claim, access};
use super::{FileError, FileOptions};

/// The alignment of direct I/O in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Of each piece of memory.
    pub memory_bytes: usize,
    /// Of each piece's size, and of the offset in the file.
    pub file_bytes: usize,
}

impl Alignment {
    const NONE: Self = Self { memory_bytes: 1, file_bytes: 1 };
}

/// An open and locked file.
#[derive(Debug)]
pub(super) struct Target {
    /// The descriptor that I/O goes to.
    file: OwnedFd,
    hold: Hold,
    pub geometry: Geometry,
    /// `None` if I/O goes through the page cache.
    pub direct: Option<Alignment>,
    /// Whether zeroing is writing zeros: the filesystem's own ways zero parts
    /// of its blocks in the page cache, which go to the device later.
    pub zero_by_writing: bool,
    /// The kernel's limits for one request; `None` if it has none.
    pub limits: Option<Limits>,
}

/// The limits of a block device below which the kernel need not split a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Bytes.
    transfer_bytes: u64,
    /// Pieces of contiguous memory, and the size of each.
    segments: u64,
    segment_bytes: u64,
}

impl Limits {
    /// The most from memory that is made of pages of this size: a power of two,
    /// so that portions of aligned buffers are aligned.
    pub fn portion_bytes(&self, page_bytes: u64) -> u64 {
        let gathered_bytes = self.segments.saturating_mul(page_bytes.min(self.segment_bytes));
        1 << self.transfer_bytes.min(gathered_bytes).max(PAGE_BYTES).ilog2()
    }

    fn of(file: &OwnedFd) -> Option<Self> {
        Some(Self {
            transfer_bytes: queue_limit(file, "max_sectors_kb")? << 10,
            segments: queue_limit(file, "max_segments")?,
            segment_bytes: queue_limit(file, "max_segment_size")?,
        })
    }
}

/// The lock that keeps the file ours for as long as there is I/O to it.
#[derive(Debug)]
enum Hold {
    /// A lock of this store's own.
    Claim(Claim),
    /// The lock of the code that opened the file.
    Owner(Arc<dyn Owner>),
}

/// An object that must live as long as a store over a descriptor that it owns.
pub(crate) trait Owner: std::fmt::Debug + Send + Sync {
    /// A descriptor with a lock that must outlive every request of the store.
    fn fence(&self) -> BorrowedFd<'_>;
}

impl AsFd for Target {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Target {
    /// Holds a lock, and must be registered with every ring on the file: see [`Claim`].
    pub fn fence(&self) -> BorrowedFd<'_> {
        match &self.hold {
            Hold::Claim(claim) => claim.fence(),
            Hold::Owner(owner) => owner.fence(),
        }
    }

    pub fn open(options: &FileOptions) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let wrap = |action| move |source: Errno| FileError::Kernel { action, path: path.into(), source: source.into() };
        wanted_block_bytes(options)?;
        let stat = rustix::fs::stat(path).map_err(wrap("find"))?;
        let claim = Claim::new(options, is_device(&stat, path)?)?;
        let (file, direct) = reopen(&claim, options)?;
        Self::new(file, direct, Hold::Claim(claim), options)
    }

    /// Over a descriptor that was opened with `O_DIRECT`, and that `owner` holds for this store.
    pub fn over(file: OwnedFd, owner: Arc<dyn Owner>, options: &FileOptions) -> Result<Self, FileError> {
        let direct = alignment_of(&file);
        Self::new(file, direct, Hold::Owner(owner), options)
    }

    /// See [`sidecore_block::BlockDevice::allocate`].
    pub fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> std::io::Result<()> {
        allocate(&self.file, offset_bytes, len_bytes)
    }

    fn new(file: OwnedFd, direct: Option<Alignment>, hold: Hold, options: &FileOptions) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let wrap = |action| move |source: Errno| FileError::Kernel { action, path: path.into(), source: source.into() };
        let wanted = wanted_block_bytes(options)?;
        let is_device = is_device(&rustix::fs::fstat(&file).map_err(wrap("inspect"))?, path)?;
        let size_bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(wrap("measure"))?;
        if size_bytes == 0 {
            return Err(FileError::Empty { path: path.into() });
        }
        if direct.is_none() && options.direct {
            tracing::warn!(path = %path.display(), "the filesystem has no direct I/O: going through the page cache");
        }
        let mut physical_bytes = PAGE_BYTES as u32;
        let mut needed_bytes = 1;
        if let Some(alignment) = direct {
            needed_bytes = u32::try_from(alignment.file_bytes).unwrap_or(u32::MAX);
        }
        if is_device {
            needed_bytes = needed_bytes.max(rustix::fs::ioctl_blksszget(&file).map_err(wrap("inspect"))?);
            physical_bytes = rustix::fs::ioctl_blkpbszget(&file).map_err(wrap("inspect"))?;
        }
        let block_bytes = options.block_bytes.unwrap_or(wanted.max(needed_bytes));
        if block_bytes < needed_bytes {
            return Err(FileError::BlockTooSmall { path: path.into(), block_bytes, needed_bytes });
        }
        if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(FileError::PartialBlock { path: path.into(), size_bytes, block_bytes });
        }
        let is_ours = matches!(hold, Hold::Claim(_));
        let discard = !options.read_only
            && is_ours
            && if is_device { device_zeroes(&file) } else { punches_holes(&file, size_bytes) };
        let geometry = Geometry {
            capacity_bytes: size_bytes,
            block_bytes,
            physical_block_bytes: physical_bytes.max(block_bytes),
            read_only: options.read_only,
            volatile_cache: true,
            discard,
            // Holes are punched, in files as on devices.
            discard_zeroes: discard,
            write_zeroes: !options.read_only,
        };
        let limits = if is_device { Limits::of(&file) } else { None };
        Ok(Self { file, hold, geometry, direct, zero_by_writing: !is_ours && !is_device, limits })
    }
}

/// The block size asked for, or the smallest.
fn wanted_block_bytes(options: &FileOptions) -> Result<u32, FileError> {
    let wanted = options.block_bytes.unwrap_or(SECTOR_BYTES as u32);
    if !wanted.is_power_of_two() || !(SECTOR_BYTES as u32..=1 << 16).contains(&wanted) {
        return Err(FileError::BadBlockSize { block_bytes: wanted });
    }
    Ok(wanted)
}

/// Allocates without changing what is there. Where there is nothing to allocate, as on a
/// block device, or no way to do it, all is as well as it can be.
fn allocate(file: &OwnedFd, offset_bytes: u64, len_bytes: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset_bytes, len_bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NODEV | Errno::INVAL | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether it is a block device, not a regular file.
fn is_device(stat: &rustix::fs::Stat, path: &Path) -> Result<bool, FileError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(false),
        FileType::BlockDevice => Ok(true),
        _ => Err(FileError::NotAFile { path: path.into() }),
    }
}

/// Opens what is claimed once more, for I/O: directly if that is wanted and possible.
fn reopen(claim: &Claim, options: &FileOptions) -> Result<(OwnedFd, Option<Alignment>), FileError> {
    // By descriptor, not by name: names change.
    let name = format!("/proc/self/fd/{}", claim.as_fd().as_raw_fd());
    let wrap =
        |action| move |source: Errno| FileError::Kernel { action, path: options.path.clone(), source: source.into() };
    let mut opened = None;
    if options.direct {
        match rustix::fs::open(&name, access(options.read_only) | OFlags::DIRECT, Mode::empty()) {
            Err(Errno::INVAL) => {}
            Err(error) => return Err(wrap("open")(error)),
            Ok(file) => opened = alignment_of(&file).map(|alignment| (file, Some(alignment))),
        }
    }
    let (file, direct) = match opened {
        Some(opened) => opened,
        None => (rustix::fs::open(&name, access(options.read_only), Mode::empty()).map_err(wrap("open"))?, None),
    };
    if !answers_at_once(&file) {
        let flags = rustix::fs::fcntl_getfl(&file).map_err(wrap("inspect"))?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(wrap("set up"))?;
    }
    Ok((file, direct))
}

/// Whether the file is in memory, so that no I/O to it waits for a device.
///
/// Filesystems on devices tell io_uring that they can try without waiting
/// (`FMODE_NOWAIT`), tmpfs does not; with `O_NONBLOCK` io_uring tries all the
/// same, instead of handing each request to a worker thread.
fn answers_at_once(file: &OwnedFd) -> bool {
    // A block device's node lies in a tmpfs, too: the one on /dev.
    let is_regular = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    rustix::fs::fstat(file).is_ok_and(is_regular)
        && rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC)
}

/// The alignment that direct I/O to the file needs; `None` if the file does not support direct I/O
/// after all.
fn alignment_of(file: &OwnedFd) -> Option<Alignment> {
    if answers_at_once(file) {
        return Some(Alignment::NONE);
    }
    let told = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    match told {
        Some(stat) if stat.stx_dio_mem_align == 0 || stat.stx_dio_offset_align == 0 => None,
        Some(stat) => Some(Alignment {
            memory_bytes: stat.stx_dio_mem_align as usize,
            file_bytes: stat.stx_dio_offset_align as usize,
        }),
        None => try_alignments(file),
    }
}

/// Finds out by reading, where the kernel (before 6.1) or the filesystem does not tell.
fn try_alignments(file: &OwnedFd) -> Option<Alignment> {
    #[repr(align(4096))]
    struct Aligned([u8; 4096]);
    let mut buffer = Box::new(Aligned([0; 4096]));
    [512, 1024, 2048, 4096].into_iter().find_map(|file_bytes| {
        let piece = buffer.0.get_mut(..file_bytes)?;
        rustix::io::pread(file, piece, 0).ok()?;
        // Memory is asked for no more than a page's alignment; assuming the
        // most costs a copy, assuming too little costs the request.
        Some(Alignment { memory_bytes: PAGE_BYTES as usize, file_bytes })
    })
}

/// Whether the filesystem gives space back. Asked behind the end of the file,
/// where there is nothing to lose.
fn punches_holes(file: &OwnedFd, size_bytes: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, size_bytes, PAGE_BYTES).is_ok()
}

/// Whether the device can zero a range by itself, which is what punching a hole in a block device
/// asks of it (`blkdev_fallocate` in the kernel's block/fops.c).
fn device_zeroes(file: &OwnedFd) -> bool {
    queue_limit(file, "write_zeroes_max_bytes").is_some_and(|limit| limit > 0)
}

/// A limit of a block device's queue, as the kernel tells it in sysfs.
fn queue_limit(file: &OwnedFd, name: &str) -> Option<u64> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    // A partition has its disk's queue.
    ["queue", "../queue"].iter().find_map(|queue| {
        let mut path = OsString::from(format!("/sys/dev/block/{major}:{minor}/"));
        path.push(queue);
        std::fs::read_to_string(Path::new(&path).join(name)).ok()?.trim().parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_as_large_as_the_memory_lets_them_be() {
        let limits = Limits { transfer_bytes: 1280 << 10, segments: 128, segment_bytes: 64 << 10 };
        assert_eq!(limits.portion_bytes(4 << 10), 512 << 10);
        assert_eq!(limits.portion_bytes(2 << 20), 1 << 20);
        let odd = Limits { transfer_bytes: 0, segments: 0, segment_bytes: 0 };
        assert_eq!(odd.portion_bytes(4 << 10), PAGE_BYTES, "never nothing");
    }
}
