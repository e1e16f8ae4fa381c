//! A stage that panics fails the requests of its device, and nothing else.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Context, FilterChannel, Flush,
    Geometry, InFlight, NullStore, OpenedStage, Operation, RamStore, Readiness, Tag, contain,
    dropped_tags,
};
use sidecore_block_contract::{check_at_each_depth, guest_memory};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

const NOW: Nanos = Nanos(1);
const DEPTH: usize = 4;

/// The place where a stage goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Nowhere,
    Open,
    TakesWriteThrough,
    Attach,
    /// With one request at the store, and the others dropped on the way.
    Submit,
    /// Before the store is polled.
    Poll,
    /// With the requests that the store has completed among those that the stage completes.
    Completion,
    Readiness,
    WaitsSince,
    WakeFd,
    /// Not by a panic: it completes a request of its own making.
    Foreign,
    UserGone,
    Drop,
}

/// A store that holds its requests until it is told otherwise, and may panic.
#[derive(Clone, Default)]
struct Store {
    holds: Arc<AtomicBool>,
    panics: Arc<AtomicBool>,
    is_read_only: bool,
    /// Its user is gone.
    is_left: Arc<AtomicBool>,
}

struct StoreChannel {
    store: Store,
    held: Batch,
}

impl BlockDevice for Store {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: self.is_read_only, ..Geometry::new(1 << 20, 512) }
    }

    fn open_channel(&self, _: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let held = Batch::with_capacity(depth);
        Ok(Box::new(StoreChannel { store: self.clone(), held }))
    }

    fn user_gone(&self) {
        self.is_left.store(true, Ordering::Relaxed);
    }
}

impl BlockChannel for StoreChannel {
    fn submit(&mut self, _: Nanos, batch: &mut Batch) {
        self.held.append(batch);
    }

    fn poll(&mut self, _: Nanos, completed: &mut Batch) {
        assert!(!self.store.panics.load(Ordering::Relaxed), "this panic of a store is a test");
        if !self.store.holds.load(Ordering::Relaxed) {
            self.held.iter_mut().for_each(|request| request.result = Ok(()));
            completed.append(&mut self.held);
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.held.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A stage that passes everything on, and goes wrong in one place when it is armed.
struct Stage {
    below: Arc<dyn BlockDevice>,
    place: Place,
    armed: Arc<AtomicBool>,
}

struct StageChannel {
    inner: Box<dyn BlockChannel>,
    place: Place,
    armed: Arc<AtomicBool>,
    /// A request of the stage's own that is queued for the store.
    own: Batch,
}

fn own_request() -> Box<BlockRequest> {
    let mut request = BlockRequest::blank(0);
    request.operation = Operation::Flush;
    request.tag = Some(Tag::from_bits(0));
    request
}

fn strike(is: bool) {
    assert!(!is, "this panic of a stage is a test");
}

impl BlockDevice for Stage {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.below.open_channel(core, depth)?;
        strike(self.place == Place::Open && self.armed.load(Ordering::Relaxed));
        let (place, armed) = (self.place, Arc::clone(&self.armed));
        Ok(Box::new(StageChannel { inner, place, armed, own: Batch::new() }))
    }

    fn user_gone(&self) {
        strike(self.place == Place::UserGone);
        self.armed.store(true, Ordering::Relaxed);
    }
}

impl StageChannel {
    fn is_at(&self, place: Place) -> bool {
        self.place == place && self.armed.load(Ordering::Relaxed)
    }
}

impl BlockChannel for StageChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        strike(self.is_at(Place::Attach));
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        if self.is_at(Place::Submit) {
            self.own.push(own_request());
            let mut first = batch.drain(..1).collect();
            self.inner.submit(now, &mut first);
            // The rest is dropped as this unwinds.
            let _rest = batch.drain(..);
            strike(true);
        }
        self.inner.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        strike(self.is_at(Place::Poll));
        if self.is_at(Place::Foreign) {
            completed.push(own_request());
        }
        self.inner.poll(now, completed);
        strike(self.is_at(Place::Completion) && !completed.is_empty());
    }

