//! A disk that records all writes and flushes, so that the power can be cut at any of them
//! afterwards.
//!
//! # The faults of this disk
//!
//! * **It forgets.** A write is safe only once a flush that was requested after it has returned.
//!   Until then a power cut may lose the write, though reads show it.
//! * **It reorders.** Of the writes that are not safe, a power cut keeps any, in any order: a later
//!   write may survive and an earlier one not, also on the same sector.
//! * **It tears writes.** A power cut keeps any of a write's 512-byte sectors and loses the others.
//!   A sector itself is old or new, never a mixture.
//! * **It had another owner.** It starts full of that owner's data, and freed blocks keep their
//!   contents, so that reads of bytes that were never written are noticed.
//! * **It may fail.** On request a write or a flush reports an error; the write is then lost, or
//!   kept, like any other that is not safe.
//! * **It may lie**, on request: [`SimDisk::lie_about_flushes`] makes flushes do nothing. No format
//!   survives that, and the simulation must notice it.
//!
//! The disk does not flip bits in safe data, nor write to the wrong place: the format's checksums
//! have tests of their own. The exception is a cut that damages one copy of the superblock (see
//! [`super::cut`]).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_volume::Disk;

/// The unit that is written atomically, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// A write or flush of the disk.
#[derive(Clone, Debug)]
pub enum Event {
    /// A write of whole sectors.
    Write {
        /// The first sector.
        sector: usize,
        /// Whole sectors.
        data: Box<[u8]>,
    },
    /// A flush that returned.
    Flush {
        /// Whether the flush made all earlier writes safe, as it should.
        honest: bool,
    },
}

/// The disk as a run found it, and all its writes and flushes since.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The content at the start, all of it safe.
    pub base: Vec<u8>,
    /// In order. The first event is a flush of nothing.
    pub log: Vec<Event>,
}

struct Inner {
    /// The content that reads show.
    bytes: Vec<u8>,
    recording: Recording,
    flushes_lie: bool,
    /// The number of writes and flushes that succeed before one fails.
    succeeds: Option<u64>,
    /// The number of writes that there is space for.
    space: Option<u64>,
}

/// A handle on the disk; all clones share the disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<Inner>>);

impl SimDisk {
    /// A disk with this content.
    ///
    /// # Panics
    /// The length is not a multiple of the sector size.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        assert!(bytes.len().is_multiple_of(SECTOR_BYTES), "a disk is whole sectors");
        let recording = Recording { base: bytes.clone(), log: vec![Event::Flush { honest: true }] };
        Self(Arc::new(Mutex::new(Inner {
            bytes,
            recording,
            flushes_lie: false,
            succeeds: None,
            space: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all later flushes return without effect.
    pub fn lie_about_flushes(&self) {
        self.lock().flushes_lie = true;
    }

    /// Makes the write or flush after the next `count` fail, and only that one; `None` cancels
    /// that.
    pub fn fail_after(&self, count: Option<u64>) {
        self.lock().succeeds = count;
    }

    /// Makes the disk full after the next `count` writes; `None` makes space again.
    pub fn full_after(&self, count: Option<u64>) {
        self.lock().space = count;
    }

    /// The number of recorded events: the position of the next one.
    #[must_use]
    pub fn position(&self) -> usize {
        self.lock().recording.log.len()
    }

    /// The disk at the start and all events since.
    #[must_use]
    pub fn recording(&self) -> Recording {
        self.lock().recording.clone()
    }

    /// The content that reads show now, and that a crash of the daemon alone leaves.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// Fills `buffer` from a byte offset, in whole sectors.
    ///
    /// # Errors
    /// The range lies outside, or is not whole sectors.
    pub fn read_sectors(&self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        let inner = self.lock();
        let range = whole_sectors(offset_bytes, buffer.len(), inner.bytes.len())?;
        buffer.copy_from_slice(&inner.bytes[range]);
        Ok(())
    }

    /// Writes whole sectors at a byte offset.
    ///
    /// # Errors
    /// The range lies outside or is not whole sectors, or the disk was told to fail or be full.
    pub fn write_sectors(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        let mut inner = self.lock();
        let range = whole_sectors(offset_bytes, data.len(), inner.bytes.len())?;
        let sector = range.start / SECTOR_BYTES;
        inner.bytes[range].copy_from_slice(data);
        inner.recording.log.push(Event::Write { sector, data: data.into() });
        // A failed write may have written some of its data.
        match &mut inner.space {
            Some(0) => Err(io::ErrorKind::StorageFull.into()),
            Some(left) => {
                *left -= 1;
                inner.may_fail()
            }
            None => inner.may_fail(),
        }
    }

    /// Makes all writes safe.
    ///
    /// # Errors
    /// The disk was told to fail.
    pub fn flush_all(&self) -> io::Result<()> {
        let mut inner = self.lock();
        inner.may_fail()?;
        let honest = !inner.flushes_lie;
        inner.recording.log.push(Event::Flush { honest });
        Ok(())
    }
}

impl Inner {
    fn may_fail(&mut self) -> io::Result<()> {
        match &mut self.succeeds {
            None => Ok(()),
            Some(0) => {
                self.succeeds = None;
                Err(io::Error::other("the disk was told to fail"))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

/// The bytes of an access that must be whole sectors inside a disk of `size` bytes.
pub(super) fn whole_sectors(
    offset_bytes: u64,
    len: usize,
    size: usize,
) -> io::Result<std::ops::Range<usize>> {
    let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
    let inside = start.checked_add(len).is_some_and(|end| end <= size);
    if inside && start.is_multiple_of(SECTOR_BYTES) && len.is_multiple_of(SECTOR_BYTES) {
        Ok(start..start + len)
    } else {
        Err(io::Error::other(format!("{len} bytes at {offset_bytes} of a disk of {size} bytes")))
    }
}

/// Checks the trait's promise about metadata accesses: multiples of 4 KiB at multiples of 4 KiB.
pub(super) fn check_metadata_access(offset_bytes: u64, len: usize) {
    assert!(
        offset_bytes.is_multiple_of(4096) && len.is_multiple_of(4096) && len > 0,
        "a metadata access of {len} bytes at {offset_bytes}"
    );
}

impl Disk for SimDisk {
    fn size_bytes(&self) -> u64 {
        self.lock().bytes.len() as u64
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        check_metadata_access(offset_bytes, buffer.len());
        self.read_sectors(offset_bytes, buffer)
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        check_metadata_access(offset_bytes, data.len());
        self.write_sectors(offset_bytes, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flush_all()
    }
}
