//! The only call in which a sidecore sleeps.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_units::Nanos;

/// Identifies a descriptor's owner, from [`Sleeper::watch`] to [`Sleeper::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WakeKey(pub u64);

/// Waits for descriptors: epoll on Linux, a script in tests.
pub trait Sleeper {
    /// Watches `fd` for being readable, level-triggered; [`wait`](Self::wait) reports it as `key`.
    ///
    /// # Errors
    /// The kernel refuses the descriptor.
    fn watch(&mut self, fd: BorrowedFd<'_>, key: WakeKey) -> io::Result<()>;

    /// Stops watching `fd`, which is still open.
    ///
    /// # Errors
    /// The descriptor was not watched.
    fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Blocks for at most `timeout` (`None`: for ever) until a watched descriptor is readable, and
    /// appends the keys of all readable descriptors.
    ///
    /// # Errors
    /// The kernel's error. An interrupted wait is no error, and reports no descriptor.
    fn wait(&mut self, timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()>;
}
