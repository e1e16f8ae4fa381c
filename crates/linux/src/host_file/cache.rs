//! Keeping a file out of the page cache while its blocks are accessed below the filesystem: a
//! cached page would be a second version of the data.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};
use sidecore_units::PAGE_BYTES;

/// The number of attempts to drop the pages: a page stays if the kernel uses it at that moment.
const ATTEMPTS: usize = 16;

/// The bytes of the file that are checked at once if the kernel does not count cached pages.
const WINDOW_BYTES: u64 = 1 << 30;

/// The number of cachestat(2), Linux 6.5; the same on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;

/// Writes data that is only in memory to the device, and drops the file's pages from the page
/// cache. Returns the bytes that stay in the cache all the same.
pub(super) fn sync_and_drop(file: BorrowedFd<'_>, size_bytes: u64) -> io::Result<u64> {
    let mut cached_bytes = 0;
    for _ in 0..ATTEMPTS {
        rustix::fs::fdatasync(file)?;
        rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?;
        cached_bytes = cached(file, size_bytes)?;
        if cached_bytes == 0 {
            break;
        }
        std::thread::yield_now();
    }
    Ok(cached_bytes)
}

/// Returns the file's bytes in the page cache.
pub(super) fn cached(file: BorrowedFd<'_>, size_bytes: u64) -> io::Result<u64> {
    match count(file) {
        Ok(cached_bytes) => Ok(cached_bytes),
        // The kernel, or a sandbox, is too old.
        Err(_) => look(file, size_bytes),
    }
}

fn count(file: BorrowedFd<'_>) -> io::Result<u64> {
    #[repr(C)]
    struct Range {
        offset: u64,
        /// Zero for the whole file.
        len: u64,
    }
    #[repr(C)]
    #[derive(Default)]
    struct Pages {
        cached: u64,
        dirty: u64,
        writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    let range = Range { offset: 0, len: 0 };
    let mut pages = Pages::default();
    // SAFETY: both structures have the kernel's layout and outlive the call.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut pages, 0_u32)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(pages.cached.saturating_mul(PAGE_BYTES))
}

/// Maps the file, a window at a time, and asks which pages are cached.
fn look(file: BorrowedFd<'_>, size_bytes: u64) -> io::Result<u64> {
    let mut present = vec![0_u8; WINDOW_BYTES.min(size_bytes).div_ceil(PAGE_BYTES) as usize];
    let mut pages = 0_u64;
    let mut at = 0;
    while at < size_bytes {
        let len = WINDOW_BYTES.min(size_bytes - at) as usize;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which is never read or
        // written.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                at,
            )?
        };
        // SAFETY: the range is the mapping, and the result has a byte for each of its pages.
        let result = unsafe { libc::mincore(mapped, len, present.as_mut_ptr()) };
        let error = io::Error::last_os_error();
        // SAFETY: this function owns the mapping.
        let _ = unsafe { rustix::mm::munmap(mapped, len) };
        if result != 0 {
            return Err(error);
        }
        let count = len.div_ceil(PAGE_BYTES as usize);
        pages += present.iter().take(count).filter(|page| **page & 1 != 0).count() as u64;
        at += len as u64;
    }
    Ok(pages.saturating_mul(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn read_pages_are_cached_until_they_are_dropped() {
        // If the temporary files are in memory, their pages stay there.
        let directory = tempfile::tempdir().unwrap();
        if rustix::fs::statfs(directory.path()).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC) {
            sidecore_skip::skip("temporary files are in memory");
            return;
        }
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(directory.path().join("file"));
        let file = file.unwrap();
        let len = 5 * PAGE_BYTES + 100;
        file.write_all_at(&vec![1; len as usize], 0).unwrap();
        let cached_bytes = 6 * PAGE_BYTES;
        assert_eq!(look(file.as_fd(), len).unwrap(), cached_bytes);
        match count(file.as_fd()) {
            Ok(counted) => assert_eq!(counted, cached_bytes),
            Err(error) => sidecore_skip::skip(format_args!("cachestat: {error}")),
        }
        assert_eq!(sync_and_drop(file.as_fd(), len).unwrap(), 0);
        assert_eq!(look(file.as_fd(), len).unwrap(), 0);
    }
}
