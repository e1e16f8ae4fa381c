//! The load: one closed loop of requests at a fixed depth on one queue.

use std::time::Duration;

use anyhow::{Result, ensure};
use quanta::Clock;
use sidecore_driver::{Counters, Notify, Queue, Slot};
use sidecore_units::{SECTOR_BYTES, Sector};

use crate::stats::Histogram;
use crate::stop;

/// The size of a request in bytes by default.
pub const BLOCK_BYTES: u32 = 4096;

/// The work of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Write instead of read.
    pub write: bool,
    /// Write to every other place, and read the others, without touching their bytes.
    pub is_mixed: bool,
    /// Requests in flight.
    pub depth: u16,
    /// Size of each request, a multiple of 512.
    pub bytes: u32,
    /// The number of places of that size, one after the other, from which random ones are chosen.
    pub blocks: u64,
    /// The start of the first place.
    pub first: Sector,
    /// Read every byte of every completed read, and write every byte before every write.
    pub touch: bool,
    /// Yield the core after each empty poll.
    pub yields: bool,
    /// The length of the run.
    pub duration: Duration,
}

impl Default for Work {
    /// Reads of 4 KiB from one place, one after the other, for no time.
    fn default() -> Self {
        Self {
            write: false,
            is_mixed: false,
            depth: 1,
            bytes: BLOCK_BYTES,
            blocks: 1,
            first: Sector(0),
            touch: false,
            yields: false,
            duration: Duration::ZERO,
        }
    }
}

impl Work {
    /// Whether the request of a place is a write.
    #[inline]
    pub(crate) const fn is_write(&self, place: u64) -> bool {
        self.write || (self.is_mixed && place % 2 == 1)
    }

    #[inline]
    fn next_sector(&self, places: &mut Places) -> Sector {
        Sector(self.first.0 + places.next_block() * (u64::from(self.bytes) / SECTOR_BYTES))
    }
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Requests a second.
    pub iops: f64,
    /// Median latency in nanoseconds; measured at depth 1 only, zero elsewhere.
    pub latency_p50_ns: f64,
    /// The 99th percentile of the latency, under the same condition.
    pub latency_p99_ns: f64,
    /// The 99.9th percentile of the latency, under the same condition.
    pub latency_p999_ns: f64,
    /// The 99.99th percentile of the latency, under the same condition.
    pub latency_p9999_ns: f64,
    /// The longest latency, under the same condition.
    pub latency_max_ns: f64,
    /// Mean latency in nanoseconds, at any depth.
    pub latency_mean_ns: f64,
    /// Notifications of the device for each request.
    pub kicks_per_request: f64,
    /// Interrupts for each request.
    pub interrupts_per_request: f64,
}

/// Random places, the same ones for every system.
#[derive(Clone, Debug)]
pub struct Places {
    state: u64,
    blocks: u64,
}

impl Places {
    /// Makes the sequence of places below `blocks`.
    #[must_use]
    pub fn new(blocks: u64) -> Self {
        Self { state: 0x9e37_79b9_7f4a_7c15, blocks: blocks.max(1) }
    }

    /// Draws the next place.
    #[inline]
    pub fn next_block(&mut self) -> u64 {
        // xorshift64*, and the high half scaled down.
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        ((self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) * self.blocks) >> 32
    }
}

/// The clock is read after requests for this many bytes, or after [`REQUESTS_PER_READING`]; and
/// sooner at first, because some requests take milliseconds.
const BYTES_PER_READING: u64 = 16 << 20;
const REQUESTS_PER_READING: u64 = 512;
const FIRST_READING: u64 = 8;

/// After so many empty polls, a polling client waits in the driver, which ends if the device is
/// silent for too long.
const POLLS_PER_WAIT: u32 = 1 << 16;

