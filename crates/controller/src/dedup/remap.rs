//! The steps of a run that change the hypervisor side's state, under its lock.

use sidecore_volume::{Disk, VolumeError};

use super::fingerprints::Place;
use super::plan::{Candidate, Plan};
use crate::epochs::Epoch;
use crate::hypervisor::{Hypervisor, State};

/// Whether a guest's write or an operation has locked any of the blocks: data of a block may be
/// being copied, which must not be freed.
pub(super) fn is_busy(state: &State, candidate: &Candidate, plan: &Plan) -> bool {
    let busy = |place: Place| {
        let open = state.open.get(&place.volume);
        open.is_some_and(|open| open.is_busy(plan.window.around(place.block)))
    };
    let changed = plan.volumes.iter().map(|volume| Place { volume: *volume, block: plan.block });
    candidate.source.into_iter().chain([candidate.target]).chain(changed).any(busy)
}

/// Guards the blocks of a plan: from the epoch on that this begins, no guest writes to them in
/// place.
pub(super) fn guard(
    hypervisor: &Hypervisor,
    state: &mut State,
    candidate: &Candidate,
    plan: &Plan,
) -> Epoch {
    state.volumes.guard(&plan.physical());
    let places = || candidate.source.into_iter().chain([candidate.target]);
    for place in places() {
        let Some(open) = state.open.get_mut(&place.volume) else { continue };
        open.tree.prune(plan.window.around(place.block));
        let retired = open.tree.take_retired();
        state.limbo.retire(retired, &hypervisor.epochs);
    }
    let epoch = hypervisor.epochs.advance();
    for place in places() {
        if let Some(open) = state.open.get_mut(&place.volume) {
            open.shared_at = epoch;
        }
    }
    epoch
}

/// Changes the mappings of a plan.
pub(super) fn change(
    hypervisor: &Hypervisor,
    state: &mut State,
    disk: &mut dyn Disk,
    plan: &Plan,
) -> Result<(), VolumeError> {
    let range = plan.window.around(plan.block);
    let transaction = state.transaction;
    for volume in &plan.volumes {
        match plan.keep {
            None => state.volumes.remap_zeros(disk, *volume, range)?,
            Some(keep) => {
                let from = (keep.volume, plan.window.around(keep.block));
                state.volumes.remap(disk, from, (*volume, range.first))?;
            }
        }
        if let Some(open) = state.open.get_mut(volume) {
            open.changed(transaction);
            open.tree.prune(range);
            let retired = open.tree.take_retired();
            state.limbo.retire(retired, &hypervisor.epochs);
        }
    }
    Ok(())
}
