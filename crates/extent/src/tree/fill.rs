//! The fill of nodes: which entries are merged, and how many go into each node.

use crate::entry::{Entry, NULL, PRUNED};
use crate::node::capacity;

/// Nodes with fewer entries take over their neighbour's, except on the tree's right edge. Two nodes
/// made from one overfull node have more entries than this, and room for more: neither splitting
/// nor joining follows the other at once.
pub(super) fn least(level: usize) -> usize {
    capacity(level).saturating_mul(2) / 5
}

/// The value of a pruned part in a node of this level.
pub(super) fn pruned_value(level: usize) -> u64 {
    if level == 0 { PRUNED } else { NULL }
}

/// Whether an entry of a node of this level is a pruned part.
pub(super) fn is_pruned(level: usize, entry: Entry) -> bool {
    entry.value == pruned_value(level)
}

/// Merges neighbours that continue each other.
pub(super) fn coalesce(level: usize, mut entries: Vec<Entry>) -> Vec<Entry> {
    entries.dedup_by(|next, entry| {
        let one = continues(level, *entry, *next);
        if one {
            entry.count = entry.count.saturating_add(next.count);
        }
        one
    });
    entries
}

pub(super) fn continues(level: usize, entry: Entry, next: Entry) -> bool {
    if entry.end() != next.first {
        return false;
    }
    match (is_pruned(level, entry), is_pruned(level, next)) {
        (true, true) => true,
        (false, false) => level == 0 && entry.extent().continues_in(next.extent()),
        _ => false,
    }
}

/// The number of entries in each node, for this many entries of a level.
///
/// On the tree's right edge nodes are filled up, because later entries mostly come behind them:
/// trees that grow by appending are full. Elsewhere all nodes get about the same number, so that
/// each has room for more.
pub(super) fn sizes(level: usize, entries: usize, edge: bool) -> impl Iterator<Item = usize> {
    let nodes = entries.div_ceil(capacity(level));
    let each = entries.checked_div(nodes).unwrap_or(0);
    let more = entries.checked_rem(nodes).unwrap_or(0);
    (0..nodes).map(move |node| match edge {
        true => capacity(level),
        false => each.saturating_add(usize::from(node < more)),
    })
}
