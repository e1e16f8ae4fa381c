//! The superblock: which tree of volumes is the durable one.
//!
//! Four slots of 4 KiB lie at the start of the store. Generation *n* is written to the slots 2*n*
//! mod 4 and the one behind it, so a generation never overwrites the one before. Each slot ends in
//! the checksum of all that is in front of it. The table of fields is in `docs/volume-format.md`.

use crate::bytes::{array_at, put, put_u64, u8_at, u32_at, u64_at};
use crate::geometry::{Geometry, SLOTS, checksum, is_whole, tag_of};
use crate::limits::{
    BLOCK_BYTES, MAX_LABEL_BYTES, MAX_LEVELS, MAX_STORE_BLOCKS, MAX_VOLUMES, MIN_STORE_BYTES,
    NODE_BYTES,
};
use crate::log::SuperblockId;
use crate::node::{Pointer, Root};
use crate::owner::Owner;

/// The first eight bytes of a slot.
pub(crate) const MAGIC: [u8; 8] = *b"SCVOLUME";
/// The version of the format that this program writes.
pub(crate) const VERSION: u32 = 1;
/// Where the checksum is.
const CHECKSUM_AT: usize = 4088;

/// The offset of the boot under which the store is open.
const IN_USE_AT: usize = 176;
/// The offset of the owner's epoch and series.
const OWNER_AT: usize = 200;

/// The fields of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) block_bytes: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) label: String,
    pub(crate) generation: u64,
    pub(crate) total_blocks: u64,
    pub(crate) next_volume: u64,
    pub(crate) volume_count: u64,
    pub(crate) catalogue: Option<Root>,
    /// Blocks were only ever shared by snapshots and clones: a block that two volumes refer to is
    /// at the same virtual block of both, and one is made from the other. False if that is not
    /// known.
    pub(crate) only_copies: bool,
    /// Features without which the store must not be opened: none are known.
    pub(crate) features: u64,
    /// Features without which it must not be written to: none are known.
    pub(crate) features_to_write: u64,
    /// The boot under which a process has the store open, with a [log](crate::log); `None` if it
    /// was closed, or is open without one.
    pub(crate) in_use: Option<[u8; 16]>,
    /// The last owner, of a store that several hosts reach.
    pub(crate) owner: Option<Owner>,
}

/// Why a slot is no superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SlotError {
    /// Nothing was ever written here.
    Blank,
    /// There is no magic number.
    NotOurs,
    /// The checksum is wrong, or the block belongs elsewhere.
    Damaged(String),
    /// Whole, and of another version.
    Version(u32),
    /// Whole, and it says what cannot be.
    Invalid(String),
}

/// The two slots of a generation.
pub(crate) fn slots_of(generation: u64) -> [u32; 2] {
    if generation.is_multiple_of(2) { [0, 1] } else { [2, 3] }
}

/// Where a slot lies.
pub(crate) fn slot_offset_bytes(slot: u32) -> u64 {
    u64::from(slot).saturating_mul(NODE_BYTES as u64)
}

/// Generations and volume numbers that no store reaches by use. What says more is no superblock of
/// ours, and there would be no next number.
pub(crate) const MAX_NUMBER: u64 = 1 << 63;

