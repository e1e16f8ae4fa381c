//! The header of a leg: the mirror that it belongs to, and the newest epoch that it knows.
//!
//! Two slots are written in turn, so that a torn one leaves the header before it.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 8 | magic, `SCMIRROR` |
//! | 8 | 4 | version, 2 |
//! | 12 | 4 | bytes of a block |
//! | 16 | 16 | UUID of the mirror |
//! | 32 | 8 | generation: the slot is its lowest bit |
//! | 40 | 8 | capacity in bytes |
//! | 48 | 8 | bytes of a region |
//! | 56 | 8 | start of the data |
//! | 64 | 8 | epoch |
//! | 72 | 8 | the epoch that the map reaches back to |
//! | 80 | 1 | number of the leg |
//! | 81 | 1 | members, a bit each |
//! | 82 | 1 | legs in sync, a bit each |
//! | 83 | 1 | 1: closed in good order |
//! | 84 | 1 | members of the epoch before, a bit each |
//! | 85 | 1 | 1: half of the members suffices, as a witness has permitted |
//! | 86 | 1 | 1: users were told that zeros can be written |
//! | 88 | 8 × 8 | the last epoch in which each leg was in sync |
//! | 152 | 8 | the newest epoch that was known when this one began |
//! | 160 | 8 | the store's own random number |
//! | 168 | 8 × 8 | that of the store which each leg's number is, or was last; 0: none |
//! | 4088 | 8 | checksum, XXH3 |

use sidecore_block::Geometry;
use twox_hash::XxHash3_64;

use crate::epoch::{Config, Holder, StoreId};
use crate::error::LegError;
use crate::layout::{BLOCK_BYTES, Layout, SLOTS};
use crate::legs::{LegSet, MAX_LEGS};

const MAGIC: [u8; 8] = *b"SCMIRROR";
/// The version that this program writes and knows.
pub(crate) const VERSION: u32 = 2;
const SEEN_AT: usize = 88;
const STORES_AT: usize = 168;
const CHECKSUM_AT: usize = 4088;
/// Epochs and generations that no mirror reaches by use.
pub(crate) const MAX_NUMBER: u64 = 1 << 63;
/// The most epochs by which one leg's header is ahead of the others'. An epoch begins when a leg
/// leaves or comes, which is durable on all legs before the next one begins: with one each second
/// that is a leg that was away for 136 years. A header that is further ahead is forged, or its
/// memory was damaged before its checksum was made; from there to [`MAX_NUMBER`], where all headers
/// would become unreadable, it is one attach.
const MAX_AHEAD: u64 = 1 << 32;
/// The largest generation of a header that is taken in: as many again are left.
const MAX_GENERATION: u64 = MAX_NUMBER / 2;

/// The mirror that a leg belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uuid: [u8; 16],
    pub(crate) layout: Layout,
    /// Whether users were told that zeros can be written: each leg can do it.
    pub(crate) writes_zeroes: bool,
}

impl Identity {
    /// Whether a store of this geometry can be a leg.
    pub(crate) fn takes(&self, geometry: &Geometry) -> Result<(), LegError> {
        if self.writes_zeroes && !geometry.write_zeroes {
            return Err(LegError::Zeroes);
        }
        self.layout.takes(geometry)
    }

    /// The stores of a new mirror, by the numbers of its legs. The identity is random.
    pub(crate) fn first_stores(&self, members: LegSet) -> [StoreId; MAX_LEGS] {
        std::array::from_fn(|leg| match members.has(leg) {
            true => XxHash3_64::oneshot_with_seed(leg as u64, &self.uuid).max(1),
            false => 0,
        })
    }
}

/// The fields of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) identity: Identity,
    pub(crate) leg: usize,
    pub(crate) store: StoreId,
    pub(crate) generation: u64,
    pub(crate) config: Config,
    pub(crate) is_clean: bool,
}

