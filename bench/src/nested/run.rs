//! The cases on one store: every system in turn, between near cores, through one client.

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_units::Sector;

use super::alone::Alone;
use super::servers::{PF, Server, Servers, System, VF};
use super::{Bench, Medium, case, depths};
use crate::against::{self, Kept, Part};
use crate::cores::Gated;
use crate::load::{self, Sample, Work};
use crate::process::Watch;
use crate::record::{FLOOR, Params};
use crate::runs::{
    BANDWIDTH, IOPS, LATENCY_MEAN, LATENCY_P50, LATENCY_P99, Metric, Runs, record_added,
    record_ratios,
};

const METRICS: [Metric; 5] = [IOPS, BANDWIDTH, LATENCY_P50, LATENCY_P99, LATENCY_MEAN];

/// The runs of one system in one case.
struct Measured {
    name: String,
    params: Params,
    runs: Runs,
}

impl Measured {
    /// Its latency at depth 1, or else its requests, for the progress on the terminal.
    fn figure(&self, work: &Work) -> String {
        let alone = work.depth == 1;
        let value = |sample: &Sample| if alone { sample.latency_p50_ns } else { sample.iops };
        let value = self.runs.rounds(value).median();
        let name = &self.name;
        if alone {
            format!("  {name} {:.2} us", value / 1e3)
        } else {
            format!("  {name} {:.1} k/s", value / 1e3)
        }
    }
}

/// A system that is measured through a client.
struct Client<'a> {
    system: &'a System,
    client: BlkClient,
}

/// The rounds to be measured, and the runs of those before.
type Rounds<'a> = (&'a Part, &'a mut Kept<Runs>);

impl Bench {
    /// Measures all cases on one medium, on the servers that `start` starts for the time that it is
    /// given, some rounds or all of them.
    pub(super) fn measure_on(
        &mut self,
        medium: Medium,
        start: impl Fn(&Self, usize) -> Result<Servers>,
    ) -> Result<()> {
        let mut kept = Kept::default();
        let parts = if self.plan.starts_again {
            against::in_parts(self.plan.rounds, against::PAIRS_PER_START)
        } else {
            against::parts(&self.options.programs.common, self.plan.rounds)
        };
        for part in parts {
            let mut servers = start(self, part.start)?;
            self.cases(medium, &mut servers, (&part, &mut kept))?;
            servers.end()?;
        }
        Ok(())
    }

