//! The parts of the time of one request: the paths of driver and device in one process, with
//! readings of the time stamp counter between the stages.
//!
//! The device is the very code that the daemon runs ([`sidecore_virtio::blk::BlkQueue`] polled in a
//! loop), on the server's core; the driver is the client of all other experiments. Stamps are taken
//! at the seams of the code: before and after submission, where the store gets the request and
//! completes it, at the end of the device's turn, and when the client has the completion. The time
//! between two seams is not divided any further, except for finding and parsing, which is measured
//! again alone, in one core's cache. A stamp costs some nanoseconds, which are in the numbers.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, NullStore, Readiness,
};
use sidecore_driver::{ClientOptions, Loopback};
use sidecore_memory::RegionHint;
use sidecore_reactor::{CoreContext, IdleMode, Pollable, Polled};
use sidecore_ring::{Chain, DeviceRing, RingState};
use sidecore_units::{Nanos, Sector};
use sidecore_virtio::QueueResources;
use sidecore_virtio::blk::request::RequestRules;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, BlkQueue};

use super::Bench;
use crate::cores::Partner;
use crate::load::{BLOCK_BYTES, Places};
use crate::process::watched;
use crate::record::{OURS, Params};
use crate::rounds::Rounds;
use crate::stats;

const CASE: &str = "breakdown/null/randread/qd1";

const DISK_BYTES: u64 = 64 << 20;

/// The stages of a request, in their order.
const STAGES: [&str; 5] = [
    "client_submits",
    "sidecore_finds_and_parses",
    "store",
    "sidecore_completes",
    "client_finds_completion",
];

/// The stamps of one request on the device's side.
#[derive(Clone, Copy, Debug)]
struct DeviceStamps {
    submitted: u64,
    stored: u64,
    turn_over: u64,
}

/// The stamps of one request on the client's side.
#[derive(Clone, Copy, Debug)]
struct ClientStamps {
    start: u64,
    published: u64,
    completed: u64,
}

pub(super) fn run(bench: &mut Bench) -> Result<()> {
    let (clock, requests) = (bench.experiment.clock.clone(), bench.plan.stages);
    let mut stages: Vec<Rounds> = STAGES.iter().map(|_| Rounds::new()).collect();
    let (mut whole, mut parsing) = (Rounds::new(), Rounds::new());
    for _ in 0..bench.plan.rounds {
        let gated = bench
            .experiment
            .gate
            .run(|partner| watched(|| one_round(partner, &clock, requests)))?;
        for (rounds, ns) in stages.iter_mut().zip(gated.result.stages) {
            rounds.add(ns, gated.counts());
        }
        whole.add(gated.result.whole, gated.counts());
        parsing.add(parse_alone(&clock, requests)?, true);
    }
    let named = STAGES.iter().copied().zip(&stages);
    let all = named.chain([("whole", &whole), ("finding_and_parsing_in_cache", &parsing)]);
    for (metric, rounds) in all {
        let mut params: Params = bench.common_params();
        params.insert(
            "how".to_owned(),
            "stamps in one process, driver and device on their cores".into(),
        );
        let (median, params) = rounds.settle(params);
        bench.experiment.records.measure(CASE, OURS, metric, median, "ns", params);
        eprintln!("  {:<20}  {metric:<30} {median:>8.0} ns", "breakdown");
    }
    Ok(())
}

struct Round {
    stages: [f64; 5],
    whole: f64,
}

