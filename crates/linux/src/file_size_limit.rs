//! The limit of a file's size (RLIMIT_FSIZE).

use std::io;

/// Makes a write past the limit an error of that write, EFBIG, for all of this
/// process: by default SIGXFSZ ends the process instead.
///
/// # Errors
/// The kernel's; there is no reason known.
pub fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: a signal that is ignored runs no code of this process.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}
