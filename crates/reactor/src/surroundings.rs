//! A change of a pollable's wake descriptors.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{CoreContext, Sleeper, WakeKey};

/// A pollable's sidecore, as a change of the pollable needs it.
pub struct Surroundings<'a> {
    pub(crate) core: &'a CoreContext,
    pub(crate) sleeper: &'a mut dyn Sleeper,
    pub(crate) key: WakeKey,
}

impl Surroundings<'_> {
    /// The state that the sidecore's pollables share.
    #[must_use]
    pub fn core(&self) -> &CoreContext {
        self.core
    }

    /// Has one more descriptor wake the pollable, which names the descriptor in
    /// [`wake_fds`](crate::Pollable::wake_fds) from now on.
    ///
    /// # Errors
    /// The kernel refuses the descriptor.
    pub fn watch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.sleeper.watch(fd, self.key)
    }

    /// Has a descriptor that is about to be closed wake the pollable no longer.
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>) {
        // The kernel forgets a descriptor that was closed by itself.
        let _ = self.sleeper.unwatch(fd);
    }
}
