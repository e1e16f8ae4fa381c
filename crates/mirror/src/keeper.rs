//! The keeper: writes metadata, decides about legs, and copies. One thread, off the data path.

mod change;
mod copy;
mod install;
mod marks;
mod open;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_units::Nanos;

use crate::disk::{LegDisk, Wait};
use crate::epoch::{Config, StoreId};
use crate::error::{MirrorError, Waits};
use crate::header::{Header, Identity};
use crate::legs::{LegSet, MAX_LEGS};
use crate::mail::{Command, Message};
use crate::map::DirtyMap;
use crate::mirror::OpenOptions;
use crate::shared::{Gauge, Shared};
use crate::status::LegState;

pub(crate) use open::{Found, read_leg};

/// The longest time between two looks at what may be done without a message.
const LOOK: Duration = Duration::from_millis(500);
/// The time until something that failed is tried again.
const RETRY: Nanos = Nanos::from_millis(1000);

/// A leg, as the keeper knows it.
#[derive(Default)]
struct Leg {
    /// `None` if its store is missing, or has failed.
    disk: Option<LegDisk>,
    /// The generation of its newest header that is durable.
    durable: u64,
    /// The newest generation that was written, or was tried to be.
    tried: u64,
    /// Whether that header was read and not written, so that it may not be durable.
    is_only_read: bool,
    held: Option<Config>,
    store: StoreId,
    is_clean: bool,
    has_failed: bool,
    /// The last error, for reports.
    reason: Option<String>,
}

/// The copy to a leg that is behind.
struct Copying {
    leg: usize,
    /// Regions to copy.
    left: VecDeque<usize>,
    next_at: Nanos,
}

/// Disks with a request that has taken too long, and the numbers of the legs that their stores were
/// then; `None` of a store that was only read.
pub(crate) type Late = Vec<(Option<usize>, LegDisk)>;

type Reply = Sender<Result<(), MirrorError>>;

/// See the module. It belongs to the thread that made it.
pub struct Keeper {
    pub(crate) shared: Arc<Shared>,
    options: OpenOptions,
    identity: Identity,
    legs: [Leg; MAX_LEGS],
    /// Headers of stores that are no legs any more: they tell which epochs were in force.
    former: Vec<Header>,
    /// The newest epoch: the one in force, or that of the newest leg.
    config: Config,
    /// The largest number that an epoch was given.
    highest: u64,
    /// Legs that have all answered writes, and work.
    in_sync: LegSet,
    /// Whether an epoch of this process has been in force.
    has_run: bool,
    /// Legs without which an operator has permitted the epoch in force. Further epochs without them
    /// need no other permission, until one is tried that needs none.
    excused: LegSet,
    /// Why no epoch is in force, if none is.
    waits: Option<Waits>,
    /// The last leg in sync, if it takes no marks, so that writes wait.
    unmarked: Option<usize>,
    /// Dirty regions, as they lie on each leg in sync.
    map: DirtyMap,
    copying: Option<Copying>,
    late: Late,
    inbox: Receiver<Message>,
    /// Regions that writes wait for.
    asked: Vec<(usize, usize)>,
    /// Legs that have failed, about which nothing is decided.
    failed: LegSet,
    commands: VecDeque<(Command, Reply)>,
    next_clearing: Nanos,
    /// When marks that no leg took are written again.
    next_mark: Nanos,
    next_try: Nanos,
    copied_regions: u64,
    copied_bytes: u64,
    failures: u64,
    is_closed: bool,
}

