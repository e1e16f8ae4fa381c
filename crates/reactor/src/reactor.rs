//! The loop of a sidecore.

use std::any::Any;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_units::Nanos;

use crate::{
    Arm, CoreContext, Mailbox, Pollable, PollableId, Polled, ReactorStats, Sleeper, Surroundings,
    WakeKey,
};

/// The time between two looks at the wake-ups of armed pollables, on a sidecore that cannot sleep.
/// Each look is one system call.
pub const GLANCE_INTERVAL: Nanos = Nanos::from_micros(20);

/// The time between two such looks when no pollable is armed: only to clear kicks that guests send
/// without being asked.
const IDLE_GLANCE_INTERVAL: Nanos = Nanos::from_millis(1);

/// Once a request has waited this long on another thread, the sidecore yields the CPU, at most once
/// per period. The kernel finishes a direct write to a file in a worker that is bound to a CPU,
/// perhaps to this one (ext4, xfs: `iomap_dio_complete_work`); a thread that never blocks can keep
/// that worker from running for as long as the scheduler allows, which has been more than ten
/// seconds.
pub const PATIENCE: Nanos = Nanos::from_millis(1);

/// The longest yield, and so the longest delay of a guest's request by a yield.
pub const YIELD: Nanos = Nanos::from_micros(50);

/// The units of work that a pollable may do before the next pollable is polled.
const BUDGET: usize = 32;

/// The shortest sleep between two looks of a sidecore that shares its core, and the time for which
/// it spins after the last work.
const MIN_PAUSE: Nanos = Nanos::from_micros(50);

/// Such a sidecore sleeps for this part of the time that it has been idle: a wake-up costs tens of
/// microseconds on a virtual machine, and idle guests should not pay for it.
const IDLE_PER_PAUSE: u64 = 32;

/// The longest sleep between two looks of such a sidecore.
const MAX_PAUSE: Nanos = Nanos::from_micros(500);

const MAIL_KEY: WakeKey = WakeKey(u64::MAX);

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A pollable or mail had work.
    Busy,
    /// No work was found.
    Idle,
    /// The sidecore slept.
    Slept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Awake,
    Armed,
}

struct Entry {
    pollable: Box<dyn Pollable>,
    generation: u64,
    /// The spin time of the pollable's idle mode; `None` if it never sleeps.
    spin: Option<Nanos>,
    state: State,
    /// The time of the last work. The spin time counts from here.
    last_busy: Nanos,
    /// There was work since the pollable was woken.
    has_worked: bool,
}

/// Owns and polls everything that one sidecore serves.
pub struct Reactor<S> {
    context: Rc<CoreContext>,
    entries: Vec<Option<Entry>>,
    /// The number of pollables added so far.
    generation: u64,
    /// The entries that are awake, in polling order.
    awake: Vec<usize>,
    armed_count: usize,
    /// The position in `awake` where the next turn starts, so that no pollable is always first.
    first: usize,
    last_glance: Nanos,
    /// The start of the last turn with work, until the turn's time is counted.
    busy_since: Option<Nanos>,
    /// See [`Reactor::set_without_core`].
    without_core: bool,
    /// The time of the last decision whether to yield.
    last_yield: Nanos,
    sleeper: S,
    mailbox: Mailbox<S>,
    woken: Vec<WakeKey>,
    stats: Arc<ReactorStats>,
}

impl<S: Sleeper> Reactor<S> {
    /// Makes a reactor without pollables. Pollables share `context`.
    ///
    /// # Errors
    /// The sleeper cannot watch the mailbox.
    pub fn new(context: CoreContext, mut sleeper: S, mailbox: Mailbox<S>) -> io::Result<Self> {
        sleeper.watch(mailbox.wake_fd(), MAIL_KEY)?;
        Ok(Self {
            context: Rc::new(context),
            entries: Vec::new(),
            generation: 0,
            awake: Vec::new(),
            armed_count: 0,
            first: 0,
            last_glance: Nanos::ZERO,
            busy_since: None,
            without_core: false,
            last_yield: Nanos::ZERO,
            sleeper,
            mailbox,
            woken: Vec::with_capacity(64),
            stats: Arc::new(ReactorStats::default()),
        })
    }

