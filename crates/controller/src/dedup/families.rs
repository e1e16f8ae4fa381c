//! The volumes whose blocks may become one: families, unless the operator allows more.

use std::collections::{BTreeMap, HashMap};

use sidecore_volume::{VolumeId, VolumeInfo};

/// The groups of volumes of a run. Each named volume brings its family along: blocks that snapshots
/// keep are not freed by changing the volume alone. Without names, all volumes.
pub(super) fn groups(
    volumes: &[VolumeInfo],
    named: &[VolumeId],
    across: bool,
) -> Vec<Vec<VolumeId>> {
    let mut roots: HashMap<VolumeId, VolumeId> = HashMap::new();
    let mut families: BTreeMap<VolumeId, Vec<VolumeId>> = BTreeMap::new();
    // By number: origins come before their copies. A deleted origin still joins its copies.
    for info in volumes {
        let root =
            info.origin.map_or(info.id, |origin| roots.get(&origin).copied().unwrap_or(origin));
        roots.insert(info.id, root);
        families.entry(root).or_default().push(info.id);
    }
    let wanted = |family: &Vec<VolumeId>| {
        named.is_empty() || family.iter().any(|member| named.contains(member))
    };
    let families: Vec<Vec<VolumeId>> = families.into_values().filter(wanted).collect();
    if across {
        let mut all: Vec<VolumeId> = families.into_iter().flatten().collect();
        all.sort_unstable();
        return vec![all];
    }
    families
}

#[cfg(test)]
mod tests {
    use sidecore_volume::VolumeState;

    use super::*;

    fn info(id: u64, origin: u64) -> VolumeInfo {
        VolumeInfo {
            id: VolumeId(id),
            name: format!("v{id}"),
            blocks: 1,
            quota_blocks: None,
            allocated_blocks: 0,
            extents: 0,
            read_only: false,
            origin: (origin > 0).then_some(VolumeId(origin)),
            created_at_unix_s: 0,
            state: VolumeState::Healthy,
        }
    }

    fn ids(groups: Vec<Vec<VolumeId>>) -> Vec<Vec<u64>> {
        groups.into_iter().map(|group| group.into_iter().map(|id| id.0).collect()).collect()
    }

    #[test]
    fn a_family_is_a_volume_with_its_copies_and_their_copies() {
        // 3 is deleted: its copies 5 and 6 are still of one family. 1, 4 and 8 are another.
        let volumes =
            [info(1, 0), info(2, 0), info(4, 1), info(5, 3), info(6, 3), info(7, 6), info(8, 4)];
        let all = vec![vec![1, 4, 8], vec![2], vec![5, 6, 7]];
        assert_eq!(ids(groups(&volumes, &[], false)), all);
        assert_eq!(ids(groups(&volumes, &[VolumeId(8)], false)), [vec![1, 4, 8]]);
        let two = [VolumeId(7), VolumeId(2)];
        assert_eq!(ids(groups(&volumes, &two, false)), [vec![2], vec![5, 6, 7]]);
        assert_eq!(ids(groups(&volumes, &two, true)), [vec![2, 5, 6, 7]]);
        assert_eq!(ids(groups(&volumes, &[], true)), [vec![1, 2, 4, 5, 6, 7, 8]]);
    }
}
