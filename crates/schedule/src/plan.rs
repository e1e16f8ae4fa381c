//! The plan of a schedule for one volume and this moment.

use crate::{Keep, LATEST_UNIX_S, Rule};

/// The changes of a volume's scheduled snapshots, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether a snapshot has to be made now. If it fails, nothing may be deleted.
    pub create: bool,
    /// The times of the snapshots that have expired then, oldest first.
    pub delete: Vec<u64>,
    /// The number of snapshots from later than now: the clock was ahead when they were made, or is
    /// behind.
    pub later: usize,
}

/// A look that found a volume to be as in one of its snapshots. Times are in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unchanged {
    /// The time of the look.
    pub at: u64,
    /// The time of the snapshot.
    pub since: u64,
}

/// Plans the changes of a volume whose scheduled snapshots have these times, in seconds since 1970.
///
/// If the volume is unchanged, the finest rule needs no other snapshot in the slot of that look,
/// because it keeps the newest states, however old. A coarser one does: of the snapshots in its
/// slots it keeps the first alone. A look at a snapshot that is gone or expires does not count: the
/// state would be lost with it.
#[must_use]
pub fn plan(now: u64, existing: &[u64], keep: &Keep, unchanged: Option<Unchanged>) -> Plan {
    let unchanged = unchanged.filter(|Unchanged { since, .. }| existing.contains(since));
    let without = unchanged.map(|Unchanged { at, since }| {
        let plan = plan_with(now, existing, keep, Some(at));
        (!plan.delete.contains(&since)).then_some(plan)
    });
    without.flatten().unwrap_or_else(|| plan_with(now, existing, keep, None))
}

fn plan_with(now: u64, existing: &[u64], keep: &Keep, unchanged_at: Option<u64>) -> Plan {
    let now = now.min(LATEST_UNIX_S);
    let mut times = existing.to_vec();
    times.sort_unstable();
    let create = keep.rules().iter().enumerate().any(|(index, rule)| {
        let slot = rule.period.slot(now);
        let unchanged_at = unchanged_at.filter(|_| index == 0);
        !times.iter().rev().chain(&unchanged_at).any(|&at| rule.period.slot(at) == slot)
    });
    // Later ones would take the places of all that are made until their time comes.
    let past = times.partition_point(|&at| at <= now);
    let later = times.len().saturating_sub(past);
    times.truncate(past);
    times.dedup();
    times.extend(create.then_some(now));
    let mut kept = vec![false; times.len()];
    keep.rules().iter().for_each(|rule| mark(&times, *rule, &mut kept));
    let expired = times.iter().zip(kept).filter(|(_, is_kept)| !is_kept);
    Plan { create, delete: expired.map(|(&at, _)| at).collect(), later }
}

/// Marks the first time of each of the newest slots of a rule. The times are sorted.
fn mark(times: &[u64], rule: Rule, kept: &mut [bool]) {
    let mut left = rule.count;
    // The slot of the time looked at last, which is the first of it so far.
    let mut newest = None;
    for (index, &at) in times.iter().enumerate().rev() {
        let slot = rule.period.slot(at);
        if let Some((_, first)) = newest.filter(|(other, _)| *other != slot) {
            set(kept, first);
            left = left.saturating_sub(1);
        }
        if left == 0 {
            return;
        }
        newest = Some((slot, index));
    }
    if let Some((_, first)) = newest {
        set(kept, first);
    }
}

fn set(kept: &mut [bool], index: usize) {
    if let Some(kept) = kept.get_mut(index) {
        *kept = true;
    }
}
