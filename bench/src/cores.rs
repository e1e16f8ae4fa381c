//! The two cores of an experiment, and the distance between them at the moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::thread::CpuSet;
use sidecore_units::CoreId;

use crate::{stats, stop};

/// The core of the client.
pub const CLIENT: CoreId = CoreId(0);
/// The core of the polling server.
pub const SERVER: CoreId = CoreId(1);

/// The cores are far apart if the round trip of a cache line takes longer than this: a run between
/// them does not count.
pub const NEAR_NS: f64 = 250.0;

/// Pins the calling thread.
///
/// # Errors
/// There is no such core.
pub fn pin(core: CoreId) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core.0 as usize);
    rustix::thread::sched_setaffinity(None, &set)
        .with_context(|| format!("cannot run on core {core}"))
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread on the server's core, which sleeps until it gets a job.
#[derive(Debug)]
pub struct Partner {
    jobs: Sender<Job>,
}

impl Partner {
    /// Starts the thread on `core`.
    ///
    /// # Errors
    /// There is no such core.
    pub fn start(core: CoreId) -> Result<Self> {
        let (jobs, inbox): (Sender<Job>, Receiver<Job>) = channel();
        let (sender, receiver) = channel();
        std::thread::Builder::new().name("partner".to_owned()).spawn(move || {
            let pinned = pin(core);
            let is_pinned = pinned.is_ok();
            let _ = sender.send(pinned);
            if is_pinned {
                inbox.into_iter().for_each(|job| job());
            }
        })?;
        receiver.recv().context("the partner thread died")??;
        Ok(Self { jobs })
    }

    /// Runs `job` on the partner's core. The result comes through the returned channel.
    ///
    /// # Errors
    /// The thread died.
    pub fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Receiver<T>> {
        let (sender, receiver) = channel();
        let job = Box::new(move || {
            let _ = sender.send(job());
        });
        self.jobs.send(job).ok().context("the partner thread died")?;
        Ok(receiver)
    }
}

/// One word alone on its cache line (and on the line that the prefetcher pairs it with).
#[repr(align(128))]
#[derive(Debug, Default)]
struct Line(AtomicU64);

#[derive(Debug, Default)]
struct Lines([Line; 2]);

const BATCHES: u64 = 15;
const ROUNDS: u64 = 1000;

/// Measures the round trip between this thread and the partner in nanoseconds: by one line which
/// both write, or by a line for each direction. Returns the median of batches, because other work
/// on the machine interrupts some of them.
///
/// # Errors
/// The partner died.
pub fn round_trip_ns(partner: &Partner, two_lines: bool) -> Result<f64> {
    let lines = Arc::new(Lines::default());
    let theirs = Arc::clone(&lines);
    let back = usize::from(two_lines);
    let done = partner.run(move || {
        for round in 1..=BATCHES * ROUNDS {
            wait_for(&theirs.0[0].0, 2 * round - 1);
            theirs.0[back].0.store(2 * round, Ordering::Release);
        }
    })?;
    let mut batches = Vec::new();
    for batch in 0..BATCHES {
        let start = Instant::now();
        for round in batch * ROUNDS + 1..=(batch + 1) * ROUNDS {
            lines.0[0].0.store(2 * round - 1, Ordering::Release);
            wait_for(&lines.0[back].0, 2 * round);
        }
        batches.push(start.elapsed().as_nanos() as f64 / ROUNDS as f64);
    }
    done.recv().context("the partner thread died")?;
    Ok(stats::median(&batches))
}

fn wait_for(word: &AtomicU64, value: u64) {
    while word.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
    }
}

/// A run that spends more than this share of its time waiting for a core does not count.
pub const UNDISTURBED_SHARE: f64 = 0.05;

/// A disturbed run is repeated at most this often: some programs disturb themselves in every run.
const MAX_REPEATS: u32 = 8;

/// A run with the state of the cores around it.
#[derive(Clone, Copy, Debug)]
pub struct Gated<T> {
    /// The result of the run.
    pub result: T,
    /// The round trip of a cache line before the run, in nanoseconds.
    pub before_ns: f64,
    /// The round trip of a cache line after the run, in nanoseconds.
    pub after_ns: f64,
    /// The share of the run's time that was spent waiting for a core.
    pub waited_share: f64,
}

impl<T> Gated<T> {
    /// Replaces the result.
    pub fn map<U>(self, result: impl FnOnce(T) -> U) -> Gated<U> {
        let Self { result: given, before_ns, after_ns, waited_share } = self;
        Gated { result: result(given), before_ns, after_ns, waited_share }
    }

    /// Whether the run counts: its cores were near, and no other work took them.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.before_ns < NEAR_NS && self.after_ns < NEAR_NS && self.waited_share < UNDISTURBED_SHARE
    }
}

/// Repeats runs until they count.
#[derive(Debug)]
pub struct Gate {
    partner: Partner,
    give_up: Instant,
    retries: u64,
}

impl Gate {
    /// Makes a gate that waits and repeats for at most `patience`, over all runs.
    #[must_use]
    pub fn new(partner: Partner, patience: Duration) -> Self {
        Self { partner, give_up: Instant::now() + patience, retries: 0 }
    }

    /// The number of runs that waited or were repeated.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.retries
    }

    /// Runs `run`, which returns a result and the share of time spent waiting for a core
    /// ([`crate::process::Watch`]), until the run counts or the patience is over: the last run is
    /// returned then, and does not count. The server's core must be idle when `run` returns.
    ///
    /// # Errors
    /// `run` fails; an interrupt.
    pub fn run<T>(
        &mut self,
        mut run: impl FnMut(&Partner) -> Result<(T, f64)>,
    ) -> Result<Gated<T>> {
        let mut repeats = 0;
        loop {
            stop::check()?;
            let patient = Instant::now() < self.give_up && repeats < MAX_REPEATS;
            let before_ns = round_trip_ns(&self.partner, false)?;
            if before_ns >= NEAR_NS && patient {
                self.retries += 1;
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            let (result, waited_share) = run(&self.partner)?;
            let after_ns = round_trip_ns(&self.partner, false)?;
            let gated = Gated { result, before_ns, after_ns, waited_share };
            if gated.counts() || !patient {
                return Ok(gated);
            }
            repeats += 1;
            self.retries += 1;
        }
    }
}
