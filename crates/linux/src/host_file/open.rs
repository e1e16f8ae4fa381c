//! Opening a host file, with all checks in their order.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::device::Device;
use super::lease::Lease;
use super::{HostFile, HostFileError, kernel, kind};
use crate::{FileError, FileOptions, FileStore};

/// The time for which a refused lease is tried again although the lock was granted: programs that
/// only look at the file have it open for a moment.
const PATIENCE: Duration = Duration::from_millis(1000);

/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// The file to open, and the way to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFileOptions {
    /// The path of a regular file on ext4 or xfs.
    pub path: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The longest time that opening waits for requests of an ended process that served the file.
    pub predecessor_timeout: Duration,
}

impl HostFileOptions {
    /// Options for a writable file.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            predecessor_timeout: FileOptions::PREDECESSOR_TIMEOUT,
        }
    }
}

impl HostFile {
    /// Opens the file and the device below it, takes a lease on the file, and checks that its
    /// blocks can be accessed on the device. Blocks the calling thread for
    /// [`HostFileOptions::predecessor_timeout`] at most while requests of a dead process are in
    /// flight to the file, for a second if another program has the file open, and for as long as it
    /// takes to write the file's dirty pages.
    ///
    /// # Errors
    /// The fault of the file, its filesystem or the device, and the remedy.
    pub fn open(options: &HostFileOptions) -> Result<Self, HostFileError> {
        let path = options.path.as_path();
        let wrap = |action| {
            move |source: Errno| HostFileError::Kernel {
                action,
                path: path.into(),
                source: source.into(),
            }
        };
        // Inspected before it is opened, because opening has effects.
        let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(wrap("find"))?;
        let kind = kind::check_filesystem(found.as_fd(), path)?;
        kind::check_attributes(found.as_fd(), path)?;
        check_no_swap(&found, path)?;
        let file = open_alone(&found, options)?;
        drop(found);
        kind::check_flags(file.as_fd(), kind, path)?;

        let stat = rustix::fs::fstat(&file).map_err(wrap("inspect"))?;
        let block_bytes = rustix::fs::fstatfs(&file).map_err(wrap("inspect"))?.f_bsize;
        let block_bytes = u32::try_from(block_bytes).unwrap_or(u32::MAX);
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if size_bytes == 0 {
            return Err(FileError::Empty { path: path.into() }.into());
        }
        if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(
                FileError::PartialBlock { path: path.into(), size_bytes, block_bytes }.into()
            );
        }
        let device = Device::below(path, stat.st_dev, options.read_only)?;

        let lease = Lease::new(file).map_err(|source| kernel("set up", path, source))?;
        take_patiently(&lease, options)?;
        let store = |name: &Path, file: BorrowedFd<'_>| {
            let file = file.try_clone_to_owned().map_err(|source| kernel("open", name, source))?;
            let options = FileOptions { read_only: options.read_only, ..FileOptions::new(name) };
            let store = FileStore::over(file, Arc::clone(&lease) as _, &options)?;
            if !store.is_direct() {
                return Err(no_direct_io(name));
            }
            Ok(Arc::new(store))
        };
        let file_store = store(path, lease.as_fd())?;
        let device_store = store(&device.path, device.file.as_fd())?;
        let read_only = options.read_only;
        let path = path.to_owned();
        let this = Self {
            path,
            read_only,
            kind,
            size_bytes,
            block_bytes,
            lease,
            device,
            device_store,
            file_store,
        };
        this.check_mappable()?;
        Ok(this)
    }
}

/// The error for a lease that cannot be taken.
pub(super) fn lease_refusal(path: &Path, error: io::Error) -> HostFileError {
    let path = path.to_owned();
    match error.raw_os_error() {
        Some(libc::EAGAIN) => HostFileError::InUse { path, may_have_ended: false },
        Some(libc::EACCES) => HostFileError::MayNotLease { path },
        Some(libc::EINVAL) => HostFileError::NoLeases { path },
        // The lease was broken, and has not been given up yet.
        Some(libc::EBUSY) => HostFileError::LeaseGone { path },
        _ => HostFileError::Kernel { action: "take a lease on", path, source: error },
    }
}

