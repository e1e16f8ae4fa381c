//! The executors of a link's requests: that of the sidecore that polls the link, and its helpers.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{BlockDevice, Next, QueueStats};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{Arm, CoreContext, WakeSet};
use sidecore_telemetry::{CounterSet as _, counters};
use sidecore_units::Nanos;
use sidecore_vrio::{Neglected, Rule};

use super::executor::{Done, Executor, Job, LaneSpec};
use super::helper::HelperEnd;
use super::steering::{Assigned, ExecutorCounts, ExecutorStats, Load};

counters! {
    /// The counters of a link's executors. The sidecore that polls the link alone writes them, any
    /// thread may read them.
    pub struct SteeringStats;

    /// The counters at one moment, or the sum over several links.
    pub struct SteeringCounts;

    /// Requests executed on the sidecore that received them.
    pub executed_here: Counter = "executed_here_total",
    /// Requests handed to other sidecores.
    pub handed_over: Counter = "handed_over_total",
    /// Times that a device's requests moved to another sidecore.
    pub moves: Counter = "moves_total",
    /// Polls in which a helper had no room for messages.
    pub congestions: Counter = "congestions_total",
}

/// The executors of a link's requests.
pub(crate) struct Executors {
    here: Executor,
    /// Requests that are executed here.
    here_in_flight: u32,
    /// Those of them that this sidecore's load has: it is shared, so it is changed once a batch.
    here_counted: u32,
    here_stats: ExecutorStats,
    /// Requests were taken here since the last exchange.
    here_has_batch: bool,
    helpers: Vec<HelperEnd>,
    /// Of this sidecore, and of those of the helpers.
    loads: Vec<Arc<Load>>,
    wakes: WakeSet,
    stats: Arc<SteeringStats>,
    neglected: Neglected,
}

