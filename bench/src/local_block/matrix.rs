//! Stores, operations and depths: this daemon and the peer in turn, between near cores, through one
//! client.

use std::path::Path;

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};

use super::Bench;
use crate::against::{self, Kept, Part};
use crate::fill::{allocated_file, directory_in_memory};
use crate::load::{self, Sample, Work};
use crate::peer::{self, Disk, Program, StorageDaemon};
use crate::process::Process;
use crate::record::{FLOOR, OURS, Params};
use crate::runs::{
    INTERRUPTS, IOPS, KICKS, LATENCY_MEAN, LATENCY_P50, LATENCY_P99, Metric, Runs, record_ratios,
};
use crate::sidecored::{Device, Sidecored, Store};

const STORES: [&str; 3] = ["null", "ram", "file"];
const DEPTHS: [u16; 3] = [1, 32, 128];

const METRICS: [Metric; 6] = [IOPS, LATENCY_P50, LATENCY_P99, LATENCY_MEAN, KICKS, INTERRUPTS];

/// One system in the comparison of one store.
struct System<'a> {
    name: String,
    kind: Kind<'a>,
    params: Params,
    runs: Runs,
}

enum Kind<'a> {
    Server {
        process: &'a mut Process,
        client: BlkClient,
    },
    /// The copies of the data alone.
    Copies,
}

/// Measures all cases. Two builds are started again after some pairs.
pub(super) fn run(bench: &mut Bench, peer: Option<&Program>) -> Result<()> {
    let mut kept = Kept::default();
    for part in against::parts(&bench.options.programs.common, bench.plan.rounds) {
        run_part(bench, peer, &part, &mut kept)?;
    }
    Ok(())
}

fn run_part(
    bench: &mut Bench,
    peer: Option<&Program>,
    part: &Part,
    kept: &mut Kept<Runs>,
) -> Result<()> {
    let files = directory_in_memory()?;
    let file = |name: &str| allocated_file(&files.path().join(name), bench.plan.store_bytes);
    let (our_file, their_file) = (file("ours")?, file("theirs")?);
    let bytes = bench.plan.store_bytes;
    let devices = |file: &Path| {
        [
            Device::new("null", Store::Null { bytes }),
            Device::new("ram", Store::Ram { bytes }),
            Device::new("file", Store::File { path: file.to_owned() }),
        ]
    };
    // Each file has one server at most.
    let of_builds = [&devices(&our_file)[..], &devices(&their_file)];
    let (mut ours, mut before) =
        bench.experiment.start_builds("matrix", part.start, &[], of_builds)?;
    ours.process.freeze()?;
    if let Some(before) = &mut before {
        before.process.freeze()?;
    }
    let start = |name: &str, disk: Disk| {
        peer.map(|program| bench.experiment.start_peer(program, name, &disk, 1, bench.plan.trial))
            .transpose()
    };
    let mut their_null = start("peer-null", Disk::Null { bytes })?;
    let mut their_file = start("peer-file", Disk::File { path: their_file, cached: true })?;
    for store in STORES {
        // The peer has no store in memory; its fastest store that keeps data is a file on tmpfs.
        let theirs = if store == "null" { &mut their_null } else { &mut their_file };
        let mut systems = vec![bench.ours(&mut ours, store, OURS)?];
        let builds = before.is_some();
        if let Some(before) = &mut before {
            systems.push(bench.ours(before, store, &against::before(OURS))?);
        }
        if let (Some(daemon), Some(program)) = (theirs, peer) {
            systems.push(bench.theirs(daemon, program)?);
        }
        if store == "ram" && !builds {
            systems.push(System::new(FLOOR, Kind::Copies, bench.common_params()));
        }
        for write in [false, true] {
            for depth in DEPTHS {
                bench.case((store, write, depth), &mut systems, (part, kept))?;
            }
        }
    }
    if let Some(before) = before {
        before.process.end()?;
    }
    ours.process.end()
}

impl<'a> System<'a> {
    fn new(name: &str, kind: Kind<'a>, params: Params) -> Self {
        Self { name: name.to_owned(), kind, params, runs: Runs::default() }
    }

    fn server(
        name: &str,
        process: &'a mut Process,
        socket: &Path,
        mut params: Params,
    ) -> Result<Self> {
        process.thaw()?;
        let slots = DEPTHS.iter().copied().max().unwrap_or(1);
        let client =
            BlkClient::connect(socket, &ClientOptions { slots, ..ClientOptions::default() })
                .with_context(|| format!("cannot use {name}"))?;
        process.freeze()?;
        params.insert("client_huge_pages".to_owned(), client.on_huge_pages().into());
        params.insert("features".to_owned(), format!("{:#x}", client.features()).into());
        Ok(Self::new(name, Kind::Server { process, client }, params))
    }
}

