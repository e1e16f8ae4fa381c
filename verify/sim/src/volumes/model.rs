//! The content that the volumes should have: now, and after a power cut at any point of the past.
//!
//! # Cells
//!
//! A *cell* is a block of storage as the volumes see it: a write to a fresh block makes a cell,
//! volumes that share a block refer to the same cell, and a write in place changes the cell. The
//! model does not know where a cell lies on the disk; it checks that every cell has a place of its
//! own.
//!
//! # Generations
//!
//! A commit takes a *generation*: the volumes that exist, and the cell at each of their blocks. A
//! power cut leaves the newest generation whose commit has returned, or the one whose commit was in
//! progress, exactly one of the two, completely.
//!
//! # The content of a block after a cut
//!
//! In a generation that was taken at position `g` of the recording, after a cut at `k`, with
//! everything before `f` flushed: a sector holds the data that its cell held at `g`, overwritten by
//! the writes in place of *the same block of the same volume* since then: certainly by those before
//! `f`, and perhaps by any one since `f`. Data that another block wrote into the cell after `g`
//! must not show: that block may have owned the cell by then, but not in the generation that came
//! back.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use sidecore_volume::VolumeInfo;

use super::disk::SECTOR_BYTES;

/// The content of a sector, as the number of the write that it comes from. Zero means zeroes.
pub type Stamp = u64;

/// The upper half of every stamp, which distinguishes stamps from other data.
const STAMP_MARK: u64 = 0x51de_c04e_0000_0000;

/// The owner of the stamps that are on the disk before the first write.
const FORMER_OWNER: &str = "the disk's former owner";

/// The place that each stamp was written to, for the messages.
#[derive(Clone, Debug, Default)]
pub struct Stamps {
    /// The volume and its sector, by the stamp's lower half.
    given: Vec<Option<(u64, u64)>>,
}

impl Stamps {
    /// A stamp for sector `sector` of `volume`; `None` for the disk's former owner.
    pub fn give(&mut self, place: Option<(u64, u64)>) -> Stamp {
        self.given.push(place);
        STAMP_MARK | (self.given.len() as u64)
    }

    /// The stamp in words.
    #[must_use]
    pub fn describe(&self, stamp: Stamp) -> String {
        let index = (stamp ^ STAMP_MARK).wrapping_sub(1);
        match self.given.get(usize::try_from(index).unwrap_or(usize::MAX)) {
            _ if stamp == 0 => "zeroes".to_owned(),
            None => format!("{stamp:#x}, which was never written as data"),
            Some(None) => FORMER_OWNER.to_owned(),
            Some(Some((volume, sector))) => {
                format!("write {index} (to sector {sector} of volume {volume})")
            }
        }
    }
}

/// A sector full of `stamp`.
#[must_use]
pub fn fill(stamp: Stamp) -> [u8; SECTOR_BYTES] {
    let mut data = [0; SECTOR_BYTES];
    for word in data.chunks_exact_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
    data
}

/// The stamp that a sector is full of.
///
/// # Errors
/// The first word of a sector that is not full of one stamp: a torn or foreign sector.
pub fn stamp_of(sector: &[u8]) -> Result<Stamp, u64> {
    let mut word = [0; 8];
    word.copy_from_slice(&sector[..8]);
    let stamp = u64::from_le_bytes(word);
    if sector[8..] == sector[..sector.len() - 8] { Ok(stamp) } else { Err(stamp) }
}

/// A block of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The volume's id.
    pub volume: u64,
    /// The block's number in the volume.
    pub block: u64,
}

/// A write to a sector of a cell.
#[derive(Clone, Copy, Debug)]
struct CellWrite {
    /// The position of the write in the recording.
    position: usize,
    writer: Place,
    stamp: Stamp,
}

/// The index of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CellId(usize);

/// All cells of a run with all their writes: by cell and sector, in order.
#[derive(Clone, Debug, Default)]
pub struct Cells(Vec<Vec<Vec<CellWrite>>>);