impl Superblock {
    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.block_bytes,
            total_blocks: self.total_blocks,
            tag: tag_of(&self.uuid),
        }
    }

    /// The identity of this superblock among all of the store.
    pub(crate) fn id(&self) -> SuperblockId {
        let [slot, _] = slots_of(self.generation);
        let bytes = self.encode(slot);
        SuperblockId { generation: self.generation, checksum: u64_at(&bytes, CHECKSUM_AT) }
    }

    /// The order of superblocks: of two in one generation, the newer owner's is the newer one.
    pub(crate) fn rank(&self) -> (u64, u64) {
        (self.generation, self.owner.map_or(0, |owner| owner.epoch))
    }

    /// Whether a former owner has written this one into the generation of `newer`.
    pub(crate) fn is_superseded_by(&self, newer: &Self) -> bool {
        let is_former = match (&self.owner, &newer.owner) {
            (former, Some(owner)) => former.is_none_or(|former| owner.is_newer_than(&former)),
            (_, None) => false,
        };
        is_former && self.generation == newer.generation && self.uuid == newer.uuid
    }

    pub(crate) fn encode(&self, slot: u32) -> Vec<u8> {
        let mut bytes = vec![0; NODE_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &self.block_bytes.to_le_bytes());
        put(&mut bytes, 16, &self.uuid);
        put_u64(&mut bytes, 32, self.generation);
        put_u64(&mut bytes, 40, self.total_blocks);
        put_u64(&mut bytes, 48, self.next_volume);
        put_u64(&mut bytes, 56, self.volume_count);
        let (pointer, level) =
            self.catalogue.map_or((Pointer::default(), 0), |root| (root.pointer, root.level));
        put_u64(&mut bytes, 64, pointer.address);
        put_u64(&mut bytes, 72, pointer.checksum);
        put(&mut bytes, 80, &[level, u8::from(self.only_copies)]);
        put_u64(&mut bytes, 88, self.features);
        put_u64(&mut bytes, 96, self.features_to_write);
        put(&mut bytes, 104, &slot.to_le_bytes());
        let label = self.label.as_bytes();
        put(&mut bytes, 108, &u32::try_from(label.len()).unwrap_or(0).to_le_bytes());
        put(&mut bytes, 112, label);
        if let Some(boot) = &self.in_use {
            put_u64(&mut bytes, IN_USE_AT, 1);
            put(&mut bytes, IN_USE_AT.saturating_add(8), boot);
        }
        if let Some(Owner { series, epoch }) = self.owner {
            put_u64(&mut bytes, OWNER_AT, epoch);
            put_u64(&mut bytes, OWNER_AT.saturating_add(8), series);
        }
        let sum = checksum(bytes.get(..CHECKSUM_AT).unwrap_or_default());
        put_u64(&mut bytes, CHECKSUM_AT, sum);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], slot: u32) -> Result<Self, SlotError> {
        if array_at(bytes, 0) != Some(MAGIC) {
            let blank = bytes.iter().all(|byte| *byte == 0);
            return Err(if blank { SlotError::Blank } else { SlotError::NotOurs });
        }
        let covered = bytes.get(..CHECKSUM_AT).unwrap_or_default();
        if bytes.len() != NODE_BYTES || !is_whole(covered, u64_at(bytes, CHECKSUM_AT)) {
            return Err(SlotError::Damaged("its checksum is wrong".to_owned()));
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(SlotError::Version(u32_at(bytes, 8)));
        }
        let generation = u64_at(bytes, 32);
        if u32_at(bytes, 104) != slot || !slots_of(generation).contains(&slot) || slot >= SLOTS {
            return Err(SlotError::Damaged(format!(
                "it holds slot {} of generation {generation}",
                u32_at(bytes, 104)
            )));
        }
        Self::fields(bytes, generation).map_err(SlotError::Invalid)
    }

    /// The fields of a slot whose checksum is right. A program that computed the checksum wrote it,
    /// but perhaps not this one, so the fields are checked.
    fn fields(bytes: &[u8], generation: u64) -> Result<Self, String> {
        let label_bytes = usize::try_from(u32_at(bytes, 108)).unwrap_or(usize::MAX);
        if label_bytes > MAX_LABEL_BYTES {
            return Err(format!("a label of {label_bytes} bytes"));
        }
        let label = bytes.get(112..).and_then(|rest| rest.get(..label_bytes)).unwrap_or_default();
        let label =
            std::str::from_utf8(label).map_err(|_| "the label is not text".to_owned())?.to_owned();
        let superblock = Self {
            block_bytes: u32_at(bytes, 12),
            uuid: array_at(bytes, 16).unwrap_or_default(),
            label,
            generation,
            total_blocks: u64_at(bytes, 40),
            next_volume: u64_at(bytes, 48),
            volume_count: u64_at(bytes, 56),
            catalogue: Root::read(u64_at(bytes, 64), u64_at(bytes, 72), u8_at(bytes, 80)),
            only_copies: u8_at(bytes, 81) == 1,
            features: u64_at(bytes, 88),
            features_to_write: u64_at(bytes, 96),
            in_use: (u64_at(bytes, IN_USE_AT) == 1)
                .then(|| array_at(bytes, IN_USE_AT.saturating_add(8)).unwrap_or_default()),
            owner: Some(Owner {
                series: u64_at(bytes, OWNER_AT.saturating_add(8)),
                epoch: u64_at(bytes, OWNER_AT),
            })
            .filter(|owner| owner.epoch != 0),
        };
        superblock.validate()?;
        Ok(superblock)
    }

    fn validate(&self) -> Result<(), String> {
        if !BLOCK_BYTES.contains(&self.block_bytes) {
            return Err(format!("blocks of {} bytes", self.block_bytes));
        }
        let size_bytes = self.total_blocks.saturating_mul(u64::from(self.block_bytes));
        if self.total_blocks > MAX_STORE_BLOCKS || size_bytes < MIN_STORE_BYTES {
            return Err(format!("a store of {} blocks", self.total_blocks));
        }
        if !(1..MAX_NUMBER).contains(&self.generation) {
            return Err(format!("generation {}", self.generation));
        }
        let too_many =
            self.volume_count > MAX_VOLUMES as u64 || self.volume_count >= self.next_volume;
        if too_many || self.next_volume >= MAX_NUMBER {
            return Err(format!(
                "{} volumes, the next one being number {}",
                self.volume_count, self.next_volume
            ));
        }
        if let Some(root) = self.catalogue
            && (root.level > MAX_LEVELS || !self.geometry().node_fits(root.pointer.address))
        {
            return Err(format!(
                "a catalogue at block {}, level {}",
                root.pointer.address, root.level
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            block_bytes: 1024,
            uuid: *b"0123456789abcdef",
            label: "shelf 7".to_owned(),
            generation: 6,
            total_blocks: 4096,
            next_volume: 9,
            volume_count: 3,
            catalogue: Some(Root {
                pointer: Pointer { address: 4000, checksum: 0xabcd },
                level: 1,
            }),
            only_copies: true,
            features: 0,
            features_to_write: 0,
            in_use: None,
            owner: None,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Superblock::decode(&example().encode(1), 1), Ok(example()));
        let empty =
            Superblock { catalogue: None, label: String::new(), generation: 7, ..example() };
        assert_eq!(Superblock::decode(&empty.encode(2), 2), Ok(empty));
        let in_use = Superblock { in_use: Some(*b"the second boot."), ..example() };
        assert_eq!(Superblock::decode(&in_use.encode(1), 1), Ok(in_use));
        let owned = Superblock { owner: Some(Owner { series: 0, epoch: 7 }), ..example() };
        assert_eq!(Superblock::decode(&owned.encode(1), 1), Ok(owned));
    }

    #[test]
    fn a_generation_never_overwrites_the_one_before() {
        for generation in 1..9 {
            let (old, new) = (slots_of(generation), slots_of(generation + 1));
            assert!(old.iter().all(|slot| !new.contains(slot)));
            assert_eq!(u64::from(new[0]), 2 * (generation + 1) % 4);
        }
    }

    #[test]
    fn every_bit_is_covered() {
        let good = example().encode(0);
        for bit in 0..NODE_BYTES * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&bad, 0).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_slot_in_the_wrong_place_is_damage() {
        assert!(matches!(Superblock::decode(&example().encode(0), 1), Err(SlotError::Damaged(_))));
        assert!(matches!(Superblock::decode(&example().encode(2), 2), Err(SlotError::Damaged(_))));
        assert_eq!(Superblock::decode(&[0; NODE_BYTES], 0), Err(SlotError::Blank));
        assert_eq!(Superblock::decode(&[1; NODE_BYTES], 0), Err(SlotError::NotOurs));
        assert_eq!(Superblock::decode(&[], 0), Err(SlotError::Blank));
    }

    #[test]
    fn another_version_is_told_apart_from_damage() {
        let mut bytes = example().encode(0);
        put(&mut bytes, 8, &7_u32.to_le_bytes());
        let sum = checksum(&bytes[..CHECKSUM_AT]);
        put_u64(&mut bytes, CHECKSUM_AT, sum);
        assert_eq!(Superblock::decode(&bytes, 0), Err(SlotError::Version(7)));
    }

    #[test]
    fn fields_that_cannot_be_are_refused_whatever_the_checksum_says() {
        let root = |address, level| Some(Root { pointer: Pointer { address, checksum: 1 }, level });
        let wrong = [
            Superblock { block_bytes: 2048, ..example() },
            Superblock { total_blocks: 10, ..example() },
            Superblock { total_blocks: u64::MAX, ..example() },
            Superblock { volume_count: 9, ..example() },
            Superblock { volume_count: 1 << 40, next_volume: 1 << 41, ..example() },
            Superblock { catalogue: root(4001, 0), ..example() },
            Superblock { catalogue: root(4096, 0), ..example() },
            Superblock { catalogue: root(4, 0), ..example() },
            Superblock { catalogue: root(4000, 200), ..example() },
        ];
        for superblock in wrong {
            let decoded = Superblock::decode(&superblock.encode(0), 0);
            assert!(matches!(decoded, Err(SlotError::Invalid(_))), "{superblock:?}");
        }
    }
}
