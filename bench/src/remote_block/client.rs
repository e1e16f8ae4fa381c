//! The clients of an IOhost, on the client's core: sessions, and a loop in place of a front end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_block::{Batch, BlockChannel, BlockDevice as _, Operation};
use sidecore_link::{Link, LinkAddress};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session, SessionOptions};
use sidecore_trust::{ClientName, ClientTrust};
use sidecore_units::Nanos;
use sidecore_vrio::ClientOptions;

use super::faulty::Losses;
use super::flood::Flood;
use super::iohost::{Disk, device_name};
use crate::load::{Places, Sample, Work};
use crate::stats::Histogram;
use crate::{requests, stop};

/// The most requests in flight of a client.
const DEPTH: usize = 128;
/// The longest request.
const MAX_BYTES: u32 = 64 << 10;
/// Frames that a session takes from its link at a time, as on a sidecore.
pub(super) const BUDGET: usize = 32;
/// A client that waits for longer is not served.
const PATIENCE: Duration = Duration::from_secs(10);
/// After so many turns without a completion, the patience is looked at.
const TURNS_PER_LOOK: u32 = 1 << 16;

/// A client as its IOhost knows it.
pub(crate) struct Identity {
    pub(crate) name: ClientName,
    pub(crate) trust: ClientTrust,
}

/// One client: a session over a link of its own.
struct Station {
    channels: Vec<(Disk, Box<dyn BlockChannel>)>,
    _stores: Vec<RemoteStore>,
    session: Session<ClientTrust>,
    memory: GuestMemory,
    /// Requests that are not in flight.
    idle: Batch,
    completed: Batch,
    places: Places,
    losses: Arc<Losses>,
}

/// The clients of an IOhost. Their time passes only while they run, because the IOhost is frozen
/// between runs.
pub(crate) struct Clients {
    stations: Vec<Station>,
    /// The IOhost's address.
    iohost: LinkAddress,
    /// The time of the clients at the end of the last run.
    now: Nanos,
    /// A client that floods the IOhost, or is idle.
    flooder: Option<(Station, Arc<Flood>)>,
}

impl Clients {
    /// Connects clients that use these disks.
    ///
    /// # Errors
    /// A client does not get its devices.
    pub(crate) fn new(
        links: Vec<(Identity, Box<dyn Link>)>,
        iohost: LinkAddress,
        disks: &[Disk],
    ) -> Result<Self> {
        let core = CoreContext::default();
        let (stations, now) = (Vec::new(), Nanos::ZERO);
        let mut clients = Self { stations, iohost, now, flooder: None };
        for (identity, link) in links {
            clients.connect(&core, identity, link, disks)?;
        }
        Ok(clients)
    }

    fn connect(
        &mut self,
        core: &CoreContext,
        Identity { name, trust }: Identity,
        link: Box<dyn Link>,
        disks: &[Disk],
    ) -> Result<()> {
        let iohost = Iohost::new(name.as_str())?;
        // Another client of this process never had it.
        let life = u64::from(std::process::id()) << 32 | (self.stations.len() as u64 + 1);
        let client = ClientOptions { client: name.to_wire(), life, ..ClientOptions::default() };
        let options = SessionOptions { client, address: self.iohost, idle: IdleMode::Poll };
        let open = |disk: &Disk| Opening::new(&iohost, &device_name(*disk, name.as_str()));
        let openings = disks.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut session = Session::new(core, &iohost, link, trust, &options)?;
        let begin = Instant::now();
        let mut stores = Vec::new();
        for mut opening in openings {
            let store = loop {
                match opening.wait(Some(Duration::ZERO))? {
                    Ok(store) => break store,
                    Err(again) => opening = again,
                }
                stop::check()?;
                ensure!(begin.elapsed() < PATIENCE, "{name} does not get its devices");
                self.now = Nanos(self.now.0 + 1_000_000);
                session.poll(self.now, BUDGET);
                std::thread::sleep(Duration::from_millis(1));
            };
            stores.push(store);
        }
        let channels = disks.iter().zip(&stores).map(|(disk, store)| {
            Ok::<_, std::io::Error>((*disk, store.open_channel(core, DEPTH)?))
        });
        self.stations.push(Station {
            channels: channels.collect::<Result<_, _>>()?,
            _stores: stores,
            session,
            memory: requests::memory(DEPTH as u64 * u64::from(MAX_BYTES))?,
            idle: Batch::with_capacity(DEPTH),
            completed: Batch::with_capacity(DEPTH),
            places: Places::new(1),
            losses: Arc::default(),
        });
        Ok(())
    }

