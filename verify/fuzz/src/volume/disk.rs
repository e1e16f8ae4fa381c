//! A disk in memory, of any size, that checks the accesses to it.

use std::collections::BTreeMap;
use std::io;

use sidecore_volume::{Disk, NODE_BYTES};

use crate::rules::Ranges;

pub const PAGE: u64 = NODE_BYTES as u64;
pub type Page = Box<[u8; NODE_BYTES]>;

/// Sparse: pages that are not in `pages` are zero.
#[derive(Clone, Default)]
pub struct SparseDisk {
    pub size_bytes: u64,
    /// The size when the store was opened.
    pub seen_bytes: u64,
    pages: BTreeMap<u64, Page>,
    /// The number of reads.
    pub reads: u64,
    /// Bytes (first, count) that must not be written.
    pub guard: Ranges,
    /// The number of writes and flushes that succeed before all fail.
    pub fail_after: Option<u32>,
}

impl SparseDisk {
    pub fn new(size_bytes: u64) -> Self {
        Self { size_bytes, seen_bytes: size_bytes, ..Self::default() }
    }

    /// The pages that are not zero.
    pub fn live(&self) -> Vec<u64> {
        self.pages.keys().copied().collect()
    }

    pub fn page(&self, index: u64) -> Option<&Page> {
        self.pages.get(&index)
    }

    /// A page to change, if the disk has it.
    pub fn page_mut(&mut self, index: u64) -> Option<&mut Page> {
        if index >= self.size_bytes / PAGE {
            return None;
        }
        Some(self.pages.entry(index).or_insert_with(|| Box::new([0; NODE_BYTES])))
    }

    pub fn erase(&mut self, index: u64) {
        self.pages.remove(&index);
    }

    /// Checks the volume crate's promises about its accesses. The crate cannot know that the disk
    /// has shrunk.
    fn inside(&self, offset_bytes: u64, len_bytes: usize) -> io::Result<()> {
        let len_bytes = len_bytes as u64;
        assert!(
            offset_bytes.is_multiple_of(PAGE) && len_bytes.is_multiple_of(PAGE),
            "not aligned: {offset_bytes}"
        );
        let end = offset_bytes.checked_add(len_bytes);
        let end = end.filter(|end| *end <= self.size_bytes.max(self.seen_bytes));
        let end = end.unwrap_or_else(|| panic!("outside: {offset_bytes}+{len_bytes}"));
        if end > self.size_bytes { Err(io::Error::other("behind the end")) } else { Ok(()) }
    }

    fn count_down(&mut self) -> io::Result<()> {
        match &mut self.fail_after {
            Some(0) => Err(io::Error::other("the disk is broken")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Disk for SparseDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.inside(offset_bytes, buffer.len())?;
        self.reads += 1;
        buffer.fill(0);
        let first = offset_bytes / PAGE;
        let end = first + buffer.len() as u64 / PAGE;
        for (index, page) in self.pages.range(first..end) {
            buffer[(index - first) as usize * NODE_BYTES..][..NODE_BYTES]
                .copy_from_slice(&page[..]);
        }
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.inside(offset_bytes, data.len())?;
        self.count_down()?;
        for (page, index) in data.chunks_exact(NODE_BYTES).zip(offset_bytes / PAGE..) {
            assert!(
                !self.guard.overlaps((index * PAGE, PAGE)),
                "page {index} is overwritten, and was not to be"
            );
            if page == [0; NODE_BYTES] {
                self.pages.remove(&index);
            } else {
                self.pages.insert(index, Box::new(page.try_into().unwrap()));
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.count_down()
    }
}
