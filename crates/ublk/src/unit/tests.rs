use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::{BlockDevice, RamStore};
use sidecore_block_contract::Asking;
use sidecore_linux::IoDescriptor;
use sidecore_memory::{GuestAddress, GuestMemory, SharedPages};
use sidecore_reactor::{CoreContext, EventFd};

use super::*;

const NOW: Nanos = Nanos::from_micros(1);
const BUFFER_BYTES: u64 = 8192;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 2;

#[derive(Default)]
struct State {
    descriptors: BTreeMap<u16, IoDescriptor>,
    /// Answers that the unit has not seen.
    answers: Vec<IoResult>,
    committed: Vec<(u16, i32)>,
    /// Completions that the unit has given in turns.
    done: Vec<(u16, i32)>,
    calls: u32,
}

/// A kernel with four tags.
struct Fake {
    state: Rc<RefCell<State>>,
    pages: SharedPages,
    event: EventFd,
}

impl Kernel for Fake {
    fn depth(&self) -> u16 {
        4
    }
    fn memory(&self) -> &GuestMemory {
        self.pages.memory()
    }
    fn buffer(&self, tag: u16) -> GuestAddress {
        GuestAddress(u64::from(tag) * BUFFER_BYTES)
    }
    fn buffer_bytes(&self) -> u64 {
        BUFFER_BYTES
    }
    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.state.borrow().descriptors[&tag]
    }
    fn commit(&mut self, tag: u16, result: i32) {
        self.state.borrow_mut().committed.push((tag, result));
    }
    fn turn(&mut self, answers: &mut Vec<IoResult>) -> bool {
        let mut state = self.state.borrow_mut();
        let has_work = !state.committed.is_empty() || !state.answers.is_empty();
        answers.append(&mut state.answers);
        let committed = std::mem::take(&mut state.committed);
        state.done.extend(committed);
        state.calls += u32::from(has_work);
        has_work
    }
    fn is_ready(&mut self) -> bool {
        self.has_queued() || !self.state.borrow().answers.is_empty()
    }
    fn has_queued(&mut self) -> bool {
        !self.state.borrow().committed.is_empty()
    }
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

struct Rig {
    unit: Box<UblkUnit<Fake>>,
    state: Rc<RefCell<State>>,
    stats: Arc<QueueStats>,
    broken: Arc<Mutex<Vec<String>>>,
}

fn rig() -> Rig {
    rig_of(&RamStore::new(Geometry::new(1 << 20, 512)).unwrap())
}

fn rig_of(store: &dyn BlockDevice) -> Rig {
    let (state, stats) = (Rc::<RefCell<State>>::default(), Arc::new(QueueStats::default()));
    let broken = Arc::<Mutex<Vec<String>>>::default();
    let pages = SharedPages::new("test", 4 * BUFFER_BYTES as usize).unwrap();
    let kernel = Fake { state: Rc::clone(&state), pages, event: EventFd::new().unwrap() };
    let geometry = store.geometry();
    let channel = store.open_channel(&CoreContext::default(), 4).unwrap();
    let reasons = Arc::clone(&broken);
    let options = UnitOptions {
        device: "d".into(),
        index: 1,
        geometry,
        mode: IdleMode::Interrupt,
        stats: Arc::clone(&stats),
        broken: Box::new(move |reason| reasons.lock().unwrap().push(reason)),
    };
    Rig { unit: Box::new(UblkUnit::new(kernel, channel, options).unwrap()), state, stats, broken }
}

impl Rig {
    /// A request of the kernel.
    fn send(&self, tag: u16, word: u32, start_sector: u64, sectors: u32) {
        let mut state = self.state.borrow_mut();
        let descriptor =
            IoDescriptor { operation_and_flags: word, sectors, start_sector, address: 0 };
        state.descriptors.insert(tag, descriptor);
        state.answers.push(IoResult { tag, code: 0 });
    }