impl Keeper {
    /// Does what is to be done now. Returns the time until the next turn, unless a message comes;
    /// `None` if the mirror was closed.
    pub fn turn(&mut self, wait: &mut dyn Wait) -> Option<Duration> {
        self.read_inbox();
        let now = wait.now();
        self.look_for_late(now);
        if !self.failed.is_empty() || (self.waits.is_some() && self.next_try <= now) {
            self.settle(wait);
        }
        while let Some((command, reply)) = self.commands.pop_front() {
            let result = self.carry_out(command, wait);
            // The answer may be followed by a look at the state.
            self.report();
            // The asking thread may be gone.
            let _ = reply.send(result);
        }
        if self.is_closed {
            return None;
        }
        let mut next = LOOK;
        if self.waits.is_none() && self.failed.is_empty() {
            self.open_asked(wait);
            self.clear_unused(wait);
            next = self.copy_some(wait).min(next);
        }
        self.report();
        // A step may have failed and left a decision for the next turn.
        Some(if self.failed.is_empty() { next } else { Duration::ZERO })
    }

    /// Waits for a message, and keeps it for the next turn.
    pub(crate) fn rest(&mut self, time: Duration) {
        if let Ok(message) = self.inbox.recv_timeout(time) {
            self.put(message);
        }
    }

