//! The client: a closed loop that works for a while before each request and publishes each request
//! at once.

use std::time::Duration;

use anyhow::{Result, ensure};
use quanta::Clock;
use sidecore_driver::{Queue, Slot};
use sidecore_units::{SECTOR_BYTES, Sector};

use crate::load::{BLOCK_BYTES, Places};
use crate::stats::Histogram;
use crate::stop;

/// Requests between two readings of the clock.
const REQUESTS_PER_READING: u64 = 512;

/// After so many empty polls, the client checks that the device is alive.
const POLLS_PER_WAIT: u32 = 1 << 16;

/// A device that is silent for longer counts as dead.
const PATIENCE: Duration = Duration::from_secs(5);

/// The client's own work: multiplications that touch no memory, in several chains at once. A
/// processor that executes out of order mostly waits in a single chain, and would hide the code
/// before and after the chain in that time.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnWork {
    steps: u64,
    /// The duration of the work.
    pub(super) ns: f64,
}

impl OwnWork {
    const TRIAL_STEPS: u64 = 1 << 20;

    /// Makes work that takes about `ns` at this core's present speed.
    pub(super) fn of(ns: u64, clock: &Clock) -> Self {
        let ns_per_step =
            (0..5).map(|_| Self::time(Self::TRIAL_STEPS, clock)).fold(f64::INFINITY, f64::min);
        Self::at(ns, ns_per_step)
    }

    fn at(ns: u64, ns_per_step: f64) -> Self {
        let steps = (ns as f64 / ns_per_step).round() as u64;
        Self { steps, ns: steps as f64 * ns_per_step }
    }

    fn time(steps: u64, clock: &Clock) -> f64 {
        let start = clock.raw();
        Self { steps, ns: 0.0 }.run();
        clock.delta_as_nanos(start, clock.raw()) as f64 / steps as f64
    }

    #[inline(always)]
    fn run(self) {
        let mut lanes = [1_u64, 2, 3, 4];
        for step in 0..self.steps {
            for lane in &mut lanes {
                *lane = lane.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(step);
            }
        }
        std::hint::black_box(lanes);
    }
}

/// The load of the client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guest {
    pub(super) depth: u16,
    pub(super) own_work: OwnWork,
    pub(super) blocks: u64,
    pub(super) duration: Duration,
}

/// The cost of a run for the client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// Requests a second.
    pub(super) iops: f64,
    /// Wall time for each request beyond the client's own work.
    pub(super) client_ns: f64,
    /// Median latency of the requests in one slot.
    pub(super) latency_p50_ns: f64,
    /// The 99th percentile of these latencies.
    pub(super) latency_p99_ns: f64,
}

/// Runs the loop on `queue`, all of whose slots are free.
///
/// # Errors
/// The device fails a request, or does not answer for some seconds; an interrupt.
pub(super) fn run<Q: Queue>(queue: &mut Q, guest: &Guest, clock: &Clock) -> Result<Cost> {
    let slots: Vec<Slot> = (0..guest.depth).map_while(|_| queue.take_slot()).collect();
    ensure!(slots.len() == usize::from(guest.depth), "the queue has too few slots");
    let result = run_on(queue, guest, clock, &slots);
    slots.iter().for_each(|slot| queue.release_slot(*slot));
    result
}

fn run_on<Q: Queue>(queue: &mut Q, guest: &Guest, clock: &Clock, slots: &[Slot]) -> Result<Cost> {
    let mut places = Places::new(guest.blocks);
    let mut completions: Vec<Q::Completion> = Vec::with_capacity(slots.len());
    let mut latencies = Histogram::default();
    let mut silence = 0_u32;
    // Latencies are of one slot: a stamp for every request would add to the client's work.
    let watched = slots.first().copied();
    let mut sent_at = clock.raw();
    let start = sent_at;
    let mut next = |queue: &mut Q, slot: Slot, sent_at: &mut u64| -> Result<()> {
        guest.own_work.run();
        if Some(slot) == watched {
            *sent_at = clock.raw();
        }
        queue.submit_read(
            slot,
            Sector(places.next_block() * (u64::from(BLOCK_BYTES) / SECTOR_BYTES)),
            BLOCK_BYTES,
        )?;
        Ok(queue.publish()?)
    };
    for slot in slots {
        next(queue, *slot, &mut sent_at)?;
    }
    let (mut done, mut next_reading) = (0_u64, 0_u64);
    let finish = loop {
        completions.clear();
        if queue.poll_completions(&mut completions)? == 0 {
            wait_on(queue, &mut silence)?;
            continue;
        }
        done += completions.len() as u64;
        for completion in &completions {
            let (slot, is_ok) = Q::outcome(*completion);
            ensure!(is_ok, "the device fails a request: {completion:?}");
            if Some(slot) == watched {
                latencies.add(clock.raw() - sent_at);
            }
            next(queue, slot, &mut sent_at)?;
        }
        if done >= next_reading {
            next_reading = done + REQUESTS_PER_READING;
            let now = clock.raw();
            if clock.delta(start, now) >= guest.duration {
                break now;
            }
            stop::check()?;
        }
    };
    while queue.in_flight() > 0 {
        completions.clear();
        if queue.poll_completions(&mut completions)? == 0 {
            wait_on(queue, &mut silence)?;
        }
    }
    let seconds = clock.delta(start, finish).as_secs_f64();
    let quantile = |share| clock.delta_as_nanos(0, latencies.quantile(share) as u64) as f64;
    Ok(Cost {
        iops: done as f64 / seconds,
        client_ns: seconds * 1e9 / done as f64 - guest.own_work.ns,
        latency_p50_ns: quantile(0.5),
        latency_p99_ns: quantile(0.99),
    })
}

/// Counts empty polls, and checks from time to time that the device still answers.
#[inline]
fn wait_on<Q: Queue>(queue: &mut Q, silence: &mut u32) -> Result<()> {
    *silence = silence.wrapping_add(1);
    if silence.is_multiple_of(POLLS_PER_WAIT) {
        stop::check()?;
        ensure!(queue.wait(PATIENCE)?, "the device does not answer");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_work_grows_with_the_requested_time() {
        let steps = [0, 100, 100_000].map(|ns| OwnWork::at(ns, 2.5).steps);
        assert_eq!(steps, [0, 40, 40_000]);
        assert_eq!(OwnWork::at(101, 2.5).ns, 100.0);
        // A step takes less than a second on any machine.
        assert!(OwnWork::of(1_000_000_000, &Clock::new()).steps > 0);
    }
}
