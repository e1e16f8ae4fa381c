//! Power cuts: the disks that a recording may leave.

use std::collections::BTreeMap;
use std::io;

use sidecore_volume::Disk;

use super::disk::{Event, Recording, SECTOR_BYTES, check_metadata_access, whole_sectors};
use crate::Random;

/// The superblock's slots at the start of the disk, in bytes, in which a cut may flip a bit.
const SUPERBLOCK_SLOTS_BYTES: u64 = 16 << 10;

/// A walk over a recording, event by event, that makes disks of it.
pub struct Cutter<'a> {
    log: &'a [Event],
    /// The disk as it was found, with all writes that are safe by now.
    bytes: Vec<u8>,
    /// The number of events that have happened.
    position: usize,
    /// One more than the newest flush's position: writes before it should be safe.
    flushed: usize,
    /// The sectors with data that is not safe, and that data, oldest first.
    pending: BTreeMap<usize, Vec<&'a [u8]>>,
    /// The sectors of the newest write, as a range, if that write is not safe.
    last_write: Option<(usize, usize)>,
}

impl<'a> Cutter<'a> {
    /// A walk at the start of `recording`.
    #[must_use]
    pub fn new(recording: &'a Recording) -> Self {
        let (log, bytes) = (recording.log.as_slice(), recording.base.clone());
        Self { log, bytes, position: 0, flushed: 0, pending: BTreeMap::new(), last_write: None }
    }

    /// The number of events that have happened.
    #[must_use]
    pub const fn position(&self) -> usize {
        self.position
    }

    /// All events before this position were followed by a flush that returned.
    #[must_use]
    pub const fn flushed(&self) -> usize {
        self.flushed
    }

    /// Whether a cut here can leave more than one disk.
    #[must_use]
    pub fn is_uncertain(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Takes the next event; false at the end.
    pub fn advance(&mut self) -> bool {
        let Some(event) = self.log.get(self.position) else { return false };
        self.position += 1;
        match event {
            Event::Flush { honest } => {
                self.flushed = self.position;
                if *honest {
                    for (sector, versions) in std::mem::take(&mut self.pending) {
                        if let Some(newest) = versions.last() {
                            self.bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES]
                                .copy_from_slice(newest);
                        }
                    }
                    self.last_write = None;
                }
            }
            Event::Write { sector, data } => {
                for (index, data) in data.chunks_exact(SECTOR_BYTES).enumerate() {
                    self.pending.entry(sector + index).or_default().push(data);
                }
                self.last_write = Some((*sector, sector + data.len() / SECTOR_BYTES));
            }
        }
        true
    }

    /// Cuts the power here: `look` gets one of the disks that may be left, chosen by `random`. If
    /// it `may_damage`, the cut may flip a bit in a copy of the superblock.
    pub fn cut<T>(
        &mut self,
        random: &mut Random,
        may_damage: bool,
        look: impl FnOnce(&mut Image<'_>) -> T,
    ) -> T {
        let luck = Luck::draw(random, self.pending.len() as u64);
        let mut image = Image { bytes: &mut self.bytes, undo: Vec::new(), is_damaged: false };
        for (index, (&sector, versions)) in self.pending.iter().enumerate() {
            let last = self.last_write.is_some_and(|(start, end)| (start..end).contains(&sector));
            if let Some(kept) = luck.keeps(random, index as u64, last, versions.len()) {
                image.put(sector, versions[kept]);
            }
        }
        if may_damage && random.once_in(16) {
            image.flip_bit(random);
        }
        let result = look(&mut image);
        image.restore();
        result
    }
}

/// The part of the unsafe data that a cut keeps.
#[derive(Clone, Copy, Debug)]
enum Luck {
    Nothing,
    Everything,
    /// Each sector with a probability of so many in 256.
    Some(u64),
    /// All sectors but one.
    AllBut(u64),
    /// One sector alone.
    Only(u64),
    /// Only the newest write, which overtook the others.
    LastWrite,
    /// All but the newest write.
    AllButLastWrite,
}

impl Luck {
    fn draw(random: &mut Random, sectors: u64) -> Self {
        match random.below(10) {
            0 => Self::Nothing,
            1 => Self::Everything,
            2 => Self::AllBut(random.below(sectors.max(1))),
            3 => Self::Only(random.below(sectors.max(1))),
            4 => Self::LastWrite,
            5 => Self::AllButLastWrite,
            6 => Self::Some(24),
            7 => Self::Some(232),
            _ => Self::Some(128),
        }
    }

    /// The index of a sector's version that is kept, if any.
    fn keeps(
        self,
        random: &mut Random,
        index: u64,
        in_last_write: bool,
        versions: usize,
    ) -> Option<usize> {
        let keeps = match self {
            Self::Nothing => false,
            Self::Everything => return Some(versions - 1),
            Self::Some(chance) => random.below(256) < chance,
            Self::AllBut(lost) => index != lost,
            Self::Only(kept) => index == kept,
            Self::LastWrite => in_last_write,
            Self::AllButLastWrite if in_last_write => return versions.checked_sub(2),
            Self::AllButLastWrite => true,
        };
        // Usually the newest version: an older version of a sector that is rewritten in place is
        // rarer.
        let kept =
            if random.once_in(4) { random.below(versions as u64) as usize } else { versions - 1 };
        keeps.then_some(kept)
    }
}

/// A disk after a power cut.
pub struct Image<'a> {
    bytes: &'a mut Vec<u8>,
    /// The former data of changed sectors, newest last.
    undo: Vec<(usize, [u8; SECTOR_BYTES])>,
    is_damaged: bool,
}

impl Image<'_> {
    /// The content of the disk.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Whether a copy of the superblock has a flipped bit.
    #[must_use]
    pub const fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    fn put(&mut self, sector: usize, data: &[u8]) {
        let place = &mut self.bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES];
        let mut before = [0; SECTOR_BYTES];
        before.copy_from_slice(place);
        self.undo.push((sector, before));
        place.copy_from_slice(data);
    }

    /// Damages one copy of the superblock, as flash may when the power is cut.
    fn flip_bit(&mut self, random: &mut Random) {
        let bit = random.below(SUPERBLOCK_SLOTS_BYTES * 8) as usize;
        let sector = bit / 8 / SECTOR_BYTES;
        let mut data = [0; SECTOR_BYTES];
        data.copy_from_slice(&self.bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES]);
        data[bit / 8 % SECTOR_BYTES] ^= 1 << (bit % 8);
        self.put(sector, &data);
        self.is_damaged = true;
    }

    fn restore(self) {
        for (sector, before) in self.undo.iter().rev() {
            self.bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(before);
        }
    }
}

impl Disk for Image<'_> {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        check_metadata_access(offset_bytes, buffer.len());
        let range = whole_sectors(offset_bytes, buffer.len(), self.bytes.len())?;
        buffer.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        check_metadata_access(offset_bytes, data.len());
        let range = whole_sectors(offset_bytes, data.len(), self.bytes.len())?;
        for (index, data) in data.chunks_exact(SECTOR_BYTES).enumerate() {
            self.put(range.start / SECTOR_BYTES + index, data);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