    /// Sets the losses that the clients' links count.
    pub(super) fn set_losses(&mut self, losses: Vec<Arc<Losses>>) {
        for (station, losses) in self.stations.iter_mut().zip(losses) {
            station.losses = losses;
        }
    }

    /// Has the clients work for a second of their time, in which they and the IOhost agree on the
    /// time after which a frame is lost.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(super) fn settle(&mut self, clock: &Clock) -> Result<()> {
        let work = Work { duration: Duration::from_secs(1), ..Work::default() };
        self.run(Disk::Null, &work, clock).map(|_| ())
    }

    /// Makes the last client one that can flood: it has sent a read, which the flood repeats.
    ///
    /// # Errors
    /// As [`run`](Self::run); there is no client.
    pub(super) fn prepare_flood(&mut self, flood: Arc<Flood>, clock: &Clock) -> Result<()> {
        let flooder = self.stations.pop().context("no client")?;
        let victims = std::mem::replace(&mut self.stations, vec![flooder]);
        let work = Work { duration: Duration::from_millis(1), ..Work::default() };
        let sent = self.run(Disk::Null, &work, clock);
        let flooder = std::mem::replace(&mut self.stations, victims).pop();
        self.flooder = flooder.map(|flooder| (flooder, flood));
        sent.map(|_| ())
    }

    /// As [`run`](Self::run), while the last client floods.
    ///
    /// # Errors
    /// As [`run`](Self::run); the IOhost does not serve the flood, which shows nothing then.
    pub(super) fn run_flooded(&mut self, disk: Disk, work: &Work, clock: &Clock) -> Result<Sample> {
        let (_, flood) = self.flooder.as_ref().context("no client floods")?;
        let flood = Arc::clone(flood);
        let [sent_before, answers_before] = flood.counts();
        flood.set(true);
        let sample = self.run(disk, work, clock);
        let [sent, _] = flood.counts();
        // An answer's frame has several requests in it.
        let answers = answers_before + (sent - sent_before) / 16;
        let sample = sample.and_then(|sample| self.await_answers(answers).map(|()| sample));
        flood.set(false);
        sample
    }

    /// Goes on with the flood until it has had more than so many answers.
    fn await_answers(&mut self, answers: u64) -> Result<()> {
        let (station, flood) = self.flooder.as_mut().context("no client floods")?;
        let mut silence = Silence::default();
        while flood.counts()[1] <= answers {
            station.session.poll(self.now, BUDGET);
            silence.look(false).context("the IOhost does not serve the flood")?;
        }
        Ok(())
    }

    /// The share of their frames that the links lost so far.
    pub(super) fn lost_share(&self) -> f64 {
        self.stations.first().map_or(0.0, |station| station.losses.share())
    }

    /// Runs the work on one disk of each client, with `work.depth` requests of each in flight, and
    /// waits for the last one.
    ///
    /// # Errors
    /// A request fails or does not come back; an interrupt.
    pub(crate) fn run(&mut self, disk: Disk, work: &Work, clock: &Clock) -> Result<Sample> {
        for station in &mut self.stations {
            station.prepare(work)?;
        }
        let mut time = Time { clock, origin: clock.raw(), base: self.now };
        let flooder = self.flooder.as_mut();
        let result = run_on((&mut self.stations, flooder), disk, work, &mut time);
        self.now = time.at(clock.raw());
        for station in &mut self.stations {
            station.idle.clear();
        }
        result
    }
}

/// The time of the clients in a run.
struct Time<'a> {
    clock: &'a Clock,
    origin: u64,
    base: Nanos,
}

impl Time<'_> {
    #[inline]
    fn at(&self, raw: u64) -> Nanos {
        Nanos(self.base.0 + self.clock.delta_as_nanos(self.origin, raw))
    }
}

impl Station {
    /// Makes the requests of a run.
    fn prepare(&mut self, work: &Work) -> Result<()> {
        let operation = if work.write { Operation::Write } else { Operation::Read };
        let (memory, bytes) = (&self.memory, u64::from(work.bytes));
        let request = |index| requests::request(memory, operation, index, bytes);
        self.idle = (0..u64::from(work.depth)).map(request).collect::<Result<_>>()?;
        self.places = Places::new(work.blocks);
        Ok(())
    }

