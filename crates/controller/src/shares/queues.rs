//! The queues of one function on one sidecore, which have equal shares.

/// The units that a queue may be ahead of another with queued requests. More than a turn's worth: a
/// queue polled early in a turn wastes no units for one polled late.
pub(super) const LEAD_UNITS: u64 = 64;

#[derive(Debug, Default)]
struct Queue {
    /// Units started while others competed.
    served: u64,
    /// The queue has requests that it may not start.
    waiting: bool,
    /// The store is the reason.
    for_store: bool,
}

/// The queues, by number.
#[derive(Debug, Default)]
pub(super) struct Queues {
    queues: Vec<Option<Queue>>,
    count: usize,
    waiting: usize,
    for_store: usize,
}

impl Queues {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn add(&mut self) -> usize {
        let queue = Some(Queue { served: self.least_allowed(), ..Queue::default() });
        let index = self.queues.iter().position(Option::is_none).unwrap_or(self.queues.len());
        match self.queues.get_mut(index) {
            Some(slot) => *slot = queue,
            None => self.queues.push(queue),
        }
        self.count = self.count.saturating_add(1);
        index
    }

    pub(super) fn remove(&mut self, index: usize) {
        self.set_waiting(index, false, false);
        if let Some(slot) = self.queues.get_mut(index)
            && slot.take().is_some()
        {
            self.count = self.count.saturating_sub(1);
        }
    }

    /// The units that queue `index` may start before the other queues with queued requests.
    pub(super) fn lead(&self, index: usize) -> i64 {
        let Some(Some(queue)) = self.queues.get(index) else { return i64::MAX };
        if self.waiting <= usize::from(queue.waiting) {
            return i64::MAX;
        }
        let others = self.queues.iter().enumerate().filter(|(other, _)| *other != index);
        let waiting = others.filter_map(|(_, other)| other.as_ref()).filter(|other| other.waiting);
        let Some(least) = waiting.map(|other| other.served).min() else { return i64::MAX };
        let allowed = least.saturating_add(LEAD_UNITS).saturating_sub(queue.served);
        i64::try_from(allowed).unwrap_or(i64::MAX)
    }

    pub(super) fn charge(&mut self, index: usize, units: i64) {
        if let Some(Some(queue)) = self.queues.get_mut(index) {
            queue.served = queue.served.saturating_add(units.unsigned_abs());
        }
    }

    /// Sets whether queue `index` has requests that it may not start, and whether the store is the
    /// reason.
    pub(super) fn set_waiting(&mut self, index: usize, waiting: bool, for_store: bool) {
        let least = self.least_allowed();
        let Some(Some(queue)) = self.queues.get_mut(index) else { return };
        if queue.waiting != waiting {
            queue.waiting = waiting;
            // A queue that was idle has saved up nothing.
            queue.served = queue.served.max(least);
            self.waiting = if waiting {
                self.waiting.saturating_add(1)
            } else {
                self.waiting.saturating_sub(1)
            };
        }
        if queue.for_store != for_store {
            queue.for_store = for_store;
            let count = self.for_store;
            self.for_store =
                if for_store { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
    }

    /// Whether a queue has requests queued for the store.
    pub(super) fn wait_for_store(&self) -> bool {
        self.for_store > 0
    }

    fn least_allowed(&self) -> u64 {
        let most = self.queues.iter().flatten().map(|queue| queue.served).max();
        most.unwrap_or(0).saturating_sub(LEAD_UNITS)
    }
}