impl Cells {
    /// Makes a cell of so many sectors, without writes.
    pub fn make(&mut self, sectors: usize) -> CellId {
        self.0.push(vec![Vec::new(); sectors]);
        CellId(self.0.len() - 1)
    }

    /// Notes a write of `writer` to a sector of a cell.
    pub fn write(
        &mut self,
        cell: CellId,
        sector: usize,
        position: usize,
        writer: Place,
        stamp: Stamp,
    ) {
        self.0[cell.0][sector].push(CellWrite { position, writer, stamp });
    }

    /// The current content of a sector of a cell.
    #[must_use]
    pub fn now(&self, cell: CellId, sector: usize) -> Option<Stamp> {
        self.0[cell.0][sector].last().map(|write| write.stamp)
    }

    /// Whether a sector of a cell, read at `place`, may hold `found` after a cut. See the
    /// [module](self).
    fn allows(&self, cell: CellId, sector: usize, place: Place, when: When, found: Stamp) -> bool {
        let writes = &self.0[cell.0][sector];
        let before =
            writes.iter().rev().find(|write| write.position < when.taken).map(|write| write.stamp);
        let mut allowed = before == Some(found);
        for write in writes {
            if write.position < when.taken || write.position >= when.cut || write.writer != place {
                continue;
            }
            if write.position < when.flushed {
                allowed = write.stamp == found;
            } else {
                allowed |= write.stamp == found;
            }
        }
        allowed
    }

    fn describe(&self, cell: CellId, sector: usize, stamps: &Stamps) -> String {
        let writes = self.0[cell.0][sector].iter();
        let lines: Vec<String> = writes
            .map(|write| {
                let Place { volume, block } = write.writer;
                format!(
                    "    at {} from block {block} of volume {volume}: {}",
                    write.position,
                    stamps.describe(write.stamp)
                )
            })
            .collect();
        lines.join("\n")
    }
}

/// The positions that decide which writes count.
#[derive(Clone, Copy, Debug)]
pub struct When {
    /// The position at which the generation was taken.
    pub taken: usize,
    /// All events before this position were flushed.
    pub flushed: usize,
    /// The position of the power cut.
    pub cut: usize,
}

/// The expected state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelVolume {
    /// The name, which is unique.
    pub name: String,
    /// The size in blocks.
    pub blocks: u64,
    /// The most blocks that the volume may have.
    pub quota_blocks: Option<u64>,
    /// Whether the volume is a snapshot.
    pub read_only: bool,
    /// The volume that this one was made from.
    pub origin: Option<u64>,
    /// The time of creation.
    pub created_at_unix_s: u64,
    /// The cell at each block; the other blocks are holes.
    pub cells: Rc<BTreeMap<u64, CellId>>,
}

/// All volumes, by id.
#[derive(Clone, Debug, Default)]
pub struct State(pub BTreeMap<u64, ModelVolume>);

impl State {
    /// The number of blocks that refer to each cell.
    #[must_use]
    pub fn references(&self) -> HashMap<CellId, u32> {
        let mut references = HashMap::new();
        for cell in self.0.values().flat_map(|volume| volume.cells.values()) {
            *references.entry(*cell).or_insert(0) += 1;
        }
        references
    }
}

/// The state that a commit makes safe.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The position of the recording at which the generation was taken.
    pub taken: usize,
    /// The volumes of the generation.
    pub state: State,
    /// The largest id ever used: once this generation is safe, no smaller or equal id may be used
    /// again.
    pub newest_id: Option<u64>,
    /// The number of answered changes that are in the generation.
    pub answered: usize,
}

/// The generations that a cut may leave, from some position on.
#[derive(Clone, Debug)]
pub struct Mark {
    /// The position of the recording.
    pub from: usize,
    /// The newest generation that is certainly safe.
    pub safe: Rc<Generation>,
    /// The generation whose commit is in progress.
    pub next: Option<Rc<Generation>>,
}

