//! The descriptors of one message.

use std::os::fd::OwnedFd;

use sidecore_memory::MemoryFile;
use sidecore_socket::Descriptor;

use crate::refusal::Refusal;

/// The descriptors that came with a command. Descriptors that the command does not take are closed
/// by the reaper of `sidecore_memory`: the descriptor of a file in memory may be its last one, and
/// the last close frees the file's pages.
#[derive(Debug)]
pub(crate) struct Descriptors(Vec<OwnedFd>);

impl Descriptors {
    pub(crate) const fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds)
    }

    pub(crate) const fn count(&self) -> usize {
        self.0.len()
    }

    /// The last descriptor, if there is any.
    pub(crate) fn into_file(mut self) -> Option<MemoryFile> {
        self.0.pop().map(MemoryFile::new)
    }

    /// All descriptors, refused if one could be slow to close.
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
