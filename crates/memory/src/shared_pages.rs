//! This process's own memory that a peer maps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::table::{GuestAddress, GuestMemory, RegionSpec, UserAddress};

/// Neither the file's size nor its seals can be changed.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Zeroed pages in a file for a peer: the peer's stores are seen here without a message.
///
/// The file can neither shrink nor grow, so that the peer can take no page away from us, nor make
/// us pay for more. The file is mapped here like guest memory, and trusted as little.
#[derive(Debug)]
pub struct SharedPages {
    file: OwnedFd,
    memory: GuestMemory,
    len_bytes: usize,
}

impl SharedPages {
    /// Makes `len_bytes` of pages, a whole number of them; `name` is the file's name in the
    /// kernel's lists.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left, or `len_bytes` is zero.
    pub fn new(name: &str, len_bytes: usize) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, len_bytes as u64)?;
        rustix::fs::fcntl_add_seals(&file, SEALS)?;
        Self::of(file, len_bytes)
    }

    /// Maps the `len_bytes` of pages that another process has made and given to a peer.
    ///
    /// # Errors
    /// The file was not made by [`SharedPages::new`], or has another size.
    pub fn from_file(file: OwnedFd, len_bytes: usize) -> io::Result<Self> {
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        let file_bytes = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        if !sealed || file_bytes != len_bytes as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "these are not the shared pages that they should be",
            ));
        }
        Self::of(file, len_bytes)
    }

    fn of(file: OwnedFd, len_bytes: usize) -> io::Result<Self> {
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: len_bytes as u64,
            file: file.try_clone()?,
            file_offset_bytes: 0,
        }])
        .map_err(io::Error::other)?;
        Ok(Self { file, memory, len_bytes })
    }

    /// The file, all or part of which the peer maps.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The pages as mapped here, from address zero on.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::RegionHint;

    #[test]
    fn pages_of_several_peers_are_one_memory_and_leave_it_one_by_one() {
        let pages = [0, 1].map(|_| SharedPages::new("test", 8192).unwrap());
        let one = GuestMemory::empty().with_memory(0, pages[0].memory()).unwrap();
        let both = one.with_memory(1 << 20, pages[1].memory()).unwrap();
        let mut hint = RegionHint::default();
        both.write_slice(GuestAddress((1 << 20) + 5), &[7, 8], &mut hint).unwrap();
        both.write_slice(GuestAddress(5), &[1, 2], &mut hint).unwrap();
        let seen = pages.each_ref().map(|pages| {
            pages.memory().read_array::<2>(GuestAddress(5), &mut RegionHint::default()).unwrap()
        });
        assert_eq!(seen, [[1, 2], [7, 8]]);
        let rest = both.without_region(GuestAddress(0), UserAddress(0), 8192).unwrap();
        assert_eq!(rest.region_count(), 1);
        assert!(rest.read_array::<2>(GuestAddress(5), &mut hint).is_err());
        assert_eq!(rest.read_array(GuestAddress((1 << 20) + 5), &mut hint).unwrap(), [7, 8]);
        assert!(both.with_memory(4096, pages[0].memory()).is_err(), "it overlaps");
        assert!(both.with_memory(u64::MAX, pages[0].memory()).is_err(), "it runs past the end");
    }

    #[test]
    fn a_peer_sees_the_same_bytes_and_cannot_resize_the_file() {
        let pages = SharedPages::new("test", 8192).unwrap();
        let peer = pages.file().try_clone_to_owned().unwrap();
        pages
            .memory()
            .write_slice(GuestAddress(4095), &[1, 2], &mut RegionHint::default())
            .unwrap();
        let mut seen = [0; 2];
        rustix::io::pread(&peer, &mut seen, 4095).unwrap();
        assert_eq!((seen, pages.len_bytes()), ([1, 2], 8192));
        let again = SharedPages::from_file(peer.try_clone().unwrap(), 8192).unwrap();
        again
            .memory()
            .read_slice(GuestAddress(4095), &mut seen, &mut RegionHint::default())
            .unwrap();
        assert_eq!(seen, [1, 2]);
        assert!(SharedPages::from_file(peer.try_clone().unwrap(), 4096).is_err());
        let growing = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&growing, 8192).unwrap();
        assert!(SharedPages::from_file(growing, 8192).is_err(), "a peer could take its pages away");
        for len_bytes in [0, 4096, 12288] {
            assert_eq!(rustix::fs::ftruncate(&peer, len_bytes), Err(rustix::io::Errno::PERM));
        }
        assert!(
            rustix::fs::fcntl_add_seals(&peer, SealFlags::WRITE).is_err(),
            "the seals are sealed"
        );
        assert!(SharedPages::new("test", 0).is_err());
    }
}