/// Fails if the kernel swaps to the file. The lease would be refused as well, but without the
/// reason.
fn check_no_swap(found: &OwnedFd, path: &Path) -> Result<(), HostFileError> {
    let Ok(stat) = rustix::fs::fstat(found) else { return Ok(()) };
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let is_it = |name: &str| {
        rustix::fs::stat(name)
            .is_ok_and(|swap| (swap.st_dev, swap.st_ino) == (stat.st_dev, stat.st_ino))
    };
    if swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next()).any(is_it) {
        let property = "is used as swap space";
        return Err(HostFileError::Property { path: path.into(), property, remedy: "swapoff it" });
    }
    Ok(())
}

/// Opens the inspected file for direct I/O, once.
fn open_alone(found: &OwnedFd, options: &HostFileOptions) -> Result<OwnedFd, HostFileError> {
    let path = options.path.as_path();
    let name = format!("/proc/self/fd/{}", found.as_raw_fd());
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // Does not wait in the kernel for another process's lease. Its holder may be dead, and then the
    // lease lasts as long as the holder's last request, or for `lease_break_time`.
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let start = Instant::now();
    let file = loop {
        match rustix::fs::open(&name, flags, Mode::empty()) {
            Ok(file) => break file,
            Err(Errno::AGAIN) if start.elapsed() < options.predecessor_timeout => {
                std::thread::sleep(PAUSE)
            }
            Err(error @ (Errno::AGAIN | Errno::TXTBSY)) => {
                return Err(HostFileError::InUse {
                    path: path.into(),
                    may_have_ended: error == Errno::AGAIN,
                });
            }
            Err(Errno::INVAL) => return Err(no_direct_io(path)),
            Err(error) => return Err(kernel("open", path, error.into())),
        }
    };
    // Otherwise io_uring would fail requests that have to wait.
    let wrap = |error: Errno| kernel("set up", path, error.into());
    let flags = rustix::fs::fcntl_getfl(&file).map_err(wrap)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(wrap)?;
    Ok(file)
}

/// Locks the file and takes the lease.
///
/// The lock is held by the description that rings register: while it is refused, another process
/// serves the file, or an ended process still has requests. The two cannot be distinguished here.
fn take_patiently(lease: &Arc<Lease>, options: &HostFileOptions) -> Result<(), HostFileError> {
    let path = &options.path;
    let start = Instant::now();
    while !lease.lock(options.read_only).map_err(|source| kernel("lock", path, source))? {
        if start.elapsed() >= options.predecessor_timeout {
            return Err(HostFileError::InUse { path: path.clone(), may_have_ended: true });
        }
        std::thread::sleep(PAUSE);
    }
    let start = Instant::now();
    loop {
        match lease.take() {
            Ok(()) => return Ok(()),
            Err(error)
                if error.raw_os_error() == Some(libc::EAGAIN) && start.elapsed() < PATIENCE =>
            {
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(lease_refusal(path, error)),
        }
    }
}

fn no_direct_io(path: &Path) -> HostFileError {
    HostFileError::Property {
        path: path.into(),
        property: "has no direct I/O",
        remedy: "serve it as an ordinary file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_lease_is_explained() {
        let refusal = |errno| lease_refusal(Path::new("disk"), io::Error::from_raw_os_error(errno));
        assert!(matches!(refusal(libc::EAGAIN), HostFileError::InUse { .. }));
        assert!(matches!(refusal(libc::EBUSY), HostFileError::LeaseGone { .. }));
        for (errno, word) in [
            (libc::EACCES, "CAP_LEASE"),
            (libc::EINVAL, "fs.leases-enable"),
            (libc::ENOLCK, "take a lease"),
        ] {
            let error = refusal(errno);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
