//! The cases of one ground, every system in turn, between near cores, through one client.

use anyhow::{Context, Result};
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_units::Sector;

use super::alone::Alone;
use super::servers::{Server, Servers, System, VF};
use super::{Bench, Ground, case, depths};
use crate::cores::Gated;
use crate::load::{self, Sample, Work};
use crate::process::Watch;
use crate::record::{FLOOR, Params};
use crate::rounds::Rounds;
use crate::stats;

/// The numbers of a run that become records: metric, unit, only at depth 1.
type Metric = (&'static str, &'static str, bool, fn(&Run) -> f64);
const METRICS: [Metric; 5] = [
    ("iops", "1/s", false, |run| run.sample.iops),
    ("bandwidth", "B/s", false, |run| run.sample.iops * f64::from(run.bytes)),
    ("latency_p50", "ns", true, |run| run.sample.latency_p50_ns),
    ("latency_p99", "ns", true, |run| run.sample.latency_p99_ns),
    ("latency_mean", "ns", true, |run| run.sample.latency_mean_ns),
];

/// The metrics whose ratio is recorded.
const RATIOS: [&str; 2] = ["iops", "latency_p50"];

/// What one system did in one round.
struct Run {
    sample: Sample,
    bytes: u32,
    counts: bool,
    line_ns: f64,
    waited_share: f64,
}

/// What one system did in one case.
struct Runs {
    name: &'static str,
    params: Params,
    runs: Vec<Run>,
}

/// A system that is measured through a client.
struct Client<'a> {
    system: &'a System,
    client: BlkClient,
}

impl Bench {
    pub(super) fn cases(&mut self, ground: Ground, servers: &mut Servers) -> Result<()> {
        for bytes in self.sizes(ground) {
            let [_, deep] = depths(bytes);
            let options = ClientOptions { slots: deep, slot_bytes: bytes, ..ClientOptions::default() };
            let Servers { programs, systems, alone, .. } = servers;
            let mut clients = Vec::new();
            // Buffers as large as the requests: with larger ones between them, they would share their places in caches.
            for system in &*systems {
                let process = programs.get_mut(system.program).context("no such program")?.process();
                process.thaw()?;
                let client = BlkClient::connect(&system.socket, &options);
                process.freeze()?;
                let client = client.with_context(|| format!("cannot use {}", system.name))?;
                clients.push(Client { system, client });
            }
            for write in [false, true] {
                for depth in depths(bytes) {
                    let work = Work {
                        write,
                        depth,
                        bytes,
                        touch: self.options.touch,
                        yields: ground.has_workers(),
                        duration: self.plan.run,
                        ..Work::default()
                    };
                    self.case(&case(ground, write, bytes, depth), &work, programs, (&mut clients, alone.as_ref()))?;
                }
            }
        }
        self.translations(ground, servers)
    }

