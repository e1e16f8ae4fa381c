//! The floor: frames of the same sizes through the same kind of link, with nothing around them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_link::{Buffer, Frame, Link, LinkAddress, LinkOptions, MemoryLink};
use sidecore_linux::peer_event;
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;

use super::client::{BUDGET, Silence};
use super::wire::{Cable, Wire};
use crate::cores::{Gate, Gated};
use crate::load::{Sample, Work};
use crate::process::watched;
use crate::stats::Histogram;

/// An end of a link.
struct End {
    link: Box<dyn Link>,
    peer: LinkAddress,
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
}

impl End {
    fn new(link: Box<dyn Link>, peer: LinkAddress) -> Self {
        Self { link, peer, frames: Vec::with_capacity(64), buffers: Vec::with_capacity(64) }
    }

    /// Sends up to `count` frames of this size; returns how many.
    #[inline]
    fn send(&mut self, count: usize, len_bytes: usize) -> usize {
        self.link.buffers(self.peer, count, &mut self.buffers);
        let sent = self.buffers.len();
        self.buffers.iter_mut().for_each(|buffer| buffer.address(self.peer, len_bytes));
        self.link.send(Nanos::ZERO, &mut self.buffers);
        sent
    }

    /// Receives the frames that have come; returns their number.
    #[inline]
    fn receive(&mut self) -> usize {
        self.link.receive(Nanos::ZERO, BUDGET, &mut self.frames);
        let count = self.frames.len();
        self.link.give_back(&mut self.frames);
        count
    }
}

/// A link with both of its ends.
pub(super) struct Exchange {
    client: End,
    /// `None` while it answers.
    host: Option<End>,
    _cable: Option<Cable>,
}

impl Exchange {
    /// Makes a link of this kind.
    ///
    /// # Errors
    /// The machine has not enough memory, or no virtual wires.
    pub(super) fn new(wire: Wire) -> Result<Self> {
        if wire == Wire::Memory {
            let options = LinkOptions::new(DATA_HEADER_BYTES);
            let (host, client) = MemoryLink::pair(&options, peer_event)?;
            let end = |link| End::new(Box::new(link), LinkAddress::Peer(0));
            return Ok(Self { client: end(client), host: Some(end(host)), _cable: None });
        }
        let cable = Cable::for_wire(wire)?;
        let [(client, at), (host, hosts)] = wire.ends(&cable)?;
        let (client, host) = (End::new(client, hosts), Some(End::new(host, at)));
        Ok(Self { client, host, _cable: Some(cable) })
    }

    /// Exchanges the frames of `work`, whose data fit into one frame.
    ///
    /// # Errors
    /// The partner died; frames are lost; an interrupt.
    pub(super) fn run(
        &mut self,
        gate: &mut Gate,
        work: &Work,
        clock: &Clock,
    ) -> Result<Gated<Sample>> {
        let data = DATA_HEADER_BYTES + work.bytes as usize;
        let (question, answer) =
            if work.write { (data, DATA_HEADER_BYTES) } else { (DATA_HEADER_BYTES, data) };
        gate.run(|partner| {
            watched(|| {
                let mut host = self.host.take().context("an earlier measurement died")?;
                let stop = Arc::new(AtomicBool::new(false));
                let theirs = Arc::clone(&stop);
                let answering = partner.run(move || {
                    while !theirs.load(Ordering::Relaxed) {
                        let mut left = host.receive();
                        while left > 0 && !theirs.load(Ordering::Relaxed) {
                            left -= host.send(left, answer);
                        }
                    }
                    host
                })?;
                let sample = ask(&mut self.client, question, work, clock);
                stop.store(true, Ordering::Relaxed);
                self.host = Some(answering.recv().context("the partner thread died")?);
                sample
            })
        })
    }
}

/// Keeps `work.depth` questions in flight.
fn ask(client: &mut End, question: usize, work: &Work, clock: &Clock) -> Result<Sample> {
    let mut round_trips = RoundTrips::new(work, clock);
    let (depth, mut silence) = (usize::from(work.depth), Silence::default());
    let mut in_flight = 0;
    while !round_trips.is_over() {
        in_flight += client.send(depth - in_flight, question);
        let count = client.receive();
        silence.look(count > 0)?;
        ensure!(count <= in_flight, "more answers than questions");
        in_flight -= count;
        round_trips.add(count);
    }
    let sample = round_trips.sample();
    while in_flight > 0 {
        let count = client.receive();
        silence.look(count > 0)?;
        in_flight -= count;
    }
    Ok(sample)
}

/// The measurement of a loop of round trips.
pub(super) struct RoundTrips<'a> {
    clock: &'a Clock,
    work: &'a Work,
    latencies: Histogram,
    start: u64,
    since: u64,
    done: u64,
}

impl<'a> RoundTrips<'a> {
    pub(super) fn new(work: &'a Work, clock: &'a Clock) -> Self {
        let start = clock.raw();
        Self { clock, work, latencies: Histogram::default(), start, since: start, done: 0 }
    }

    /// Adds so many round trips that have ended now.
    #[inline]
    pub(super) fn add(&mut self, count: usize) {
        if count > 0 {
            let now = self.clock.raw();
            self.latencies.add(now - self.since);
            self.since = now;
            self.done += count as u64;
        }
    }

    /// Whether the time of the work is over.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.clock.delta(self.start, self.since) >= self.work.duration
    }

    /// The results; latencies with a single request in flight alone.
    pub(super) fn sample(&self) -> Sample {
        let seconds = self.clock.delta(self.start, self.since).as_secs_f64();
        let sample = Sample {
            iops: self.done as f64 / seconds,
            latency_mean_ns: seconds * 1e9 * f64::from(self.work.depth) / self.done as f64,
            ..Sample::default()
        };
        let alone = self.work.depth == 1;
        if alone { sample.with_latencies(&self.latencies, self.clock) } else { sample }
    }
}