    /// Sends the idle requests at `now`.
    #[inline]
    fn submit(&mut self, disk: usize, work: &Work, now: Nanos) -> Result<()> {
        for request in &mut self.idle {
            let place = self.places.next_block();
            if work.is_mixed {
                let is_write = work.is_write(place);
                request.operation = if is_write { Operation::Write } else { Operation::Read };
            }
            request.offset_bytes = place * u64::from(work.bytes);
            request.taken_at = now;
        }
        let (_, channel) = self.channels.get_mut(disk).context("no such disk")?;
        channel.submit(now, &mut self.idle);
        ensure!(self.idle.is_empty(), "a channel takes less than its depth");
        Ok(())
    }

    /// Takes what has come. Returns the number of requests that have ended.
    #[inline]
    fn poll(&mut self, disk: usize, now: Nanos) -> Result<usize> {
        self.session.poll(now, BUDGET);
        let (_, channel) = self.channels.get_mut(disk).context("no such disk")?;
        channel.poll(now, &mut self.completed);
        Ok(self.completed.len())
    }

    /// Makes requests idle that have ended by `now`.
    #[inline]
    fn rest(&mut self, now: Nanos, latencies: &mut Histogram) -> Result<()> {
        for request in &self.completed {
            request.result.context("a request failed")?;
            latencies.add(now.since(request.taken_at).0);
        }
        self.idle.append(&mut self.completed);
        Ok(())
    }
}

fn run_on(
    (stations, mut flooder): (&mut [Station], Option<&mut (Station, Arc<Flood>)>),
    disk: Disk,
    work: &Work,
    time: &mut Time<'_>,
) -> Result<Sample> {
    let disk = stations
        .first()
        .and_then(|station| station.channels.iter().position(|(of, _)| *of == disk))
        .context("no such disk")?;
    let mut latencies = Histogram::default();
    for station in stations.iter_mut() {
        station.submit(disk, work, time.base)?;
    }
    let mut in_flight = stations.len() * usize::from(work.depth);
    let (mut done, mut silence) = (0_u64, Silence::default());
    let end = Nanos(time.base.0 + u64::try_from(work.duration.as_nanos())?);
    let (mut now, mut finish) = (time.base, None);
    while in_flight > 0 {
        let mut found = false;
        for station in stations.iter_mut() {
            let count = station.poll(disk, now)?;
            // One reading for each turn, as on a sidecore: it is the end of this one.
            now = time.at(time.clock.raw());
            if count == 0 {
                continue;
            }
            found = true;
            station.rest(now, &mut latencies)?;
            if finish.is_none() {
                done += count as u64;
                station.submit(disk, work, now)?;
            } else {
                in_flight -= count;
            }
        }
        if let Some((station, flood)) = &mut flooder {
            // Time stands still for the session of a flood, which gets no answers.
            let now = if flood.is_on() { time.base } else { now };
            station.session.poll(now, BUDGET);
        }
        silence.look(found)?;
        if finish.is_none() && now >= end {
            finish = Some(now);
        }
    }
    let seconds = finish.unwrap_or(now).since(time.base).0 as f64 / 1e9;
    let depth = stations.len() as f64 * f64::from(work.depth);
    Ok(Sample {
        iops: done as f64 / seconds,
        latency_p50_ns: latencies.quantile(0.5),
        latency_p99_ns: latencies.quantile(0.99),
        latency_p999_ns: latencies.quantile(0.999),
        latency_max_ns: latencies.quantile(1.0),
        latency_mean_ns: seconds * 1e9 * depth / done as f64,
        ..Sample::default()
    })
}

/// Turns without a completion.
#[derive(Default)]
pub(super) struct Silence {
    turns: u32,
    since: Option<Instant>,
}

impl Silence {
    #[inline]
    pub(super) fn look(&mut self, found: bool) -> Result<()> {
        if found {
            self.since = None;
        }
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS_PER_LOOK) { self.lose_patience() } else { Ok(()) }
    }

    #[cold]
    fn lose_patience(&mut self) -> Result<()> {
        stop::check()?;
        let since = *self.since.get_or_insert_with(Instant::now);
        ensure!(since.elapsed() < PATIENCE, "the server does not answer");
        Ok(())
    }
}