    fn case(
        &mut self,
        case: &str,
        work: &Work,
        programs: &mut [Server],
        (clients, alone): (&mut [Client<'_>], Option<&Alone>),
    ) -> Result<()> {
        let mut all: Vec<Runs> = clients.iter().map(Client::no_runs).collect();
        let mut floor = Runs { name: FLOOR, params: self.common_params(), runs: Vec::new() };
        for round in 0..self.plan.rounds {
            if round > 0 && self.begin.elapsed() > self.plan.budget {
                break;
            }
            // Each round begins with another one, so that none always comes after the same.
            for turn in 0..clients.len() {
                let index = (turn + round) % clients.len();
                let (Some(client), Some(runs)) = (clients.get_mut(index), all.get_mut(index)) else { continue };
                let program = programs.get_mut(client.system.program).context("no such program")?;
                let run = self.round(program, client, work);
                runs.runs.push(run.with_context(|| format!("measuring {}, {case}", runs.name))?);
            }
            if let Some(alone) = alone {
                let run = self.round_alone(alone, work);
                floor.runs.push(run.with_context(|| format!("measuring the disk alone, {case}"))?);
            }
        }
        all.extend(alone.map(|_| floor));
        let mut line = format!("  {case:<26}");
        for runs in &all {
            self.record(case, runs, work);
            let alone = work.depth == 1;
            let value =
                runs.rounds(if alone { |run| run.sample.latency_p50_ns } else { |run| run.sample.iops }).median();
            let said = if alone { format!("{:.2} us", value / 1e3) } else { format!("{:.1} k/s", value / 1e3) };
            line.push_str(&format!("  {} {said}", runs.name));
        }
        if let Some((vf, others)) = all.split_first() {
            others.iter().for_each(|peer| self.record_ratios(case, vf, peer, work.depth));
        }
        eprintln!("{line}");
        Ok(())
    }

    fn round_alone(&mut self, alone: &Alone, work: &Work) -> Result<Run> {
        let work = Work { blocks: self.plan.volume_bytes / u64::from(work.bytes), ..*work };
        let warm_up = Work { duration: self.plan.warm_up, ..work };
        let gated = self.gate.run(|partner| {
            let watch = if work.yields { Watch::start_with_workers(None) } else { Watch::start(None) }?;
            alone.run(partner, &warm_up)?;
            let sample = alone.run(partner, &work)?;
            Ok((sample, watch.share(None)?))
        })?;
        Ok(Run::of(gated, work.bytes))
    }

    fn round(&mut self, program: &mut Server, client: &mut Client<'_>, work: &Work) -> Result<Run> {
        let Client { system, client } = client;
        let places = system.span_bytes / u64::from(work.bytes);
        let work = Work { blocks: places, first: Sector(system.first.0), ..*work };
        let warm_up = Work { duration: self.plan.warm_up, ..work };
        let clock = &self.clock;
        let process = program.process();
        let gated = self.gate.run(|_| {
            let watch =
                if work.yields { Watch::start_with_workers(Some(process)) } else { Watch::start(Some(process)) }?;
            process.thaw()?;
            let queue = client.queue(0).context("no queue")?;
            load::run(queue, &warm_up, clock)?;
            let sample = load::run(queue, &work, clock)?;
            process.freeze()?;
            Ok((sample, watch.share(Some(process))?))
        })?;
        Ok(Run::of(gated, work.bytes))
    }

    fn record(&mut self, case: &str, runs: &Runs, work: &Work) {
        for (metric, unit, alone, value) in METRICS {
            if alone && work.depth != 1 {
                continue;
            }
            let mut params = runs.params.clone();
            params.insert("bytes".to_owned(), work.bytes.into());
            params.insert("depth".to_owned(), work.depth.into());
            params.insert("yields".to_owned(), work.yields.into());
            params.insert("run_ms".to_owned(), (work.duration.as_millis() as u64).into());
            params.insert("line_ns".to_owned(), runs.median(|run| run.line_ns).into());
            params.insert("waited_share".to_owned(), runs.median(|run| run.waited_share).into());
            let (median, params) = runs.rounds(value).settle(params);
            self.records.measure(case, runs.name, metric, median, unit, params);
        }
    }

    fn record_ratios(&mut self, case: &str, ours: &Runs, peer: &Runs, depth: u16) {
        for (metric, _, alone, value) in METRICS {
            if !RATIOS.contains(&metric) || (alone && depth != 1) {
                continue;
            }
            let mut rounds = Rounds::new();
            for (ours, peer) in ours.runs.iter().zip(&peer.runs) {
                rounds.add(value(ours) / value(peer), ours.counts && peer.counts);
            }
            let (median, params) = rounds.settle(Params::new());
            self.records.ratio(case, metric, ours.name, peer.name, median, params);
        }
    }

    /// How often the last extent was the right one, over everything that was measured.
    fn translations(&mut self, ground: Ground, servers: &mut Servers) -> Result<()> {
        servers.programs.first_mut().context("no program")?.process().thaw()?;
        let mut found = Vec::new();
        for system in &servers.systems {
            if let Some((hits, misses)) = system.volume().and_then(|volume| servers.translations(volume)) {
                found.push((system.name, hits as f64 / (hits + misses).max(1) as f64));
            }
        }
        servers.programs.first_mut().context("no program")?.process().freeze()?;
        debug_assert!(found.iter().any(|(name, _)| *name == VF));
        for (name, share) in found {
            self.records.measure(ground.name(), name, "last_extent_share", share, "1", self.common_params());
            eprintln!("  {:<26}  {name}: {share:.4} of all requests in the last extent", ground.name());
        }
        Ok(())
    }
}

impl Run {
    fn of(gated: Gated<Sample>, bytes: u32) -> Self {
        Self {
            counts: gated.counts(),
            line_ns: f64::midpoint(gated.before_ns, gated.after_ns),
            waited_share: gated.waited_share,
            sample: gated.result,
            bytes,
        }
    }
}

impl Client<'_> {
    fn no_runs(&self) -> Runs {
        let mut params = self.system.params.clone();
        params.insert("client_huge_pages".to_owned(), self.client.on_huge_pages().into());
        Runs { name: self.system.name, params, runs: Vec::new() }
    }
}

impl Runs {
    fn rounds(&self, value: fn(&Run) -> f64) -> Rounds {
        let mut rounds = Rounds::new();
        for run in &self.runs {
            rounds.add(value(run), run.counts);
        }
        rounds
    }

    fn median(&self, value: fn(&Run) -> f64) -> f64 {
        stats::median(&self.runs.iter().map(value).collect::<Vec<_>>())
    }
}
