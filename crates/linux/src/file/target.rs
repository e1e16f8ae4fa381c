//! The target of a file store: the open file, and its capabilities.

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
    /// The alignment of each piece of memory.
    pub memory_bytes: usize,
    /// The alignment of each piece's size, and of the offset in the file.
    pub file_bytes: usize,
}

impl Alignment {
    const NONE: Self = Self { memory_bytes: 1, file_bytes: 1 };
}

/// An open and locked file.
#[derive(Debug)]
pub(super) struct Target {
    /// The descriptor for I/O.
    file: OwnedFd,
    hold: Hold,
    pub geometry: Geometry,
    /// `None` if I/O goes through the page cache.
    pub direct: Option<Alignment>,
    /// Whether zeroing writes zeros: the filesystem's own operations zero partial blocks in the
    /// page cache, which reaches the device later.
    pub zero_by_writing: bool,
    /// The kernel's limits for one request; `None` without limits.
    pub limits: Option<Limits>,
}

/// The limits of a block device below which the kernel need not split a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// The largest transfer in bytes.
    transfer_bytes: u64,
    /// The largest number of contiguous memory pieces, and the largest size of each.
    segments: u64,
    segment_bytes: u64,
}

impl Limits {
    /// The largest portion whose memory consists of pages of this size: a power of two, so that
    /// portions of aligned buffers are aligned.
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

/// The lock on the file, held as long as I/O to the file is possible.
#[derive(Debug)]
enum Hold {
    /// The store's own lock.
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
    /// The descriptor with the lock, which must be registered with every ring on the file: see
    /// [`Claim`].
    pub fn fence(&self) -> BorrowedFd<'_> {
        match &self.hold {
            Hold::Claim(claim) => claim.fence(),
            Hold::Owner(owner) => owner.fence(),
        }
    }

    pub fn open(options: &FileOptions) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let wrap = |action| {
            move |source: Errno| FileError::Kernel {
                action,
                path: path.into(),
                source: source.into(),
            }
        };
        wanted_block_bytes(options)?;
        let stat = rustix::fs::stat(path).map_err(wrap("find"))?;
        let claim = Claim::new(options, is_device(&stat, path)?)?;
        let (file, direct) = reopen(&claim, options)?;
        Self::new(file, direct, Hold::Claim(claim), options)
    }

    /// Makes a target of a descriptor that was opened with `O_DIRECT`, and that `owner` holds for
    /// the store.
    pub fn over(
        file: OwnedFd,
        owner: Arc<dyn Owner>,
        options: &FileOptions,
    ) -> Result<Self, FileError> {
        let direct = alignment_of(&file);
        Self::new(file, direct, Hold::Owner(owner), options)
    }

    /// See [`sidecore_block::BlockDevice::allocate`].
    pub fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> std::io::Result<()> {
        allocate(&self.file, offset_bytes, len_bytes)
    }

    fn new(
        file: OwnedFd,
        direct: Option<Alignment>,
        hold: Hold,
        options: &FileOptions,
    ) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let wrap = |action| {
            move |source: Errno| FileError::Kernel {
                action,
                path: path.into(),
                source: source.into(),
            }
        };
        let wanted = wanted_block_bytes(options)?;
        let is_device = is_device(&rustix::fs::fstat(&file).map_err(wrap("inspect"))?, path)?;
        let size_bytes =
            rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(wrap("measure"))?;
        if size_bytes == 0 {
            return Err(FileError::Empty { path: path.into() });
        }
        if direct.is_none() && options.direct {
            tracing::warn!(
                path = %path.display(),
                "the filesystem has no direct I/O: going through the page cache"
            );
        }
        let mut physical_bytes = PAGE_BYTES as u32;
        let mut needed_bytes = 1;
        if let Some(alignment) = direct {
            needed_bytes = u32::try_from(alignment.file_bytes).unwrap_or(u32::MAX);
        }
        if is_device {
            needed_bytes =
                needed_bytes.max(rustix::fs::ioctl_blksszget(&file).map_err(wrap("inspect"))?);
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
            // Punched holes read as zeros, in files and on devices.
            discard_zeroes: discard,
            write_zeroes: !options.read_only,
        };
        let limits = if is_device { Limits::of(&file) } else { None };
        Ok(Self { file, hold, geometry, direct, zero_by_writing: !is_ours && !is_device, limits })
    }
}

