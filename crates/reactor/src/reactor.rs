//! The loop itself.

use std::any::Any;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_units::Nanos;

use crate::{Arm, CoreContext, Mailbox, Pollable, PollableId, Polled, ReactorStats, Sleeper, WakeKey};

/// How often a sidecore that cannot sleep looks whether an armed pollable was
/// woken: one system call in this time.
pub const GLANCE_INTERVAL: Nanos = Nanos::from_micros(20);

/// How often it looks when none is armed: only to take note of kicks that
/// guests send unasked.
const IDLE_GLANCE_INTERVAL: Nanos = Nanos::from_millis(1);

/// A sidecore whose oldest request has waited for others for so long gives way to
/// them, and again as often. What the kernel still has to do for a direct write to a
/// file is done by a worker that is bound to a CPU, perhaps to this one (ext4, xfs:
/// `iomap_dio_complete_work`); a thread that never blocks can keep it from running for
/// as long as the scheduler likes, which has been more than ten seconds.
pub const PATIENCE: Nanos = Nanos::from_millis(1);

/// How long it gives way, unless something comes before: the most that a guest's
/// request waits because of it.
pub const YIELD: Nanos = Nanos::from_micros(50);

/// Units of work that a pollable may do before the next one has its turn.
const BUDGET: usize = 32;

/// A sidecore that shares its core spins for so long after the last work, and then sleeps between two
/// looks for at least so long.
const MIN_PAUSE: Nanos = Nanos::from_micros(50);

/// Such a sidecore sleeps for this part of the time that it has been idle: waking up costs tens of
/// microseconds on a virtual machine, and guests that rest should not be charged for it.
const IDLE_PER_PAUSE: u64 = 32;

/// Such a sidecore sleeps between two looks for at most so long.
const MAX_PAUSE: Nanos = Nanos::from_micros(500);

const MAIL_KEY: WakeKey = WakeKey(u64::MAX);

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Something was done.
    Busy,
    /// Nothing was found to do.
    Idle,
    /// The sidecore slept in it.
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
    /// Its idle mode's spin time; `None` if it never sleeps.
    spin: Option<Nanos>,
    state: State,
    /// When it last had work; the spin time counts from here.
    last_busy: Nanos,
}

/// Owns and polls everything that one sidecore serves.
pub struct Reactor<S> {
    context: Rc<CoreContext>,
    entries: Vec<Option<Entry>>,
    /// How many pollables there have been.
    generation: u64,
    /// Who is awake, in polling order.
    awake: Vec<usize>,
    armed_count: usize,
    /// Position in `awake` that the next turn starts from, so that no
    /// pollable is always first.
    first: usize,
    last_glance: Nanos,
    /// When the last turn that did something began, until its time is counted.
    busy_since: Option<Nanos>,
    /// See [`Reactor::set_without_core`].
    without_core: bool,
    /// When it was last considered whether to give way.
    last_yield: Nanos,
    sleeper: S,
    mailbox: Mailbox<S>,
    woken: Vec<WakeKey>,
    stats: Arc<ReactorStats>,
}

impl<S: Sleeper> Reactor<S> {
    /// A reactor with nothing to poll, whose pollables share `context`.
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

    /// What the pollables here share.
    #[must_use]
    pub fn context(&self) -> &Rc<CoreContext> {
        &self.context
    }

    /// The counters, for other threads to read.
    #[must_use]
    pub fn stats(&self) -> Arc<ReactorStats> {
        Arc::clone(&self.stats)
    }

