//! The loop under a simulated clock and a scripted sleeper.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use super::*;
use crate::{CoreContext, IdleMode, Mail, mailbox};

#[derive(Default)]
struct World {
    now: Cell<u64>,
    /// For each sleep, its longest time and the keys that wake it.
    wakes: RefCell<VecDeque<(u64, Vec<WakeKey>)>>,
    timeouts: RefCell<Vec<Option<Nanos>>>,
    log: RefCell<Vec<String>>,
    stats: RefCell<Option<Arc<ReactorStats>>>,
}

struct Script(Rc<World>);

impl Sleeper for Script {
    fn watch(&mut self, _fd: BorrowedFd<'_>, _key: WakeKey) -> io::Result<()> {
        Ok(())
    }
    fn unwatch(&mut self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
    fn wait(&mut self, timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()> {
        self.0.timeouts.borrow_mut().push(timeout);
        if timeout == Some(Nanos::ZERO) {
            return Ok(());
        }
        let (passes, keys) = self.0.wakes.borrow_mut().pop_front().unwrap_or_default();
        let passes = timeout.map_or(passes, |timeout| passes.min(timeout.0));
        self.0.now.set(self.0.now.get() + passes);
        woken.extend(keys);
        Ok(())
    }
}

struct Worker {
    name: &'static str,
    world: Rc<World>,
    mode: IdleMode,
    work: Rc<Cell<usize>>,
    /// Work that arrives between the last poll and the look after arming.
    races: usize,
    deadline: Option<Nanos>,
    waits_since: Rc<Cell<Option<Nanos>>>,
    /// A poll without work gives a sign of life.
    is_quiet: bool,
    finished: bool,
    fd: OwnedFd,
}

impl Worker {
    fn new(world: &Rc<World>, name: &'static str, mode: IdleMode) -> Self {
        Self {
            name,
            world: Rc::clone(world),
            mode,
            work: Rc::new(Cell::new(0)),
            races: 0,
            deadline: None,
            waits_since: Rc::default(),
            is_quiet: false,
            finished: false,
            fd: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap(),
        }
    }
    fn log(&self, event: &str) {
        self.world.log.borrow_mut().push(format!("{} {event}", self.name));
    }
}

impl Pollable for Worker {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        if self.finished {
            return Polled::Finished;
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.log("timer");
            return Polled::Busy(1);
        }
        let done = self.work.get().min(budget);
        self.work.set(self.work.get() - done);
        if done == 0 {
            return if self.is_quiet { Polled::Quiet } else { Polled::Idle };
        }
        self.log(&format!("did {done}"));
        Polled::Busy(done)
    }
    fn idle_mode(&self) -> IdleMode {
        self.mode
    }
    fn arm(&mut self) -> Arm {
        if self.races > 0 {
            self.races -= 1;
            self.work.set(1);
            return Arm::WorkPending;
        }
        self.log("arms");
        Arm::Armed
    }
    fn disarm(&mut self) {
        self.log("disarms");
    }
    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.fd.as_fd());
    }
    fn on_wake(&mut self) {
        self.log("woken");
    }
    fn deadline(&self) -> Option<Nanos> {
        self.deadline
    }
    fn waits_since(&self) -> Option<Nanos> {
        self.waits_since.get()
    }
    fn finish(self: Box<Self>) {
        let queues = self.world.stats.borrow().as_ref().map_or(0, |stats| stats.queues.get());
        self.log(&format!("finishes, then {queues} queues"));
    }
}

struct Bench {
    world: Rc<World>,
    reactor: Reactor<Script>,
    post: crate::Post<Script>,
}

impl Bench {
    fn new() -> Self {
        let world = Rc::new(World::default());
        let (post, mailbox) = mailbox().unwrap();
        let reactor =
            Reactor::new(CoreContext::default(), Script(Rc::clone(&world)), mailbox).unwrap();
        *world.stats.borrow_mut() = Some(reactor.stats());
        Self { world, reactor, post }
    }
    fn turn(&mut self, passes_ns: u64) -> Turn {
        self.world.now.set(self.world.now.get() + passes_ns);
        let world = Rc::clone(&self.world);
        self.reactor.turn(&mut || Nanos(world.now.get())).unwrap()
    }
    fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.world.log.borrow_mut())
    }
}

const SPIN: Nanos = Nanos::from_micros(10);

