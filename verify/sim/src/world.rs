//! The scheduling of a sidecore and its guests.

use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use sidecore_block::{BlockDevice, Geometry, RamStore, dropped_tags};
use sidecore_linux::EpollSleeper;
use sidecore_reactor::{
    CoreContext, EventFd, IdleMode, PollableId, Reactor, Sleeper, Unit, WakeKey, mailbox,
};
use sidecore_ring::RingState;
use sidecore_stage_delay::DelayStore;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::Nanos;
use sidecore_virtio::blk::BlkQueue;

use crate::Random;
use crate::guest::{BLOCKS, Guest};

/// Steps of guests within which a sleeping sidecore must be woken, if it has work.
const PATIENCE: u32 = 20_000;

/// The sum of a run's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests completed.
    pub requests: u64,
    /// Notifications that guests sent.
    pub kicks: u64,
    /// Interrupts that the sidecore raised.
    pub calls: u64,
    /// Times that the sidecore slept.
    pub sleeps: u64,
    /// Queues stopped with requests in flight and started again.
    pub restarts: u64,
    /// Simulated time.
    pub duration_ns: u64,
}

/// Everything but the sidecore.
struct World {
    now: Nanos,
    random: Random,
    guests: Vec<Guest>,
    /// Queues that are being stopped. The component that stops them would send mail next, so the
    /// sidecore must not sleep for good.
    stopping: usize,
}

impl World {
    /// A random guest takes a step, and a little time passes.
    fn step(&mut self) {
        self.now = self.now.after(Nanos(self.random.below(2_000)));
        let index = self.random.below(self.guests.len() as u64) as usize;
        self.guests[index].step(&mut self.random);
    }

    fn is_done(&self) -> bool {
        self.guests.iter().all(|guest| guest.wanted == 0 && guest.in_flight() == 0)
    }
}

/// Sleeps on the real descriptors, in simulated time, while guests take steps.
struct SimulatedSleep {
    world: Rc<RefCell<World>>,
    epoll: EpollSleeper,
}

impl Sleeper for SimulatedSleep {
    fn watch(&mut self, fd: BorrowedFd<'_>, key: WakeKey) -> io::Result<()> {
        self.epoll.watch(fd, key)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.epoll.unwatch(fd)
    }

