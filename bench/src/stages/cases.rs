//! The stages, the stores and the loads.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use sidecore_block::{
    Batch, BlockDevice, Geometry, NullStore, OpenedStage, Operation, RamStore, Stage, StageError,
    Tag, contain, open_stage,
};
use sidecore_linux::{FileOptions, FileStore};
use sidecore_luks::{KEY_BYTES, SectorSize, Segment, Xts};
use sidecore_reactor::CoreContext;
use sidecore_stage_delay::DelayStage;
use sidecore_stage_encrypt::{EncryptStage, EncryptStore};
use sidecore_stage_fault::FaultPlan;
use sidecore_stage_integrity::{FormatOptions, IntegrityStage, format};
use sidecore_stage_meter::MeterStage;
use sidecore_stage_read_only::ReadOnlyStage;
use sidecore_units::Nanos;
use tempfile::TempDir;

use crate::fill::{allocated_file, directory_in_memory};
use crate::requests;

/// Bytes of a block with a checksum.
const BLOCK_BYTES: u32 = 4096;

pub(super) type Store = Arc<dyn BlockDevice>;

/// The sector of encryption: that of a disk which `sidecore luks format` makes.
pub(super) const SECTOR: SectorSize = SectorSize::SMALLEST;

/// The stages of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chain {
    None,
    ReadOnly,
    /// Without failures.
    Fault,
    /// Without a delay.
    Delay,
    Meter,
    Encrypt,
    /// Plain data is counted.
    MeterEncrypt,
    Integrity,
}

impl Chain {
    const MEASURED: [Self; 7] = [
        Self::ReadOnly,
        Self::Fault,
        Self::Delay,
        Self::Meter,
        Self::Encrypt,
        Self::MeterEncrypt,
        Self::Integrity,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::ReadOnly => "read-only",
            Self::Fault => "fault",
            Self::Delay => "delay",
            Self::Meter => "meter",
            Self::Encrypt => "encrypt",
            Self::MeterEncrypt => "meter+encrypt",
            Self::Integrity => "integrity",
        }
    }

    /// Puts the stages in front of a store, each contained as in the daemon.
    pub(super) fn open(self, store: Store) -> Result<Store> {
        Ok(match self {
            Self::None => store,
            Self::ReadOnly => open(&ReadOnlyStage, store)?,
            Self::Fault => open(&FaultPlan::default(), store)?,
            Self::Delay => open(&DelayStage { delay_us: 0 }, store)?,
            Self::Meter => open(&MeterStage::default(), store)?,
            Self::Encrypt => encrypt(store)?,
            Self::MeterEncrypt => open(&MeterStage::default(), encrypt(store)?)?,
            Self::Integrity => integrity(store)?,
        })
    }
}

fn open(stage: &impl Stage, below: Store) -> OpenedStage {
    open_stage(stage, super::NAME, below)
}

/// The stage `encrypt`, without the files of its key.
fn encrypt(below: Store) -> OpenedStage {
    contain(EncryptStage::WORD, super::NAME, below, |below| {
        let segment = Segment { offset_bytes: 0, len_bytes: None, sector: SECTOR, first_unit: 0 };
        let store = EncryptStore::new(below, key(), segment, false);
        let failed = |misfit: sidecore_stage_encrypt::Misfit| StageError {
            stage: EncryptStage::WORD,
            reason: misfit.to_string(),
        };
        Ok(Arc::new(store.map_err(failed)?))
    })
}

/// The stage `integrity`, on a store that is made anew: the queue without it has written to the
/// checksums. All blocks are written, since memory of a block that never was lies in a cache.
fn integrity(below: Store) -> Result<Store> {
    let (uuid, block_bytes) = ([1; 16], BLOCK_BYTES);
    format(&*below, &FormatOptions { uuid, block_bytes, slots: None, force: true })?;
    let store = open(&IntegrityStage { uuid: None }, below)?;
    write_all(&store)?;
    Ok(store)
}

