//! Memory of a process that serves block devices of its own host.
//!
//! The kernel may write dirty pages to such a device when memory is short. A thread of this process
//! that waited for memory then would wait for itself.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Of `include/uapi/linux/prctl.h`, since Linux 5.6.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

static PREPARED: AtomicBool = AtomicBool::new(false);

/// Locks the memory of this process as it comes to be used (`MCL_ONFAULT`: guests' memory is not
/// filled by that), and has the calling thread and the threads that it starts afterwards allocate
/// memory without waiting for a disk (`PR_SET_IO_FLUSHER`). Call it before other threads start.
///
/// # Errors
/// The process has neither the limit nor the privileges: CAP_IPC_LOCK and CAP_SYS_RESOURCE.
pub fn prepare_ublk_memory() -> io::Result<()> {
    let flags = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
    // SAFETY: the arguments are plain numbers.
    if unsafe { libc::mlockall(flags) } != 0 {
        return Err(explain("memory cannot be locked", "CAP_IPC_LOCK, or `ulimit -l unlimited`"));
    }
    // SAFETY: the arguments are plain numbers.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        return Err(explain("PR_SET_IO_FLUSHER is refused", "CAP_SYS_RESOURCE"));
    }
    PREPARED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether [`prepare_ublk_memory`] has succeeded in this process.
#[must_use]
pub fn ublk_memory_prepared() -> bool {
    PREPARED.load(Ordering::Relaxed)
}

fn explain(what: &str, remedy: &str) -> io::Error {
    let error = io::Error::last_os_error();
    io::Error::new(error.kind(), format!("{what}: {error}; the daemon needs {remedy}"))
}
