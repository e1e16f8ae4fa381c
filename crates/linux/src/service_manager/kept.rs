//! Descriptors that the service manager kept: `sd_listen_fds(3)`.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::EnvironmentError;

/// The number of the first kept descriptor.
const FIRST: RawFd = 3;

/// A larger count is a mistake: this is the default of the most files that Linux lets a process
/// have open (`fs.nr_open`).
const MAX: usize = 1 << 20;

/// systemd's name for an unnamed descriptor.
const UNNAMED: &str = "unknown";

/// Whether the descriptors were taken. The variables keep their values: no thread may change the
/// environment while another reads it.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// A descriptor that outlived the process which stored it.
#[derive(Debug)]
pub struct KeptDescriptor {
    /// The name under which the descriptor was stored; several may have the same one.
    pub name: String,
    /// The descriptor, closed on exec. The manager keeps a copy until
    /// [`ServiceManager::forget`](super::ServiceManager::forget).
    pub fd: OwnedFd,
}

/// Takes the descriptors that the service manager kept for this process: as many as `$LISTEN_FDS`
/// counts, if `$LISTEN_PID` is this process, named by `$LISTEN_FDNAMES`. Only the first call
/// returns any. The order has no meaning: systemd has the newest first, others the oldest.
///
/// Call before any other file is opened. Numbers that are not open, or were opened by this process,
/// are left out with a warning.
///
/// # Errors
/// The variables have invalid values; no descriptor was taken.
pub fn take_kept() -> Result<Vec<KeptDescriptor>, EnvironmentError> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let variables = Variables {
        pid: env::var_os("LISTEN_PID"),
        count: env::var_os("LISTEN_FDS"),
        names: env::var_os("LISTEN_FDNAMES"),
    };
    let names = variables.names(std::process::id())?;
    let announced = names.len();
    let (mut kept, mut first_missing) = (Vec::new(), None);
    for (number, name) in (FIRST..).zip(names) {
        match take(number) {
            Ok(fd) => kept.push(KeptDescriptor { name, fd }),
            Err(error) if first_missing.is_none() => first_missing = Some((number, name, error)),
            Err(_) => {}
        }
    }
    if let Some((number, name, error)) = first_missing {
        let missing = announced.saturating_sub(kept.len());
        tracing::warn!(
            "{missing} of {announced} kept descriptors are not there; the first is {number}, \
             {name:?}: {error}"
        );
    }
    Ok(kept)
}

/// The values of the environment's variables.
pub(super) struct Variables {
    pub(super) pid: Option<OsString>,
    pub(super) count: Option<OsString>,
    pub(super) names: Option<OsString>,
}

impl Variables {
    /// Returns the names of descriptors 3, 4, and so on, if they are for this process.
    pub(super) fn names(self, own_pid: u32) -> Result<Vec<String>, EnvironmentError> {
        let (Some(pid), Some(count)) = (self.pid, self.count) else {
            return Ok(Vec::new());
        };
        match pid.to_str().and_then(|pid| pid.parse::<u32>().ok()) {
            None => return wrong("LISTEN_PID", pid, "the number of a process"),
            // The variables were inherited from a parent that did not take the descriptors.
            Some(pid) if pid != own_pid => return Ok(Vec::new()),
            Some(_) => {}
        }
        let count = match count.to_str().and_then(|count| count.parse::<usize>().ok()) {
            Some(count) if count <= MAX => count,
            _ => return wrong("LISTEN_FDS", count, "a number of descriptors"),
        };
        let names: Vec<String> = match &self.names {
            None => vec![UNNAMED.to_owned(); count],
            Some(_) if count == 0 => Vec::new(),
            Some(names) => names.to_string_lossy().split(':').map(str::to_owned).collect(),
        };
        if names.len() != count {
            return wrong(
                "LISTEN_FDNAMES",
                self.names.unwrap_or_default(),
                "as many names as LISTEN_FDS says",
            );
        }
        Ok(names)
    }
}

fn wrong<T>(
    variable: &'static str,
    value: OsString,
    expected: &'static str,
) -> Result<T, EnvironmentError> {
    Err(EnvironmentError { variable, value, expected })
}

/// Takes ownership of a number that came through exec.
fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: these commands of fcntl take and return plain numbers, and fail if no file is open
    // under the number.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // Exec closes all files with this flag, and all files that this process opens have it: so this
    // file has an owner here, even if the environment says otherwise.
    if flags & libc::FD_CLOEXEC != 0 {
        return Err(io::Error::other("this process has opened it itself"));
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(number, libc::F_SETFD, flags | libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the file is open, was inherited, and gets its owner once: the flag that was just set
    // keeps a second call, even a racing one, which `TAKEN` prevents, from taking it again.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
