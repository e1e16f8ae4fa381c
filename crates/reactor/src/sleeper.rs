//! The one call that a sidecore sleeps in.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_units::Nanos;

/// What a descriptor belongs to, from [`Sleeper::watch`] to
/// [`Sleeper::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WakeKey(pub u64);

/// Waits for descriptors: epoll on Linux, a script in tests.
pub trait Sleeper {
    /// Wakes for `fd` being readable, level-triggered, and reports `key`.
    ///
    /// # Errors
    /// The kernel refuses the descriptor.
    fn watch(&mut self, fd: BorrowedFd<'_>, key: WakeKey) -> io::Result<()>;

    /// Stops watching `fd`, which is still open.
    ///
    /// # Errors
    /// It was not watched.
    fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()>;

    /// Blocks for at most `timeout` (`None`: for ever) until a watched
    /// descriptor is readable, and appends the keys of those that are.
    ///
    /// # Errors
    /// The kernel's; an interrupted wait is not an error but an empty answer.
    fn wait(&mut self, timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()>;
}