#[test]
fn adaptive_spins_then_arms_then_sleeps_until_woken() {
    let mut bench = Bench::new();
    let worker = Worker::new(&bench.world, "a", IdleMode::Adaptive { spin: SPIN });
    let work = Rc::clone(&worker.work);
    let id = bench.reactor.add(worker).unwrap();
    work.set(1);
    assert_eq!(bench.turn(0), Turn::Busy);
    assert_eq!(bench.turn(SPIN.0 - 1), Turn::Idle);
    assert_eq!(bench.log(), ["a did 1"]);
    bench.world.wakes.borrow_mut().push_back((1_000_000, vec![WakeKey(id.index as u64)]));
    assert_eq!(bench.turn(1), Turn::Slept);
    assert_eq!(bench.log(), ["a arms", "a woken", "a disarms"]);
    assert_eq!(*bench.world.timeouts.borrow(), [None]);
    work.set(1);
    assert_eq!(bench.turn(1), Turn::Busy, "it spins again after the wake-up");
    assert_eq!(bench.turn(SPIN.0 - 1), Turn::Idle);
}

#[test]
fn a_sign_of_life_is_no_reason_to_spin_and_work_before_it_is() {
    let mut bench = Bench::new();
    let worker = Worker {
        is_quiet: true,
        ..Worker::new(&bench.world, "a", IdleMode::Adaptive { spin: SPIN })
    };
    let work = Rc::clone(&worker.work);
    let id = bench.reactor.add(worker).unwrap();
    work.set(1);
    assert_eq!(bench.turn(0), Turn::Busy);
    assert_eq!(bench.turn(SPIN.0 - 1), Turn::Idle, "there was work");
    for _ in 0..2 {
        bench.world.wakes.borrow_mut().push_back((1_000_000, vec![WakeKey(id.index as u64)]));
        assert_eq!(bench.turn(1), Turn::Slept, "it sleeps at once");
    }
    work.set(1);
    assert_eq!(bench.turn(1), Turn::Busy);
    assert_eq!(bench.turn(SPIN.0 - 1), Turn::Idle, "there was work");
}

#[test]
fn without_its_core_a_sidecore_pauses_between_polls_and_asks_for_no_kick() {
    let mut bench = Bench::new();
    let worker = Worker::new(&bench.world, "p", IdleMode::Poll);
    let work = Rc::clone(&worker.work);
    bench.reactor.add(worker).unwrap();
    assert_eq!(bench.turn(MIN_PAUSE.0), Turn::Idle, "with its core it polls");
    bench.reactor.set_without_core(true);
    work.set(1);
    assert_eq!(bench.turn(1), Turn::Busy);
    let work_at = bench.world.now.get();
    assert_eq!(bench.turn(MIN_PAUSE.0 - 1), Turn::Idle, "it spins for a while after its work");
    for (idle, pause) in
        [(MIN_PAUSE.0, MIN_PAUSE.0), (3_200_000, 100_000), (1_000_000_000, MAX_PAUSE.0)]
    {
        assert_eq!(bench.turn(work_at + idle - bench.world.now.get()), Turn::Slept);
        assert_eq!(bench.world.timeouts.borrow().last(), Some(&Some(Nanos(pause))));
    }
    work.set(1);
    assert_eq!(bench.turn(1), Turn::Busy);
    bench.reactor.set_without_core(false);
    assert_eq!(bench.turn(10 * MIN_PAUSE.0), Turn::Idle, "the sidecore has its core again");
    assert_eq!(bench.log(), ["p did 1", "p did 1"], "the pollable was never armed");
}

#[test]
fn a_sleep_that_a_notification_ends_is_a_wake_up_and_others_are_not() {
    let mut bench = Bench::new();
    let worker = Worker::new(&bench.world, "a", IdleMode::Interrupt);
    let id = bench.reactor.add(worker).unwrap();
    let stats = bench.reactor.stats();
    let counts = || (stats.sleeps.get(), stats.wakeups.get());
    let mut slept = |keys: &[WakeKey]| {
        bench.world.wakes.borrow_mut().push_back((1_000, keys.to_vec()));
        while bench.turn(1) != Turn::Slept {}
        counts()
    };
    let key = WakeKey(id.index as u64);
    assert_eq!(slept(&[]), (1, 0), "no descriptor was readable");
    assert_eq!(slept(&[MAIL_KEY]), (2, 0), "the control path is no notification");
    assert_eq!(slept(&[key]), (3, 1));
    assert_eq!(slept(&[key, MAIL_KEY]), (4, 2));
    // A pollable that is never armed has asked for nothing, even if its descriptor ends a pause.
    let id = bench.reactor.add(Worker::new(&bench.world, "p", IdleMode::Poll)).unwrap();
    bench.reactor.set_without_core(true);
    bench.turn(MIN_PAUSE.0);
    bench.world.wakes.borrow_mut().push_back((1_000, vec![WakeKey(id.index as u64)]));
    let before = stats.wakeups.get();
    while bench.turn(MIN_PAUSE.0) != Turn::Slept {}
    assert_eq!(stats.wakeups.get(), before);
}

