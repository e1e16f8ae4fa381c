//! Ends: of the mirror, of its users, of queues' channels to a leg that has left, and of patience
//! with a store.

mod common;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, Next, Operation, Readiness};
use sidecore_block_contract::{Asking, Harness, pattern};
use sidecore_memory::GuestMemory;
use sidecore_mirror::{LegError, LegState, Mirror, MirrorError, OpenOptions, Sleep, create};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use common::{breakable, creation, mirror, options, ram, until, until_in_sync};

/// More than anything takes that does not hang.
const LONG: Duration = Duration::from_secs(20);

const OPEN: u8 = 0;
const NOTHING_PASSES: u8 = 1;
const NO_WRITE_PASSES: u8 = 2;

/// A store that holds requests back while it is told to.
struct Gate {
    below: Arc<dyn BlockDevice>,
    state: Arc<AtomicU8>,
    channels: Arc<AtomicUsize>,
}

impl Gate {
    fn new() -> Arc<Self> {
        let (state, channels) = (Arc::new(AtomicU8::new(OPEN)), Arc::new(AtomicUsize::new(0)));
        Arc::new(Self { below: ram(), state, channels })
    }

    fn set(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.channels.fetch_add(1, Ordering::SeqCst);
        let (state, channels) = (Arc::clone(&self.state), Arc::clone(&self.channels));
        let below = self.below.open_channel(core, depth)?;
        Ok(Box::new(GateChannel { below, state, channels, held: Batch::new() }))
    }
}

struct GateChannel {
    below: Box<dyn BlockChannel>,
    state: Arc<AtomicU8>,
    channels: Arc<AtomicUsize>,
    held: Batch,
}

impl Drop for GateChannel {
    fn drop(&mut self) {
        self.channels.fetch_sub(1, Ordering::SeqCst);
    }
}

impl BlockChannel for GateChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.below.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let state = self.state.load(Ordering::SeqCst);
        let passes = |operation| match state {
            OPEN => true,
            NO_WRITE_PASSES => operation == Operation::Read,
            _ => false,
        };
        let (mut passed, held): (Batch, Batch) =
            batch.drain(..).partition(|request| passes(request.operation));
        self.held.extend(held);
        self.below.submit(now, &mut passed);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        if self.state.load(Ordering::SeqCst) == OPEN {
            self.below.submit(now, &mut self.held);
        }
        self.below.poll(now, completed);
    }

    fn readiness(&self) -> Readiness {
        let below = self.below.readiness();
        let in_flight = below.in_flight + self.held.len();
        Readiness { in_flight, next: if self.held.is_empty() { below.next } else { Next::OnWake } }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.below.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Calls `f` on a thread of its own, which may hang, and returns its result.
fn in_time<T: Send + 'static>(what: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(f()));
    receiver.recv_timeout(LONG).unwrap_or_else(|_| panic!("{what} takes forever"))
}