    fn wait(&mut self, timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()> {
        let begin = self.world.borrow().now;
        for _ in 0..PATIENCE {
            self.epoll.wait(Some(Nanos::ZERO), woken)?;
            let mut world = self.world.borrow_mut();
            let over = timeout.is_some_and(|timeout| world.now.since(begin) >= timeout);
            if !woken.is_empty() || over || world.stopping > 0 || world.is_done() {
                return Ok(());
            }
            world.step();
        }
        let world = self.world.borrow();
        let waiting: Vec<String> = world.guests.iter().map(Guest::describe).collect();
        panic!("the sidecore sleeps and no guest wakes it: {waiting:#?}");
    }
}

/// A guest's queue: running, or being stopped.
enum Queue {
    Running(PollableId<BlkQueue>),
    Stopping(Receiver<RingState>),
}

type Sidecore = Reactor<SimulatedSleep>;

fn start(reactor: &mut Sidecore, random: &mut Random, guest: &Guest, state: RingState) -> Queue {
    let mode = match random.below(3) {
        0 => IdleMode::Poll,
        1 => IdleMode::Adaptive { spin: Nanos(random.below(20_000)) },
        _ => IdleMode::Interrupt,
    };
    let channel = guest.store.open_channel(reactor.context(), 16).expect("a channel");
    let queue = BlkQueue::new(
        &guest.device,
        0,
        guest.resources(),
        state,
        channel,
        mode,
        EventFd::peer_signal,
    )
    .expect("a queue");
    Queue::Running(reactor.add(queue).expect("room"))
}

/// A store of a random kind, and whether it may fail requests.
fn store(random: &mut Random) -> (Arc<dyn BlockDevice>, bool) {
    let geometry = Geometry { volatile_cache: true, ..Geometry::new(BLOCKS * 1024, 512) };
    let ram: Arc<dyn BlockDevice> = Arc::new(RamStore::new(geometry).expect("32 KiB"));
    match random.below(3) {
        0 => (ram, false),
        1 => (Arc::new(DelayStore::new(ram, Nanos(random.below(50_000)))), false),
        _ => {
            let rule = FaultRule {
                affected: Affected::All,
                when: When::PerMillion(100_000),
                fault: Fault::Eio,
            };
            let plan = FaultPlan { seed: random.below(u64::MAX), rules: vec![rule] };
            let slow = Arc::new(DelayStore::new(ram, Nanos(random.below(5_000))));
            (Arc::new(FaultStore::new(slow, plan)), true)
        }
    }
}

/// Runs `guests` guests of `requests` requests each to their end, with the random numbers of
/// `seed`.
///
/// # Panics
/// A check that failed.
#[must_use]
pub fn run(seed: u64, guests: usize, requests: u64) -> Outcome {
    let mut random = Random::new(seed);
    let dropped_before = dropped_tags();
    let guests: Vec<Guest> = (0..guests)
        .map(|_| {
            let (store, faults) = store(&mut random);
            Guest::new(&mut random, store, faults, requests)
        })
        .collect();
    let world =
        Rc::new(RefCell::new(World { now: Nanos(1), random: random.clone(), guests, stopping: 0 }));
    let (_post, mail) = mailbox().expect("a mailbox");
    let sleep =
        SimulatedSleep { world: Rc::clone(&world), epoll: EpollSleeper::new().expect("an epoll") };
    let mut reactor: Sidecore =
        Reactor::new(CoreContext::default(), sleep, mail).expect("a reactor");
    let mut outcome = Outcome::default();
    let mut queues: Vec<Queue> = Vec::new();
    for guest in &world.borrow().guests {
        let state = RingState::fresh(guest.resources().layout.format);
        queues.push(start(&mut reactor, &mut random, guest, state));
    }
    let mut turns_at_rest = 0_u32;
    while !world.borrow().is_done() {
        reactor
            .turn(&mut || {
                let mut world = world.borrow_mut();
                world.now = world.now.after(Nanos(100));
                world.now
            })
            .expect("epoll works");
        if random.once_in(50) {
            reactor.set_without_core(random.once_in(2));
        }
        let before: u64 =
            world.borrow().guests.iter().map(|guest| guest.completed + guest.wanted).sum();
        for _ in 0..random.below(4) {
            world.borrow_mut().step();
        }
        outcome.restarts += restart_some(&mut reactor, &mut random, &world, &mut queues);
        let after: u64 =
            world.borrow().guests.iter().map(|guest| guest.completed + guest.wanted).sum();
        turns_at_rest = if before == after { turns_at_rest + 1 } else { 0 };
        assert!(turns_at_rest < PATIENCE, "the sidecore runs and no request makes progress");
    }
    let world = world.borrow();
    for guest in &world.guests {
        assert!(guest.device.broken().is_none(), "{:?}", guest.device.broken());
        assert_eq!(guest.completed, requests);
        outcome.requests += guest.completed;
        outcome.kicks += guest.kicks;
        outcome.calls += guest.device.queue_stats(0).map_or(0, |stats| stats.interrupts.get());
    }
    assert_eq!(dropped_tags(), dropped_before, "a request was dropped");
    outcome.sleeps = reactor.stats().sleeps.get();
    outcome.duration_ns = world.now.0;
    outcome
}

/// Now and then stops a queue in any state, and starts the stopped queues again from their state.
fn restart_some(
    reactor: &mut Sidecore,
    random: &mut Random,
    world: &Rc<RefCell<World>>,
    queues: &mut [Queue],
) -> u64 {
    let mut restarts = 0;
    for (index, queue) in queues.iter_mut().enumerate() {
        match queue {
            Queue::Running(id) => {
                if random.once_in(200)
                    && let Some(running) = reactor.get_mut(*id)
                {
                    let (reply, state) = mpsc::channel();
                    running.stop(Box::new(move |stopped| {
                        let _ = reply.send(stopped);
                    }));
                    *queue = Queue::Stopping(state);
                    world.borrow_mut().stopping += 1;
                }
            }
            Queue::Stopping(state) => {
                if let Ok(state) = state.try_recv() {
                    *queue = start(reactor, random, &world.borrow().guests[index], state);
                    world.borrow_mut().stopping -= 1;
                    restarts += 1;
                }
            }
        }
    }
    restarts
}