    fn fill(&self, tag: u16, with: u8) {
        let data = [with; BUFFER_BYTES as usize];
        let (memory, at) = (self.unit.kernel.memory().clone(), self.unit.kernel.buffer(tag));
        memory.write_slice(at, &data, &mut RegionHint::default()).unwrap();
    }

    fn data(&self, tag: u16) -> [u8; 512] {
        let (memory, at) = (self.unit.kernel.memory(), self.unit.kernel.buffer(tag));
        memory.read_array(at, &mut RegionHint::default()).unwrap()
    }

    /// Polls until the unit has nothing to do; the completions in order.
    fn run(&mut self) -> Vec<(u16, i32)> {
        while self.unit.poll(NOW, 32) != Polled::Idle || self.unit.kernel.is_ready() {}
        std::mem::take(&mut self.state.borrow_mut().done)
    }
}

#[test]
fn data_go_to_the_store_and_come_back() {
    let mut rig = rig();
    rig.fill(0, 7);
    rig.send(0, WRITE | 1 << 13, 8, 16);
    assert_eq!(rig.run(), [(0, 8192)]);
    rig.fill(2, 0);
    rig.send(2, READ, 8, 16);
    rig.send(1, FLUSH, 0, 0);
    let mut done = rig.run();
    done.sort_unstable();
    assert_eq!(done, [(1, 0), (2, 8192)]);
    assert_eq!(rig.data(2), [7; 512]);
    let stats = &rig.stats;
    assert_eq!((stats.requests.get(), stats.writes.get(), stats.reads.get()), (3, 1, 1));
    assert_eq!((stats.bytes_written.get(), stats.flushes.get()), (8192, 1));
}

#[test]
fn requests_that_come_together_cost_two_system_calls_and_an_idle_queue_none() {
    let mut rig = rig();
    for tag in 0..4 {
        rig.send(tag, READ, u64::from(tag), 1);
    }
    assert_eq!(rig.run().len(), 4);
    assert_eq!(rig.state.borrow().calls, 2, "one takes the requests, one completes them");
    assert_eq!(rig.stats.enters.get(), 2);
    for _ in 0..10 {
        assert_eq!(rig.unit.poll(NOW, 32), Polled::Idle);
    }
    assert_eq!(rig.stats.enters.get(), 2);
    assert_eq!(rig.unit.arm(), Arm::Armed);
    rig.send(0, READ, 0, 1);
    assert_eq!(rig.unit.arm(), Arm::WorkPending);
}

#[test]
fn an_idle_queue_polls_a_store_that_asks_for_it_and_then_sleeps() {
    let store = Asking::new(Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap()));
    let mut rig = rig_of(&*store);
    assert_eq!((rig.unit.poll(NOW, 32), rig.unit.arm()), (Polled::Idle, Arm::Armed));
    store.ask();
    assert_eq!(rig.unit.arm(), Arm::CannotSleep);
    assert_eq!((rig.unit.poll(NOW, 32), rig.unit.arm()), (Polled::Idle, Arm::Armed));
    assert!(!store.asks());
    // Its descriptor has woken the sidecore, and would again.
    store.signal();
    rig.unit.on_wake();
    assert_eq!((rig.unit.poll(NOW, 32), rig.unit.arm()), (Polled::Idle, Arm::Armed));
    assert!(store.is_quiet());
}

#[test]
fn a_budget_leaves_the_rest_for_the_next_poll() {
    let mut rig = rig();
    for tag in 0..4 {
        rig.send(tag, READ, u64::from(tag), 1);
    }
    assert_eq!(rig.unit.poll(NOW, 1), Polled::Busy(1));
    assert_eq!(rig.unit.queued.len(), 3);
    assert_eq!(rig.unit.arm(), Arm::WorkPending);
    assert_eq!(rig.run().len(), 4);
}