/// The place of the slot of a generation.
pub(crate) fn slot_bytes(generation: u64) -> u64 {
    generation.checked_rem(SLOTS).unwrap_or(0).saturating_mul(BLOCK_BYTES as u64)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

/// `N` bytes from there on; zeros outside of the block.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// The place of a leg's number in a table.
fn in_table(start: usize, leg: usize) -> usize {
    start.saturating_add(leg.saturating_mul(8))
}

fn table_at(bytes: &[u8], start: usize) -> [u64; MAX_LEGS] {
    std::array::from_fn(|leg| u64_at(bytes, in_table(start, leg)))
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        let Identity { uuid, layout, writes_zeroes } = &self.identity;
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &layout.block_bytes.to_le_bytes());
        put(&mut bytes, 16, uuid);
        let config = &self.config;
        for (at, number) in [
            (32, self.generation),
            (40, layout.capacity_bytes),
            (48, layout.region_bytes),
            (56, layout.data_bytes),
            (64, config.epoch),
            (72, config.covered_from),
            (152, config.parent),
            (160, self.store),
        ] {
            put(&mut bytes, at, &number.to_le_bytes());
        }
        let leg = u8::try_from(self.leg).unwrap_or(u8::MAX);
        let (members, in_sync) = (config.members.bits(), config.in_sync.bits());
        put(&mut bytes, 80, &[leg, members, in_sync, u8::from(self.is_clean)]);
        let flags = [config.is_permitted, *writes_zeroes].map(u8::from);
        put(&mut bytes, 84, &[config.former.bits()]);
        put(&mut bytes, 85, &flags);
        for (start, table) in [(SEEN_AT, &config.seen), (STORES_AT, &config.stores)] {
            for (leg, number) in table.iter().enumerate() {
                put(&mut bytes, in_table(start, leg), &number.to_le_bytes());
            }
        }
        let sum = XxHash3_64::oneshot(bytes.get(..CHECKSUM_AT).unwrap_or_default());
        put(&mut bytes, CHECKSUM_AT, &sum.to_le_bytes());
        bytes
    }

    /// The header in the two slots of a leg: the newer one of those that are whole.
    ///
    /// # Errors
    /// There is none, or it is of a version or contents that this program does not know.
    pub(crate) fn newest(slots: &[u8]) -> Result<Self, LegError> {
        let mut found = Vec::new();
        for bytes in slots.chunks_exact(BLOCK_BYTES) {
            found.push(Self::decode(bytes));
        }
        let newest = found.iter().flatten().max_by_key(|header| header.generation);
        if let Some(header) = newest {
            return Ok(header.clone());
        }
        // A slot of another version says more than a blank one.
        let errors = found.into_iter().filter_map(Result::err);
        Err(errors.max_by_key(LegError::rank).unwrap_or(LegError::NoHeader))
    }

    fn decode(bytes: &[u8]) -> Result<Self, LegError> {
        if array_at(bytes, 0) != MAGIC {
            return Err(LegError::NoHeader);
        }
        let sum = XxHash3_64::oneshot(bytes.get(..CHECKSUM_AT).unwrap_or_default());
        if u64_at(bytes, CHECKSUM_AT) != sum {
            return Err(LegError::Damaged);
        }
        let version = u32::from_le_bytes(array_at(bytes, 8));
        if version != VERSION {
            return Err(LegError::Version(version));
        }
        let [leg, members, in_sync, clean, former, permitted, zeroes] = array_at(bytes, 80);
        let layout = Layout {
            capacity_bytes: u64_at(bytes, 40),
            block_bytes: u32::from_le_bytes(array_at(bytes, 12)),
            region_bytes: u64_at(bytes, 48),
            data_bytes: u64_at(bytes, 56),
        };
        let header = Self {
            identity: Identity { uuid: array_at(bytes, 16), layout, writes_zeroes: zeroes == 1 },
            leg: usize::from(leg),
            store: u64_at(bytes, 160),
            generation: u64_at(bytes, 32),
            config: Config {
                epoch: u64_at(bytes, 64),
                parent: u64_at(bytes, 152),
                covered_from: u64_at(bytes, 72),
                members: LegSet::from_bits(members),
                former: LegSet::from_bits(former),
                is_permitted: permitted == 1,
                in_sync: LegSet::from_bits(in_sync),
                seen: table_at(bytes, SEEN_AT),
                stores: table_at(bytes, STORES_AT),
            },
            is_clean: clean == 1,
        };
        if header.is_sound() { Ok(header) } else { Err(LegError::Damaged) }
    }

    /// Whether a program of this version may have written it. The checksum says that some program
    /// did.
    fn is_sound(&self) -> bool {
        let config = &self.config;
        self.identity.layout.is_sound()
            && self.leg < MAX_LEGS
            && !config.in_sync.is_empty()
            && config.in_sync.is_within(config.members)
            && !config.former.is_empty()
            && (1..MAX_NUMBER).contains(&config.epoch)
            && (1..MAX_NUMBER).contains(&self.generation)
            && config.covered_from <= config.epoch
            && config.parent < config.epoch
            && config.seen.iter().all(|seen| *seen <= config.epoch)
            && self.store > 0
            && config.members.numbers().all(|leg| config.store(leg) > 0)
    }

    /// Whether the numbers are such as a mirror comes to whose other legs know the epoch `known`.
    pub(crate) fn counts_on(&self, known: u64) -> bool {
        self.config.epoch <= known.saturating_add(MAX_AHEAD) && self.generation <= MAX_GENERATION
    }

    /// Whether another store, of the same mirror, is a copy of this one.
    pub(crate) fn is_copied_by(&self, other: &Self) -> bool {
        self.leg == other.leg && self.store == other.store
    }

    /// The leg, as far as epochs are concerned.
    pub(crate) fn holder(&self) -> Holder {
        let (leg, store) = (self.leg, Some(self.store));
        Holder { leg, store, config: self.config, is_clean: self.is_clean }
    }
}