    fn cases(
        &mut self,
        medium: Medium,
        servers: &mut Servers,
        (part, kept): Rounds<'_>,
    ) -> Result<()> {
        for bytes in self.sizes(medium) {
            let [_, deep] = depths(bytes);
            let options =
                ClientOptions { slots: deep, slot_bytes: bytes, ..ClientOptions::default() };
            let Servers { programs, systems, alone, .. } = servers;
            let mut clients = Vec::new();
            // Buffers are as large as the requests: larger ones between them would share their
            // places in caches.
            for system in &*systems {
                let process =
                    programs.get_mut(system.program).context("no such program")?.process();
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
                        yields: medium.has_workers(),
                        duration: self.plan.run,
                        ..Work::default()
                    };
                    self.case(
                        &case(medium, write, bytes, depth),
                        &work,
                        programs,
                        (&mut clients, alone.as_ref()),
                        (part, kept),
                    )?;
                }
            }
        }
        if part.is_last {
            self.translations(medium, servers)?;
        }
        Ok(())
    }

    fn case(
        &mut self,
        case: &str,
        work: &Work,
        programs: &mut [Server],
        (clients, alone): (&mut [Client<'_>], Option<&Alone>),
        (part, kept): Rounds<'_>,
    ) -> Result<()> {
        let mut all: Vec<Measured> = clients.iter().map(Client::unmeasured).collect();
        let params = self.common_params();
        all.extend(alone.map(|_| Measured {
            name: FLOOR.to_owned(),
            params,
            runs: Runs::default(),
        }));
        let runs = kept.take(case, all.len());
        all.iter_mut().zip(runs).for_each(|(measured, runs)| measured.runs = runs);
        let builds = self.builds();
        for round in part.rounds.clone() {
            if round > 0 && self.experiment.begin.elapsed() > self.plan.budget {
                break;
            }
            // Each round begins with another system, so that no system always comes after the same
            // one.
            for turn in 0..clients.len() {
                let index = if builds {
                    against::index(turn, round)
                } else {
                    (turn + round) % clients.len()
                };
                let (Some(client), Some(measured)) = (clients.get_mut(index), all.get_mut(index))
                else {
                    continue;
                };
                let program = programs.get_mut(client.system.program).context("no such program")?;
                let run = self.round(program, client, work);
                measured
                    .runs
                    .add(run.with_context(|| format!("measuring {}, {case}", measured.name))?);
            }
            if let (Some(alone), Some(floor)) = (alone, all.last_mut()) {
                let run = self.round_alone(alone, work);
                floor.runs.add(run.with_context(|| format!("measuring the disk alone, {case}"))?);
            }
        }
        if part.is_last {
            self.record_case(case, work, &all);
        } else {
            kept.keep(case, all.into_iter().map(|measured| measured.runs));
        }
        Ok(())
    }

    /// Records the runs of all systems.
    fn record_case(&mut self, case: &str, work: &Work, all: &[Measured]) {
        all.iter().for_each(|measured| self.record(case, measured, work));
        if self.builds() {
            let named: Vec<_> =
                all.iter().map(|measured| (measured.name.as_str(), &measured.runs)).collect();
            against::record_pairs(&mut self.experiment.records, case, work, &named);
        } else if let Some((vf, others)) = all.split_first() {
            for peer in others {
                let (vf, peer) = ((vf.name.as_str(), &vf.runs), (peer.name.as_str(), &peer.runs));
                let records = &mut self.experiment.records;
                record_ratios(records, case, work, work.depth == 1, vf, peer);
                if peer.0 == PF {
                    record_added(records, case, vf, peer);
                }
            }
        }
        let figures: String = all.iter().map(|measured| measured.figure(work)).collect();
        eprintln!("  {case:<26}{figures}");
    }

    fn round_alone(&mut self, alone: &Alone, work: &Work) -> Result<Gated<Sample>> {
        let work = Work { blocks: self.plan.volume_bytes / u64::from(work.bytes), ..*work };
        let warm_up = Work { duration: self.plan.warm_up, ..work };
        self.experiment.gate.run(|partner| {
            let watch =
                if work.yields { Watch::start_with_workers(None) } else { Watch::start(None) }?;
            alone.run(partner, &warm_up)?;
            let sample = alone.run(partner, &work)?;
            Ok((sample, watch.share(None)?))
        })
    }

    fn round(
        &mut self,
        program: &mut Server,
        client: &mut Client<'_>,
        work: &Work,
    ) -> Result<Gated<Sample>> {
        let Client { system, client } = client;
        let places = system.span_bytes / u64::from(work.bytes);
        let work = Work { blocks: places, first: Sector(system.first.0), ..*work };
        let load = |work: &Work, clock: &Clock| {
            load::run(client.queue(0).context("no queue")?, work, clock)
        };
        self.experiment.round(program.process(), self.plan.warm_up, &work, load)
    }

    fn record(&mut self, case: &str, measured: &Measured, work: &Work) {
        let Measured { name, params, runs } = measured;
        for metric in METRICS.iter().filter(|metric| work.depth == 1 || !metric.alone) {
            let mut params = runs.params(work, params.clone());
            params.insert("bytes".to_owned(), work.bytes.into());
            params.insert("yields".to_owned(), work.yields.into());
            let (median, params) = runs.settle(metric, work, params);
            self.experiment.records.measure(case, name, metric.name, median, metric.unit, params);
        }
    }

    /// Records the share of requests that found their mapping in the last extent, over all
    /// measurements.
    fn translations(&mut self, medium: Medium, servers: &mut Servers) -> Result<()> {
        servers.programs.first_mut().context("no program")?.process().thaw()?;
        let mut found = Vec::new();
        for system in servers.systems.iter().filter(|system| !system.before) {
            if let Some((hits, misses)) =
                system.volume().and_then(|volume| servers.translations(volume))
            {
                found.push((system.name, hits as f64 / (hits + misses).max(1) as f64));
            }
        }
        servers.programs.first_mut().context("no program")?.process().freeze()?;
        debug_assert!(found.iter().any(|(name, _)| *name == VF));
        for (name, share) in found {
            let params = self.common_params();
            self.experiment.records.measure(
                medium.name(),
                name,
                "last_extent_share",
                share,
                "1",
                params,
            );
            eprintln!(
                "  {:<26}  {name}: {share:.4} of all requests in the last extent",
                medium.name()
            );
        }
        Ok(())
    }
}

impl Client<'_> {
    fn unmeasured(&self) -> Measured {
        let mut params = self.system.params.clone();
        params.insert("client_huge_pages".to_owned(), self.client.on_huge_pages().into());
        let System { name, before, .. } = self.system;
        let name = if *before { against::before(name) } else { (*name).to_owned() };
        Measured { name, params, runs: Runs::default() }
    }
}
