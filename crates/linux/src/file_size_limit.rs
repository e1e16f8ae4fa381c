//! The limit of a file's size (RLIMIT_FSIZE).

use std::io;

/// Makes a write past the limit an error of that write, EFBIG, in the whole process: by default
/// SIGXFSZ ends the process instead.
///
/// # Errors
/// The kernel's error, for which no reason is known.
pub fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: an ignored signal runs no code of this process.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}