#[test]
fn the_last_channel_does_not_wait_for_the_keeper() {
    let (gate, other) = (Gate::new(), ram());
    let legs = [Arc::clone(&gate) as Arc<dyn BlockDevice>, other];
    let mirror = mirror(&legs);
    let closing = Arc::clone(&gate);
    in_time("the end of a channel", move || {
        let mut guest = Harness::new(&(Arc::clone(&mirror) as Arc<dyn BlockDevice>), 8);
        guest.store(0, &pattern(1, 4096));
        // Its channels may live longer.
        drop(mirror);
        closing.set(NOTHING_PASSES);
        drop(guest);
    });
    gate.set(OPEN);
    let begin = Instant::now();
    while gate.channels.load(Ordering::SeqCst) > 0 {
        assert!(begin.elapsed() < LONG, "the keeper does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let again = Mirror::open(&legs, options()).unwrap();
    let status = until_in_sync(&again, &[0, 1]);
    assert_eq!((status.copied_regions, status.dirty_regions), (0, 0), "it was closed");
}

#[test]
fn a_store_that_hangs_is_no_leg_and_holds_no_request_up() {
    let (gate, first, second) = (Gate::new(), ram(), ram());
    let third = Arc::clone(&gate) as Arc<dyn BlockDevice>;
    let legs = [first, second, Arc::clone(&third)];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let options = OpenOptions { patience: Nanos::from_millis(50), ..options() };
    let mirror = Arc::new(Mirror::open(&legs[..2], options).unwrap());
    let attach = |what: &'static str| {
        let (mirror, third) = (Arc::clone(&mirror), Arc::clone(&third));
        in_time(what, move || mirror.attach(third))
    };
    gate.set(NOTHING_PASSES);
    let error = attach("a store that does not answer").unwrap_err();
    assert!(matches!(error, MirrorError::Leg { error: LegError::Silent { .. }, .. }), "{error}");
    let mut guest = Harness::new(&(Arc::clone(&mirror) as Arc<dyn BlockDevice>), 8);
    guest.store(0, &pattern(1, 4096));
    // It is read, and not written: requests are paused for its header.
    gate.set(NO_WRITE_PASSES);
    attach("a store that does not write").unwrap();
    until(&mirror, "failed", |status| status.legs[2] == LegState::Failed);
    guest.store(4096, &pattern(2, 4096));
    let error = attach("a store that is late").unwrap_err();
    assert!(matches!(error, MirrorError::Leg { error: LegError::Late { leg: 2 }, .. }), "{error}");
    gate.set(OPEN);
    until(&mirror, "attached", |_| attach("a store that answers").is_ok());
    until_in_sync(&mirror, &[0, 1, 2]);
    assert!(Harness::new(&mirror.leg(2).unwrap(), 1).load(4096, 4096) == pattern(2, 4096));
}

#[test]
fn a_late_request_keeps_its_store_out_and_not_another_one_with_its_number() {
    let gate = Gate::new();
    let late = Arc::clone(&gate) as Arc<dyn BlockDevice>;
    let legs = [ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let options = OpenOptions { patience: Nanos::from_millis(50), ..options() };
    let mirror = Mirror::open(&legs, options).unwrap();
    // Its header as leg 2 is in flight, and the store has none that could say so.
    gate.set(NO_WRITE_PASSES);
    mirror.add((2, 12), Arc::clone(&late)).unwrap_err();
    let error = mirror.add((3, 13), Arc::clone(&late)).unwrap_err();
    assert!(matches!(error, MirrorError::Leg { error: LegError::Late { leg: 2 }, .. }), "{error}");
    mirror.add((2, 14), ram()).unwrap();
    until_in_sync(&mirror, &[0, 1, 2]);
    // It arrives: the store says now that it has the number of another one, and is a store of its
    // own all the same.
    gate.set(OPEN);
    until(&mirror, "quiet", |_| {
        let error = mirror.attach(Arc::clone(&late)).unwrap_err();
        matches!(error, MirrorError::Leg { error: LegError::Removed { leg: 2 }, .. })
    });
    mirror.add((3, 13), late).unwrap();
    until_in_sync(&mirror, &[0, 1, 2, 3]);
}

#[test]
fn a_repair_that_waits_for_a_leg_does_not_hold_the_end_up() {
    let gate = Gate::new();
    let mirror = mirror(&[ram(), Arc::clone(&gate) as Arc<dyn BlockDevice>]);
    gate.set(NOTHING_PASSES);
    let (asking, repaired) = (Arc::clone(&mirror), mpsc::channel());
    std::thread::spawn(move || repaired.0.send(asking.repair((0, 1), (0, 4096))));
    assert!(repaired.1.recv_timeout(Duration::from_millis(200)).is_err(), "it waits for the leg");
    mirror.answer_no_more();
    let result = repaired.1.recv_timeout(LONG).unwrap();
    assert!(matches!(result, Err(MirrorError::Closed)), "{result:?}");
    gate.set(OPEN);
    // The rest of the repair is given up.
    let end = mirror.end();
    drop(mirror);
    assert!(end.wait(LONG));
}

#[test]
fn an_idle_queue_closes_its_channel_to_a_leg_that_was_removed() {
    let gate = Gate::new();
    let mirror = mirror(&[ram(), Arc::clone(&gate) as Arc<dyn BlockDevice>]);
    let mut guest = Harness::new(&(Arc::clone(&mirror) as Arc<dyn BlockDevice>), 8);
    guest.store(0, &pattern(1, 4096));
    mirror.remove(1).unwrap();
    // Front ends poll an idle channel that says so.
    until(&mirror, "closed", |_| {
        if guest.channel.readiness().next == Next::Now {
            common::poll(&mut guest, &mut Batch::new());
        }
        gate.channels.load(Ordering::SeqCst) == 0
    });
    assert_eq!(guest.channel.readiness().next, Next::OnWake, "its sidecore may sleep");
}

#[test]
fn an_idle_queue_takes_a_late_signal_of_a_leg() {
    let leg = Asking::new(ram());
    let mirror = mirror(&[ram(), Arc::clone(&leg) as Arc<dyn BlockDevice>]);
    let mut guest = Harness::new(&(Arc::clone(&mirror) as Arc<dyn BlockDevice>), 8);
    guest.store(0, &pattern(1, 4096));
    // The keeper polls the leg as long as it has something to do there.
    until(&mirror, "clean", |status| status.dirty_regions == 0);
    leg.signal();
    common::poll(&mut guest, &mut Batch::new());
    assert!(leg.is_quiet());
}

/// A store that takes requests until its user is gone, as a remote one takes writes.
struct Left {
    below: Arc<dyn BlockDevice>,
    is_left: Arc<AtomicBool>,
}

impl BlockDevice for Left {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.below.open_channel(core, depth)
    }

    fn loss(&self) -> Option<String> {
        self.is_left.load(Ordering::SeqCst).then(|| "its user is gone".to_owned())
    }

    fn user_gone(&self) {
        self.is_left.store(true, Ordering::SeqCst);
    }
}

#[test]
fn the_end_of_a_guest_is_none_of_the_legs_user() {
    let (below, is_left) = breakable();
    let leg = Arc::new(Left { below, is_left: Arc::clone(&is_left) });
    let mirror = mirror(&[ram(), leg]);
    let device = Arc::clone(&mirror) as Arc<dyn BlockDevice>;
    let mut guest = Harness::new(&device, 8);
    guest.store(0, &pattern(1, 4096));
    assert!(mirror.status().dirty_regions > 0);
    drop(guest);
    device.user_gone();
    assert!(!is_left.load(Ordering::SeqCst) && device.loss().is_none());
    // The keeper flushes the legs, and clears marks there.
    until(&mirror, "clean", |status| status.dirty_regions == 0);
    let mut guest = Harness::new(&device, 8);
    guest.store(4096, &pattern(2, 4096));
    let status = until_in_sync(&mirror, &[0, 1]);
    assert_eq!(status.failures, 0);
}
