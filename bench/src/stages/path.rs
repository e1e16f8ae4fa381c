//! A queue of a store, with stages or without.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sidecore_block::{Batch, BlockChannel, Tag};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::Plan;
use super::cases::{Case, Chain, Store};
use crate::load::Places;
use crate::{requests, stop};

/// The clock of a run is compared with its end after so many turns.
const TURNS_PER_READING: u32 = 64;

pub(super) struct Path {
    channel: Box<dyn BlockChannel>,
    /// Requests that are not in flight.
    idle: Batch,
    completed: Batch,
    places: Places,
    bytes: u64,
    depth: usize,
    begin: Instant,
    /// Lives as long as its channel.
    _store: Store,
}

impl Path {
    /// Opens a queue of `store` behind `chain` for the requests of `case`.
    ///
    /// # Errors
    /// There is not enough memory, or the stages do not fit the store.
    pub(super) fn open(case: Case, chain: Chain, store: &Store) -> Result<Self> {
        let (bytes, depth) = (case.load.bytes, case.depth);
        let store = chain.open(store.clone())?;
        // The layers of stages measure the stages' time, as in the daemon.
        let (begin, clock) = (Instant::now(), quanta::Clock::new());
        let start = clock.raw();
        let core = CoreContext::default()
            .with_clock(move || Nanos(clock.delta_as_nanos(start, clock.raw())));
        let mut channel = store.open_channel(&core, depth)?;
        let memory = requests::memory(depth as u64 * bytes)?;
        channel.attach_memory(&memory)?;
        let request = |index| requests::request(&memory, case.load.operation, index, bytes);
        Ok(Self {
            channel,
            idle: (0..depth as u64).map(request).collect::<Result<Batch>>()?,
            completed: Batch::with_capacity(depth),
            places: Places::new(store.geometry().capacity_bytes / bytes),
            bytes,
            depth,
            begin,
            _store: store,
        })
    }

    /// Keeps the queue full for the time of the plan, after a warm-up. Returns the requests a
    /// second.
    ///
    /// # Errors
    /// A request fails; an interrupt.
    pub(super) fn run(&mut self, plan: &Plan) -> Result<f64> {
        self.keep_full(plan.warm_up)?;
        let (start, count) = (Instant::now(), self.keep_full(plan.measured)?);
        let per_s = count as f64 / start.elapsed().as_secs_f64();
        while self.idle.len() < self.depth {
            let now = self.now()?;
            self.channel.poll(now, &mut self.completed);
            self.rest()?;
            stop::check()?;
        }
        Ok(per_s)
    }

    /// Returns the number of completions.
    fn keep_full(&mut self, duration: std::time::Duration) -> Result<u64> {
        let (start, mut count) = (Instant::now(), 0);
        loop {
            for _ in 0..TURNS_PER_READING {
                count += self.turn()?;
            }
            if start.elapsed() >= duration {
                return Ok(count);
            }
            stop::check()?;
        }
    }

    /// A turn of a sidecore. Returns the number of completions.
    fn turn(&mut self) -> Result<u64> {
        for request in &mut self.idle {
            request.offset_bytes = self.places.next_block() * self.bytes;
            request.tag = Some(Tag::from_bits(0));
        }
        // As a sidecore, which reads the clock once in each turn.
        let now = self.now()?;
        self.channel.exchange(now, &mut self.idle, &mut self.completed);
        ensure!(self.idle.is_empty(), "a channel takes less than its depth");
        self.rest()
    }

    /// Makes completed requests idle. Returns their number.
    fn rest(&mut self) -> Result<u64> {
        let count = self.completed.len() as u64;
        for mut request in self.completed.drain(..) {
            request.result.context("a request failed")?;
            request.tag.take().map(Tag::into_bits).context("a request without its tag")?;
            self.idle.push(request);
        }
        Ok(count)
    }

    fn now(&self) -> Result<Nanos> {
        Ok(Nanos(u64::try_from(self.begin.elapsed().as_nanos())?))
    }
}
