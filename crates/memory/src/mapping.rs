//! One `mmap`, unmapped when its last owner is dropped: a peer's memory by the reaper, our own
//! memory at once.

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
    /// Set for a peer's memory only.
    peers: Option<Peers>,
}

/// The additional state of a peer's memory.
#[derive(Debug)]
struct Peers {
    /// The SIGBUS handler's entry for the mapping.
    watch: Watch,
    /// The reaper unmaps a peer's memory. Our own is unmapped at once: the next RAM disk may need
    /// the huge pages of the one that was removed.
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
    pub(crate) fn shared(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> io::Result<Arc<Self>> {
        let mut mapping = Self::of_file(file, offset_bytes, len_bytes)?;
        let watch = Watch::begin(mapping.base, len_bytes).ok_or_else(|| {
            io::Error::other("too many guest memory regions are mapped in this process")
        })?;
        mapping.peers = Some(Peers { watch, place: Place::new() });
        Ok(Arc::new(mapping))
    }

    /// Maps `len_bytes` that the kernel shares through `file`. The last user unmaps them at once:
    /// until then a socket's rings keep the socket.
    pub(crate) fn kernel(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
    ) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self::of_file(file, offset_bytes, len_bytes)?))
    }

    fn of_file(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Self> {
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
        Self::own(base, len_bytes)
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
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned the null page"))?;
        Ok(Self { base, len_bytes, peers: None })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Whether the peer has truncated the file behind the mapping.
    pub(crate) fn is_lost(&self) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.watch.is_lost())
    }

    /// Applies `advice` to the whole mapping.
    pub(crate) fn advise(&self, advice: rustix::mm::Advice) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping, and the advice used here (huge pages,
        // populate) never discards its contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len_bytes, advice)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and every user of the range holds a count on the table
        // that owns this value.
        let range = unsafe { Range::own(self.base, self.len_bytes) };
        if let Some(Peers { watch, place }) = self.peers.take() {
            // The handler must forget the mapping now: the range is no longer accessed, whenever it
            // is unmapped, and after that the addresses may belong to another mapping.
            drop(watch);
            place.let_go(Remains::Mapped { _range: range });
        }
    }
}
