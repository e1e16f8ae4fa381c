//! One `mmap`, unmapped when its last owner lets go.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::sigbus;

/// A readable and writable mapping that this process owns.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
    /// Set by the SIGBUS handler once the file behind the mapping has shrunk.
    lost: AtomicBool,
    /// Whether the SIGBUS handler watches it.
    guarded: bool,
}

// SAFETY: the mapping is plain memory; every access goes through raw pointers
// with volatile or opaque copies, never through references, so sharing it
// between threads cannot break an aliasing rule.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of `file` from `offset_bytes`, shared.
    ///
    /// The mapping comes counted because the SIGBUS handler keeps its address.
    pub(crate) fn shared(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Arc<Self>> {
        // SAFETY: a fresh mapping at an address of the kernel's choice
        // overlaps nothing that exists.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset_bytes,
            )?
        };
        let mapping = Arc::new(Self::own(base, len_bytes, true)?);
        if !sigbus::watch(&mapping) {
            return Err(io::Error::other("too many guest memory regions are mapped in this process"));
        }
        Ok(mapping)
    }

    /// Maps `len_bytes` of zeroed private memory with `extra` flags.
    pub(crate) fn anonymous(len_bytes: usize, extra: MapFlags) -> io::Result<Arc<Self>> {
        // SAFETY: as in `shared`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | extra,
            )?
        };
        Ok(Arc::new(Self::own(base, len_bytes, false)?))
    }

    fn own(base: *mut std::ffi::c_void, len_bytes: usize, guarded: bool) -> io::Result<Self> {
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap returned the null page"))?;
        Ok(Self { base, len_bytes, lost: AtomicBool::new(false), guarded })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether the file behind the mapping was truncated under us.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Asks the kernel for something about the whole mapping.
    pub(crate) fn advise(&self, advice: rustix::mm::Advice) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping, and the advice used here
        // (huge pages, populate) never discards its contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len_bytes, advice)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.guarded {
            sigbus::unwatch(self);
        }
        // SAFETY: this value owns the range, and whoever could still reach it
        // holds a count on the table that owns this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}
