//! Surviving a peer that truncates the file behind its memory.
//!
//! A mapping whose file shrinks raises SIGBUS on access, which would end the
//! daemon and all of its guests. [`install`] puts a handler in place that
//! looks the address up among the watched guest mappings, replaces the whole
//! mapping by zeroed private memory and marks it lost; the access is then
//! retried and the sidecore goes on. The device notices
//! ([`GuestMemory::is_lost`](crate::GuestMemory::is_lost)) and stops alone.
//! A SIGBUS anywhere else ends the process, as it should.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::mapping::Mapping;

const MAX_WATCHED: usize = 8192;

static WATCHED: [AtomicPtr<Mapping>; MAX_WATCHED] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX_WATCHED];

/// Installs the handler, once per process. Mapping guest memory does it too.
///
/// # Errors
/// What `sigaction` says.
pub fn install() -> io::Result<()> {
    static INSTALLED: Once = Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid empty one; the handler only
        // does what is async-signal-safe (atomics, mmap, sigaction).
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

/// Adds a mapping to the table; false if the table is full.
pub(crate) fn watch(mapping: &Mapping) -> bool {
    if install().is_err() {
        return false;
    }
    let pointer = std::ptr::from_ref(mapping).cast_mut();
    WATCHED
        .iter()
        .any(|slot| slot.compare_exchange(std::ptr::null_mut(), pointer, Ordering::AcqRel, Ordering::Relaxed).is_ok())
}

pub(crate) fn unwatch(mapping: &Mapping) {
    let pointer = std::ptr::from_ref(mapping).cast_mut();
    for slot in &WATCHED {
        if slot.compare_exchange(pointer, std::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

extern "C" fn on_sigbus(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &WATCHED {
        let pointer = slot.load(Ordering::Acquire);
        if pointer.is_null() {
            continue;
        }
        // SAFETY: a mapping takes itself out of the table before it goes, and
        // one that is being accessed is alive by the accessor's hold on it.
        let mapping = unsafe { &*pointer };
        let base = mapping.base().as_ptr();
        let offset = address.wrapping_sub(base.addr());
        if offset >= mapping.len_bytes() {
            continue;
        }
        // SAFETY: replaces exactly the range that this mapping owns.
        let replaced = unsafe {
            libc::mmap(
                base.cast(),
                mapping.len_bytes(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if replaced != libc::MAP_FAILED {
            mapping.mark_lost();
            return;
        }
    }
    // Not ours: let the access fault again, with the default action.
    // SAFETY: as in `install`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}