impl Executors {
    /// An executor on this sidecore, which has this load, and no helpers.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(core: &Rc<CoreContext>, load: &Arc<Load>, neglected: Neglected) -> io::Result<Self> {
        Ok(Self {
            here: Executor::new(core)?,
            here_in_flight: 0,
            here_counted: 0,
            here_stats: ExecutorStats::default(),
            here_has_batch: false,
            helpers: Vec::new(),
            loads: vec![Arc::clone(load)],
            wakes: WakeSet::new()?,
            stats: Arc::default(),
            neglected,
        })
    }

    pub const fn stats(&self) -> &Arc<SteeringStats> {
        &self.stats
    }

    /// The counters of each executor: this sidecore's, and those of the helpers.
    pub fn counts(&self) -> Vec<ExecutorCounts> {
        let helpers = self.helpers.iter().map(|helper| &helper.stats);
        std::iter::once(&self.here_stats).chain(helpers).map(ExecutorStats::counts).collect()
    }

    /// Adds a helper. Devices that are added later are opened there, too.
    ///
    /// # Errors
    /// The kernel has no memory left.
    pub fn add_helper(&mut self, helper: HelperEnd) -> io::Result<()> {
        self.wakes.add(helper.wake_fd())?;
        self.loads.push(Arc::clone(helper.load()));
        self.helpers.push(helper);
        Ok(())
    }

    /// The number of executors.
    pub const fn count(&self) -> usize {
        self.loads.len()
    }

    /// Opens the store of a device for all executors. `stats` are its counters, for each of them.
    ///
    /// # Errors
    /// The kernel refuses what the channel here needs.
    pub fn add(
        &mut self,
        device: u16,
        (name, store): (&Arc<str>, &Arc<dyn BlockDevice>),
        depth: usize,
        stats: &[Arc<QueueStats>],
    ) -> io::Result<()> {
        let mut specs = stats.iter().map(|stats| LaneSpec {
            name: Arc::clone(name),
            device: Arc::clone(store),
            depth,
            stats: Arc::clone(stats),
        });
        if let Some(spec) = specs.next() {
            self.here.add(device, spec)?;
        }
        for (helper, spec) in self.helpers.iter_mut().zip(specs) {
            helper.open(device, spec);
        }
        Ok(())
    }

    /// Closes the store of a device, of which nothing is in flight. Returns the number of helpers
    /// that will say when they have closed it.
    pub fn remove(&mut self, device: u16) -> usize {
        self.here.remove(device);
        for helper in &mut self.helpers {
            helper.close(device);
        }
        self.helpers.len()
    }

    /// Takes a request of a device, whose data are in `memory`.
    #[inline]
    pub fn take(
        &mut self,
        now: Nanos,
        (device, assigned): (u16, &mut Assigned),
        (memory, job): (&GuestMemory, Job),
        done: &mut Vec<Done>,
    ) {
        let before = assigned.sidecore;
        let here = self.here_in_flight.saturating_sub(self.here_counted);
        if !self.neglected.keeps(Rule::Steering) {
            assigned.choose(&self.loads, here);
        }
        let sidecore = assigned.next(&self.loads, here);
        if sidecore != before {
            self.stats.moves.add(1);
        }
        match sidecore.checked_sub(1).and_then(|index| self.helpers.get_mut(index)) {
            Some(helper) => {
                self.stats.handed_over.add(1);
                helper.take(device, memory, job);
            }
            None => {
                self.stats.executed_here.add(1);
                self.here_stats.requests.add(1);
                if !std::mem::replace(&mut self.here_has_batch, true) {
                    self.here_stats.sub_batches.add(1);
                }
                self.here_in_flight = self.here_in_flight.saturating_add(1);
                self.here.take(now, device, (memory, job), done);
            }
        }
    }

    /// Sends what the helpers were given, and appends the results of all, and the devices that a
    /// helper has closed.
    #[inline]
    pub fn exchange(&mut self, now: Nanos, done: &mut Vec<Done>, closed: &mut Vec<u16>) {
        if self.here_in_flight > 0 {
            self.here_has_batch = false;
            self.here.exchange(now, done);
            // Those that no store was given are in the list already, and of here.
            let ended = u32::try_from(done.len()).unwrap_or(u32::MAX);
            self.here_in_flight = self.here_in_flight.saturating_sub(ended);
            self.update_load();
        }
        for helper in &mut self.helpers {
            if helper.send() > 0 {
                self.stats.congestions.add(1);
            }
            helper.receive(done, closed);
        }
    }

    /// Brings this sidecore's load up to date.
    #[inline]
    fn update_load(&mut self) {
        let Some(load) = self.loads.first() else { return };
        if self.here_in_flight > self.here_counted {
            load.add(self.here_in_flight.saturating_sub(self.here_counted));
        } else if self.here_in_flight < self.here_counted {
            load.sub(self.here_counted.saturating_sub(self.here_in_flight));
        }
        self.here_counted = self.here_in_flight;
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.here_in_flight == 0 && self.helpers.iter().all(HelperEnd::is_idle)
    }

    /// When to exchange next, if no descriptor wakes the sidecore before.
    pub fn next(&self) -> Next {
        if self.helpers.iter().any(HelperEnd::has_unsent) { Next::Now } else { self.here.next() }
    }

    /// See [`sidecore_block::BlockChannel::waits_since`].
    pub fn waits_since(&self) -> Option<Nanos> {
        self.here.waits_since()
    }

    /// Turns wake-ups by the helpers on, *then* looks once more.
    pub fn arm(&mut self) -> Arm {
        if self.next() == Next::Now {
            return Arm::CannotSleep;
        }
        let has_work = self.helpers.iter_mut().any(|helper| helper.arm() != Arm::Armed);
        if has_work {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    pub fn disarm(&mut self) {
        for helper in &mut self.helpers {
            helper.disarm();
        }
    }

    pub fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.here.wake_fd());
        watch(self.wakes.as_fd());
    }

    pub fn on_wake(&self) {
        for helper in &self.helpers {
            helper.on_wake();
        }
    }
}
