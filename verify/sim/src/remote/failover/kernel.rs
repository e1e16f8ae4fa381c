//! The stores that all IOhosts share, and the requests that kernels have for them.

use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;
use sidecore_vrio::{Execute, Request};

use super::super::store::{Buffers, Stamp, Store, stamp_of};
use crate::Random;

/// A request that a kernel has, for a daemon that may have died.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    ends_at: Nanos,
    /// The daemon: the number of its supervisor's start.
    pub(super) process: u64,
    /// The opening of the stores that it belongs to.
    opening: u64,
    pub(super) execute: Execute,
    pub(super) data: Vec<u8>,
    pub(super) result: Result<(), BlockError>,
}

/// A write that the stores had of an owner whose successor was about to fence it: its device, its
/// offset and the contents of its first block.
type Attempt = (u16, u64, Stamp);

pub(super) struct Kernel {
    random: Random,
    stores: Vec<Store>,
    block_bytes: usize,
    /// One request in so many takes longer than a lease; 0 for none.
    stuck: u64,
    /// The next write takes at least until then.
    hangs_until: Option<Nanos>,
    in_flight: Vec<InFlight>,
    /// Writes that it was given.
    pub(super) submitted_writes: u64,
    /// Daemons whose way to the stores was cut.
    cut_off: Vec<u64>,
    /// The newest opening of the stores.
    pub(super) openings: u64,
    /// Of the last owner, while it was fenced.
    attempts: Vec<Attempt>,
    /// The opening before that fence.
    attempts_before: u64,
    /// Those of them that were sent again to the owner after it.
    pub(super) resends: u64,
}

impl Kernel {
    pub(super) fn new(random: Random, stores: Vec<Store>, block_bytes: u64, stuck: u64) -> Self {
        Self {
            random,
            stores,
            block_bytes: block_bytes as usize,
            stuck,
            hangs_until: None,
            in_flight: Vec::new(),
            submitted_writes: 0,
            cut_off: Vec::new(),
            openings: 0,
            attempts: Vec::new(),
            attempts_before: 0,
            resends: 0,
        }
    }

    /// Takes a request of a daemon, with the data of a write.
    pub(super) fn submit(
        &mut self,
        now: Nanos,
        (process, opening): (u64, u64),
        execute: Execute,
        data: &[u8],
    ) {
        let mut ends_at = self.stores[usize::from(execute.device)].end_of(now);
        if self.stuck > 0 && self.random.once_in(self.stuck) {
            ends_at = now.after(Nanos(self.random.below(4_000_000_000)));
        }
        if execute.request.operation.is_write()
            && let Some(until) = self.hangs_until.take()
        {
            ends_at = ends_at.max(until);
        }
        self.submitted_writes += u64::from(execute.request.operation.is_write());
        let is_cut = self.cut_off.contains(&process);
        let result = if is_cut { Err(BlockError::Io { errno: 5 }) } else { Ok(()) };
        let data = data[..execute.request.len_bytes as usize].to_vec();
        let request = InFlight { ends_at, process, opening, execute, data, result };
        if let Some(attempt) = self.attempt_of(&request)
            && opening == self.openings
            && opening != self.attempts_before
            && let Some(position) = self.attempts.iter().position(|other| *other == attempt)
        {
            self.attempts.swap_remove(position);
            self.resends += 1;
        }
        self.in_flight.push(request);
    }

    /// Lets the next write take at least until then.
    pub(super) fn hang(&mut self, until: Nanos) {
        self.hangs_until = Some(until);
    }

    fn attempt_of(&self, request: &InFlight) -> Option<Attempt> {
        let Request { operation, offset_bytes, .. } = request.execute.request;
        let stamp = stamp_of(request.data.get(..self.block_bytes)?)?;
        (operation == Operation::Write).then_some((request.execute.device, offset_bytes, stamp))
    }

    /// The successor of these daemons begins to fence them, or tries again.
    pub(super) fn note_attempts(&mut self, processes: &[u64]) {
        if std::mem::replace(&mut self.attempts_before, self.openings) != self.openings {
            self.attempts.clear();
        }
        let suspect = |request: &&InFlight| processes.contains(&request.process);
        for request in self.in_flight.iter().filter(suspect) {
            if let Some(attempt) = self.attempt_of(request).filter(|a| !self.attempts.contains(a)) {
                self.attempts.push(attempt);
            }
        }
    }

    /// When the next request ends.
    pub(super) fn next(&self) -> Nanos {
        self.in_flight.iter().map(|request| request.ends_at).min().unwrap_or(Nanos::MAX)
    }

    /// Whether it has requests of this daemon.
    pub(super) fn has(&self, process: u64) -> bool {
        self.in_flight.iter().any(|request| request.process == process)
    }

    /// Whether it has requests of others than this daemon.
    pub(super) fn has_others(&self, process: u64) -> bool {
        self.in_flight.iter().any(|request| request.process != process)
    }

    /// Carries a request out that ends by `now`.
    ///
    /// # Errors
    /// It is a write of a daemon whose successor has opened the stores.
    pub(super) fn land(&mut self, now: Nanos) -> Result<Option<InFlight>, String> {
        let mut requests = self.in_flight.iter();
        let Some(index) = requests.position(|request| request.ends_at <= now) else {
            return Ok(None);
        };
        let mut ended = self.in_flight.swap_remove(index);
        if ended.result.is_ok() {
            let InFlight { execute, data, opening, process, .. } = &mut ended;
            let is_late = *opening != self.openings && execute.request.operation.is_write();
            if is_late {
                return Err(format!(
                    "{:?} of daemon {process} takes effect in opening {} of the stores, and was \
                     accepted in opening {opening}",
                    execute.request, self.openings
                ));
            }
            self.stores[usize::from(execute.device)].carry_out(&execute.request, data)?;
        }
        Ok(Some(ended))
    }

    /// The IOhost of a daemon was switched off.
    pub(super) fn power_off(&mut self, process: u64) {
        self.abandon(|request| request.process == process);
    }

    /// The way of a daemon to the stores was cut: what it has in flight fails.
    pub(super) fn cut_off(&mut self, now: Nanos, process: u64) {
        self.cut_off.push(process);
        for request in self.in_flight.iter_mut().filter(|request| request.process == process) {
            (request.ends_at, request.result) = (now, Err(BlockError::Io { errno: 5 }));
        }
    }

    /// Loses writes that no flush covered, all of them or a part.
    pub(super) fn lose_caches(&mut self) {
        let mut none = Buffers::default();
        self.stores.iter_mut().for_each(|store| store.cut_power(&mut none));
    }

    /// The stores lose their power.
    pub(super) fn cut_power(&mut self) {
        self.abandon(|_| true);
        self.lose_caches();
    }

    fn abandon(&mut self, is_gone: impl Fn(&InFlight) -> bool) {
        let (gone, kept) = self.in_flight.drain(..).partition(is_gone);
        self.in_flight = kept;
        let gone: Vec<InFlight> = gone;
        for InFlight { execute, data, .. } in gone.iter().filter(|request| request.result.is_ok()) {
            self.stores[usize::from(execute.device)].abandon(&execute.request, data);
        }
    }
}
