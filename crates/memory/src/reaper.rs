//! Giving a peer's memory back to the kernel, where nobody waits for it.
//!
//! Whoever has the last reference to a file in memory frees its pages, inside `munmap` or `close`:
//! about 0.2 s a GiB in pages of 4 KiB. When a VMM has died that is us, and whoever lets go of its
//! memory last would be held up for as long: a sidecore, or the thread that serves all vfio-user
//! sockets. So the peer's mappings, and [`MemoryFile`]s, are only handed to the thread here when
//! they are dropped.
//!
//! To hand something over neither waits, locks nor allocates: its place in the queue was made when
//! it was mapped. A sidecore pays two atomic operations and, if the reaper sleeps, the system call
//! that wakes it; all that once for each region that a guest loses, and never for a request.
//!
//! What has been handed over is out of everybody's reach: the last reference to it is gone. Nobody
//! has to wait for the reaper then, at the end of the process least of all, as the kernel gives
//! everything back by itself.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};

/// Most mappings and files that wait for the reaper. What is more is given back by whoever lets go
/// of it.
///
/// One that takes long may keep the reaper busy for many seconds, in which a peer can map and unmap
/// as much as it likes: it must not use up what all share of descriptors (`RLIMIT_NOFILE`) and
/// mappings (`vm.max_map_count`, 65530).
pub const MAX_WAITING: usize = 8192;

/// A mapping is emptied in pieces of this size: each keeps other threads from mapping anything for
/// some milliseconds. Smaller ones would make much work of a large mapping of a file that has no
/// pages.
const PIECE_BYTES: usize = 64 << 20;

/// What waits, the newest first.
static WAITING: AtomicPtr<Node> = AtomicPtr::new(null_mut());
/// How much that is, with what the reaper has taken and not given back yet.
static WAITING_COUNT: AtomicUsize = AtomicUsize::new(0);
static REAPER: OnceLock<Thread> = OnceLock::new();

/// What is given back when it is dropped.
pub(crate) enum Remains {
    /// Nothing yet.
    None,
    Mapped {
        _range: Range,
    },
    File {
        _file: OwnedFd,
    },
    Call(Option<Box<dyn FnOnce() + Send>>),
}

/// Addresses that nobody can reach any more.
pub(crate) struct Range {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: nothing but the range's end is left to be done, by whichever thread.
unsafe impl Send for Range {}

struct Node {
    remains: Remains,
    next: *mut Node,
}

/// A place in the reaper's queue.
pub(crate) struct Place(Box<Node>);

// SAFETY: `next` belongs to the queue, and is null outside of it.
unsafe impl Send for Place {}
// SAFETY: as above, and nothing can be done with a place that is shared.
unsafe impl Sync for Place {}

const _: () = {
    const fn may_go_to_the_reaper<T: Send>() {}
    may_go_to_the_reaper::<Remains>();
};

impl Range {
    /// # Safety
    /// The range is a mapping, or several, and from now on nobody uses it or unmaps it but this
    /// value.
    pub(crate) const unsafe fn own(base: NonNull<u8>, len_bytes: usize) -> Self {
        Self { base, len_bytes }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // The address space is locked for as long as a mapping's pages are taken out of it, for all
        // who want to map something meanwhile: 0.1 s a GiB, if `munmap` does it. So that is done
        // before, in pieces.
        let mut done = 0_usize;
        while done < self.len_bytes {
            let len = PIECE_BYTES.min(self.len_bytes.saturating_sub(done));
            // SAFETY: inside the range, whose contents nobody wants any more. If it fails (huge
            // pages that are larger than a piece) `munmap` does it all.
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
    /// A place for what will be let go of one day. To be made by a thread that may wait: it starts
    /// the reaper, if need be.
    pub(crate) fn new() -> Self {
        start();
        Self(Box::new(Node { remains: Remains::None, next: null_mut() }))
    }

    /// Has the reaper drop `remains`. They are dropped here if there is no reaper, or too much
    /// waits for it.
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
            match WAITING.compare_exchange_weak(newest, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(other) => newest = other,
            }
        }
        // Otherwise whoever found the queue empty has woken it, or is about to, and it has not
        // looked since.
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

/// Starts the reaper unless it is there. If that fails it is tried again with the next place.
///
/// A thread is allowed on the cores of the one that starts it. That is not a sidecore: none maps a
/// peer's memory.
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
        // The oldest first: who waits for a call waits for what came before it.
        let mut oldest = null_mut::<Node>();
        while !newest.is_null() {
            // SAFETY: what was in the queue is ours now, and each node in it is one of `let_go`'s.
            newest = unsafe { std::mem::replace(&mut (*newest).next, std::mem::replace(&mut oldest, newest)) };
        }
        while !oldest.is_null() {
            // SAFETY: as above; it came from a box.
            let node = unsafe { Box::from_raw(oldest) };
            oldest = node.next;
            drop(node);
            WAITING_COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Calls `call` when all that has been let go of so far is given back, on the thread that does
/// that: nothing else is given back before it returns, and it must not panic. It is called at once
/// if there is no such thread, or too much waits for it.
pub fn when_reaped(call: impl FnOnce() + Send + 'static) {
    Place::new().let_go(Remains::Call(Some(Box::new(call))));
}

/// Waits until all that has been let go of so far is given back. Nobody needs it but whoever
/// measures or tests that.
pub fn wait_until_reaped() {
    let (done, all_done) = sync_channel(1);
    when_reaped(move || {
        let _ = done.send(());
    });
    let _ = all_done.recv();
}

/// A descriptor of a file in memory, which the reaper closes: the last one frees the file's pages.
pub struct MemoryFile {
    file: ManuallyDrop<OwnedFd>,
    place: ManuallyDrop<Place>,
}

impl MemoryFile {
    /// Takes it over. To be called by a thread that may allocate.
    #[must_use]
    pub fn new(file: OwnedFd) -> Self {
        Self { file: ManuallyDrop::new(file), place: ManuallyDrop::new(Place::new()) }
    }

    /// The descriptor itself, for whoever may be held up by closing it.
    #[must_use]
    pub fn into_inner(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped any more.
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
        // SAFETY: neither is used any more.
        let (file, place) = unsafe { (ManuallyDrop::take(&mut self.file), ManuallyDrop::take(&mut self.place)) };
        place.let_go(Remains::File { _file: file });
    }
}
