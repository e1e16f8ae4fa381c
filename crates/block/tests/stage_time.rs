//! The time of a stage is that of its own code.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, NullStore, OpenedStage, Operation,
    Readiness, StageCounts, Tag, contain,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

/// A clock that moves when a test says so.
#[derive(Clone, Default)]
struct Time {
    us: Arc<AtomicU64>,
    reads: Arc<AtomicU64>,
}

impl Time {
    fn pass(&self, us: u64) {
        self.us.fetch_add(us, Ordering::Relaxed);
    }

    fn now(&self) -> Nanos {
        Nanos::from_micros(self.us.load(Ordering::Relaxed))
    }

    fn core(&self) -> CoreContext {
        let time = self.clone();
        CoreContext::default().with_clock(move || {
            time.reads.fetch_add(1, Ordering::Relaxed);
            time.now()
        })
    }
}

/// A device that takes time: before the device below is called, and after that, in `submit` and in
/// `poll`.
struct Slow {
    below: Arc<dyn BlockDevice>,
    time: Time,
    us: [u64; 2],
}

struct SlowChannel {
    inner: Box<dyn BlockChannel>,
    time: Time,
    us: [u64; 2],
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.below.open_channel(core, depth)?;
        Ok(Box::new(SlowChannel { inner, time: self.time.clone(), us: self.us }))
    }
}

impl BlockChannel for SlowChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.time.pass(self.us[0]);
        self.inner.submit(now, batch);
        self.time.pass(self.us[1]);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.time.pass(self.us[0]);
        self.inner.poll(now, completed);
        self.time.pass(self.us[1]);
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

/// A store that takes 20 ms of each turn.
fn store(time: &Time) -> Arc<dyn BlockDevice> {
    let below = Arc::new(NullStore::new(Geometry::new(1 << 20, 512)));
    Arc::new(Slow { below, time: time.clone(), us: [5_000, 5_000] })
}

fn stage(below: Arc<dyn BlockDevice>, time: &Time, us: [u64; 2]) -> Arc<dyn BlockDevice> {
    let time = time.clone();
    let open = |below| -> OpenedStage { Ok(Arc::new(Slow { below, time, us })) };
    contain("slow", "disk", below, open).unwrap()
}

/// One turn with `count` requests.
fn turn(channel: &mut dyn BlockChannel, now: Nanos, count: usize) {
    let requests = (0..count).map(|_| {
        let mut request = BlockRequest::blank(0);
        request.operation = Operation::Flush;
        request.tag = Some(Tag::from_bits(7));
        request
    });
    let (mut batch, mut completed) = (requests.collect(), Batch::new());
    channel.exchange(now, &mut batch, &mut completed);
    assert_eq!(completed.len(), count);
    for request in &mut completed {
        assert_eq!(request.tag.take().map(Tag::into_bits), Some(7));
    }
}

fn counts(requests: u64, turns: u64, busy_us: u64, long_turns: u64) -> StageCounts {
    StageCounts { requests, turns, busy_ns: busy_us * 1_000, long_turns }
}

#[test]
fn neither_the_store_nor_another_stage_counts() {
    let time = Time::default();
    let lower = stage(store(&time), &time, [100, 30]);
    let upper = stage(lower, &time, [7, 0]);
    let mut channel = upper.open_channel(&time.core(), 4).unwrap();
    for number in 1..=3 {
        turn(&mut *channel, time.now(), 2);
        let shown: Vec<StageCounts> = upper.stages().iter().map(|stage| stage.counts()).collect();
        let expected = [
            counts(2 * number, number, 14 * number, 0),
            counts(2 * number, number, 260 * number, 0),
        ];
        assert_eq!(shown, expected);
    }
    assert_eq!(upper.stages()[0].longest_turn(), Nanos::ZERO);
    drop(channel);
    assert_eq!(upper.stages()[1].counts(), counts(6, 3, 780, 0), "also of closed channels");
}

#[test]
fn a_turn_over_a_millisecond_is_counted_once() {
    let time = Time::default();
    for (us, is_long) in [([250, 249], false), ([250, 250], true), ([900, 300], true)] {
        let device = stage(store(&time), &time, us);
        let account = Arc::clone(&device.stages()[0]);
        let mut channel = device.open_channel(&time.core(), 4).unwrap();
        let now = time.now();
        turn(&mut *channel, now, 1);
        assert_eq!(account.counts().long_turns, u64::from(is_long), "{us:?}");
        let spent = if is_long { Nanos::from_micros(2 * (us[0] + us[1])) } else { Nanos::ZERO };
        assert_eq!(account.longest_turn(), spent);
        // The store is asked again in the same turn.
        turn(&mut *channel, now, 1);
        assert_eq!((account.counts().turns, account.counts().long_turns), (1, 1), "{us:?}");
        turn(&mut *channel, time.now(), 1);
        assert_eq!(account.counts().long_turns, 1 + u64::from(is_long), "{us:?}");
    }
}

#[test]
fn a_turn_without_requests_reads_no_clock() {
    let time = Time::default();
    let device = stage(store(&time), &time, [3, 3]);
    let mut channel = device.open_channel(&time.core(), 4).unwrap();
    (0..100).for_each(|_| turn(&mut *channel, time.now(), 0));
    assert_eq!(time.reads.load(Ordering::Relaxed), 0);
    assert_eq!(device.stages()[0].counts(), counts(0, 0, 0, 0));
    turn(&mut *channel, time.now(), 4);
    // Around the stage, and around each of its two calls of the store.
    assert_eq!(time.reads.load(Ordering::Relaxed), 6);
    let mut untimed = device.open_channel(&CoreContext::default(), 4).unwrap();
    turn(&mut *untimed, time.now(), 4);
    assert_eq!(device.stages()[0].counts(), counts(8, 2, 12, 0));
}