    /// How many pollables there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.awake.len() + self.armed_count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Starts to poll `pollable`, awake.
    ///
    /// # Errors
    /// One of its wake descriptors cannot be watched; it is dropped then.
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
        let entry = Some(Entry { pollable, generation, spin, state: State::Awake, last_busy: Nanos::ZERO });
        match self.entries.get_mut(index) {
            Some(slot) => *slot = entry,
            None => self.entries.push(entry),
        }
        self.awake.push(index);
        self.stats.queues.set(self.len() as u64);
        Ok(PollableId::new(index, generation))
    }

    /// Access to a pollable, which is awake from now on: what is changed about
    /// it may mean work. `None` if it has finished.
    pub fn get_mut<P: Pollable>(&mut self, id: PollableId<P>) -> Option<&mut P> {
        if self.entries.get(id.index)?.as_ref()?.generation != id.generation {
            return None;
        }
        self.wake(id.index);
        let pollable: &mut dyn Any = &mut *self.entries.get_mut(id.index)?.as_mut()?.pollable;
        pollable.downcast_mut()
    }

    /// Sets whether other threads keep the sidecore from running. While they do, the sidecore sleeps
    /// for moments when it finds nothing to do, so that the scheduler lets it run soon after each: a
    /// thread that spins waits for whole time slices of the others. Notifications stay off, because a
    /// guest of a pollable with [`IdleMode::Poll`](crate::IdleMode::Poll) is promised that it never kicks.
    pub fn set_without_core(&mut self, without_core: bool) {
        self.without_core = without_core;
    }

    /// One round: mail, work, idleness, sleep.
    ///
    /// `clock` is asked again after a sleep, because time passes in it.
    ///
    /// # Errors
    /// The sleeper's.
    pub fn turn(&mut self, clock: &mut impl FnMut() -> Nanos) -> io::Result<Turn> {
        let now = clock();
        self.count_busy(now);
        self.stats.turns.add(1);
        let mut busy = false;
        while let Some(mail) = self.mailbox.take() {
            mail(self);
            self.stats.mails.add(1);
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
        let glance_interval = if self.armed_count > 0 { GLANCE_INTERVAL } else { IDLE_GLANCE_INTERVAL };
        if now.since(self.last_glance) >= glance_interval {
            self.last_glance = now;
            self.stats.glances.add(1);
            let timeout = if self.waits_in_vain(now) { YIELD } else { Nanos::ZERO };
            if timeout > Nanos::ZERO && self.busy_since.is_some() {
                self.count_busy(clock());
            }
            self.wait(Some(timeout))?;
            self.wake_overdue(now);
        }
        Ok(if busy { Turn::Busy } else { Turn::Idle })
    }

    /// Counts the time of a turn that did something and that ended at `now`: with the next
    /// turn's look at the clock, so that no turn needs another.
    fn count_busy(&mut self, now: Nanos) {
        if let Some(since) = self.busy_since.take() {
            self.stats.busy_ns.add(now.since(since).0);
        }
    }

    /// Whether it is time to give way to those that somebody here waits for.
    fn waits_in_vain(&mut self, now: Nanos) -> bool {
        if now.since(self.last_yield) < PATIENCE {
            return false;
        }
        self.last_yield = now;
        let mut waiting = self.entries.iter().flatten().filter_map(|entry| entry.pollable.waits_since());
        let in_vain = waiting.any(|since| now.since(since) >= PATIENCE);
        if in_vain {
            self.stats.yields.add(1);
        }
        in_vain
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
                    busy = true;
                }
                Polled::Idle => changed |= entry.rest(now),
                Polled::Finished => {
                    let slot = self.entries.get_mut(index).and_then(Option::take);
                    // Before `finish`: a thread that waits for it may read the gauge next.
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

    /// Brings `awake` and `armed_count` in line with the entries' states.
    fn recount(&mut self) {
        let entries = &self.entries;
        let state = |index: usize| entries.get(index)?.as_ref().map(|entry| entry.state);
        self.awake.retain(|&index| state(index) == Some(State::Awake));
        self.armed_count = entries.iter().flatten().filter(|entry| entry.state == State::Armed).count();
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

    /// Everything has been armed and has been looked at once more since: only
    /// a descriptor or a deadline can bring work now.
    fn sleep(&mut self, turn_began: Nanos, clock: &mut impl FnMut() -> Nanos) -> io::Result<Turn> {
        let now = if self.busy_since.is_some() { clock() } else { turn_began };
        self.count_busy(now);
        let timeout = self.next_deadline().map(|deadline| deadline.since(now));
        self.stats.sleeps.add(1);
        self.wait(timeout)?;
        let woken_at = clock();
        self.stats.asleep_ns.add(woken_at.since(now).0);
        self.wake_overdue(woken_at);
        // Spin time counts from the wake-up, or an adaptive pollable that was
        // woken for nothing would spin on from its last work for no time.
        for &index in &self.awake {
            if let Some(Some(entry)) = self.entries.get_mut(index) {
                entry.last_busy = woken_at;
            }
        }
        Ok(Turn::Slept)
    }

    /// How long every pollable that is awake has been idle.
    fn idle_time(&self, now: Nanos) -> Nanos {
        let awake = self.awake.iter().filter_map(|&index| self.entries.get(index)?.as_ref());
        awake.map(|entry| now.since(entry.last_busy)).min().unwrap_or_default()
    }

    /// Sleeps until a wake-up or a deadline, but not for long: some pollables are not armed.
    fn pause(&mut self, now: Nanos, idle: Nanos, clock: &mut impl FnMut() -> Nanos) -> io::Result<Turn> {
        let pause = Nanos(idle.0 / IDLE_PER_PAUSE).clamp(MIN_PAUSE, MAX_PAUSE);
        let timeout = self.next_deadline().map_or(pause, |deadline| deadline.since(now).min(pause));
        self.last_glance = now;
        self.stats.sleeps.add(1);
        self.wait(Some(timeout))?;
        let woken_at = clock();
        self.stats.asleep_ns.add(woken_at.since(now).0);
        self.wake_overdue(woken_at);
        Ok(Turn::Slept)
    }

    fn next_deadline(&self) -> Option<Nanos> {
        self.entries.iter().flatten().filter_map(|entry| entry.pollable.deadline()).min()
    }

    fn wake_overdue(&mut self, now: Nanos) {
        for index in 0..self.entries.len() {
            let overdue = self.entries.get(index).is_some_and(|slot| {
                slot.as_ref().is_some_and(|entry| {
                    entry.state == State::Armed && entry.pollable.deadline().is_some_and(|at| at <= now)
                })
            });
            if overdue {
                self.wake(index);
            }
        }
    }

    fn wait(&mut self, timeout: Option<Nanos>) -> io::Result<()> {
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
                entry.pollable.on_wake();
            }
            self.wake(index);
        }
        Ok(())
    }
}

impl<S> Drop for Reactor<S> {
    fn drop(&mut self) {
        self.stats.queues.set(0);
    }
}

impl Entry {
    /// Puts it to sleep if it has been idle for long enough; whether it was.
    fn rest(&mut self, now: Nanos) -> bool {
        let Some(spin) = self.spin else {
            return false;
        };
        if now.since(self.last_busy) < spin {
            return false;
        }
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