    fn takes_write_through(&self) -> bool {
        strike(self.is_at(Place::TakesWriteThrough));
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        strike(self.is_at(Place::Readiness));
        self.inner.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        strike(self.is_at(Place::WaitsSince));
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        strike(self.is_at(Place::WakeFd));
        self.inner.wake_fd()
    }
}

impl Drop for StageChannel {
    fn drop(&mut self) {
        strike(self.is_at(Place::Drop));
    }
}

/// A contained stage in front of `below`, and what arms it.
fn stage(below: Arc<dyn BlockDevice>, place: Place) -> (Arc<dyn BlockDevice>, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let its = Arc::clone(&armed);
    let open = |below| -> OpenedStage { Ok(Arc::new(Stage { below, place, armed: its })) };
    (contain("bad", "disk", below, open).unwrap(), armed)
}

#[derive(Debug, PartialEq, Eq)]
struct Number(u64);

impl Context for Number {
    fn into_words(self) -> [u64; 2] {
        [self.0, 77]
    }

    fn from_words([number, rest]: [u64; 2]) -> Self {
        assert_eq!(rest, 77);
        Self(number)
    }
}

/// A queue of a front end, as far as the block seam knows it.
struct Queue {
    engine: InFlight<Number>,
    next: u64,
}

impl Queue {
    fn open(device: &dyn BlockDevice, core: &CoreContext) -> Self {
        let mut engine = InFlight::new(Arc::default());
        engine.add_requests(DEPTH, 3);
        engine.set_channel(Some(device.open_channel(core, DEPTH).unwrap()));
        Self { engine, next: 0 }
    }

    fn submit(&mut self, flush: Flush) {
        let mut request = self.engine.blank().unwrap();
        assert_eq!(request.segments.max_segments(), 3);
        request.operation = Operation::Write;
        request.offset_bytes = 512 * self.next;
        request.len_bytes = 512;
        self.engine.submit(request, Number(self.next), flush);
        self.next += 1;
    }

    /// Polls once: the numbers and results of what is over.
    fn poll(&mut self) -> Vec<(u64, Result<(), BlockError>)> {
        self.engine.exchange(NOW);
        let mut over = Vec::new();
        while let Some((Number(number), request)) = self.engine.next_completed(NOW) {
            assert_eq!((request.operation, request.offset_bytes), (Operation::Write, 512 * number));
            assert_eq!((request.len_bytes, request.taken_at), (512, Nanos::ZERO));
            over.push((number, request.result));
            self.engine.recycle(request);
        }
        over.sort_unstable_by_key(|(number, _)| *number);
        over
    }
}

/// The result of a request without a front end.
fn end(request: &mut BlockRequest) -> Result<(), BlockError> {
    assert_eq!(request.tag.take().map(Tag::into_bits), Some(0));
    request.result
}

fn failed(numbers: std::ops::Range<u64>) -> Vec<(u64, Result<(), BlockError>)> {
    numbers.map(|number| (number, Err(BlockError::EIO))).collect()
}

/// Brings the stage to its place, with `DEPTH` requests in flight.
fn go_wrong(queue: &mut Queue, place: Place, armed: &AtomicBool) {
    match place {
        Place::Submit => {
            armed.store(true, Ordering::Relaxed);
            (0..DEPTH).for_each(|_| queue.submit(Flush::Never));
        }
        _ => {
            queue.submit(Flush::After);
            (1..DEPTH).for_each(|_| queue.submit(Flush::Never));
            assert_eq!(queue.poll(), [], "the store holds them");
            armed.store(true, Ordering::Relaxed);
        }
    }
    match place {
        Place::Attach => queue.engine.attach_memory(&guest_memory()).unwrap(),
        Place::Readiness => assert_eq!(queue.engine.readiness(), Readiness::polled(DEPTH)),
        Place::WaitsSince => {
            assert_eq!(queue.engine.channel().unwrap().waits_since(), None);
        }
        Place::WakeFd => assert!(queue.engine.channel().unwrap().wake_fd().is_none()),
        _ => {}
    }
}

