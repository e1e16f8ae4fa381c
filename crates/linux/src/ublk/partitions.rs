//! Whether the kernel reads the partitions of a device that is started.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Whether the kernel is to read the partitions of a device when it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkPartitions {
    /// The kernel reads them.
    Read,
    /// The kernel reads none, also later. `partx --add` makes their block devices.
    NotRead,
}

impl UblkPartitions {
    /// Carries out the fetch commands of a queue. The kernel reads no partitions of a device one of
    /// whose queues was last fetched for by a thread without CAP_SYS_ADMIN (`ublk_mark_io_ready`):
    /// the thread is without it meanwhile.
    ///
    /// # Errors
    /// The capabilities of the thread cannot be changed.
    pub(super) fn fetch(self, fetch: impl FnOnce()) -> io::Result<()> {
        if self == Self::Read {
            fetch();
            return Ok(());
        }
        let held = capabilities(None)?;
        let effective = held.effective.difference(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, CapabilitySets { effective, ..held })?;
        fetch();
        set_capabilities(None, held)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_admin() -> bool {
        capabilities(None).unwrap().effective.contains(CapabilitySet::SYS_ADMIN)
    }

    #[test]
    fn a_thread_has_its_capability_back_after_it_has_fetched() {
        let before = is_admin();
        let mut meanwhile = true;
        UblkPartitions::NotRead.fetch(|| meanwhile = is_admin()).unwrap();
        assert_eq!((meanwhile, is_admin()), (false, before));
        UblkPartitions::Read.fetch(|| meanwhile = is_admin()).unwrap();
        assert_eq!(meanwhile, before);
    }
}
