//! Returns a peer's memory to the kernel on a background thread.
//!
//! The kernel frees the pages of a memory file inside the `munmap` or `close` that drops the last
//! reference: about 0.2 s a GiB in pages of 4 KiB. When a VMM has died, this process has that
//! reference, and the thread that drops it would stop for as long: a sidecore, or the thread that
//! serves all vfio-user sockets. So the peer's mappings, and [`MemoryFile`]s, are only queued for
//! the reaper thread when they are dropped.
//!
//! Queuing neither waits, locks nor allocates: the queue's node was allocated when the memory was
//! mapped. A sidecore pays two atomic operations and, if the reaper sleeps, the system call that
//! wakes the thread; all that once for each region that a guest loses, and never for a request.
//!
//! Queued memory is unreachable: the last reference to it is gone. No thread has to wait for the
//! reaper then, at the end of the process least of all, because the kernel frees all memory of a
//! process by itself.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};

/// The most mappings and files queued for the reaper. Beyond that, the thread that drops the last
/// reference frees the memory itself.
///
/// A large mapping may keep the reaper busy for many seconds, in which a peer can map and unmap as
/// much as it likes: the peer must not use up the descriptors (`RLIMIT_NOFILE`) and mappings
/// (`vm.max_map_count`, 65530) that all peers share.
pub const MAX_WAITING: usize = 8192;

/// A mapping is emptied in pieces of this size: each keeps other threads from mapping memory for
/// some milliseconds. Smaller pieces would make much work of a large mapping of a file without
/// pages.
const PIECE_BYTES: usize = 64 << 20;

/// The queue, the newest node first.
static WAITING: AtomicPtr<Node> = AtomicPtr::new(null_mut());
/// The length of the queue, and the nodes that the reaper has taken and not freed yet.
static WAITING_COUNT: AtomicUsize = AtomicUsize::new(0);
static REAPER: OnceLock<Thread> = OnceLock::new();

/// A resource that is freed by its drop.
pub(crate) enum Remains {
    /// A place that is not in the queue yet.
    None,
    Mapped {
        _range: Range,
    },
    File {
        _file: OwnedFd,
    },
    Call(Option<Box<dyn FnOnce() + Send>>),
}

/// Addresses that no thread can reach.
pub(crate) struct Range {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: only the unmapping of the range is left to do, which any thread may do.
unsafe impl Send for Range {}

struct Node {
    remains: Remains,
    next: *mut Node,
}

/// A place in the reaper's queue, allocated in advance.
pub(crate) struct Place(Box<Node>);

// SAFETY: `next` belongs to the queue, and is null outside of it.
unsafe impl Send for Place {}
// SAFETY: as above, and a shared reference to a place permits no operation.
unsafe impl Sync for Place {}

const _: () = {
    const fn may_go_to_the_reaper<T: Send>() {}
    may_go_to_the_reaper::<Remains>();
};

impl Range {
    /// # Safety
    /// The range is a mapping, or several, and from now on only this value uses it or unmaps it.
    pub(crate) const unsafe fn own(base: NonNull<u8>, len_bytes: usize) -> Self {
        Self { base, len_bytes }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // While `munmap` removes a mapping's pages, it locks the address space, so that no other
        // thread can map memory: 0.1 s a GiB. So the pages are removed before, in pieces.
        let mut done = 0_usize;
        while done < self.len_bytes {
            let len = PIECE_BYTES.min(self.len_bytes.saturating_sub(done));
            // SAFETY: inside the range, whose contents are no longer needed. If it fails (huge
            // pages that are larger than a piece) `munmap` removes all pages.
            let emptied = unsafe {
                let piece = self.base.as_ptr().add(done);
                rustix::mm::madvise(piece.cast(), len, rustix::mm::Advice::LinuxDontNeed)
            };
            if emptied.is_err() {
                break;
            }
            done = done.saturating_add(len);
        }
        // SAFETY: see `own`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        if let Self::Call(call) = self
            && let Some(call) = call.take()
        {
            call();
        }
    }
}

impl Place {
    /// A place for memory that will be dropped later. Call on a thread that may wait: this starts
    /// the reaper, if it is not running.
    pub(crate) fn new() -> Self {
        start();
        Self(Box::new(Node { remains: Remains::None, next: null_mut() }))
    }