fn one_round(partner: &Partner, clock: &Clock, requests: usize) -> Result<Round> {
    let ahead = clock_ahead(partner, clock)?;
    let options = ClientOptions::default();
    let device = disk();
    let Loopback { mut queue, memory, layout, kick, call, error } =
        Loopback::new(&options, device.features())?;
    let features = device.features();
    let resources = QueueResources {
        memory,
        layout,
        features,
        kick: Some(kick),
        call: Some(call),
        err: Some(error),
        log: None,
        is_enabled: true,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let (their_stop, their_clock) = (Arc::clone(&stop), clock.clone());
    let served =
        partner.run(move || serve(&device, resources, &their_stop, &their_clock, requests))?;

    let did = drive(&mut queue, clock, requests);
    stop.store(true, Ordering::Relaxed);
    let seen = served.recv().context("the partner thread died")??;
    let did = did?;
    ensure!(seen.len() == did.len(), "{} requests were served, {} sent", seen.len(), did.len());

    let ns =
        |ticks: i64| ticks.signum() as f64 * clock.delta_as_nanos(0, ticks.unsigned_abs()) as f64;
    let between = |from: u64, to: u64, correction: i64| {
        ns((to.wrapping_sub(from) as i64).wrapping_add(correction))
    };
    // The first requests fault pages in and train the branch predictors.
    let pairs = || did.iter().zip(&seen).skip(requests / 10);
    // A step of the counter is as long as a stage, but a mean resolves finer times. The trimming
    // leaves out interrupted requests.
    let mean = |stage: &dyn Fn(&ClientStamps, &DeviceStamps) -> f64| {
        stats::trimmed_mean(pairs().map(|(d, s)| stage(d, s)).collect())
    };
    Ok(Round {
        stages: [
            mean(&|did, _| between(did.start, did.published, 0)),
            mean(&|did, seen| between(did.published, seen.submitted, -ahead)),
            mean(&|_, seen| between(seen.submitted, seen.stored, 0)),
            mean(&|_, seen| between(seen.stored, seen.turn_over, 0)),
            mean(&|did, seen| between(seen.turn_over, did.completed, ahead)),
        ],
        whole: mean(&|did, _| between(did.start, did.completed, 0)),
    })
}

fn disk() -> Arc<BlkDevice> {
    Arc::new(BlkDevice::new("disk", BlkOptions::default(), Geometry::new(DISK_BYTES, 512)))
}

/// The client's side: one request at a time.
fn drive(
    queue: &mut sidecore_driver::BlkQueue,
    clock: &Clock,
    requests: usize,
) -> Result<Vec<ClientStamps>> {
    let mut did = Vec::with_capacity(requests);
    let mut completions = Vec::with_capacity(1);
    let slot = queue.take_slot().context("no slot")?;
    let mut places = Places::new(DISK_BYTES / u64::from(BLOCK_BYTES));
    for _ in 0..requests {
        let sector = Sector(places.next_block() * 8);
        let start = clock.raw();
        queue.submit_read(slot, sector, BLOCK_BYTES)?;
        queue.publish()?;
        let published = clock.raw();
        completions.clear();
        let mut polls = 0_u64;
        while queue.poll_completions(&mut completions)? == 0 {
            polls += 1;
            ensure!(polls < 1 << 32, "the device does not answer");
        }
        did.push(ClientStamps { start, published, completed: clock.raw() });
    }
    Ok(did)
}

/// The device's side: the same turns as a sidecore's.
fn serve(
    device: &Arc<BlkDevice>,
    resources: QueueResources,
    stop: &AtomicBool,
    clock: &Clock,
    requests: usize,
) -> Result<Vec<DeviceStamps>> {
    let depth = usize::from(resources.layout.size);
    let fresh = RingState::fresh(resources.layout.format);
    let inner = NullStore::new(device.geometry()).open_channel(&CoreContext::default(), depth)?;
    let stamps = Rc::new(Stamps::default());
    let channel = Box::new(Stamped { inner, clock: clock.clone(), stamps: Rc::clone(&stamps) });
    let mut queue = BlkQueue::new(
        device,
        0,
        resources,
        fresh,
        channel,
        IdleMode::Poll,
        sidecore_linux::peer_event,
    )?;
    let mut seen = Vec::with_capacity(requests);
    while !stop.load(Ordering::Relaxed) {
        let now = clock.raw();
        if matches!(queue.poll(Nanos(now), 32), Polled::Busy(_)) {
            let turn_over = clock.raw();
            seen.push(DeviceStamps {
                submitted: stamps.submitted.get(),
                stored: stamps.stored.get(),
                turn_over,
            });
        }
    }
    Ok(seen)
}

/// The times at which the store last got and completed requests.
#[derive(Debug, Default)]
struct Stamps {
    submitted: Cell<u64>,
    stored: Cell<u64>,
}

/// A store's channel that stamps the times.
struct Stamped {
    inner: Box<dyn BlockChannel>,
    clock: Clock,
    stamps: Rc<Stamps>,
}

impl BlockChannel for Stamped {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.stamps.submitted.set(self.clock.raw());
        self.inner.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.inner.poll(now, completed);
        if !completed.is_empty() {
            self.stamps.stored.set(self.clock.raw());
        }
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

/// The ticks by which the partner's time stamp counter is ahead of this core's: its stamp against
/// the middle of two stamps around it.
fn clock_ahead(partner: &Partner, clock: &Clock) -> Result<i64> {
    const ROUNDS: u64 = 2000;
    let words = Arc::new([AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)]);
    let (theirs, their_clock) = (Arc::clone(&words), clock.clone());
    let done = partner.run(move || {
        for round in 1..=ROUNDS {
            while theirs[0].load(Ordering::Acquire) != round {
                std::hint::spin_loop();
            }
            theirs[1].store(their_clock.raw(), Ordering::Relaxed);
            theirs[2].store(round, Ordering::Release);
        }
    })?;
    let mut ahead = Vec::new();
    for round in 1..=ROUNDS {
        let before = clock.raw();
        words[0].store(round, Ordering::Release);
        while words[2].load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        let after = clock.raw();
        let middle = before + (after - before) / 2;
        ahead.push(words[1].load(Ordering::Relaxed).wrapping_sub(middle) as i64 as f64);
    }
    done.recv().context("the partner thread died")?;
    Ok(stats::median(&ahead) as i64)
}

/// Measures the taking and parsing of a request when all of it is in this core's cache, in
/// nanoseconds.
fn parse_alone(clock: &Clock, requests: usize) -> Result<f64> {
    let device = disk();
    let Loopback { mut queue, memory, layout, .. } =
        Loopback::new(&ClientOptions::default(), device.features())?;
    let rules = RequestRules {
        geometry: device.geometry(),
        features: device.features(),
        size_max_bytes: None,
        id: Default::default(),
    };
    let mut ring = DeviceRing::new(&memory, &layout, RingState::fresh(layout.format))?;
    let mut chain = Chain::with_limit(8);
    let mut hint = RegionHint::default();
    let mut request = BlockRequest::blank(8);
    let slots: Vec<_> = std::iter::from_fn(|| queue.take_slot()).collect();
    let mut completions = Vec::new();
    let mut rounds = Vec::new();
    for _ in 0..(requests / slots.len()).max(1) {
        for slot in &slots {
            queue.submit_read(*slot, Sector(0), BLOCK_BYTES)?;
        }
        queue.publish()?;
        let mut tokens = Vec::with_capacity(slots.len());
        let start = clock.raw();
        while let Some(token) = ring.pop(&memory, &mut chain)? {
            rules.parse(&memory, &chain, &mut hint, &mut request)?;
            tokens.push(token);
        }
        rounds.push(clock.delta_as_nanos(start, clock.raw()) as f64 / slots.len() as f64);
        tokens.into_iter().for_each(|token| ring.complete(token, 1));
        ring.publish();
        completions.clear();
        queue.poll_completions(&mut completions)?;
    }
    Ok(stats::median(&rounds))
}