/// Decodes the fields of a header, whatever they are, with the right magic, version and checksum:
/// for a fuzz target. Returns whether they were taken, and are written as they were read.
#[doc(hidden)]
#[must_use]
pub fn decodes(fields: &[u8]) -> Option<bool> {
    let mut bytes = [0; BLOCK_BYTES];
    let count = fields.len().min(CHECKSUM_AT);
    put(&mut bytes, 0, fields.get(..count).unwrap_or_default());
    put(&mut bytes, 0, &MAGIC);
    put(&mut bytes, 8, &VERSION.to_le_bytes());
    let sum = XxHash3_64::oneshot(bytes.get(..CHECKSUM_AT).unwrap_or_default());
    put(&mut bytes, CHECKSUM_AT, &sum.to_le_bytes());
    let header = Header::newest(&bytes).ok()?;
    Some(Header::newest(&header.encode()).as_ref() == Ok(&header))
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn example() -> Header {
        let layout = Layout::of(4 << 20, 512, None).unwrap();
        let stores = [3, 5, 8, 0, 0, 0, 0, 0];
        let mut config = Config::first(LegSet::first(3), LegSet::first(2), stores);
        config.epoch = 9;
        Header {
            identity: Identity { uuid: *b"0123456789abcdef", layout, writes_zeroes: true },
            leg: 1,
            store: 5,
            generation: 4,
            config,
            is_clean: true,
        }
    }

    #[test]
    fn the_newer_slot_counts_and_a_torn_one_leaves_the_older() {
        let old = example();
        let new = Header { generation: 5, is_clean: false, ..example() };
        assert_eq!((slot_bytes(old.generation), slot_bytes(new.generation)), (0, 4096));
        let slots = [old.encode(), new.encode()].concat();
        assert_eq!(Header::newest(&slots), Ok(new));
        let mut torn = slots.clone();
        torn[4096 + 64] ^= 1;
        assert_eq!(Header::newest(&torn), Ok(old));
        torn[64] ^= 1;
        assert_eq!(Header::newest(&torn), Err(LegError::Damaged));
        assert_eq!(Header::newest(&[0; 8192]), Err(LegError::NoHeader));
        assert_eq!(Header::newest(&[]), Err(LegError::NoHeader));
        assert_eq!(decodes(&slots), Some(true));
        assert_eq!(decodes(&[]), None);
    }

    /// Inputs that are all refused would have a fuzzer begin in front of the checks.
    #[test]
    fn the_corpus_of_the_fuzz_target_has_headers_of_this_version() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../verify/fuzz/corpus/mirror_header");
        let files = std::fs::read_dir(corpus).unwrap();
        let inputs = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
        let read: Vec<Option<bool>> = inputs.map(|fields| decodes(&fields)).collect();
        assert!(!read.contains(&Some(false)), "{read:?}");
        let sound = read.iter().filter(|read| **read == Some(true)).count();
        assert!(sound >= 3 && sound < read.len(), "{read:?}");
    }

    #[test]
    fn every_bit_is_covered() {
        let good = example().encode();
        for bit in 0..BLOCK_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::newest(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_told_apart_from_damage() {
        let mut bytes = example().encode();
        put(&mut bytes, 8, &7_u32.to_le_bytes());
        let sum = XxHash3_64::oneshot(&bytes[..CHECKSUM_AT]);
        put(&mut bytes, CHECKSUM_AT, &sum.to_le_bytes());
        assert_eq!(Header::newest(&bytes), Err(LegError::Version(7)));
        assert_eq!(
            Header::newest(&[&[0; 4096], &bytes[..]].concat()),
            Err(LegError::Version(7)),
            "a blank slot says less"
        );
    }

    #[test]
    fn fields_that_cannot_be_are_refused_whatever_the_checksum_says() {
        let good = example();
        let config = |change: &dyn Fn(&mut Config)| {
            let mut header = example();
            change(&mut header.config);
            header
        };
        for bad in [
            Header { leg: MAX_LEGS, ..good.clone() },
            Header { generation: 0, ..good.clone() },
            Header { generation: u64::MAX, ..good.clone() },
            Header { store: 0, ..good },
            config(&|config| config.epoch = 0),
            config(&|config| config.covered_from = 10),
            config(&|config| config.parent = 9),
            config(&|config| config.former = LegSet::EMPTY),
            config(&|config| config.seen[7] = 10),
            config(&|config| config.in_sync = LegSet::EMPTY),
            config(&|config| config.in_sync = LegSet::of(5)),
            config(&|config| config.stores[2] = 0),
        ] {
            assert_eq!(Header::newest(&bad.encode()), Err(LegError::Damaged), "{bad:?}");
        }
    }
}