#[test]
fn requests_fail_once_the_store_is_done_with_them() {
    for place in [
        Place::Attach,
        Place::Submit,
        Place::Poll,
        Place::Readiness,
        Place::WaitsSince,
        Place::WakeFd,
        Place::Foreign,
    ] {
        let (store, core) = (Store::default(), CoreContext::default());
        store.holds.store(true, Ordering::Relaxed);
        let (device, armed) = stage(Arc::new(store.clone()), place);
        let (beside, _) = stage(Arc::new(NullStore::new(store.geometry())), Place::Nowhere);
        let mut queue = Queue::open(&*device, &core);
        let (mut second, mut neighbour) =
            (Queue::open(&*device, &core), Queue::open(&*beside, &core));
        second.submit(Flush::Never);
        assert_eq!(second.poll(), []);
        go_wrong(&mut queue, place, &armed);
        for _ in 0..3 {
            assert_eq!(queue.poll(), [], "{place:?}: the store may write to their buffers");
            assert_eq!(queue.engine.readiness(), Readiness::polled(DEPTH), "{place:?}");
        }
        let failure = device.stages()[0].failure().unwrap().to_owned();
        let reason = match place {
            Place::Foreign => "it has completed a request that it was not given",
            _ => "it has panicked: this panic of a stage is a test",
        };
        assert_eq!(failure, reason, "{place:?}");
        assert_eq!(device.stages()[0].word(), "bad");
        armed.store(false, Ordering::Relaxed);
        store.holds.store(false, Ordering::Relaxed);
        assert_eq!(queue.poll(), failed(0..4), "{place:?}");
        assert_eq!(queue.engine.readiness(), Readiness::polled(0));
        queue.submit(Flush::Never);
        assert_eq!(queue.poll(), failed(4..5), "{place:?}: it has failed for good");
        // Also on the device's other queues, and on those that start later.
        assert_eq!(second.poll(), failed(0..1), "{place:?}");
        let mut third = Queue::open(&*device, &core);
        third.submit(Flush::Before);
        assert_eq!(third.poll(), failed(0..1), "{place:?}");
        let mut last = device.open_channel(&core, 1).unwrap();
        let (mut batch, mut completed) = (vec![own_request()], Batch::new());
        last.exchange(NOW, &mut batch, &mut completed);
        assert_eq!(end(&mut completed[0]), Ok(()), "{place:?}: a flush for what was done");
        neighbour.submit(Flush::After);
        assert_eq!(neighbour.poll(), [(0, Ok(()))], "{place:?}");
        assert!(beside.stages()[0].failure().is_none());
    }
    assert_eq!(dropped_tags(), 0);
}

#[test]
fn requests_that_a_failing_stage_completes_are_no_successes() {
    let (store, core) = (Store::default(), CoreContext::default());
    store.holds.store(true, Ordering::Relaxed);
    let (device, armed) = stage(Arc::new(store.clone()), Place::Completion);
    let mut queue = Queue::open(&*device, &core);
    go_wrong(&mut queue, Place::Completion, &armed);
    store.holds.store(false, Ordering::Relaxed);
    assert_eq!(queue.poll(), failed(0..4));
    assert!(device.stages()[0].failure().is_some());
}

