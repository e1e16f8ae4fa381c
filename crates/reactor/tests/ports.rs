//! Units of one sidecore reach each other through ports, awake or asleep, and allocate nothing.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_reactor::{
    Arm, CoreContext, IdleMode, NotSent, Pollable, Polled, Port, PortId, PortSender, Reactor,
    Sleeper, Turn, WakeKey, mailbox,
};
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A sleeper that returns at once, and records the timeouts.
struct Sleepless(Rc<RefCell<Vec<Option<Nanos>>>>);

impl Sleeper for Sleepless {
    fn watch(&mut self, _fd: BorrowedFd<'_>, _key: WakeKey) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Nanos>, _woken: &mut Vec<WakeKey>) -> io::Result<()> {
        self.0.borrow_mut().push(timeout);
        Ok(())
    }
}

/// Adds one to each number that it receives, and passes it on.
struct Adder {
    port: Port<u64>,
    next: Option<PortSender<u64>>,
    mode: IdleMode,
    seen: Rc<Cell<u64>>,
    refused: Rc<Cell<Option<NotSent<u64>>>>,
    is_finished: bool,
}

impl Adder {
    fn new(core: &CoreContext, mode: IdleMode) -> Self {
        let port = core.open_port(4);
        Self {
            port,
            next: None,
            mode,
            seen: Rc::default(),
            refused: Rc::default(),
            is_finished: false,
        }
    }
}

impl Pollable for Adder {
    fn poll(&mut self, _now: Nanos, budget: usize) -> Polled {
        if self.is_finished {
            return Polled::Finished;
        }
        let mut work = 0;
        while work < budget
            && let Some(number) = self.port.receive()
        {
            work += 1;
            self.seen.set(number);
            if let Some(next) = &self.next {
                self.refused.set(next.send(number + 1).err());
            }
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.mode
    }

    fn arm(&mut self) -> Arm {
        self.port.arm()
    }

    fn disarm(&mut self) {
        self.port.disarm();
    }

    fn wake_fds(&self, _watch: &mut dyn FnMut(BorrowedFd<'_>)) {}

    fn on_wake(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        self.port.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn finish(self: Box<Self>) {}
}

struct Sidecore {
    reactor: Reactor<Sleepless>,
    timeouts: Rc<RefCell<Vec<Option<Nanos>>>>,
    now: u64,
}

impl Sidecore {
    fn new() -> Self {
        let timeouts = Rc::new(RefCell::new(Vec::with_capacity(64)));
        let (_post, mail) = mailbox().unwrap();
        let reactor =
            Reactor::new(CoreContext::default(), Sleepless(Rc::clone(&timeouts)), mail).unwrap();
        Self { reactor, timeouts, now: 0 }
    }

    fn turn(&mut self) -> Turn {
        self.now += 100;
        let now = Nanos(self.now);
        self.reactor.turn(&mut || now).unwrap()
    }

    fn connect(&self, id: PortId<u64>) -> PortSender<u64> {
        self.reactor.context().connect(id).unwrap()
    }
}

#[test]
fn two_units_exchange_messages_without_an_allocation() {
    let mut sidecore = Sidecore::new();
    let core = Rc::clone(sidecore.reactor.context());
    let (mut one, mut other) =
        (Adder::new(&core, IdleMode::Poll), Adder::new(&core, IdleMode::Poll));
    one.next = Some(sidecore.connect(other.port.id()));
    other.next = Some(sidecore.connect(one.port.id()));
    let (first, seen) = (sidecore.connect(one.port.id()), Rc::clone(&other.seen));
    sidecore.reactor.add(one).unwrap();
    sidecore.reactor.add(other).unwrap();
    first.send(0).unwrap();
    for _ in 0..8 {
        assert_eq!(sidecore.turn(), Turn::Busy);
    }
    let (warm, before) = (seen.get(), allocations());
    for _ in 0..10_000 {
        sidecore.turn();
    }
    assert_eq!(allocations() - before, 0);
    assert!(seen.get() >= warm + 9_999, "{warm} {}", seen.get());
}

#[test]
fn a_message_wakes_a_unit_that_sleeps_beside_one_that_polls() {
    let mut sidecore = Sidecore::new();
    let core = Rc::clone(sidecore.reactor.context());
    let (mut polls, sleeps) =
        (Adder::new(&core, IdleMode::Poll), Adder::new(&core, IdleMode::Interrupt));
    polls.next = Some(sidecore.connect(sleeps.port.id()));
    let (first, seen) = (sidecore.connect(polls.port.id()), Rc::clone(&sleeps.seen));
    sidecore.reactor.add(polls).unwrap();
    sidecore.reactor.add(sleeps).unwrap();
    assert_eq!(sidecore.turn(), Turn::Idle);
    let looks = sidecore.timeouts.borrow().len();
    for number in 1..100 {
        first.send(number).unwrap();
        sidecore.turn();
        sidecore.turn();
        assert_eq!(
            seen.get(),
            number + 1,
            "the message arrives by the turn after the one that sent it"
        );
        sidecore.turn();
    }
    let elapsed_us = sidecore.now / 1_000;
    assert!(
        sidecore.timeouts.borrow().len() - looks <= elapsed_us as usize / 20 + 1,
        "by looks only"
    );
}

#[test]
fn a_sidecore_with_a_message_to_deliver_does_not_sleep() {
    let mut sidecore = Sidecore::new();
    let core = Rc::clone(sidecore.reactor.context());
    let (mut one, other) =
        (Adder::new(&core, IdleMode::Interrupt), Adder::new(&core, IdleMode::Interrupt));
    one.next = Some(sidecore.connect(other.port.id()));
    let (first, seen) = (sidecore.connect(one.port.id()), Rc::clone(&other.seen));
    sidecore.reactor.add(one).unwrap();
    sidecore.reactor.add(other).unwrap();
    assert_eq!(sidecore.turn(), Turn::Slept);
    assert_eq!(sidecore.timeouts.take(), [None], "without a timeout");
    first.send(1).unwrap();
    for _ in 0..3 {
        assert_ne!(sidecore.turn(), Turn::Slept);
    }
    assert_eq!(seen.get(), 2);
}

#[test]
fn a_unit_learns_that_its_neighbour_is_gone_and_reaches_no_other() {
    let mut sidecore = Sidecore::new();
    let core = Rc::clone(sidecore.reactor.context());
    let (mut sends, mut goes) =
        (Adder::new(&core, IdleMode::Poll), Adder::new(&core, IdleMode::Poll));
    let gone = goes.port.id();
    sends.next = Some(sidecore.connect(gone));
    goes.is_finished = true;
    let (first, refused) = (sidecore.connect(sends.port.id()), Rc::clone(&sends.refused));
    sidecore.reactor.add(sends).unwrap();
    sidecore.reactor.add(goes).unwrap();
    sidecore.turn();
    let comes = Adder::new(&core, IdleMode::Poll);
    let seen = Rc::clone(&comes.seen);
    sidecore.reactor.add(comes).unwrap();
    first.send(7).unwrap();
    sidecore.turn();
    sidecore.turn();
    assert_eq!(refused.get(), Some(NotSent::Closed(8)));
    assert!(core.connect(gone).is_none());
    assert_eq!(seen.get(), 0, "the next unit in its place got nothing");
}

#[test]
fn a_name_may_travel_between_threads() {
    fn is_send<T: Send + Sync + Copy>(_: T) {}
    is_send(CoreContext::default().open_port::<Rc<u8>>(1).id());
}