/// A volume as it was found: its description and the content of its blocks.
#[derive(Clone, Debug)]
pub struct FoundVolume {
    /// The volume crate's description.
    pub info: VolumeInfo,
    /// The mapped blocks.
    pub blocks: BTreeMap<u64, FoundBlock>,
}

/// A block as it was found.
#[derive(Clone, Debug)]
pub struct FoundBlock {
    /// The number of the physical block.
    pub physical: u64,
    /// The volume crate's answer whether the block is shared.
    pub shared: bool,
    /// The stamp of each sector, or the first word of a sector that has none.
    pub sectors: Vec<Result<Stamp, u64>>,
}

/// All volumes that were found, by id.
pub type Found = BTreeMap<u64, FoundVolume>;

/// Compares found volumes with a generation. A block may be reported as shared though it is so no
/// longer, as long as a generation in which it was shared may come back, unless `exactly_shared`.
///
/// # Errors
/// The first difference, in words.
pub fn compare(
    found: &Found,
    generation: &Generation,
    cells: &Cells,
    stamps: &Stamps,
    when: When,
    exactly_shared: bool,
) -> Result<(), String> {
    let state = &generation.state;
    let names = |ids: Vec<&u64>| format!("{ids:?}");
    if !found.keys().eq(state.0.keys()) {
        return Err(format!(
            "volumes {} instead of {}",
            names(found.keys().collect()),
            names(state.0.keys().collect())
        ));
    }
    let references = state.references();
    let (mut places, mut owners) = (HashMap::new(), HashMap::new());
    for ((id, found), expected) in found.iter().zip(state.0.values()) {
        compare_info(&found.info, expected).map_err(|what| format!("volume {id}: {what}"))?;
        if !found.blocks.keys().eq(expected.cells.keys()) {
            let extra: Vec<_> =
                found.blocks.keys().filter(|block| !expected.cells.contains_key(block)).collect();
            let missing: Vec<_> =
                expected.cells.keys().filter(|block| !found.blocks.contains_key(block)).collect();
            return Err(format!(
                "volume {id}: blocks {extra:?} should be holes, and {missing:?} should not"
            ));
        }
        for ((&block, found), &cell) in found.blocks.iter().zip(expected.cells.values()) {
            let place = Place { volume: *id, block };
            let wrong = |what: String| {
                Err(format!("volume {id}, block {block} (physical {}): {what}", found.physical))
            };
            if *places.entry(cell).or_insert(found.physical) != found.physical {
                return wrong(format!(
                    "shares its content with another block, which lies at {}",
                    places[&cell]
                ));
            }
            if let Some((other, at)) = owners.insert(found.physical, (cell, place))
                && other != cell
            {
                return wrong(format!(
                    "the same physical block is {at:?} as well, and has another content"
                ));
            }
            let shared = references[&cell] > 1;
            if found.shared != shared && (shared || exactly_shared) {
                return wrong(format!("said to be {}shared", if found.shared { "" } else { "un" }));
            }
            for (sector, content) in found.sectors.iter().enumerate() {
                match content {
                    Ok(stamp) if cells.allows(cell, sector, place, when, *stamp) => {}
                    Ok(stamp) | Err(stamp) => {
                        return wrong(format!(
                            "its sector {sector} is {}{}; {when:?}; written there was, in order,\n\
                             {}",
                            stamps.describe(*stamp),
                            if content.is_err() { ", and not alone" } else { "" },
                            cells.describe(cell, sector, stamps)
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

fn compare_info(found: &VolumeInfo, expected: &ModelVolume) -> Result<(), String> {
    let said = (
        &found.name,
        found.blocks,
        found.quota_blocks,
        found.read_only,
        found.origin.map(|id| id.0),
        found.created_at_unix_s,
        found.allocated_blocks,
    );
    let wanted = (
        &expected.name,
        expected.blocks,
        expected.quota_blocks,
        expected.read_only,
        expected.origin,
        expected.created_at_unix_s,
        expected.cells.len() as u64,
    );
    if said == wanted { Ok(()) } else { Err(format!("is {said:?} instead of {wanted:?}")) }
}