    fn read_inbox(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            self.put(message);
        }
    }

    fn put(&mut self, message: Message) {
        match message {
            Message::Open(first, end) => self.asked.push((first, end)),
            // Of a leg that was taken out before, there is nothing to decide.
            Message::Failed(leg, error) => {
                self.blame(leg, format!("a write or flush of a user: {error}"));
                let copied = self.copying.as_ref().map_or(LegSet::EMPTY, |it| LegSet::of(it.leg));
                let used = self.in_sync.with(copied);
                self.failed = self.failed.with(LegSet::of(leg).and(used));
            }
            Message::Differs(first, end) => {
                let Some(copying) = &mut self.copying else { return };
                for region in first..end {
                    self.shared.equal.clear(region);
                    if !copying.left.contains(&region) {
                        copying.left.push_back(region);
                    }
                }
            }
            Message::Command(command, reply) => self.commands.push_back((command, reply)),
        }
    }

    fn disk(&mut self, leg: usize) -> Option<&mut LegDisk> {
        self.legs.get_mut(leg)?.disk.as_mut()
    }

    /// Legs whose stores are there and work.
    fn present(&self) -> LegSet {
        let legs = self.legs.iter().enumerate().filter(|(_, leg)| leg.disk.is_some());
        legs.map(|(number, _)| LegSet::of(number)).fold(LegSet::EMPTY, LegSet::with)
    }

    /// Forgets disks whose late requests have ended.
    fn look_for_late(&mut self, now: Nanos) {
        self.late.iter_mut().for_each(|(_, disk)| disk.look(now));
        self.late.retain(|(_, disk)| disk.is_late());
    }

    /// Gives the disk of a leg up.
    fn give_up(&mut self, number: usize) {
        let disk = self.legs.get_mut(number).and_then(|leg| leg.disk.take());
        self.late.extend(disk.filter(LegDisk::is_late).map(|disk| (Some(number), disk)));
    }

    /// Notes an error of a leg, for reports.
    fn blame(&mut self, number: usize, reason: String) {
        if let Some(leg) = self.legs.get_mut(number).filter(|leg| leg.disk.is_some()) {
            leg.reason = Some(reason);
        }
    }

    /// Stops the use of a leg that has failed.
    fn drop_leg(&mut self, number: usize) {
        self.give_up(number);
        let mut reason = "unknown";
        if let Some(leg) = self.legs.get_mut(number) {
            leg.has_failed = true;
            reason = leg.reason.as_deref().unwrap_or(reason);
        }
        tracing::warn!(leg = number, "a leg has failed and is not used any more: {reason}");
        self.failures = self.failures.saturating_add(1);
        self.in_sync = self.in_sync.without(LegSet::of(number));
        if self.copying.as_ref().is_some_and(|copying| copying.leg == number) {
            self.copying = None;
        }
    }

    /// Has no request start, and waits until nothing is at a leg.
    fn pause(&mut self, wait: &mut dyn Wait) {
        self.shared.set_plan(|plan| plan.is_paused = true);
        self.drain(wait, Gauge::is_idle);
        self.read_inbox();
    }

    /// Waits until each queue has been seen to be as `is_over` says.
    fn drain(&self, wait: &mut dyn Wait, is_over: impl Fn(&Gauge) -> bool) {
        // After the store that keeps requests from starting, and before the look at queues.
        fence(Ordering::SeqCst);
        let gauges = self.shared.gauges().clone();
        for gauge in gauges {
            // The list and this loop hold it, too.
            while !is_over(&gauge) && Arc::strong_count(&gauge) > 2 {
                wait.for_queues();
            }
        }
    }

    /// Has requests start by the epoch in force.
    fn publish(&mut self) {
        let preferred = self.options.read.filter(|leg| self.in_sync.has(*leg));
        let read = preferred.or(self.in_sync.lowest()).unwrap_or(0);
        let required = self.in_sync;
        let copied = self.copying.as_ref().map_or(LegSet::EMPTY, |it| LegSet::of(it.leg));
        self.shared.set_plan(|plan| {
            plan.required = required;
            plan.copied = copied;
            plan.read = read;
            plan.is_paused = false;
        });
    }

    /// Runs `begin` on the disks of several legs, and then waits for each. Returns those that
    /// failed.
    fn on_each(
        &mut self,
        legs: LegSet,
        wait: &mut dyn Wait,
        mut begin: impl FnMut(&mut LegDisk, Nanos),
    ) -> LegSet {
        let now = wait.now();
        let mut failed = LegSet::EMPTY;
        for leg in legs.numbers() {
            match self.disk(leg) {
                Some(disk) => begin(disk, now),
                None => failed = failed.with(LegSet::of(leg)),
            }
        }
        for leg in legs.without(failed).numbers() {
            if let Some(disk) = self.disk(leg)
                && let Err(error) = disk.end(wait)
            {
                self.blame(leg, format!("metadata: {error}"));
                failed = failed.with(LegSet::of(leg));
            }
        }
        failed
    }

    /// The devices of legs, for queues that open later.
    fn set_device(&self, leg: usize, device: Option<Arc<dyn BlockDevice>>) {
        self.shared.set_device(leg, device);
    }

    /// Publishes the state for reports.
    fn report(&self) {
        let copied = self.copying.as_ref().map(|copying| copying.leg);
        let mut status = self.shared.status();
        status.epoch = self.config.epoch;
        status.members = self.config.members;
        let known = (0..MAX_LEGS).zip(self.config.stores).filter(|(_, store)| *store > 0);
        let known = known.map(|(leg, _)| LegSet::of(leg)).fold(LegSet::EMPTY, LegSet::with);
        status.former = known.without(self.config.members);
        status.stores = self.config.stores;
        status.read = self.waits.is_none().then(|| self.shared.plan().read);
        let unmarked = || self.unmarked.map(|leg| Waits::Write { leg });
        status.waits = self.waits.clone().or_else(unmarked);
        status.dirty_regions = self.map.count();
        status.regions_to_copy = self.copying.as_ref().map_or(0, |copying| copying.left.len());
        status.copied_regions = self.copied_regions;
        status.copied_bytes = self.copied_bytes;
        status.failures = self.failures;
        status.read_errors = self.shared.read_errors.load(Ordering::Relaxed);
        for (number, (state, leg)) in status.legs.iter_mut().zip(&self.legs).enumerate() {
            *state = match () {
                () if !self.config.members.has(number) => LegState::None,
                () if leg.has_failed => LegState::Failed,
                () if leg.disk.is_none() => LegState::Missing,
                () if self.in_sync.has(number) => LegState::InSync,
                () if copied == Some(number) => LegState::Copying,
                () => LegState::Behind,
            };
        }
        for (reason, leg) in status.reasons.iter_mut().zip(&self.legs) {
            let why = leg.reason.as_ref().filter(|_| leg.has_failed);
            reason.clone_from(&why.cloned());
        }
    }
}
