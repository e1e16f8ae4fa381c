//! The client: the NICs of all guests on one thread, which send frames to each other and check what
//! arrives.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_driver::{NetClient, NetClientOptions, NetQueues};

use super::cases::{Case, Kind};
use super::frames::{Frames, HEADER_BYTES};
use super::systems::Socket;
use crate::load::{Sample, Work};
use crate::stats::Histogram;
use crate::stop;

/// The most frames that a stream sends or takes in one turn.
const BATCH: usize = 32;
/// The client reads the clock after so many frames.
const FRAMES_PER_READING: u64 = 1024;
/// The client reads the clock after so many turns without a frame.
const EMPTY_TURNS: u32 = 1 << 12;
/// Frames that are in flight for longer, while nothing arrives, are lost.
const LOST_AFTER: Duration = Duration::from_millis(20);
/// A switch through which no frame comes for longer is dead.
const PATIENCE: Duration = Duration::from_secs(20);
/// Buffers of a ring whose memory stays in the caches, and of one whose does not.
const WARM_BUFFERS: u16 = 256;
const COLD_BUFFERS: u16 = 4096;
/// Frames in flight of each stream.
const WINDOW: u64 = 128;
const WINDOW_OF_MANY: u64 = 64;
const LARGE_WINDOW: u64 = 8;

/// Frames of one guest to another one.
struct Stream {
    from: usize,
    to: usize,
    frames: Frames,
    window: u64,
    /// The number of the next frame to send, and of the next one to arrive.
    sent: u64,
    arrived: u64,
    lost: u64,
    /// Older frames than this were given up, and may arrive all the same.
    given_up: u64,
}

/// All guests of a case.
pub(super) struct Client {
    nics: Vec<NetClient>,
    streams: Vec<Stream>,
    /// From the second guest to the first one.
    back: Stream,
}

impl Client {
    /// Connects a NIC to each socket, and waits until frames pass in both directions.
    ///
    /// # Errors
    /// A socket refuses, or no frames pass.
    pub(super) fn connect(sockets: &[Socket], case: &Case) -> Result<Self> {
        let is_large = case.kind == Kind::Tso;
        let slots = if case.is_cold { COLD_BUFFERS } else { WARM_BUFFERS };
        let options = NetClientOptions {
            slots,
            buffer_bytes: if is_large { 4096 } else { 2048 },
            // A whole number of lines.
            sending_bytes: is_large.then_some((case.bytes + 64).next_multiple_of(64)),
            frame_buffers: 1,
            huge_pages: true,
            packed: case.packed,
            ..NetClientOptions::default()
        };
        let connect = |socket: &Socket| socket.connect(&options);
        let nics = sockets.iter().map(connect).collect::<Result<Vec<_>>>()?;
        if is_large {
            let all = nics.iter().all(NetClient::takes_large_frames);
            ensure!(all, "the switch takes no frame that is larger than the MTU");
        }
        let window = match case.kind {
            Kind::RoundTrip => 1,
            Kind::Tso => LARGE_WINDOW,
            Kind::OneWay if nics.len() > 2 => WINDOW_OF_MANY,
            Kind::OneWay => WINDOW,
        };
        let stream = |from: usize, to: usize| Stream {
            from,
            to,
            frames: Frames::new(from, to, case.bytes, is_large),
            window,
            sent: 0,
            arrived: 0,
            lost: 0,
            given_up: 0,
        };
        let streams = (0..nics.len() / 2).map(|pair| stream(2 * pair, 2 * pair + 1)).collect();
        let mut client = Self { nics, streams, back: stream(1, 0) };
        client.settle(case)?;
        Ok(client)
    }

    /// The share of the frames that did not arrive.
    pub(super) fn lost_share(&self) -> f64 {
        let sum = |of: fn(&Stream) -> u64| self.streams.iter().map(of).sum::<u64>() as f64;
        sum(|stream| stream.lost) / sum(|stream| stream.sent).max(1.0)
    }

    /// Has the frames of each stream belong to so many flows.
    pub(super) fn set_flows(&mut self, flows: u32) {
        self.streams.iter_mut().for_each(|stream| stream.frames.set_flows(flows));
    }

