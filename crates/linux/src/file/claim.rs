//! Exclusive use of a file by one store, also against requests of a process that has ended.
//!
//! Two locks of open file descriptions (fcntl(2)) on one file:
//!
//! * The **claim** is held by a descriptor that is registered with no ring, and ends with the
//!   process. The claim covers the file's content, and says that a process serves the file.
//! * The **fence** is held by a descriptor that is registered with every ring on the file. The
//!   kernel takes a ring down some time after its process has ended, when the ring's last request
//!   has completed, and closes the ring's files only then: so the kernel lifts the fence after the
//!   last request of a dead process.
//!
//! If a store gets the claim while a fence is still up, the file's last process is dead, and its
//! requests may still write to the file, or to guest memory.
//!
//! Readers share a file. Each takes a *seat*: one byte that its claim's descriptor locks, and one
//! that its fence does. A seat with a fence but without a claim belongs to a dead process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{FileError, FileOptions, overlap};

/// The largest number of simultaneous readers of one file.
const SEATS: libc::off_t = 256;

/// The last bytes that a lock can name, behind the end of every file: one byte of each kind for a
/// seat. All bytes before are the claim's.
const FENCES: libc::off_t = libc::off_t::MAX - SEATS + 1;
const SEAT_CLAIMS: libc::off_t = FENCES - SEATS;

/// The time between two looks at the fence.
const PAUSE: Duration = Duration::from_millis(5);

/// The length of a wait that is logged. Rings without requests are taken down within a few
/// milliseconds.
const WORTH_A_LINE: Duration = Duration::from_millis(200);

/// The locks on a file. Lifted when dropped, the fence first.
#[derive(Debug)]
pub(super) struct Claim {
    fence: Locked,
    file: Locked,
}

/// A descriptor whose locks are lifted when it is dropped.
///
/// The close would lift them, but not while a child that is just being forked has a copy of the
/// descriptor, or a ring is being taken down. No request is in flight: channels wait for their
/// requests, and hold the claim.
#[derive(Debug)]
struct Locked(OwnedFd);

impl AsFd for Locked {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = set(self.as_fd(), libc::F_UNLCK, 0, 0);
    }
}

impl Claim {
    /// Opens the file, locks it for this store, and waits until no request of a dead process is in
    /// flight to it.
    ///
    /// Block devices are opened exclusively for writing: then they are not mounted, not swap and
    /// not used by another program (open(2)). QEMU respects the claim, because it locks single
    /// bytes of a file in the same way.
    pub fn new(options: &FileOptions, is_device: bool) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let mut flags = access(options.read_only);
        if is_device && !options.read_only {
            flags |= OFlags::EXCL;
        }
        let kernel = |action| move |source| FileError::Kernel { action, path: path.into(), source };
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::BUSY) => return Err(FileError::Busy { path: path.into() }),
            opened => Locked(opened.map_err(|error| kernel("open")(error.into()))?),
        };
        if !try_claim(file.as_fd(), options.read_only).map_err(kernel("lock"))? {
            return Err(FileError::Busy { path: path.into() });
        }
        let stat =
            rustix::fs::fstat(file.as_fd()).map_err(|error| kernel("inspect")(error.into()))?;
        // Checked with the claim held: of two stores that start at once, one sees the other.
        if let Some(other) = overlap::in_use(&stat, options.read_only) {
            return Err(FileError::Overlaps { path: path.into(), other });
        }
        // By descriptor, not by name, because names change.
        let name = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let fence = rustix::fs::open(name, access(true), Mode::empty())
            .map_err(|error| kernel("open")(error.into()))?;
        let claim = Self { fence: Locked(fence), file };
        claim.wait_for_predecessor(path, options.predecessor_timeout)?;
        claim.raise_fence(options.read_only, path).map_err(kernel("lock"))?;
        Ok(claim)
    }

    /// The lock's descriptor, which each ring on the file must register.
    pub fn fence(&self) -> BorrowedFd<'_> {
        self.fence.as_fd()
    }

    /// Waits until no fence of a dead process is up.
    fn wait_for_predecessor(&self, path: &Path, timeout: Duration) -> Result<(), FileError> {
        let start = Instant::now();
        let (mut seat, mut is_told) = (0, false);
        loop {
            // Never goes back: a dead process raises no fence.
            match self.first_dead_seat(seat).map_err(|source| lock_error(path, source))? {
                None => break,
                Some(dead) => seat = dead,
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Err(FileError::Predecessor { path: path.into(), waited });
            }
            if waited >= WORTH_A_LINE && !std::mem::replace(&mut is_told, true) {
                tracing::warn!(
                    path = %path.display(),
                    "waiting for requests of a process that has ended"
                );
            }
            std::thread::sleep(PAUSE.min(timeout.saturating_sub(waited)));
        }
        if is_told {
            let waited_ms = start.elapsed().as_millis() as u64;
            tracing::info!(
                path = %path.display(),
                waited_ms,
                "the last request of an ended process is done"
            );
        }
        Ok(())
    }

    /// Returns the first seat from `from` on whose fence outlives its claim.
    fn first_dead_seat(&self, from: libc::off_t) -> io::Result<Option<libc::off_t>> {
        if is_free(self.fence(), FENCES + from, SEATS - from)? {
            return Ok(None);
        }
        for seat in from..SEATS {
            let has_fence = || is_free(self.fence(), FENCES + seat, 1).map(|free| !free);
            // In this order, because a reader that is ending lifts its fence first.
            if has_fence()? && is_free(self.file.as_fd(), SEAT_CLAIMS + seat, 1)? && has_fence()? {
                return Ok(Some(seat));
            }
        }
        Ok(None)
    }

    /// Takes a seat. A writer has no readers, and takes the first seat.
    fn raise_fence(&self, read_only: bool, path: &Path) -> io::Result<()> {
        for seat in 0..SEATS {
            let (mine, fence) = (SEAT_CLAIMS + seat, FENCES + seat);
            if !is_free(self.file.as_fd(), mine, 1)? || !is_free(self.fence(), fence, 1)? {
                continue;
            }
            if read_only {
                set(self.file.as_fd(), libc::F_RDLCK, mine, 1)?;
                // Two readers that took a seat at the same moment both go to the next seat.
                if !is_free(self.file.as_fd(), mine, 1)? {
                    set(self.file.as_fd(), libc::F_UNLCK, mine, 1)?;
                    continue;
                }
            }
            return set(self.fence(), libc::F_RDLCK, fence, 1);
        }
        tracing::warn!(path = %path.display(), "too many readers");
        Err(io::Error::from_raw_os_error(libc::ENOLCK))
    }
}