#[test]
fn a_stage_that_panics_as_its_channel_opens_or_closes_is_contained() {
    for place in [Place::Open, Place::TakesWriteThrough] {
        let core = CoreContext::default();
        let (device, armed) = stage(Arc::new(Store::default()), place);
        armed.store(true, Ordering::Relaxed);
        let mut queue = Queue::open(&*device, &core);
        queue.submit(Flush::Never);
        assert_eq!(queue.poll(), failed(0..1), "{place:?}");
        assert!(device.stages()[0].failure().is_some());
        // The next stage is opened as if nothing had been.
        let (device, _) = stage(Arc::new(Store::default()), Place::Nowhere);
        let mut queue = Queue::open(&*device, &core);
        queue.submit(Flush::Never);
        assert_eq!(queue.poll(), [(0, Ok(()))]);
    }
    let (device, armed) = stage(Arc::new(Store::default()), Place::Drop);
    let queue = Queue::open(&*device, &CoreContext::default());
    armed.store(true, Ordering::Relaxed);
    drop(queue);
    assert!(device.stages()[0].failure().is_some());
    let opened = contain("bad", "disk", Arc::new(Store::default()), |_| panic!("a test, too"));
    let error = opened.err().unwrap().to_string();
    assert_eq!(error, "stage \"bad\": it has panicked as it was opened: a test, too");
}

#[test]
fn of_two_stages_the_one_that_panics_is_named() {
    for (above, below) in [(Place::Poll, Place::Nowhere), (Place::Nowhere, Place::Poll)] {
        let (lower, armed_below) = stage(Arc::new(Store::default()), below);
        let (upper, armed_above) = stage(lower, above);
        let mut queue = Queue::open(&*upper, &CoreContext::default());
        armed_below.store(true, Ordering::Relaxed);
        armed_above.store(true, Ordering::Relaxed);
        queue.submit(Flush::Never);
        let mut over = queue.poll();
        over.extend(queue.poll());
        assert_eq!(over, failed(0..1));
        let has_failed: Vec<bool> =
            upper.stages().iter().map(|stage| stage.failure().is_some()).collect();
        assert_eq!(has_failed, [above == Place::Poll, below == Place::Poll]);
    }
}

#[test]
fn a_panic_of_the_store_is_not_one_of_the_stage() {
    let store = Store::default();
    let (lower, _) = stage(Arc::new(store.clone()), Place::Nowhere);
    let (upper, _) = stage(lower, Place::Nowhere);
    let mut queue = Queue::open(&*upper, &CoreContext::default());
    store.panics.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| queue.poll())).is_err());
    assert!(upper.stages().iter().all(|stage| stage.failure().is_none()));
}

/// The stages do not pass it on themselves.
#[test]
fn stages_and_the_store_are_told_that_its_user_is_gone_unless_that_could_not_write() {
    for is_read_only in [false, true] {
        let store = Store { is_read_only, ..Store::default() };
        let (lower, is_told) = stage(Arc::new(store.clone()), Place::Nowhere);
        let (upper, _) = stage(lower, Place::UserGone);
        upper.user_gone();
        upper.user_gone();
        for is_left in [is_told, store.is_left] {
            assert_eq!(is_left.load(Ordering::Relaxed), !is_read_only);
        }
        let has_failed: Vec<_> =
            upper.stages().iter().map(|stage| stage.failure().is_some()).collect();
        assert_eq!(has_failed, vec![!is_read_only, false], "a panic ends here");
    }
}

#[test]
fn a_contained_stage_keeps_the_contract() {
    let open = |below: Arc<dyn BlockDevice>| -> OpenedStage {
        struct Pass(Arc<dyn BlockDevice>);
        impl BlockDevice for Pass {
            fn geometry(&self) -> Geometry {
                self.0.geometry()
            }

            fn open_channel(
                &self,
                core: &CoreContext,
                depth: usize,
            ) -> io::Result<Box<dyn BlockChannel>> {
                let inner = self.0.open_channel(core, depth)?;
                Ok(Box::new(FilterChannel::new(inner, depth, |_: &BlockRequest| Ok(()))))
            }
        }
        Ok(Arc::new(Pass(below)))
    };
    check_at_each_depth(&|| {
        let ram = Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap());
        let lower = contain("pass", "disk", ram, open).unwrap();
        contain("pass", "disk", lower, open).unwrap()
    });
}