/// Runs the loop on `queue`, all of whose slots are free, and waits for the last completion.
///
/// # Errors
/// The device fails a request, or does not answer for some seconds; an interrupt.
pub fn run<Q: Queue>(queue: &mut Q, work: &Work, clock: &Clock) -> Result<Sample> {
    run_all(std::slice::from_mut(queue), work, clock)
}

/// As [`run`], on several queues in turn, each with `work.depth` requests in flight.
///
/// # Errors
/// As [`run`]; `queues` is empty.
pub fn run_all<Q: Queue>(queues: &mut [Q], work: &Work, clock: &Clock) -> Result<Sample> {
    let take =
        |queue: &mut Q| (0..work.depth).map_while(|_| queue.take_slot()).collect::<Vec<Slot>>();
    let slots: Vec<Vec<Slot>> = queues.iter_mut().map(take).collect();
    ensure!(
        slots.iter().all(|slots| slots.len() == usize::from(work.depth)),
        "a queue has too few slots"
    );
    let result = run_on(queues, work, clock, &slots);
    for (queue, slots) in queues.iter_mut().zip(&slots) {
        slots.iter().for_each(|slot| queue.release_slot(*slot));
    }
    result
}

fn sum<Q: Queue>(queues: &[Q]) -> Counters {
    queues.iter().map(Queue::counters).fold(Counters::default(), |sum, one| Counters {
        requests: sum.requests + one.requests,
        completions: sum.completions + one.completions,
        kicks: sum.kicks + one.kicks,
        calls: sum.calls + one.calls,
    })
}

/// The requests after which the clock is read: few at first, then more and more of them.
struct Readings {
    /// The most requests from one reading to the next.
    most: u64,
    step: u64,
    next: u64,
}

impl Readings {
    fn new(most: u64) -> Self {
        let step = most.min(FIRST_READING);
        Self { most, step, next: step }
    }

    /// Whether the clock is to be read after so many requests.
    #[inline]
    fn is_due(&mut self, done: u64) -> bool {
        let is_due = done >= self.next;
        if is_due {
            self.step = (self.step * 2).min(self.most);
            self.next = done + self.step;
        }
        is_due
    }
}

fn run_on<Q: Queue>(
    queues: &mut [Q],
    work: &Work,
    clock: &Clock,
    slots: &[Vec<Slot>],
) -> Result<Sample> {
    ensure!(!queues.is_empty(), "no queue");
    let before = sum(queues);
    let pattern =
        if work.touch && work.write { vec![0x5a; work.bytes as usize] } else { Vec::new() };
    let per_reading =
        (BYTES_PER_READING / u64::from(work.bytes.max(1))).clamp(1, REQUESTS_PER_READING);
    let alone = work.depth == 1 && queues.len() == 1;
    let mut places = Places::new(work.blocks);
    let mut latencies = Histogram::default();
    let mut completions: Vec<Q::Completion> = Vec::with_capacity(usize::from(work.depth));
    let start = clock.raw();
    for (queue, slots) in queues.iter_mut().zip(slots) {
        for slot in slots {
            submit(queue, *slot, work.next_sector(&mut places), work, &pattern)?;
        }
        queue.publish()?;
    }
    let (mut since, mut done) = (start, 0_u64);
    let mut readings = Readings::new(per_reading);
    let mut silence = 0_u32;
    let finish = 'load: loop {
        for queue in &mut *queues {
            completions.clear();
            if queue.poll_completions(&mut completions)? == 0 {
                wait_on(queue, work, &mut silence)?;
                continue;
            }
            done += completions.len() as u64;
            if alone {
                let now = clock.raw();
                latencies.add(now - since);
                since = now;
            }
            for completion in &completions {
                let (slot, is_ok) = Q::outcome(*completion);
                ensure!(is_ok, "the device fails a request: {completion:?}");
                if work.touch && !work.write {
                    std::hint::black_box(queue.sum_data(slot));
                }
                submit(queue, slot, work.next_sector(&mut places), work, &pattern)?;
            }
            queue.publish()?;
            if readings.is_due(done) {
                let now = clock.raw();
                if clock.delta(start, now) >= work.duration {
                    break 'load now;
                }
                stop::check()?;
            }
        }
    };
    drain(queues, work, &mut completions)?;
    let elapsed = clock.delta(start, finish);
    let in_flight = f64::from(work.depth) * queues.len() as f64;
    let sample = sample_of(done, elapsed, in_flight, (before, sum(queues)));
    Ok(if alone { sample.with_latencies(&latencies, clock) } else { sample })
}