    /// Sends frames between the guests of each stream, both ways, until one arrives each way: ports
    /// need a while until they are up, and a switch learns where the stations are.
    fn settle(&mut self, case: &Case) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        for index in 0..self.streams.len() {
            let (from, to) = (self.streams[index].from, self.streams[index].to);
            let there = Frames::new(from, to, 64, false);
            // The stream's frames are of a connection that this one has begun.
            let back = Frames::new(to, from, 64, false).answering();
            for (greeting, from, to) in [(back, to, from), (there, from, to)] {
                while !self.greet(&greeting, from, to)? {
                    stop::check()?;
                    ensure!(Instant::now() < end, "no frame passes from NIC {from} to {to}");
                }
            }
        }
        // Copies of greetings for stations that were not known yet.
        let quiet = Instant::now() + LOST_AFTER;
        while Instant::now() < quiet {
            for nic in 0..self.nics.len() {
                let queues = queues(&mut self.nics, nic)?;
                queues.reclaim()?;
                while queues.receive_in_place(|_, _, _| {})?.is_some() {}
                queues.publish()?;
            }
        }
        ensure!(self.nics.len() == usize::from(case.ports), "a socket for each port");
        Ok(())
    }

    /// Sends a frame, and waits for it for a moment.
    fn greet(&mut self, greeting: &Frames, from: usize, to: usize) -> Result<bool> {
        let sender = queues(&mut self.nics, from)?;
        sender.reclaim()?;
        sender.send_in_place(greeting.len_bytes() as u32, |buffer| greeting.write(0, buffer))?;
        sender.publish()?;
        let end = Instant::now() + LOST_AFTER;
        let receiver = queues(&mut self.nics, to)?;
        let mut is_there = false;
        while !is_there && Instant::now() < end {
            while receiver
                .receive_in_place(|buffer, offset, len_bytes| {
                    is_there |= greeting.check(&mut None, (buffer, offset, len_bytes));
                })?
                .is_some()
            {}
            receiver.publish()?;
        }
        Ok(is_there)
    }

    /// Runs the case for the time of `work`.
    ///
    /// # Errors
    /// A frame is not as it was sent, or overtakes an older one; the switch is dead; an interrupt.
    pub(super) fn run(&mut self, kind: Kind, work: &Work, clock: &Clock) -> Result<Sample> {
        match kind {
            Kind::RoundTrip => self.round_trips(work, clock),
            Kind::OneWay | Kind::Tso => self.one_way(work, clock),
        }
    }

    fn one_way(&mut self, work: &Work, clock: &Clock) -> Result<Sample> {
        let start = clock.raw();
        let (mut done, mut next, mut silence) = (0_u64, FRAMES_PER_READING, Silence::new());
        let end = loop {
            let mut arrived = 0;
            for stream in &mut self.streams {
                stream.send(&mut self.nics)?;
                arrived += stream.receive(&mut self.nics)?;
            }
            done += arrived;
            if silence.is_long(arrived)? {
                self.streams.iter_mut().for_each(Stream::give_up);
            }
            if done >= next || silence.asks() {
                next = done + FRAMES_PER_READING;
                stop::check()?;
                let now = clock.raw();
                if clock.delta(start, now) >= work.duration {
                    break now;
                }
            }
        };
        let mut silence = Silence::new();
        while self.streams.iter().any(|stream| stream.in_flight() > 0) {
            let mut arrived = 0;
            for stream in &mut self.streams {
                arrived += stream.receive(&mut self.nics)?;
            }
            if silence.is_long(arrived)? {
                self.streams.iter_mut().for_each(Stream::give_up);
            }
        }
        let packets = done as f64 / clock.delta(start, end).as_secs_f64();
        Ok(Sample { iops: packets, ..Sample::default() })
    }

    /// One frame there and one back, again and again.
    fn round_trips(&mut self, work: &Work, clock: &Clock) -> Result<Sample> {
        let start = clock.raw();
        let (mut latencies, mut next) = (Histogram::default(), FRAMES_PER_READING);
        let mut since = start;
        let end = loop {
            let there = self.streams.first_mut().context("no stream")?;
            let mut is_whole = there.pass(&mut self.nics)?;
            is_whole &= self.back.pass(&mut self.nics)?;
            let now = clock.raw();
            if is_whole {
                latencies.add(now - since);
            }
            since = now;
            if latencies.count() >= next || !is_whole {
                next = latencies.count() + FRAMES_PER_READING;
                stop::check()?;
                if clock.delta(start, now) >= work.duration {
                    break now;
                }
            }
        };
        let trips = latencies.count() as f64;
        let seconds = clock.delta(start, end).as_secs_f64();
        let mean = seconds * 1e9 / trips;
        let sample = Sample { iops: trips / seconds, latency_mean_ns: mean, ..Sample::default() };
        Ok(sample.with_latencies(&latencies, clock))
    }
}

