//! What a host writes down before it sends an order whose end it may not see.

/// The keys kept of a host: a registration that comes later than so many claims is not its own.
const KEYS: usize = 16;

/// The notes of one host about the disks of one store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The newest keys that this host may have registered, the newest last.
    pub keys: Vec<u64>,
    /// The keys of others whose preemption this host has begun, and whose end it does not know.
    pub preempted: Vec<u64>,
}

impl Notes {
    /// The notes of the next attempt, with its key. `known` are the keys that it may preempt.
    pub(super) fn begin(mut self, key: u64, known: &[u64]) -> Self {
        self.keys.retain(|old| *old != key);
        self.keys.push(key);
        let surplus = self.keys.len().saturating_sub(KEYS);
        self.keys.drain(..surplus);
        // Another owner has served since without the others.
        self.preempted.retain(|noted| known.contains(noted));
        self
    }

    /// The notes, with a key that is preempted next.
    pub(super) fn with(&self, victim: Option<u64>) -> Self {
        let mut notes = self.clone();
        if let Some(victim) = victim.filter(|victim| !notes.preempted.contains(victim)) {
            notes.preempted.push(victim);
        }
        notes
    }
}