impl Sample {
    /// The sample with the quantiles of these latencies, in raw ticks of the clock, which are
    /// equally long in every run.
    #[must_use]
    pub fn with_latencies(self, latencies: &Histogram, clock: &Clock) -> Self {
        let quantile = |share| clock.delta_as_nanos(0, latencies.quantile(share) as u64) as f64;
        Self {
            latency_p50_ns: quantile(0.5),
            latency_p99_ns: quantile(0.99),
            latency_p999_ns: quantile(0.999),
            latency_p9999_ns: quantile(0.9999),
            latency_max_ns: quantile(1.0),
            ..self
        }
    }
}

/// The sample of so many completed requests, without quantiles of the latency.
fn sample_of(
    done: u64,
    elapsed: Duration,
    in_flight: f64,
    (before, after): (Counters, Counters),
) -> Sample {
    let (done, seconds) = (done as f64, elapsed.as_secs_f64());
    let requests = (after.requests - before.requests) as f64;
    Sample {
        iops: done / seconds,
        latency_mean_ns: seconds * 1e9 * in_flight / done,
        kicks_per_request: (after.kicks - before.kicks) as f64 / requests,
        interrupts_per_request: (after.calls - before.calls) as f64 / requests,
        ..Sample::default()
    }
}

/// Waits for the requests in flight, and takes the interrupts that no wait has taken.
fn drain<Q: Queue>(
    queues: &mut [Q],
    work: &Work,
    completions: &mut Vec<Q::Completion>,
) -> Result<()> {
    let mut silence = 0_u32;
    for queue in queues {
        while queue.in_flight() > 0 {
            completions.clear();
            if queue.poll_completions(completions)? == 0 {
                wait_on(queue, work, &mut silence)?;
            }
        }
        queue.take_calls();
    }
    Ok(())
}

#[inline]
fn submit<Q: Queue>(
    queue: &mut Q,
    slot: Slot,
    sector: Sector,
    work: &Work,
    pattern: &[u8],
) -> Result<()> {
    if work.is_mixed && work.is_write(sector.0 * SECTOR_BYTES / u64::from(work.bytes)) {
        queue.submit_write(slot, sector, work.bytes)?;
    } else if work.write {
        if work.touch {
            queue.write_data(slot, 0, pattern);
        }
        queue.submit_write(slot, sector, work.bytes)?;
    } else {
        queue.submit_read(slot, sector, work.bytes)?;
    }
    Ok(())
}

/// A device that is silent for longer counts as dead.
const PATIENCE: Duration = Duration::from_secs(5);

/// After an empty poll: sleeps until an interrupt, or returns to go on polling.
#[inline]
fn wait_on<Q: Queue>(queue: &mut Q, work: &Work, silence: &mut u32) -> Result<()> {
    *silence = silence.wrapping_add(1);
    if work.yields {
        rustix::thread::sched_yield();
    }
    if queue.notify() == Notify::Interrupt || silence.is_multiple_of(POLLS_PER_WAIT) {
        wait(queue)
    } else {
        Ok(())
    }
}

/// Spins or sleeps until there is a completion.
#[cold]
#[inline(never)]
fn wait<Q: Queue>(queue: &mut Q) -> Result<()> {
    stop::check()?;
    ensure!(queue.wait(PATIENCE)?, "the device does not answer");
    Ok(())
}
