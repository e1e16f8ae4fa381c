//! A sidecore that makes its own requests.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidecore_block::{Batch, BlockChannel, BlockDevice, Operation, Tag};
use sidecore_controller::VirtualFunction;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::load::Places;
use crate::process::watched;
use crate::requests;

/// A request that takes longer is lost; each run is shorter.
const PATIENCE: Duration = Duration::from_secs(10);

/// The distance between the sequences of two queues, in places.
const PLACES_APART: usize = 10_000;

/// The queues of one function on this sidecore.
pub(super) struct Queues {
    pub(super) function: Arc<VirtualFunction>,
    pub(super) count: usize,
    /// The queues are polled and have no requests.
    pub(super) rests: bool,
}

/// The load of a sidecore in a run.
pub(super) struct Work {
    pub(super) queues: Vec<Queues>,
    /// The size of each request.
    pub(super) bytes: u64,
    /// The range of a function's requests.
    pub(super) span_bytes: u64,
    /// Requests in flight in each queue.
    pub(super) depth: usize,
    pub(super) warm_up: Duration,
    pub(super) measured: Duration,
    /// Makes all sidecores begin at the same time, and keep their queues until all are done.
    pub(super) barrier: Arc<Barrier>,
}

struct Queue {
    channel: Box<dyn BlockChannel>,
    /// Requests that are not in flight.
    idle: Batch,
    places: Places,
}

/// Reads at random places, as fast as the sidecore can. Returns the number of reads in the measured
/// time, and the share of the time that this thread waited for its core.
pub(super) fn serve(work: &Work) -> Result<(u64, f64)> {
    let mut queues = open(work);
    work.barrier.wait();
    let served = match &mut queues {
        Ok(queues) => watched(|| turns(queues, work)),
        Err(_) => Ok((0, 0.0)),
    };
    // Both sidecores end together: a function without queues would not share the store.
    work.barrier.wait();
    drain(&mut queues?)?;
    served
}

fn open(work: &Work) -> Result<Vec<Queue>> {
    let (core, mut queues) = (CoreContext::default(), Vec::new());
    for of in &work.queues {
        for number in 0..of.count {
            let mut channel = of.function.open_channel(&core, work.depth)?;
            let memory = requests::memory(work.depth as u64 * work.bytes)?;
            channel.attach_memory(&memory)?;
            let count = if of.rests { 0 } else { work.depth as u64 };
            let request = |index| requests::request(&memory, Operation::Read, index, work.bytes);
            let idle = (0..count).map(request).collect::<Result<Batch>>()?;
            let mut places = Places::new(work.span_bytes / work.bytes);
            // Each queue starts elsewhere in the sequence, so that no two queues read the same
            // places.
            (0..number * PLACES_APART).for_each(|_| _ = places.next_block());
            queues.push(Queue { channel, idle, places });
        }
    }
    Ok(queues)
}

/// Polls every queue in turns, and sends each completed request again. Returns the number of
/// completions in the measured time.
fn turns(queues: &mut [Queue], work: &Work) -> Result<u64> {
    let begin = Instant::now();
    let end = work.warm_up + work.measured;
    let mut completed = Batch::with_capacity(work.depth);
    let (mut served, mut before) = (0_u64, None);
    loop {
        let elapsed = begin.elapsed();
        if before.is_none() && elapsed >= work.warm_up {
            before = Some(served);
        }
        if elapsed >= end {
            return Ok(served - before.unwrap_or(0));
        }
        let now = Nanos(u64::try_from(elapsed.as_nanos())?);
        for queue in &mut *queues {
            served += queue.turn(work.bytes, now, &mut completed)?;
        }
    }
}

impl Queue {
    /// Sends all idle requests, as a front end does. Returns the number of completed requests.
    fn turn(&mut self, bytes: u64, now: Nanos, completed: &mut Batch) -> Result<u64> {
        for request in &mut self.idle {
            request.offset_bytes = self.places.next_block() * bytes;
            request.tag = Some(Tag::from_bits(0));
        }
        self.channel.exchange(now, &mut self.idle, completed);
        ensure!(self.idle.is_empty(), "a channel takes less than its depth");
        self.rest(completed)
    }

    /// Makes completed requests idle. Returns their number.
    fn rest(&mut self, completed: &mut Batch) -> Result<u64> {
        let count = completed.len() as u64;
        for mut request in completed.drain(..) {
            request.result.context("a read failed")?;
            request.tag.take().map(Tag::into_bits).context("a request without its tag")?;
            self.idle.push(request);
        }
        Ok(count)
    }
}

/// Polls all queues until no request is in flight: other queues may wait for a queue that is not
/// polled.
fn drain(queues: &mut [Queue]) -> Result<()> {
    let begin = Instant::now();
    let mut completed = Batch::new();
    while queues.iter().any(|queue| queue.channel.readiness().in_flight > 0) {
        ensure!(begin.elapsed() < PATIENCE, "a read does not come back");
        let now = Nanos(u64::try_from((PATIENCE + begin.elapsed()).as_nanos())?);
        for queue in &mut *queues {
            queue.channel.poll(now, &mut completed);
            queue.rest(&mut completed)?;
        }
    }
    Ok(())
}
