//! The SIGBUS handler: the process survives a peer that truncates the file behind its memory.
//!
//! A mapping whose file shrinks raises SIGBUS on access, which would end the daemon and all of its
//! guests. [`install`] sets a handler that looks the address up among the watched guest mappings,
//! replaces the whole mapping by zeroed private memory and marks it lost; the access is then
//! retried and the sidecore continues. The device finds the loss by
//! [`GuestMemory::is_lost`](crate::GuestMemory::is_lost), and is the only one to stop. A SIGBUS at
//! any other address ends the process, as it should.

use std::fmt;
use std::io;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

const MAX_WATCHED: usize = 8192;

/// A mapping as the handler sees it. The handler may read any slot at any time, also while the slot
/// gets a new owner: so slots are never freed, and the handler compares an address only with a base
/// and a size that belonged together while it read them.
struct Slot {
    /// Null if the slot is free, [`SETTING_UP`] while its new owner fills it in.
    base: AtomicPtr<u8>,
    len_bytes: AtomicUsize,
    /// Whether the file behind the mapping has shrunk.
    lost: AtomicBool,
}

const SETTING_UP: *mut u8 = without_provenance_mut(1);

static SLOTS: [Slot; MAX_WATCHED] = [const {
    Slot {
        base: AtomicPtr::new(null_mut()),
        len_bytes: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAX_WATCHED];

/// A mapping's slot in the handler's table. Drop it before the mapping is unmapped, after the last
/// access.
pub(crate) struct Watch(&'static Slot);

/// Installs the handler, once per process. Mapping guest memory also calls this.
///
/// # Errors
/// The error of `sigaction`.
pub fn install() -> io::Result<()> {
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid empty one; the handler only does what is
        // async-signal-safe (atomics, mmap, sigaction).
        let code = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
        };
        if code != 0 {
            result = Err(io::Error::last_os_error());
        }
    });
    result
}

impl Watch {
    /// Watches a mapping; `None` if too many are watched.
    pub(crate) fn begin(base: NonNull<u8>, len_bytes: usize) -> Option<Self> {
        install().ok()?;
        let take = |slot: &&Slot| {
            slot.base.load(Ordering::Relaxed).is_null()
                && slot
                    .base
                    .compare_exchange(null_mut(), SETTING_UP, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
        };
        let slot = SLOTS.iter().find(take)?;
        slot.lost.store(false, Ordering::Relaxed);
        slot.len_bytes.store(len_bytes, Ordering::Release);
        slot.base.store(base.as_ptr(), Ordering::Release);
        Some(Self(slot))
    }

    /// Whether the peer has truncated the file behind the mapping.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Watch").field("lost", &self.is_lost()).finish_non_exhaustive()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.base.store(null_mut(), Ordering::Release);
    }
}

impl Slot {
    /// The range of the slot's mapping, if there is one.
    fn range(&self) -> Option<(*mut u8, usize)> {
        let base = self.base.load(Ordering::Acquire);
        if base.is_null() || base == SETTING_UP {
            return None;
        }
        let len_bytes = self.len_bytes.load(Ordering::Acquire);
        // If the size read is the next owner's, the base has changed by now, or is the next owner's
        // too.
        (self.base.load(Ordering::Relaxed) == base).then_some((base, len_bytes))
    }
}

extern "C" fn on_sigbus(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &SLOTS {
        // The mapping of this access is alive, by the reference of the accessing thread, and so was
        // the mapping of each slot when it was read: they do not overlap unless they are the same.
        let Some((base, len_bytes)) =
            slot.range().filter(|(base, len)| address.wrapping_sub(base.addr()) < *len)
        else {
            continue;
        };
        // SAFETY: replaces exactly the range of the mapping that is being accessed.
        let replaced = unsafe {
            libc::mmap(
                base.cast(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if replaced != libc::MAP_FAILED {
            slot.lost.store(true, Ordering::Relaxed);
            return;
        }
    }
    // Not a watched mapping: let the access fault again, with the default action. SAFETY: as in
    // `install`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}
