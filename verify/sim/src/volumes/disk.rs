//! A disk that records what is done to it, so that the power can be cut afterwards, anywhere.
//!
//! # What this disk does that a good one would not
//!
//! * **It forgets.** A write is safe only once a flush that was asked for after it has returned. Until then a power cut may
//!   lose it, though reads show it.
//! * **It reorders.** Of the writes that are not safe, a power cut keeps any, in any order: a later one may be there and an
//!   earlier one not, also on the same sector.
//! * **It tears.** What it keeps of a write is any of its 512-byte sectors, and loses the others. A sector itself is old or
//!   new, never a mixture.
//! * **It was somebody else's.** It starts full of another owner's data, and what is freed on it keeps its contents, so
//!   that showing bytes which were never written there is noticed.
//! * **It may fail.** On request a write or a flush reports an error; the write is then lost, or kept, like any other that
//!   is not safe.
//! * **It may lie**, on request: [`SimDisk::lie_about_flushes`] makes flushes do nothing. No format survives that, and the
//!   simulation must notice it.
//!
//! It does not flip bits in what is safe, nor write to the wrong place: the format's checksums have tests of their own,
//! except that a cut may come with one damaged copy of the superblock (see [`super::cut`]).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_volume::Disk;

/// The unit that is written entirely or not at all, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// One thing that was done to the disk.
#[derive(Clone, Debug)]
pub enum Event {
    /// A write of whole sectors.
    Write {
        /// The first sector.
        sector: usize,
        /// What was written.
        data: Box<[u8]>,
    },
    /// A flush that returned.
    Flush {
        /// Whether everything written before is safe from now on, as it should be.
        honest: bool,
    },
}

/// What a run left behind: the disk as it was found, and everything that was done to it since.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The bytes at the start, all of them safe.
    pub base: Vec<u8>,
    /// In the order in which it was done. The first event is a flush of nothing.
    pub log: Vec<Event>,
}

struct Inner {
    /// What a read shows.
    bytes: Vec<u8>,
    recording: Recording,
    flushes_lie: bool,
    /// How many more writes and flushes succeed before one fails.
    succeeds: Option<u64>,
    /// How many more writes there is space for.
    space: Option<u64>,
}

/// A handle on the disk; all clones are the same disk.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<Inner>>);

impl SimDisk {
    /// A disk that holds `bytes`.
    ///
    /// # Panics
    /// They are not whole sectors.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        assert!(bytes.len().is_multiple_of(SECTOR_BYTES), "a disk is whole sectors");
        let recording = Recording { base: bytes.clone(), log: vec![Event::Flush { honest: true }] };
        Self(Arc::new(Mutex::new(Inner { bytes, recording, flushes_lie: false, succeeds: None, space: None })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on flushes return without doing anything.
    pub fn lie_about_flushes(&self) {
        self.lock().flushes_lie = true;
    }

    /// The write or flush after the next `count` ones fails, and that one only; `None` calls it off.
    pub fn fail_after(&self, count: Option<u64>) {
        self.lock().succeeds = count;
    }

    /// After the next `count` writes there is no space for any; `None` makes some.
    pub fn full_after(&self, count: Option<u64>) {
        self.lock().space = count;
    }

    /// How many events were recorded: the position of the next one.
    #[must_use]
    pub fn position(&self) -> usize {
        self.lock().recording.log.len()
    }

    /// What was recorded, and the disk as reads show it now.
    #[must_use]
    pub fn recording(&self) -> Recording {
        self.lock().recording.clone()
    }

    /// The bytes as reads show them now: what is found after a crash of the daemon alone.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// Fills `buffer` from a byte offset on, in whole sectors.
    ///
    /// # Errors
    /// It lies outside.
    pub fn read_sectors(&self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        let inner = self.lock();
        let range = whole_sectors(offset_bytes, buffer.len(), inner.bytes.len())?;
        buffer.copy_from_slice(&inner.bytes[range]);
        Ok(())
    }

    /// Writes whole sectors at a byte offset.
    ///
    /// # Errors
    /// It lies outside, or the disk was told to fail.
    pub fn write_sectors(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        let mut inner = self.lock();
        let range = whole_sectors(offset_bytes, data.len(), inner.bytes.len())?;
        let sector = range.start / SECTOR_BYTES;
        inner.bytes[range].copy_from_slice(data);
        inner.recording.log.push(Event::Write { sector, data: data.into() });
        // It failed, and some of it may be there all the same.
        match &mut inner.space {
            Some(0) => Err(io::ErrorKind::StorageFull.into()),
            Some(left) => {
                *left -= 1;
                inner.may_fail()
            }
            None => inner.may_fail(),
        }
    }

    /// Makes what was written safe.
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
pub(super) fn whole_sectors(offset_bytes: u64, len: usize, size: usize) -> io::Result<std::ops::Range<usize>> {
    let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
    let inside = start.checked_add(len).is_some_and(|end| end <= size);
    if inside && start.is_multiple_of(SECTOR_BYTES) && len.is_multiple_of(SECTOR_BYTES) {
        Ok(start..start + len)
    } else {
        Err(io::Error::other(format!("{len} bytes at {offset_bytes} of a disk of {size} bytes")))
    }
}

/// What the trait promises of metadata accesses, checked: multiples of 4 KiB at multiples of 4 KiB.
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