/// The requested block size, or the smallest.
fn wanted_block_bytes(options: &FileOptions) -> Result<u32, FileError> {
    let wanted = options.block_bytes.unwrap_or(SECTOR_BYTES as u32);
    if !wanted.is_power_of_two() || !(SECTOR_BYTES as u32..=1 << 16).contains(&wanted) {
        return Err(FileError::BadBlockSize { block_bytes: wanted });
    }
    Ok(wanted)
}

/// Allocates blocks without changing data. Succeeds if no block has to be allocated, as on a block
/// device, or the filesystem cannot allocate.
fn allocate(file: &OwnedFd, offset_bytes: u64, len_bytes: u64) -> std::io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset_bytes, len_bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NODEV | Errno::INVAL | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether the path is a block device, not a regular file.
fn is_device(stat: &rustix::fs::Stat, path: &Path) -> Result<bool, FileError> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(false),
        FileType::BlockDevice => Ok(true),
        _ => Err(FileError::NotAFile { path: path.into() }),
    }
}

/// Opens the claimed file again, for I/O: directly, if that is requested and possible.
fn reopen(claim: &Claim, options: &FileOptions) -> Result<(OwnedFd, Option<Alignment>), FileError> {
    // By descriptor, not by name, because names change.
    let name = format!("/proc/self/fd/{}", claim.as_fd().as_raw_fd());
    let wrap = |action| {
        move |source: Errno| FileError::Kernel {
            action,
            path: options.path.clone(),
            source: source.into(),
        }
    };
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
        None => (
            rustix::fs::open(&name, access(options.read_only), Mode::empty())
                .map_err(wrap("open"))?,
            None,
        ),
    };
    if !answers_at_once(&file) {
        let flags = rustix::fs::fcntl_getfl(&file).map_err(wrap("inspect"))?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(wrap("set up"))?;
    }
    Ok((file, direct))
}

/// Whether the file is in memory, so that no I/O to it waits for a device.
///
/// Filesystems on devices tell io_uring that they can try without waiting (`FMODE_NOWAIT`), but
/// tmpfs does not; with `O_NONBLOCK` io_uring tries all the same, instead of passing each request
/// to a worker thread.
fn answers_at_once(file: &OwnedFd) -> bool {
    // A block device's node is on a tmpfs, too: the one on /dev.
    let is_regular =
        |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    rustix::fs::fstat(file).is_ok_and(is_regular)
        && rustix::fs::fstatfs(file).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC)
}

/// Returns the alignment of direct I/O to the file; `None` if the file does not support direct I/O
/// after all.
fn alignment_of(file: &OwnedFd) -> Option<Alignment> {
    if answers_at_once(file) {
        return Some(Alignment::NONE);
    }
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    match found {
        Some(stat) if stat.stx_dio_mem_align == 0 || stat.stx_dio_offset_align == 0 => None,
        Some(stat) => Some(Alignment {
            memory_bytes: stat.stx_dio_mem_align as usize,
            file_bytes: stat.stx_dio_offset_align as usize,
        }),
        None => try_alignments(file),
    }
}

/// Finds the alignment by reading, if the kernel (before 6.1) or the filesystem does not report it.
fn try_alignments(file: &OwnedFd) -> Option<Alignment> {
    #[repr(align(4096))]
    struct Aligned([u8; 4096]);
    let mut buffer = Box::new(Aligned([0; 4096]));
    [512, 1024, 2048, 4096].into_iter().find_map(|file_bytes| {
        let piece = buffer.0.get_mut(..file_bytes)?;
        rustix::io::pread(file, piece, 0).ok()?;
        // No device needs more than a page's alignment of memory. A larger assumption than
        // necessary costs a copy, a smaller one costs the request.
        Some(Alignment { memory_bytes: PAGE_BYTES as usize, file_bytes })
    })
}

/// Whether the filesystem can punch holes. Tested behind the end of the file, where no data can be
/// lost.
fn punches_holes(file: &OwnedFd, size_bytes: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, size_bytes, PAGE_BYTES).is_ok()
}

/// Whether the device can zero a range by itself, as a punched hole in a block device needs
/// (`blkdev_fallocate` in the kernel's block/fops.c).
fn device_zeroes(file: &OwnedFd) -> bool {
    queue_limit(file, "write_zeroes_max_bytes").is_some_and(|limit| limit > 0)
}

/// A limit of a block device's queue, from sysfs.
fn queue_limit(file: &OwnedFd, name: &str) -> Option<u64> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    // A partition uses its disk's queue.
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