impl Bench {
    fn ours<'a>(&self, ours: &'a mut Sidecored, store: &str, name: &str) -> Result<System<'a>> {
        let socket = ours.socket(store);
        System::server(name, &mut ours.process, &socket, self.common_params())
    }

    fn theirs<'a>(&self, daemon: &'a mut StorageDaemon, program: &Program) -> Result<System<'a>> {
        let mut params = self.common_params();
        params.extend(daemon.params(program));
        System::server(peer::NAME, &mut daemon.process, &daemon.socket, params)
    }

    fn case(
        &mut self,
        (store, write, depth): (&str, bool, u16),
        systems: &mut [System<'_>],
        (part, kept): (&Part, &mut Kept<Runs>),
    ) -> Result<()> {
        let case = format!("{store}/{}/qd{depth}", if write { "randwrite" } else { "randread" });
        let work = Work {
            write,
            depth,
            blocks: self.plan.store_bytes / u64::from(load::BLOCK_BYTES),
            touch: self.options.touch,
            duration: self.plan.run,
            ..Work::default()
        };
        let builds = self.options.programs.common.against.is_some();
        let runs = kept.take(&case, systems.len());
        systems.iter_mut().zip(runs).for_each(|(system, runs)| system.runs = runs);
        for round in part.rounds.clone() {
            if round > 0 && self.experiment.begin.elapsed() > self.plan.budget {
                break;
            }
            for turn in 0..systems.len() {
                let index = if builds { against::index(turn, round) } else { turn };
                self.round(systems.get_mut(index).context("no such system")?, &work)?;
            }
        }
        if part.is_last {
            self.record_case(&case, &work, systems);
        } else {
            kept.keep(&case, systems.iter_mut().map(|system| std::mem::take(&mut system.runs)));
        }
        Ok(())
    }

    /// Records the runs of all systems.
    fn record_case(&mut self, case: &str, work: &Work, systems: &[System<'_>]) {
        let mut line = format!("  {case:<20}");
        for system in systems {
            self.record(case, system, work);
            let iops = system.runs.rounds(|sample| sample.iops).median();
            line.push_str(&format!("  {} {:.0} k/s", system.name, iops / 1e3));
        }
        if self.options.programs.common.against.is_some() {
            let named: Vec<_> =
                systems.iter().map(|system| (system.name.as_str(), &system.runs)).collect();
            against::record_pairs(&mut self.experiment.records, case, work, &named);
        } else if let Some((ours, others)) = systems.split_first() {
            for peer in others {
                let is_alone = work.depth == 1 && peer.name != FLOOR;
                let (ours, peer) =
                    ((ours.name.as_str(), &ours.runs), (peer.name.as_str(), &peer.runs));
                record_ratios(&mut self.experiment.records, case, work, is_alone, ours, peer);
            }
        }
        eprintln!("{line}");
    }

    fn round(&mut self, system: &mut System<'_>, work: &Work) -> Result<()> {
        match &mut system.kind {
            Kind::Server { process, client } => {
                let load = |work: &Work, clock: &Clock| {
                    load::run(client.queue(0).context("no queue")?, work, clock)
                };
                let run = self.experiment.round(process, self.plan.warm_up, work, load);
                system.runs.add(run.with_context(|| format!("measuring {}", system.name))?);
            }
            Kind::Copies => {
                let gated = self.copy_once(work.write, false)?;
                system.params.insert("how".to_owned(), gated.result.1.into());
                system
                    .runs
                    .add(gated.map(|(ns, _)| Sample { iops: 1e9 / ns, ..Sample::default() }));
            }
        }
        Ok(())
    }

    fn record(&mut self, case: &str, system: &System<'_>, work: &Work) {
        let is_copy = matches!(system.kind, Kind::Copies);
        for metric in METRICS {
            if (metric.alone && work.depth != 1) || (is_copy && metric.name != IOPS.name) {
                continue;
            }
            let mut params = system.params.clone();
            params.insert("block_bytes".to_owned(), load::BLOCK_BYTES.into());
            params.insert("depth".to_owned(), work.depth.into());
            params.insert("touch".to_owned(), work.touch.into());
            params.insert("run_ms".to_owned(), (work.duration.as_millis() as u64).into());
            if !is_copy {
                params.insert("line_ns".to_owned(), system.runs.line_ns().into());
                params.insert("waited_share".to_owned(), system.runs.waited_share().into());
            }
            let (median, params) =
                system.runs.rounds(|sample| (metric.value)(sample, work)).settle(params);
            self.experiment.records.measure(
                case,
                &system.name,
                metric.name,
                median,
                metric.unit,
                params,
            );
        }
    }
}