impl AsFd for Claim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn lock_error(path: &Path, source: io::Error) -> FileError {
    FileError::Kernel { action: "lock", path: path.into(), source }
}

/// The flags for opening: with `O_NONBLOCK`, a name that has meanwhile become a pipe cannot block
/// the daemon.
pub(super) fn access(read_only: bool) -> OFlags {
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
}

/// Locks the content of a file for this open file description. False if another description's lock
/// conflicts.
pub(crate) fn try_claim(file: BorrowedFd<'_>, read_only: bool) -> io::Result<bool> {
    match set(file, if read_only { libc::F_RDLCK } else { libc::F_WRLCK }, 0, SEAT_CLAIMS) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether another open file description has a conflicting claim.
pub(super) fn is_claimed(file: BorrowedFd<'_>, read_only: bool) -> io::Result<bool> {
    is_free_for(file, if read_only { libc::F_RDLCK } else { libc::F_WRLCK }, 0, SEAT_CLAIMS)
        .map(|free| !free)
}

/// Lifts the lock of [`try_claim`].
pub(crate) fn unclaim(file: BorrowedFd<'_>) -> io::Result<()> {
    set(file, libc::F_UNLCK, 0, SEAT_CLAIMS)
}

/// Whether no other open file description has a lock in a range.
fn is_free(file: BorrowedFd<'_>, start: libc::off_t, len: libc::off_t) -> io::Result<bool> {
    is_free_for(file, libc::F_WRLCK, start, len)
}

/// Whether a lock of this kind would be granted.
fn is_free_for(
    file: BorrowedFd<'_>,
    kind: libc::c_int,
    start: libc::off_t,
    len: libc::off_t,
) -> io::Result<bool> {
    let mut range = flock(kind, start, len);
    // SAFETY: the descriptor is open and the structure outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(range.l_type) == libc::F_UNLCK)
}

/// Sets or lifts a lock of the open file description; a length of 0 reaches to the end.
fn set(
    file: BorrowedFd<'_>,
    kind: libc::c_int,
    start: libc::off_t,
    len: libc::off_t,
) -> io::Result<()> {
    let range = flock(kind, start, len);
    // SAFETY: the descriptor is open and the structure outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn flock(kind: libc::c_int, start: libc::off_t, len: libc::off_t) -> libc::flock {
    // SAFETY: all-zero is a valid flock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start;
    range.l_len = len;
    range
}
