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
use super::steering::{Assigned, ExecutorCounts, ExecutorStats, Load, OwnLoad};

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
    here_load: OwnLoad,
    here_stats: ExecutorStats,
    /// Requests were taken here since the last exchange.
    here_has_batch: bool,
    helpers: Vec<HelperEnd>,
    /// Those of the helpers' sidecores.
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
            here_load: OwnLoad::new(load),
            here_stats: ExecutorStats::default(),
            here_has_batch: false,
            helpers: Vec::new(),
            loads: Vec::new(),
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
        self.helpers.len().saturating_add(1)
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
    #[inline(always)]
    pub fn take(
        &mut self,
        now: Nanos,
        (device, assigned): (u16, &mut Assigned),
        (memory, job): (&GuestMemory, Job),
        done: &mut Vec<Done>,
    ) {
        let before = assigned.sidecore;
        if !self.neglected.keeps(Rule::Steering) {
            assigned.choose(&self.here_load, &self.loads);
        }
        let sidecore = assigned.next(&self.here_load, &self.loads);
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
                self.here_load.add();
                self.here.take(now, device, (memory, job), done);
            }
        }
    }

    /// Sends what the helpers were given, then executes what was taken here, so that all of them
    /// work at the same time. Appends the results of all, and the devices that a helper has closed.
    #[inline]
    pub fn exchange(&mut self, now: Nanos, done: &mut Vec<Done>, closed: &mut Vec<u16>) {
        for helper in &mut self.helpers {
            if helper.send() > 0 {
                self.stats.congestions.add(1);
            }
        }
        self.here_load.publish();
        if self.here_load.in_flight() > 0 {
            self.here_has_batch = false;
            self.here.exchange(now, done);
            // Those that no store was given are in the list already, and of here.
            let ended = u32::try_from(done.len()).unwrap_or(u32::MAX);
            self.here_load.sub(ended);
        }
        self.receive(done, closed);
    }

    /// Appends the results of the helpers, and the devices that a helper has closed: before new
    /// requests are steered, so that a helper's load is what it has left.
    #[inline]
    pub fn receive(&mut self, done: &mut Vec<Done>, closed: &mut Vec<u16>) {
        for helper in &mut self.helpers {
            helper.receive(done, closed);
        }
    }

    /// Whether requests may be executed on another sidecore.
    #[inline]
    pub const fn has_helpers(&self) -> bool {
        !self.helpers.is_empty()
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.here_load.in_flight() == 0 && self.helpers.iter().all(HelperEnd::is_idle)
    }

    /// Whether nothing is in flight, the load says so, and there is no helper that could send
    /// something.
    #[inline]
    pub const fn is_alone_and_idle(&self) -> bool {
        self.here_load.is_published_empty() && self.helpers.is_empty()
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use sidecore_block::{
        Batch, BlockChannel, Geometry, NullStore, Operation, QueueStats, Readiness,
    };
    use sidecore_memory::{GuestAddress, SharedPages};
    use sidecore_reactor::{IdleMode, Pollable as _};

    use super::super::helper::{Helper, helper};
    use super::*;

    const NOW: Nanos = Nanos::from_micros(1);

    thread_local! {
        /// The helper that works while the sidecore of the link does.
        static HELPER: RefCell<Option<Helper>> = const { RefCell::new(None) };
    }

    /// A null store, and while it has requests, the helper has its turn.
    struct Beside(NullStore);

    struct BesideChannel(Box<dyn BlockChannel>);

    impl BlockDevice for Beside {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }

        fn open_channel(
            &self,
            core: &CoreContext,
            depth: usize,
        ) -> io::Result<Box<dyn BlockChannel>> {
            Ok(Box::new(BesideChannel(self.0.open_channel(core, depth)?)))
        }
    }

    impl BlockChannel for BesideChannel {
        fn submit(&mut self, now: Nanos, batch: &mut Batch) {
            HELPER.with(|helper| {
                // The helper's own store comes here, too.
                if let Ok(mut helper) = helper.try_borrow_mut()
                    && let Some(helper) = helper.as_mut()
                {
                    helper.poll(now, 32);
                }
            });
            self.0.submit(now, batch);
        }

        fn poll(&mut self, now: Nanos, completed: &mut Batch) {
            self.0.poll(now, completed);
        }

        fn readiness(&self) -> Readiness {
            self.0.readiness()
        }

        fn waits_since(&self) -> Option<Nanos> {
            None
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    /// A read with this name.
    const fn read(ticket: u64) -> Job {
        Job {
            ticket,
            data: GuestAddress(0),
            is_lent: false,
            operation: Operation::Read,
            offset_bytes: 0,
            len_bytes: 512,
            fua: false,
        }
    }

    #[test]
    fn a_helper_works_while_this_sidecore_does() {
        let core = Rc::<CoreContext>::default();
        let loads: [Arc<Load>; 2] = [Arc::default(), Arc::default()];
        let mut executors = Executors::new(&core, &loads[0], Neglected::default()).unwrap();
        let (end, seed) = helper(&loads[1]).unwrap();
        executors.add_helper(end).unwrap();
        let worker = Helper::new(&core, seed, IdleMode::Poll).unwrap();
        HELPER.set(Some(worker));
        let pages = SharedPages::new("test", 1 << 16).unwrap();
        let store: Arc<dyn BlockDevice> =
            Arc::new(Beside(NullStore::new(Geometry::new(1 << 20, 512))));
        let stats: Vec<Arc<QueueStats>> = vec![Arc::default(), Arc::default()];
        let mut done = Vec::new();
        for device in 0..2 {
            executors.add(device, (&"d".into(), &store), 4, &stats).unwrap();
        }
        for device in 0..2_u16 {
            let mut assigned = Assigned { sidecore: device.into(), in_flight: 1 };
            let (ticket, device) = (device, (device, &mut assigned));
            let job = (pages.memory(), read(ticket.into()));
            executors.take(NOW, device, job, &mut done);
        }
        assert_eq!(loads[1].get(), 1);
        executors.exchange(NOW, &mut done, &mut Vec::new());
        let tickets: Vec<u64> = done.iter().map(|done| done.ticket).collect();
        assert_eq!(tickets, [0, 1]);
        assert!(executors.is_idle());
        // Of the request that was executed here, until the next poll.
        assert_eq!([loads[0].get(), loads[1].get()], [1, 0]);
        executors.exchange(NOW, &mut done, &mut Vec::new());
        assert_eq!([loads[0].get(), loads[1].get()], [0, 0]);
        HELPER.set(None);
    }

    /// Two sidecores with a link each, which are as busy, and stores that complete at once.
    #[test]
    fn sidecores_that_are_busy_are_given_nothing() {
        let core = Rc::<CoreContext>::default();
        let loads: [Arc<Load>; 2] = [Arc::default(), Arc::default()];
        let store: Arc<dyn BlockDevice> = Arc::new(NullStore::new(Geometry::new(1 << 20, 512)));
        let pages = SharedPages::new("test", 1 << 16).unwrap();
        let mut links = [0, 1].map(|own: usize| {
            let mut link = Executors::new(&core, &loads[own], Neglected::default()).unwrap();
            let (end, seed) = helper(&loads[1 - own]).unwrap();
            link.add_helper(end).unwrap();
            for device in 0..8 {
                let stats: Vec<Arc<QueueStats>> = vec![Arc::default(), Arc::default()];
                link.add(device, (&"d".into(), &store), 4, &stats).unwrap();
            }
            // In the first poll, which finds the other sidecore without work.
            let devices = [Assigned { sidecore: 0, in_flight: 1 }; 8];
            (link, Helper::new(&core, seed, IdleMode::Poll).unwrap(), devices)
        });
        let mut done = Vec::new();
        for round in 0..100 {
            for (link, helper, devices) in &mut links {
                link.receive(&mut done, &mut Vec::new());
                done.drain(..).for_each(|done| devices[usize::from(done.device)].ended());
                for (device, assigned) in (0..).zip(devices.iter_mut()) {
                    assert_eq!(assigned.in_flight, u32::from(round == 0));
                    link.take(NOW, (device, assigned), (pages.memory(), read(round)), &mut done);
                }
                link.exchange(NOW, &mut done, &mut Vec::new());
                done.drain(..).for_each(|done| devices[usize::from(done.device)].in_flight = 0);
                helper.poll(NOW, 32);
            }
        }
        let counts = links.each_ref().map(|(link, ..)| link.stats().counts());
        assert!(counts.iter().all(|counts| counts.handed_over == 0), "{counts:?}");
        assert!(counts.iter().all(|counts| counts.executed_here == 800), "{counts:?}");
    }
}