/// Writes all blocks of a store, and flushes them.
fn write_all(store: &Store) -> Result<()> {
    const PIECE_BYTES: u64 = 64 << 10;
    let mut channel = store.open_channel(&CoreContext::default(), 1)?;
    let memory = requests::memory(PIECE_BYTES)?;
    let end_bytes = store.geometry().capacity_bytes;
    let mut run = |operation, at_bytes, bytes| {
        let mut request = requests::request(&memory, operation, 0, bytes)?;
        (request.offset_bytes, request.tag) = (at_bytes, Some(Tag::from_bits(0)));
        let (mut batch, mut completed) = (vec![request], Batch::new());
        while completed.is_empty() {
            channel.exchange(Nanos::ZERO, &mut batch, &mut completed);
        }
        let mut request = completed.remove(0);
        request.tag.take().map(Tag::into_bits);
        request.result.context("a store that is made anew")
    };
    for at_bytes in (0..end_bytes).step_by(PIECE_BYTES as usize) {
        run(Operation::Write, at_bytes, PIECE_BYTES.min(end_bytes - at_bytes))?;
    }
    run(Operation::Flush, 0, 0)
}

/// A key like any other: the two halves differ.
pub(super) fn key() -> Xts {
    Xts::new(&std::array::from_fn::<u8, KEY_BYTES, _>(|index| index as u8))
}

/// The store below the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    Null,
    Ram,
    File,
}

impl Medium {
    pub(super) const ALL: [Self; 3] = [Self::Null, Self::Ram, Self::File];

    const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ram => "ram",
            Self::File => "file",
        }
    }

    /// Makes the store, with the directory that it lies in, if any.
    pub(super) fn open(self, bytes: u64) -> Result<(Store, Option<TempDir>)> {
        let geometry = Geometry::new(bytes, 512);
        Ok(match self {
            Self::Null => (Arc::new(NullStore::new(geometry)), None),
            Self::Ram => {
                let store = RamStore::new(geometry).context("not enough memory")?;
                (Arc::new(store), None)
            }
            Self::File => {
                let directory = directory_in_memory()?;
                let path = allocated_file(&Path::join(directory.path(), "store"), bytes)?;
                (Arc::new(FileStore::open(&FileOptions::new(path))?), Some(directory))
            }
        })
    }
}

/// The operation and the size of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    name: &'static str,
    pub(super) operation: Operation,
    pub(super) bytes: u64,
}

const LOADS: [Load; 3] = [
    Load { name: "randread512", operation: Operation::Read, bytes: 512 },
    Load { name: "randread", operation: Operation::Read, bytes: 4096 },
    Load { name: "randwrite", operation: Operation::Write, bytes: 4096 },
];

const DEPTHS: [usize; 2] = [1, 32];

/// A case, named STAGES/STORE/OPERATION/qdDEPTH.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) chain: Chain,
    pub(super) medium: Medium,
    pub(super) load: Load,
    pub(super) depth: usize,
}

impl Case {
    /// Whether a library does the work of the stage, on a store that takes none of the time.
    pub(super) fn has_floor(self) -> bool {
        self.chain == Chain::Encrypt && self.medium == Medium::Ram && self.load.bytes == 4096
    }

    fn makes_sense(self) -> bool {
        match self.chain {
            Chain::ReadOnly => self.load.operation == Operation::Read,
            // The store has to keep the checksums, and requests are blocks with one.
            Chain::Integrity => {
                self.medium != Medium::Null && self.load.bytes == u64::from(BLOCK_BYTES)
            }
            _ => true,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (chain, medium) = (self.chain.name(), self.medium.name());
        write!(f, "{chain}/{medium}/{}/qd{}", self.load.name, self.depth)
    }
}

/// All cases, in the order of the table.
pub(super) fn all() -> impl Iterator<Item = Case> {
    let chains = Chain::MEASURED.into_iter();
    let media = |chain| Medium::ALL.into_iter().map(move |medium| (chain, medium));
    let loads = |(chain, medium)| LOADS.into_iter().map(move |load| (chain, medium, load));
    let cases = |(chain, medium, load)| {
        DEPTHS.into_iter().map(move |depth| Case { chain, medium, load, depth })
    };
    chains.flat_map(media).flat_map(loads).flat_map(cases).filter(|case| case.makes_sense())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_about_cases_that_exist() {
        let names: Vec<String> = all().map(|case| case.to_string()).collect();
        for bound in super::super::BOUNDS {
            assert!(names.iter().any(|name| name == bound.case), "{}", bound.case);
        }
        let floors = all().filter(|case| case.has_floor()).count();
        assert_eq!(floors, 4);
    }
}
