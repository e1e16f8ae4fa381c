//! The descriptors of one message.

use std::os::fd::OwnedFd;

use sidecore_memory::MemoryFile;
use sidecore_socket::Descriptor;

use crate::refusal::Refusal;

/// What came with a command. What nobody takes is closed, and not by whoever drops this: a file in memory may be nobody
/// else's any more, and its last close frees its pages.
#[derive(Debug)]
pub(crate) struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    pub(crate) const fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds)
    }

    pub(crate) const fn count(&self) -> usize {
        self.0.len()
    }

    /// The last one, if there is any.
    pub(crate) fn into_file(mut self) -> Option<MemoryFile> {
        self.0.pop().map(MemoryFile::new)
    }

    /// All, as what whoever drops them can close at once.
    pub(crate) fn into_events(mut self) -> Result<Vec<OwnedFd>, Refusal> {
        if self.0.iter().any(|fd| Descriptor::of(fd) == Descriptor::Memory) {
            return Err(Refusal::NotEvent);
        }
        Ok(std::mem::take(&mut self.0))
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|fd| drop(MemoryFile::new(fd)));
    }
}