#[test]
fn a_pause_ends_at_a_deadline_and_at_a_kick_of_a_neighbour() {
    let mut bench = Bench::new();
    let mut polls = Worker::new(&bench.world, "p", IdleMode::Poll);
    polls.deadline = Some(Nanos(MIN_PAUSE.0 + 10));
    bench.reactor.add(polls).unwrap();
    let id = bench.reactor.add(Worker::new(&bench.world, "i", IdleMode::Interrupt)).unwrap();
    bench.reactor.set_without_core(true);
    bench.world.wakes.borrow_mut().push_back((5, vec![WakeKey(id.index as u64)]));
    assert_eq!(bench.turn(MIN_PAUSE.0), Turn::Slept);
    assert_eq!(bench.world.timeouts.borrow().last(), Some(&Some(Nanos(10))));
    assert_eq!(bench.log(), ["i arms", "i woken", "i disarms"]);
}

#[test]
fn the_reactor_does_not_sleep_if_work_arrives_while_arming() {
    let mut bench = Bench::new();
    let mut worker = Worker::new(&bench.world, "a", IdleMode::Interrupt);
    worker.races = 1;
    bench.reactor.add(worker).unwrap();
    assert_eq!(bench.turn(1), Turn::Idle);
    assert_eq!(bench.turn(1), Turn::Busy);
    assert_eq!(bench.log(), ["a did 1"]);
    assert!(bench.world.timeouts.borrow().is_empty(), "never slept");
}

#[test]
fn a_polling_unit_keeps_the_core_awake_but_not_its_neighbours() {
    let mut bench = Bench::new();
    let poller = Worker::new(&bench.world, "p", IdleMode::Poll);
    let sleeper = Worker::new(&bench.world, "s", IdleMode::Interrupt);
    bench.reactor.add(poller).unwrap();
    bench.reactor.add(sleeper).unwrap();
    bench.turn(1);
    assert_eq!(bench.log(), ["s arms"]);
    assert_eq!(bench.turn(1), Turn::Idle);
    assert!(bench.world.timeouts.borrow().is_empty());
    bench.turn(GLANCE_INTERVAL.0);
    bench.turn(1);
    assert_eq!(
        *bench.world.timeouts.borrow(),
        [Some(Nanos::ZERO)],
        "one glance in its interval, and no sleep"
    );
}

#[test]
fn a_request_that_waits_on_another_thread_makes_the_sidecore_yield() {
    let mut bench = Bench::new();
    let poller = Worker::new(&bench.world, "p", IdleMode::Poll);
    let waits_since = Rc::clone(&poller.waits_since);
    bench.reactor.add(poller).unwrap();
    let timeouts = |bench: &Bench| std::mem::take(&mut *bench.world.timeouts.borrow_mut());
    bench.turn(PATIENCE.0);
    assert_eq!(timeouts(&bench), [Some(Nanos::ZERO)], "no request waits");

    waits_since.set(Some(Nanos(bench.world.now.get() + 1)));
    bench.turn(PATIENCE.0);
    assert_eq!(timeouts(&bench), [Some(Nanos::ZERO)], "not for long enough");
    bench.turn(PATIENCE.0);
    assert_eq!(timeouts(&bench), [Some(YIELD)]);
    bench.turn(PATIENCE.0 - 1);
    bench.turn(1);
    assert_eq!(timeouts(&bench), [Some(YIELD)], "once in that time");
    assert_eq!(bench.reactor.stats().yields.get(), 2);

    // Also for a pollable that sleeps, while another one keeps the sidecore awake.
    let sleeper = Worker::new(&bench.world, "s", IdleMode::Interrupt);
    let armed_waits_since = Rc::clone(&sleeper.waits_since);
    waits_since.set(None);
    bench.reactor.add(sleeper).unwrap();
    bench.turn(PATIENCE.0);
    assert_eq!(bench.log(), ["s arms"]);
    timeouts(&bench);
    armed_waits_since.set(Some(Nanos::ZERO));
    bench.turn(PATIENCE.0);
    assert_eq!(timeouts(&bench), [Some(YIELD)]);
}

#[test]
fn busy_time_is_the_time_of_turns_with_work_and_not_their_number() {
    let mut bench = Bench::new();
    let worker = Worker::new(&bench.world, "a", IdleMode::Poll);
    let work = Rc::clone(&worker.work);
    bench.reactor.add(worker).unwrap();
    // A fifth of the time is work: one long turn, and eight thousand short turns without work.
    work.set(1);
    assert_eq!(bench.turn(0), Turn::Busy);
    bench.turn(200_000);
    for _ in 0..8_000 {
        bench.turn(100);
    }
    let stats = bench.reactor.stats();
    assert_eq!((stats.busy_turns.get(), stats.busy_ns.get()), (1, 200_000));
}