fn queues(nics: &mut [NetClient], index: usize) -> Result<&mut NetQueues> {
    nics.get_mut(index).and_then(|nic| nic.pair(0)).context("no such NIC")
}

impl Stream {
    fn in_flight(&self) -> u64 {
        self.sent - self.arrived
    }

    /// Sends as many frames as the window and a batch have room for.
    #[inline]
    fn send(&mut self, nics: &mut [NetClient]) -> Result<usize> {
        let room = (self.window - self.in_flight()).min(BATCH as u64);
        let sender = queues(nics, self.from)?;
        sender.reclaim()?;
        let mut count = 0;
        for _ in 0..room {
            let (frames, number) = (&self.frames, self.sent);
            let len_bytes = frames.len_bytes() as u32;
            if !sender.send_in_place(len_bytes, |buffer| frames.write(number, buffer))? {
                break;
            }
            self.sent += 1;
            count += 1;
        }
        sender.publish()?;
        Ok(count)
    }

    /// Takes and checks up to a batch of frames. Returns their number.
    #[inline]
    fn receive(&mut self, nics: &mut [NetClient]) -> Result<u64> {
        let receiver = queues(nics, self.to)?;
        let (frames, mut count) = (&self.frames, 0);
        while count < BATCH as u64 {
            let (mut number, mut is_good) = (None, true);
            let len_bytes = receiver.receive_in_place(|buffer, offset, len_bytes| {
                is_good &= frames.check(&mut number, (buffer, offset, len_bytes));
            })?;
            let Some(len_bytes) = len_bytes else { break };
            let number = number.unwrap_or(u64::MAX);
            ensure!(
                is_good && len_bytes == frames.len_bytes(),
                "frame {number} of {} bytes is not what was sent: {} bytes",
                len_bytes - HEADER_BYTES.min(len_bytes),
                frames.len_bytes() - HEADER_BYTES
            );
            if number >= self.given_up {
                let is_next = (self.arrived..self.sent).contains(&number);
                ensure!(is_next, "frame {number} came late, or twice, or was not sent");
                self.lost += number - self.arrived;
                self.arrived = number + 1;
                count += 1;
            }
        }
        receiver.publish()?;
        Ok(count)
    }

    /// Sends one frame and waits for it. False if it is lost.
    fn pass(&mut self, nics: &mut [NetClient]) -> Result<bool> {
        let mut silence = Silence::new();
        while self.send(nics)? == 0 {
            if silence.is_long(0)? {
                self.give_up();
            }
        }
        while self.receive(nics)? == 0 {
            if silence.is_long(0)? {
                self.give_up();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Counts the frames in flight as lost.
    fn give_up(&mut self) {
        self.lost += self.in_flight();
        (self.arrived, self.given_up) = (self.sent, self.sent);
    }
}

/// The turns and the time without a frame.
struct Silence {
    empty: u32,
    since: Option<Instant>,
    began: Option<Instant>,
}

impl Silence {
    fn new() -> Self {
        Self { empty: 0, since: None, began: None }
    }

    /// Whether it is time to read the clock.
    fn asks(&self) -> bool {
        self.empty > 0 && self.empty.is_multiple_of(EMPTY_TURNS)
    }

    /// Whether a turn with so many frames ends a time without frames that is so long that those in
    /// flight are lost.
    ///
    /// # Errors
    /// The switch is dead.
    #[inline]
    fn is_long(&mut self, arrived: u64) -> Result<bool> {
        if arrived > 0 {
            *self = Self::new();
            return Ok(false);
        }
        self.empty = self.empty.wrapping_add(1);
        if !self.asks() {
            return Ok(false);
        }
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let since = *self.since.get_or_insert(now);
        ensure!(now - began < PATIENCE, "the switch does not deliver frames");
        let is_long = now - since > LOST_AFTER;
        if is_long {
            stop::check()?;
            self.since = None;
        }
        Ok(is_long)
    }
}
