//! Blocks that two claim, both of them by trees that are whole.

use std::collections::{BTreeMap, BTreeSet};

use super::mend::Cut;
use crate::claims::claimants;
use crate::doubt::Families;
use crate::error::RepairError;
use crate::info::VolumeId;
use crate::node::Entry;
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::walk::Source;

/// As many are listed.
const MOST: usize = 256;

/// Blocks of the store that only one of these can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rivals {
    /// The first block.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The volumes that claim them, by number and name. Snapshots and clones may claim them with
    /// each other.
    pub volumes: Vec<(VolumeId, String)>,
    /// A node of the catalogue lies there: then all of the volumes have to lose.
    pub is_catalogue: bool,
}

/// The claims of volumes on blocks, as far as they were read.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Nodes, with the volumes that came upon them.
    nodes: BTreeMap<u64, BTreeSet<u64>>,
    data: Vec<(Entry, u64)>,
}

impl Claims {
    pub(super) fn node(&mut self, address: u64, volume: u64) {
        self.nodes.entry(address).or_default().insert(volume);
    }

    pub(super) fn data(&mut self, entry: Entry, volume: u64) {
        self.data.push((entry, volume));
    }

    /// Blocks (first, count) that two volumes claim and only one of them can have, in order.
    pub(super) fn rivals(
        &mut self,
        records: &[Record],
        catalogue: &BTreeSet<u64>,
        node_blocks: u64,
        only_copies: bool,
    ) -> Vec<(u64, u64)> {
        let families = Families::of(records);
        let mut all = RangeSet::default();
        let mut used = RangeSet::default();
        for (entry, _) in &self.data {
            used.cover(entry.physical, entry.count);
        }
        for address in self.nodes.keys().chain(catalogue) {
            if used.overlaps(*address, node_blocks) {
                all.cover(*address, node_blocks);
            }
        }
        // Otherwise equal blocks may have been made one, wherever they were.
        if only_copies {
            for (address, volumes) in &self.nodes {
                let first = volumes.first().copied().unwrap_or(0);
                if volumes.iter().any(|volume| !families.may_be_related(first, *volume)) {
                    all.cover(*address, node_blocks);
                }
            }
            self.data_of_strangers(&families, &mut all);
        }
        all.iter().take(MOST).collect()
    }

    /// Data that is at two virtual blocks, or of two families.
    fn data_of_strangers(&mut self, families: &Families, all: &mut RangeSet) {
        self.data.sort_unstable_by_key(|(entry, volume)| (entry.physical, *volume));
        // The claim that reaches furthest: a claim compatible with it is compatible with all claims
        // that it is compatible with.
        let mut furthest: Option<(Entry, u64)> = None;
        for (entry, volume) in &self.data {
            if let Some((other, rival)) = furthest {
                let end = entry.physical_end().min(other.physical_end());
                let count = end.saturating_sub(entry.physical);
                let same_place = entry.first.wrapping_sub(entry.physical)
                    == other.first.wrapping_sub(other.physical);
                if count > 0 && !(same_place && families.may_be_related(*volume, rival)) {
                    all.cover(entry.physical, count);
                }
            }
            if furthest.is_none_or(|(other, _)| entry.physical_end() > other.physical_end()) {
                furthest = Some((*entry, *volume));
            }
        }
    }
}

/// Finds the volumes of the claims.
pub(super) fn name(
    source: &mut dyn Source,
    records: &[Record],
    catalogue: &BTreeSet<u64>,
    node_blocks: u64,
    blocks: &[(u64, u64)],
) -> Vec<Rivals> {
    if blocks.is_empty() {
        return Vec::new();
    }
    let claimants = claimants(source, records, node_blocks, blocks);
    let name = |id: &u64| {
        let record = records.iter().find(|record| record.id == *id);
        (VolumeId(*id), record.map(|record| record.name.clone()).unwrap_or_default())
    };
    let rivals = blocks.iter().zip(claimants).map(|((first, count), volumes)| {
        let from = first.saturating_sub(node_blocks).saturating_add(1);
        let mut nodes = catalogue.range(from..first.saturating_add(*count));
        Rivals {
            first: *first,
            count: *count,
            volumes: volumes.iter().map(name).collect(),
            is_catalogue: nodes.next().is_some(),
        }
    });
    rivals.filter(|rivals| !rivals.volumes.is_empty()).collect()
}

/// The blocks that the volumes of these names lose: all that another volume claims as well.
pub(super) fn cuts(
    records: &[Record],
    rivals: &[Rivals],
    losers: &[String],
) -> Result<Vec<Cut>, RepairError> {
    let mut cuts = Vec::new();
    for loser in losers {
        let Some(record) = records.iter().find(|record| record.name == *loser) else {
            return Err(RepairError::NoSuchVolume(loser.clone()));
        };
        let mut blocks = RangeSet::default();
        for rivals in
            rivals.iter().filter(|rivals| rivals.volumes.iter().any(|(id, _)| id.0 == record.id))
        {
            blocks.cover(rivals.first, rivals.count);
        }
        if blocks.blocks() == 0 {
            return Err(RepairError::NoRival(loser.clone()));
        }
        cuts.push(Cut { volume: record.id, from: None, blocks });
    }
    Ok(cuts)
}
