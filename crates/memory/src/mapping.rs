//! One `mmap`, which is unmapped when its last owner has let go: a peer's memory by the reaper, our
//! own on the spot.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use crate::reaper::{Place, Range, Remains};
use crate::sigbus::Watch;

/// A readable and writable mapping that this process owns.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
    /// What a peer's memory has.
    peers: Option<Peers>,
}

/// What a peer's memory has, and our own has not.
#[derive(Debug)]
struct Peers {
    /// The SIGBUS handler looks after it.
    watch: Watch,
    /// The reaper unmaps it. Our own goes at once: whoever takes down a RAM disk may want its huge
    /// pages for the next one.
    place: Place,
}

// SAFETY: the mapping is plain memory; every access goes through raw pointers with volatile or
// opaque copies, never through references, so sharing it between threads cannot break an aliasing
// rule.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` of a peer's `file` from `offset_bytes`, shared.
    pub(crate) fn shared(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Arc<Self>> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing that
        // exists.
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
        let mut mapping = Self::own(base, len_bytes)?;
        let watch = Watch::begin(mapping.base, len_bytes)
            .ok_or_else(|| io::Error::other("too many guest memory regions are mapped in this process"))?;
        mapping.peers = Some(Peers { watch, place: Place::new() });
        Ok(Arc::new(mapping))
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
        Ok(Arc::new(Self::own(base, len_bytes)?))
    }

    fn own(base: *mut std::ffi::c_void, len_bytes: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mmap returned the null page"))?;
        Ok(Self { base, len_bytes, peers: None })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Whether the file behind the mapping was truncated under us.
    pub(crate) fn is_lost(&self) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.watch.is_lost())
    }

    /// Asks the kernel for something about the whole mapping.
    pub(crate) fn advise(&self, advice: rustix::mm::Advice) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping, and the advice used here (huge pages,
        // populate) never discards its contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len_bytes, advice)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and whoever could still reach it holds a count on the
        // table that owns this value.
        let range = unsafe { Range::own(self.base, self.len_bytes) };
        if let Some(Peers { watch, place }) = self.peers.take() {
            // The handler need not know of it any longer: nobody accesses the range, whenever it is
            // unmapped. And it must not: once that is done, the addresses may be another mapping's.
            drop(watch);
            place.let_go(Remains::Mapped { _range: range });
        }
    }
}
