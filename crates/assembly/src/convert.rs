//! Converts controllers' reports to those of the API, with blocks as bytes.

use sidecore_controller as controller;
use sidecore_volume::{Loss, Repair, Report, Space, VolumeInfo};

use crate::report::{
    CheckReport, ControllerReport, EventReport, FunctionReport, LossReport, RepairReport,
    RivalsReport, SpaceReport, TreeMemoryReport, TreeReport,
};

/// The report of a controller and its volumes, at one moment.
pub(crate) fn controller(
    report: controller::ControllerReport,
    store: &str,
    volumes: &[VolumeInfo],
) -> ControllerReport {
    let block_bytes = report.block_bytes;
    ControllerReport {
        name: report.name,
        store: store.to_owned(),
        label: report.label,
        block_bytes,
        capacity_bytes: report.store.capacity_bytes,
        read_only: report.read_only.is_some(),
        reason: report.read_only,
        full: report.full,
        nearly_full_percent: report.used_percent,
        provisioned_bytes: volumes
            .iter()
            .filter(|volume| !volume.read_only)
            .map(|volume| volume.blocks.saturating_mul(block_bytes.into()))
            .fold(0, u64::saturating_add),
        damage: report.damage.iter().map(ToString::to_string).collect(),
        space: space(&report.space, block_bytes),
        volumes: volumes.len() as u64,
        extents: volumes.iter().map(|volume| volume.extents).fold(0, u64::saturating_add),
        tree_memory: TreeMemoryReport {
            used_bytes: report.tree_bytes,
            max_bytes: report.tree_bytes_max,
        },
        translation: report.translation,
        counts: report.counts,
        functions: report
            .functions
            .into_iter()
            .map(|report| function(report, block_bytes))
            .collect(),
        events: report.events.into_iter().map(event).collect(),
    }
}

fn space(space: &Space, block_bytes: u32) -> SpaceReport {
    let bytes = |blocks: u64| blocks.saturating_mul(block_bytes.into());
    SpaceReport {
        total_bytes: bytes(space.total),
        free_bytes: bytes(space.free),
        data_bytes: bytes(space.data),
        metadata_bytes: bytes(space.metadata),
        reserved_bytes: bytes(space.reserved),
        granted_bytes: bytes(space.granted),
        pending_bytes: bytes(space.pending),
    }
}

fn function(report: controller::FunctionReport, block_bytes: u32) -> FunctionReport {
    let bytes = |blocks: u64| blocks.saturating_mul(block_bytes.into());
    let per_s = |limit: Option<controller::Limit>| limit.map(|limit| limit.per_s);
    let (limits, tree) = (report.limits, report.tree);
    FunctionReport {
        id: report.id,
        volume: report.volume,
        weight: report.weight,
        read_only: report.read_only,
        read_iops: per_s(limits.read_iops),
        write_iops: per_s(limits.write_iops),
        read_bps: per_s(limits.read_bytes_per_s),
        write_bps: per_s(limits.write_bytes_per_s),
        channels: report.channels,
        tree: TreeReport {
            depth: u32::try_from(tree.depth).unwrap_or(u32::MAX),
            nodes: tree.nodes as u64,
            extents: tree.extents,
            mapped_bytes: bytes(tree.mapped_blocks),
            pruned_ranges: tree.pruned_ranges,
            pruned_bytes: bytes(tree.pruned_blocks),
        },
        stats: report.stats,
        miss_address: report.miss_address,
        miss_size: report.miss_size,
    }
}

fn event(event: controller::Event) -> EventReport {
    EventReport { at_unix_s: event.at_unix_s, what: event.what, times: event.times }
}

/// The result of a check of all metadata.
pub(crate) fn check(report: Report) -> CheckReport {
    CheckReport {
        clean: report.is_clean(),
        generation: report.generation,
        volumes: report.volumes,
        nodes: report.nodes,
        extents: report.extents,
        total_blocks: report.total_blocks,
        data_blocks: report.data_blocks,
        shared_data_blocks: report.shared_data_blocks,
        metadata_blocks: report.metadata_blocks.saturating_add(report.superblock_blocks),
        free_blocks: report.free_blocks,
        transient_blocks: report.granted_blocks.saturating_add(report.pending_blocks),
        problems: report
            .problems
            .iter()
            .map(|problem| format!("{}: {}", problem.place, problem.what))
            .collect(),
        more_problems: report.more_problems,
    }
}

/// The plan of a repair, or its result.
pub(crate) fn repair(repair: &Repair) -> RepairReport {
    let bytes = |blocks: u64| blocks.saturating_mul(repair.block_bytes.into());
    let mut report = RepairReport {
        needed: repair.is_needed(),
        decided: repair.is_decided(),
        generation: repair.generation,
        block_bytes: repair.block_bytes,
        damage: repair.damage.iter().map(ToString::to_string).collect(),
        notes: repair.notes.clone(),
        ..RepairReport::default()
    };
    for loss in &repair.losses {
        match loss {
            Loss::Volumes { count, numbers } => {
                report.lost_volumes = *count;
                report.lost_numbers.clone_from(numbers);
            }
            Loss::Blocks { name, first, count, why, .. } => report.losses.push(LossReport {
                volume: name.clone(),
                offset_bytes: bytes(*first),
                size_bytes: bytes(*count),
                why: why.to_string(),
            }),
        }
    }
    let rivals = repair.rivals.iter().map(|rivals| RivalsReport {
        first: rivals.first,
        count: rivals.count,
        volumes: rivals.volumes.iter().map(|(_, name)| name.clone()).collect(),
        catalogue: rivals.is_catalogue,
    });
    report.rivals = rivals.collect();
    report
}
