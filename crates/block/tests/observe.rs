//! Stages that only look at requests: each ended request once, at little cost, and a panic leaves
//! the stage out and harms no request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sidecore_block::{
    BlockDevice, BlockRequest, Geometry, Observe, Observer, Operation, RamStore, StageError,
    observe,
};
use sidecore_block_contract::{Harness, check_at_each_depth, pattern};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

#[derive(Default)]
struct Shared {
    requests: AtomicU64,
    bytes: AtomicU64,
    panics: AtomicBool,
}

#[derive(Clone, Default)]
struct Looking(Arc<Shared>);

impl Observe for Looking {
    fn open_channel(&self, _: &CoreContext) -> Box<dyn Observer> {
        Box::new(self.clone())
    }
}

impl Observer for Looking {
    fn completed(&mut self, _: Nanos, requests: &[Box<BlockRequest>]) {
        assert!(!requests.is_empty());
        for request in requests {
            self.0.requests.fetch_add(1, Ordering::Relaxed);
            assert!(!self.0.panics.load(Ordering::Relaxed), "a bug\nin it");
            let bytes = if request.result.is_ok() { request.len_bytes } else { 0 };
            self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        assert!(
            std::thread::panicking() || !self.0.panics.load(Ordering::Relaxed),
            "in the destructor as well"
        );
    }
}

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

fn observed() -> (Arc<dyn BlockDevice>, Arc<Shared>) {
    let looking = Looking::default();
    let shared = Arc::clone(&looking.0);
    (observe("look", "disk", ram(), || Ok(Arc::new(looking))).unwrap(), shared)
}

#[test]
fn an_observed_device_keeps_the_contract() {
    check_at_each_depth(&|| observed().0);
}

#[test]
fn each_ended_request_is_seen_once() {
    let (device, shared) = observed();
    let mut harness = Harness::new(&device, 8);
    harness.store(0, &pattern(1, 8192));
    assert_eq!(harness.load(0, 8192), pattern(1, 8192));
    let seen = shared.requests.load(Ordering::Relaxed);
    assert_eq!(shared.bytes.load(Ordering::Relaxed), 16_384);
    let requests = vec![
        harness.range_request(Operation::Flush, 0, 0),
        harness.range_request(Operation::Discard, 8 << 20, 4096),
    ];
    assert!(harness.run(requests)[1].is_err());
    assert_eq!(shared.requests.load(Ordering::Relaxed), seen + 2);
    let account = &device.stages()[0];
    assert_eq!((account.word(), account.counts().requests), ("look", seen + 2));
}

#[test]
fn a_panic_leaves_the_observer_out_and_harms_no_request() {
    let (device, shared) = observed();
    let (mut one, mut other) = (Harness::new(&device, 8), Harness::new(&device, 1));
    one.store(0, &pattern(1, 8192));
    assert_eq!(device.stages()[0].failure(), None);
    shared.panics.store(true, Ordering::Relaxed);
    one.store(8192, &pattern(2, 8192));
    let account = &device.stages()[0];
    assert_eq!(account.failure(), Some("it has panicked: a bug in it"));
    assert!(account.is_left_out());
    let seen = shared.requests.load(Ordering::Relaxed);
    assert_eq!(one.load(0, 8192), pattern(1, 8192));
    assert_eq!(one.load(8192, 8192), pattern(2, 8192));
    assert_eq!(shared.requests.load(Ordering::Relaxed), seen, "it is not called again");
    // The observer of another channel is left out, too.
    assert_eq!(other.load(0, 512), pattern(1, 8192)[..512]);
    assert_eq!(shared.requests.load(Ordering::Relaxed), seen);
    // Nor is one made for a channel that is opened later.
    let mut later = Harness::new(&device, 1);
    assert_eq!(later.load(0, 512), pattern(1, 8192)[..512]);
    assert_eq!(shared.requests.load(Ordering::Relaxed), seen);
}

#[test]
fn a_panic_of_a_destructor_is_contained() {
    let (device, shared) = observed();
    let one = Harness::new(&device, 8);
    let account = Arc::clone(&device.stages()[0]);
    shared.panics.store(true, Ordering::Relaxed);
    drop(one);
    assert_eq!(account.failure(), Some("it has panicked: in the destructor as well"));
    drop(device);
    // An observer whose channels were all closed before.
    let (device, shared) = observed();
    let account = Arc::clone(&device.stages()[0]);
    shared.panics.store(true, Ordering::Relaxed);
    drop(device);
    assert_eq!(account.failure(), Some("it has panicked: in the destructor as well"));
}

#[test]
fn an_observer_that_cannot_be_opened_is_an_error() {
    let refused = StageError { stage: "look", reason: "no".to_owned() };
    let opened = observe("look", "disk", ram(), || Err(refused.clone()));
    assert_eq!(opened.err(), Some(refused));
    let opened = observe("look", "disk", ram(), || panic!("a bug"));
    let reason = opened.err().unwrap().reason;
    assert_eq!(reason, "it has panicked as it was opened: a bug");
}

/// A clock that is read, and what a stage spends by it.
#[test]
fn time_is_sampled_when_requests_follow_each_other_closely() {
    let (device, _) = observed();
    let reads = Arc::new(AtomicU64::new(0));
    let of_clock = Arc::clone(&reads);
    let clock = move || Nanos(of_clock.fetch_add(1, Ordering::Relaxed) * 100);
    let core = CoreContext::default().with_clock(clock);
    let mut channel = device.open_channel(&core, 1).unwrap();
    let mut now = Nanos::from_millis(10);
    let mut turns = |count: u64| {
        for _ in 0..count {
            now = now.after(Nanos::from_micros(1));
            let mut request = BlockRequest::blank(0);
            request.operation = Operation::Flush;
            request.tag = Some(sidecore_block::Tag::from_bits(7));
            let (mut batch, mut completed) = (vec![request], Vec::new());
            channel.exchange(now, &mut batch, &mut completed);
            completed.remove(0).tag.take().map(sidecore_block::Tag::into_bits).unwrap();
        }
        (reads.load(Ordering::Relaxed), device.stages()[0].counts().busy_ns)
    };
    let (reads, busy_ns) = turns(1024);
    assert_eq!((reads, busy_ns), (2 * 1024, 1024 * 100));
    let (more_reads, busy_ns) = turns(1600);
    assert_eq!(more_reads - reads, 2 * 100, "one call in sixteen is measured");
    assert_eq!(busy_ns, (1024 + 1600) * 100, "and stands for all");
}