    /// The state that the pollables share.
    #[must_use]
    pub fn context(&self) -> &Rc<CoreContext> {
        &self.context
    }

    /// The counters, for other threads to read.
    #[must_use]
    pub fn stats(&self) -> Arc<ReactorStats> {
        Arc::clone(&self.stats)
    }

    /// The number of pollables.
    #[must_use]
    pub fn len(&self) -> usize {
        self.awake.len() + self.armed_count
    }

    /// Whether the reactor has no pollables.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds `pollable`, awake.
    ///
    /// # Errors
    /// One of its wake descriptors cannot be watched; the pollable is dropped then.
    pub fn add<P: Pollable>(&mut self, pollable: P) -> io::Result<PollableId<P>> {
        let index = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len());
        let mut result = Ok(());
        let sleeper = &mut self.sleeper;
        pollable.wake_fds(&mut |fd| {
            if result.is_ok() {
                result = sleeper.watch(fd, WakeKey(index as u64));
            }
        });
        if let Err(error) = result {
            pollable.wake_fds(&mut |fd| {
                let _ = sleeper.unwatch(fd);
            });
            return Err(error);
        }
        self.generation += 1;
        let generation = self.generation;
        let spin = pollable.idle_mode().spin();
        let pollable = Box::new(pollable);
        let entry = Some(Entry {
            pollable,
            generation,
            spin,
            state: State::Awake,
            last_busy: Nanos::ZERO,
            has_worked: true,
        });
        match self.entries.get_mut(index) {
            Some(slot) => *slot = entry,
            None => self.entries.push(entry),
        }
        self.awake.push(index);
        self.stats.queues.set(self.len() as u64);
        Ok(PollableId::new(index, generation))
    }

    /// Returns a pollable, which is awake from now on: a change may cause work. `None` if the
    /// pollable has finished.
    pub fn get_mut<P: Pollable>(&mut self, id: PollableId<P>) -> Option<&mut P> {
        if self.entries.get(id.index)?.as_ref()?.generation != id.generation {
            return None;
        }
        self.wake(id.index);
        let pollable: &mut dyn Any = &mut *self.entries.get_mut(id.index)?.as_mut()?.pollable;
        pollable.downcast_mut()
    }

    /// The same, with the pollable's surroundings: for a change of its wake descriptors.
    pub fn get_mut_with<P: Pollable>(
        &mut self,
        id: PollableId<P>,
    ) -> Option<(&mut P, Surroundings<'_>)> {
        self.get_mut(id)?;
        let entry = self.entries.get_mut(id.index)?.as_mut()?;
        let pollable: &mut dyn Any = &mut *entry.pollable;
        let key = WakeKey(id.index as u64);
        let around = Surroundings { core: &self.context, sleeper: &mut self.sleeper, key };
        pollable.downcast_mut().map(|pollable| (pollable, around))
    }

    /// Sets whether other threads keep the sidecore from running. While they do, a sidecore without
    /// work sleeps for short times, so that the scheduler lets it run soon after each: a thread
    /// that spins waits for whole time slices of the others. Notifications stay off, because a
    /// guest of a pollable with [`IdleMode::Poll`](crate::IdleMode::Poll) is promised that it never
    /// kicks.
    pub fn set_without_core(&mut self, without_core: bool) {
        self.without_core = without_core;
    }

    /// Runs one round: mail, work, idleness, sleep.
    ///
    /// `clock` is read again after a sleep, because time passes in it.
    ///
    /// # Errors
    /// The sleeper's error.
    pub fn turn(&mut self, clock: &mut impl FnMut() -> Nanos) -> io::Result<Turn> {
        let now = clock();
        self.count_busy(now);
        self.stats.turns.add(1);
        let mut busy = false;
        while let Some(mail) = self.mailbox.take() {
            mail(self);
            self.stats.messages.add(1);
            busy = true;
        }
        busy |= self.poll_awake(now);
        if busy {
            self.stats.busy_turns.add(1);
            self.busy_since = Some(now);
        }
        if self.context.ports.take_wake() {
            self.wake_overdue(now);
        }
        if self.awake.is_empty() {
            return self.sleep(now, clock);
        }
        if self.without_core && !busy {
            let idle = self.idle_time(now);
            if idle >= MIN_PAUSE {
                return self.pause(now, idle, clock);
            }
        }
        let glance_interval =
            if self.armed_count > 0 { GLANCE_INTERVAL } else { IDLE_GLANCE_INTERVAL };
        if now.since(self.last_glance) >= glance_interval {
            self.last_glance = now;
            self.stats.wakeup_checks.add(1);
            let timeout = if self.waits_in_vain(now) { YIELD } else { Nanos::ZERO };
            if timeout > Nanos::ZERO && self.busy_since.is_some() {
                self.count_busy(clock());
            }
            self.wait(Some(timeout))?;
            self.wake_overdue(now);
        }
        Ok(if busy { Turn::Busy } else { Turn::Idle })
    }

    /// Counts the time of a turn with work that ended at `now`: with the next turn's reading of the
    /// clock, so that no turn needs a second one.
    fn count_busy(&mut self, now: Nanos) {
        if let Some(since) = self.busy_since.take() {
            self.stats.busy_ns.add(now.since(since).0);
        }
    }

    /// Whether a request here has waited too long on another thread, so that the sidecore yields.
    fn waits_in_vain(&mut self, now: Nanos) -> bool {
        if now.since(self.last_yield) < PATIENCE {
            return false;
        }
        self.last_yield = now;
        let mut waiting =
            self.entries.iter().flatten().filter_map(|entry| entry.pollable.waits_since());
        let is_due = waiting.any(|since| now.since(since) >= PATIENCE);
        if is_due {
            self.stats.yields.add(1);
        }
        is_due
    }

    fn poll_awake(&mut self, now: Nanos) -> bool {
        let count = self.awake.len();
        if count == 0 {
            return false;
        }
        let mut busy = false;
        let mut changed = false;
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        let (head, tail) = self.awake.split_at(self.first);
        for &index in tail.iter().chain(head) {
            let Some(Some(entry)) = self.entries.get_mut(index) else {
                continue;
            };
            match entry.pollable.poll(now, BUDGET) {
                Polled::Busy(_) => {
                    entry.last_busy = now;
                    entry.has_worked = true;
                    busy = true;
                }
                Polled::Idle => changed |= entry.arm_if_idle(now),
                Polled::Quiet => changed |= entry.arm_if_quiet(now),
                Polled::Finished => {
                    let slot = self.entries.get_mut(index).and_then(Option::take);
                    // Before `finish`: a thread that waits for `finish` may read the gauge next.
                    self.stats.queues.set(self.entries.iter().flatten().count() as u64);
                    if let Some(entry) = slot {
                        let sleeper = &mut self.sleeper;
                        entry.pollable.wake_fds(&mut |fd| {
                            let _ = sleeper.unwatch(fd);
                        });
                        entry.pollable.finish();
                    }
                    busy = true;
                    changed = true;
                }
            }
        }
        if changed {
            self.recount();
        }
        busy
    }

    /// Recomputes `awake` and `armed_count` from the entries' states.
    fn recount(&mut self) {
        let entries = &self.entries;
        let state = |index: usize| entries.get(index)?.as_ref().map(|entry| entry.state);
        self.awake.retain(|&index| state(index) == Some(State::Awake));
        self.armed_count =
            entries.iter().flatten().filter(|entry| entry.state == State::Armed).count();
    }

    fn wake(&mut self, index: usize) {
        if let Some(Some(entry)) = self.entries.get_mut(index)
            && entry.state == State::Armed
        {
            entry.pollable.disarm();
            entry.state = State::Awake;
            self.awake.push(index);
            self.armed_count -= 1;
        }
    }

    /// Sleeps. All pollables are armed and have looked for work once more: only a descriptor or a
    /// deadline can bring work now.
    fn sleep(&mut self, turn_began: Nanos, clock: &mut impl FnMut() -> Nanos) -> io::Result<Turn> {
        let now = if self.busy_since.is_some() { clock() } else { turn_began };
        self.count_busy(now);
        let timeout = self.next_deadline().map(|deadline| deadline.since(now));
        let woken_at = self.sleep_for(timeout, now, clock)?;
        // The spin time counts from the wake-up. Otherwise an adaptive pollable with a false
        // wake-up would not spin at all, because its last work is too long ago.
        for &index in &self.awake {
            if let Some(Some(entry)) = self.entries.get_mut(index) {
                entry.last_busy = woken_at;
                entry.has_worked = false;
            }
        }
        Ok(Turn::Slept)
    }

    /// The time for which all pollables that are awake have been idle.
    fn idle_time(&self, now: Nanos) -> Nanos {
        let awake = self.awake.iter().filter_map(|&index| self.entries.get(index)?.as_ref());
        awake.map(|entry| now.since(entry.last_busy)).min().unwrap_or_default()
    }

    /// Sleeps until a wake-up or a deadline, but only for a short time: some pollables are not
    /// armed.
    fn pause(
        &mut self,
        now: Nanos,
        idle: Nanos,
        clock: &mut impl FnMut() -> Nanos,
    ) -> io::Result<Turn> {
        let pause = Nanos(idle.0 / IDLE_PER_PAUSE).clamp(MIN_PAUSE, MAX_PAUSE);
        let timeout = self.next_deadline().map_or(pause, |deadline| deadline.since(now).min(pause));
        self.last_glance = now;
        self.sleep_for(Some(timeout), now, clock)?;
        Ok(Turn::Slept)
    }

    /// Sleeps from `now` until a wake-up or the end of `timeout`, and returns the time after that.
    fn sleep_for(
        &mut self,
        timeout: Option<Nanos>,
        now: Nanos,
        clock: &mut impl FnMut() -> Nanos,
    ) -> io::Result<Nanos> {
        self.stats.sleeps.add(1);
        if self.wait(timeout)? {
            self.stats.wakeups.add(1);
        }
        let woken_at = clock();
        self.stats.asleep_ns.add(woken_at.since(now).0);
        self.wake_overdue(woken_at);
        Ok(woken_at)
    }

    fn next_deadline(&self) -> Option<Nanos> {
        self.entries.iter().flatten().filter_map(|entry| entry.pollable.deadline()).min()
    }

    fn wake_overdue(&mut self, now: Nanos) {
        for index in 0..self.entries.len() {
            let overdue = self.entries.get(index).is_some_and(|slot| {
                slot.as_ref().is_some_and(|entry| {
                    entry.state == State::Armed
                        && entry.pollable.deadline().is_some_and(|at| at <= now)
                })
            });
            if overdue {
                self.wake(index);
            }
        }
    }

    /// Waits for descriptors. Returns whether an armed pollable was woken.
    fn wait(&mut self, timeout: Option<Nanos>) -> io::Result<bool> {
        let mut is_notified = false;
        self.woken.clear();
        self.sleeper.wait(timeout, &mut self.woken)?;
        for position in 0..self.woken.len() {
            let Some(&key) = self.woken.get(position) else {
                break;
            };
            if key == MAIL_KEY {
                self.mailbox.clear_wake();
                continue;
            }
            let Ok(index) = usize::try_from(key.0) else {
                continue;
            };
            if let Some(Some(entry)) = self.entries.get_mut(index) {
                is_notified |= entry.state == State::Armed;
                entry.pollable.on_wake();
            }
            self.wake(index);
        }
        Ok(is_notified)
    }
}

impl<S> Drop for Reactor<S> {
    fn drop(&mut self) {
        self.stats.queues.set(0);
    }
}

impl Entry {
    /// Arms the pollable if it has been idle for its spin time. Returns whether it was armed.
    fn arm_if_idle(&mut self, now: Nanos) -> bool {
        self.spin.is_some_and(|spin| now.since(self.last_busy) >= spin) && self.arm(now)
    }

    /// Arms the pollable if there was no work since it was woken, or if it has been idle for its
    /// spin time. Returns whether it was armed.
    fn arm_if_quiet(&mut self, now: Nanos) -> bool {
        if self.has_worked { self.arm_if_idle(now) } else { self.spin.is_some() && self.arm(now) }
    }

    fn arm(&mut self, now: Nanos) -> bool {
        match self.pollable.arm() {
            Arm::Armed => {
                self.state = State::Armed;
                true
            }
            Arm::WorkPending => {
                self.last_busy = now;
                false
            }
            Arm::CannotSleep => false,
        }
    }
}

#[cfg(test)]
mod tests;