#[test]
fn neither_a_sleep_nor_a_yield_counts_as_busy() {
    let mut bench = Bench::new();
    let world = Rc::clone(&bench.world);
    // Mail that takes 3 us makes a turn busy, and the sidecore sleeps at the end of the same turn.
    let work = |reactor: &mut Reactor<Script>| {
        let now = &reactor.sleeper.0.now;
        now.set(now.get() + 3_000);
    };
    bench.post.send(Box::new(work)).unwrap();
    world.wakes.borrow_mut().push_back((50_000, vec![]));
    assert_eq!(bench.turn(0), Turn::Slept);
    let stats = bench.reactor.stats();
    assert_eq!((stats.busy_ns.get(), stats.asleep_ns.get()), (3_000, 50_000));

    let worker = Worker::new(&world, "a", IdleMode::Poll);
    worker.work.set(1);
    worker.waits_since.set(Some(Nanos::ZERO));
    bench.reactor.add(worker).unwrap();
    world.wakes.borrow_mut().push_back((YIELD.0, vec![]));
    bench.turn(PATIENCE.0);
    bench.turn(0);
    assert_eq!((stats.yields.get(), stats.busy_ns.get()), (1, 3_000));
}

#[test]
fn a_deadline_ends_the_sleep_and_wakes_its_owner() {
    let mut bench = Bench::new();
    let mut worker = Worker::new(&bench.world, "a", IdleMode::Interrupt);
    worker.deadline = Some(Nanos(5_000));
    bench.reactor.add(worker).unwrap();
    bench.world.wakes.borrow_mut().push_back((1_000_000, vec![]));
    assert_eq!(bench.turn(1_000), Turn::Slept);
    assert_eq!(*bench.world.timeouts.borrow(), [Some(Nanos(4_000))]);
    assert_eq!(bench.turn(0), Turn::Busy);
    assert_eq!(bench.log(), ["a arms", "a disarms", "a timer"]);
}

#[test]
fn a_flood_on_one_pollable_does_not_delay_the_others() {
    let mut bench = Bench::new();
    let flood = Worker::new(&bench.world, "flood", IdleMode::Poll);
    let other = Worker::new(&bench.world, "other", IdleMode::Poll);
    flood.work.set(10 * BUDGET);
    other.work.set(1);
    bench.reactor.add(flood).unwrap();
    bench.reactor.add(other).unwrap();
    bench.turn(1);
    let mut log = bench.log();
    log.sort();
    assert_eq!(log, [format!("flood did {BUDGET}"), "other did 1".into()]);
}

#[test]
fn each_turn_starts_with_another_pollable() {
    let mut bench = Bench::new();
    let mut works = Vec::new();
    for name in ["a", "b", "c"] {
        let worker = Worker::new(&bench.world, name, IdleMode::Poll);
        works.push(Rc::clone(&worker.work));
        bench.reactor.add(worker).unwrap();
    }
    let mut firsts = Vec::new();
    for _ in 0..3 {
        works.iter().for_each(|work| work.set(1));
        bench.turn(1);
        firsts.push(bench.log().remove(0));
    }
    firsts.sort();
    assert_eq!(firsts, ["a did 1", "b did 1", "c did 1"]);
}

#[test]
fn mail_is_delivered_in_order_and_refused_after_the_end() {
    let mut bench = Bench::new();
    let id = bench.reactor.add(Worker::new(&bench.world, "a", IdleMode::Poll)).unwrap();
    let order = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    for number in 0..2 {
        let order = std::sync::Arc::clone(&order);
        let mail: Mail<Script> = Box::new(move |reactor| {
            order.lock().unwrap().push(number);
            if number == 1 {
                reactor.get_mut(id).unwrap().finished = true;
            }
        });
        bench.post.send(mail).unwrap();
    }
    assert_eq!(bench.turn(1), Turn::Slept, "the last pollable finished");
    assert_eq!(*order.lock().unwrap(), [0, 1]);
    assert_eq!(bench.log(), ["a finishes, then 0 queues"]);
    assert!(bench.reactor.get_mut(id).is_none());
    drop(bench.reactor);
    assert_eq!(bench.post.send(Box::new(|_| {})), Err(crate::Closed));
}

#[test]
fn a_place_is_used_again_and_an_old_name_is_invalid() {
    let mut bench = Bench::new();
    let mut worker = Worker::new(&bench.world, "a", IdleMode::Poll);
    worker.finished = true;
    let first = bench.reactor.add(worker).unwrap();
    bench.turn(1);
    let again = bench.reactor.add(Worker::new(&bench.world, "b", IdleMode::Poll)).unwrap();
    assert_eq!(first.index, again.index);
    assert!(bench.reactor.get_mut(first).is_none());
    assert_eq!(bench.reactor.get_mut(again).unwrap().name, "b");
    assert_eq!(bench.reactor.len(), 1);
}