    /// Queues `remains` for the reaper. They are dropped here if there is no reaper, or the queue
    /// is full.
    pub(crate) fn let_go(mut self, remains: Remains) {
        self.0.remains = remains;
        let Some(reaper) = REAPER.get() else { return };
        if WAITING_COUNT.fetch_add(1, Ordering::Relaxed) >= MAX_WAITING {
            WAITING_COUNT.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let node = Box::into_raw(self.0);
        let mut newest = WAITING.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is ours until it is in the queue.
            unsafe { (*node).next = newest };
            match WAITING.compare_exchange_weak(newest, node, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(other) => newest = other,
            }
        }
        // If the queue was not empty, the thread that found it empty has woken the reaper, or is
        // about to, and the reaper has not read the queue since.
        if newest.is_null() {
            reaper.unpark();
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Place").finish_non_exhaustive()
    }
}

/// Starts the reaper unless it is running. After a failure the next place tries again.
///
/// A thread inherits the CPU affinity of the thread that starts it. That is never a sidecore,
/// because sidecores map no peer's memory.
fn start() {
    static STARTING: Mutex<()> = Mutex::new(());
    if REAPER.get().is_some() {
        return;
    }
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if REAPER.get().is_none()
        && let Ok(reaper) = thread::Builder::new().name("memory-reaper".to_owned()).spawn(|| reap())
    {
        let _ = REAPER.set(reaper.thread().clone());
    }
}

fn reap() -> ! {
    loop {
        let mut newest = WAITING.swap(null_mut(), Ordering::Acquire);
        if newest.is_null() {
            thread::park();
            continue;
        }
        // The oldest first: a call must come after everything that was queued before it.
        let mut oldest = null_mut::<Node>();
        while !newest.is_null() {
            // SAFETY: the reaper owns the nodes taken from the queue, and each of them comes from
            // `let_go`.
            newest = unsafe {
                std::mem::replace(&mut (*newest).next, std::mem::replace(&mut oldest, newest))
            };
        }
        while !oldest.is_null() {
            // SAFETY: as above; the node comes from a box.
            let node = unsafe { Box::from_raw(oldest) };
            oldest = node.next;
            drop(node);
            WAITING_COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Calls `call` when everything queued so far is freed, on the reaper's thread: no other memory is
/// freed before `call` returns, and it must not panic. It is called at once if there is no such
/// thread, or the queue is full.
pub fn when_reaped(call: impl FnOnce() + Send + 'static) {
    Place::new().let_go(Remains::Call(Some(Box::new(call))));
}

/// Waits until everything queued so far is freed. For measurements and tests of the reaper.
pub fn wait_until_reaped() {
    let (done, all_done) = sync_channel(1);
    when_reaped(move || {
        let _ = done.send(());
    });
    let _ = all_done.recv();
}

/// A descriptor of a memory file, which the reaper closes: closing the last descriptor frees the
/// file's pages.
pub struct MemoryFile {
    file: ManuallyDrop<OwnedFd>,
    place: ManuallyDrop<Place>,
}

impl MemoryFile {
    /// Takes ownership of a descriptor. Call on a thread that may allocate.
    #[must_use]
    pub fn new(file: OwnedFd) -> Self {
        Self { file: ManuallyDrop::new(file), place: ManuallyDrop::new(Place::new()) }
    }

    /// The descriptor itself, for a thread that may wait for its closing.
    #[must_use]
    pub fn into_inner(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped after this.
        unsafe {
            ManuallyDrop::drop(&mut this.place);
            ManuallyDrop::take(&mut this.file)
        }
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for MemoryFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("MemoryFile").field(&*self.file).finish()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: both fields are not used after this.
        let (file, place) =
            unsafe { (ManuallyDrop::take(&mut self.file), ManuallyDrop::take(&mut self.place)) };
        place.let_go(Remains::File { _file: file });
    }
}