#[test]
fn what_the_store_may_not_see_is_refused_and_the_tag_stays_in_use() {
    let mut rig = rig();
    rig.send(3, 15, 0, 1);
    assert_eq!(rig.run(), [(3, -95)]);
    rig.send(3, READ, 1 << 40, 1);
    assert_eq!(rig.run(), [(3, -5)]);
    rig.send(3, READ, 0, 17);
    assert_eq!(rig.run(), [(3, -5)], "larger than the buffer");
    assert_eq!((rig.stats.rejected.get(), rig.stats.requests.get()), (3, 0));
    rig.send(3, READ, 0, 1);
    assert_eq!(rig.run(), [(3, 512)]);
}

#[test]
fn a_store_that_has_grown_is_used_to_its_new_end() {
    let mut rig = rig();
    let end = (1 << 20) / 512;
    rig.send(0, READ, end - 1, 2);
    assert_eq!(rig.run(), [(0, -5)]);
    rig.unit.resize((1 << 20) - 4096);
    rig.send(0, READ, end - 8, 8);
    assert_eq!(rig.run(), [(0, -5)]);
    rig.unit.resize(1 << 20);
    rig.send(0, READ, end - 8, 8);
    assert_eq!(rig.run(), [(0, 4096)]);
}

#[test]
fn an_aborted_tag_is_no_fault_and_every_other_answer_is_one() {
    let mut rig = rig();
    let answer = |tag, code| IoResult { tag, code };
    rig.state.borrow_mut().answers.extend([answer(0, ABORTED), answer(1, ABORTED)]);
    assert!(rig.run().is_empty() && rig.broken.lock().unwrap().is_empty());
    rig.state.borrow_mut().answers.extend([answer(2, -22), answer(9, 0), answer(3, 1)]);
    assert!(rig.run().is_empty());
    let broken = rig.broken.lock().unwrap();
    assert_eq!(broken.len(), 3);
    assert!(broken[0].contains("tag 2 with -22"), "{broken:?}");
}

#[test]
fn a_stop_completes_what_was_begun_and_leaves_the_rest_to_the_kernel() {
    let mut rig = rig();
    rig.send(0, READ, 0, 1);
    rig.send(1, READ, 8, 1);
    assert_eq!(rig.unit.poll(NOW, 1), Polled::Busy(1));
    let stopped = Arc::new(AtomicBool::new(false));
    let is_stopped = Arc::clone(&stopped);
    rig.unit.stop(Box::new(move |()| is_stopped.store(true, Ordering::Relaxed)));
    while rig.unit.poll(NOW, 32) != Polled::Finished {}
    assert_eq!(rig.state.borrow().done, [(0, 512)], "the other one was not begun");
    rig.unit.finish();
    assert!(stopped.load(Ordering::Relaxed));
}

#[test]
fn a_paused_queue_leaves_its_requests_and_goes_on_with_another_channel() {
    let mut rig = rig();
    rig.fill(0, 7);
    rig.send(0, WRITE, 0, 1);
    assert_eq!(rig.run(), [(0, 512)]);
    let empty = RamStore::new(Geometry::new(1 << 20, 512)).unwrap();
    let spare = empty.open_channel(&CoreContext::default(), rig.unit.depth()).unwrap();
    assert!(rig.unit.set_spare(Some(spare)).unwrap().is_none());
    let paused = Arc::new(AtomicBool::new(false));
    let is_paused = Arc::clone(&paused);
    rig.unit.pause(Box::new(move || is_paused.store(true, Ordering::Relaxed)));
    rig.send(1, READ, 0, 1);
    assert!(rig.run().is_empty() && paused.load(Ordering::Relaxed));
    assert_eq!(rig.unit.arm(), Arm::Armed);
    rig.fill(1, 9);
    rig.unit.resume(true);
    assert_eq!(rig.run(), [(1, 512)]);
    assert_eq!(rig.data(1), [0; 512], "of the other store");
    assert!(rig.unit.set_spare(None).unwrap().is_some());
}
