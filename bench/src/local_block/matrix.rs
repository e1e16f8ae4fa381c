//! Stores, operations and depths: ours and the peer's in turn, between near cores, through one client.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sidecore_driver::{BlkClient, ClientOptions};

use super::Bench;
use crate::load::{self, Sample, Work};
use crate::peer::{self, Disk, Program, StorageDaemon};
use crate::process::{Process, Watch};
use crate::record::{FLOOR, OURS, Params};
use crate::rounds::Rounds;
use crate::sidecored::{Device, FrontEnd, Sidecored, Store};

const STORES: [&str; 3] = ["null", "ram", "file"];
const DEPTHS: [u16; 3] = [1, 32, 128];

/// The numbers of a sample that become records: metric, unit, only at depth 1.
type Metric = (&'static str, &'static str, bool, fn(&Sample) -> f64);
const METRICS: [Metric; 6] = [
    ("iops", "1/s", false, |sample| sample.iops),
    ("latency_p50", "ns", true, |sample| sample.latency_p50_ns),
    ("latency_p99", "ns", true, |sample| sample.latency_p99_ns),
    ("latency_mean", "ns", true, |sample| sample.latency_mean_ns),
    ("kicks_per_request", "1", false, |sample| sample.kicks_per_request),
    ("calls_per_request", "1", false, |sample| sample.calls_per_request),
];

/// The metrics whose ratio is recorded.
const RATIOS: [&str; 2] = ["iops", "latency_p50"];

/// One system in the comparison of one store.
struct System<'a> {
    name: &'static str,
    kind: Kind<'a>,
    params: Params,
    samples: Vec<(Sample, bool)>,
    lines_ns: Vec<f64>,
    waited: Vec<f64>,
}

enum Kind<'a> {
    Server {
        process: &'a mut Process,
        client: BlkClient,
    },
    /// Nothing but the copies.
    Copies,
}

pub(super) fn run(bench: &mut Bench, peer: Option<&Program>) -> Result<()> {
    let directory = bench.directory.path().to_owned();
    // Files of a file system in memory, so that what is measured is the path and not a medium.
    let tmpfs = tempfile::Builder::new().prefix("sidecore-bench").tempdir_in("/dev/shm").context("no tmpfs")?;
    let file = |name: &str| filled_file(&tmpfs.path().join(name), bench.plan.store_bytes);
    let (our_file, their_file) = (file("ours")?, file("theirs")?);
    let bytes = bench.plan.store_bytes;
    let device = |name: &str, store| Device {
        name: name.to_owned(),
        store,
        idle: "poll",
        front_end: FrontEnd::VirtioBlk,
        queues: 1,
    };
    let devices = [
        device("null", Store::Null { bytes }),
        device("ram", Store::Ram { bytes }),
        device("file", Store::File { path: our_file }),
    ];
    let mut ours = Sidecored::start(&bench.daemon, &directory, "matrix", &devices)?;
    ours.process.freeze()?;
    let start = |name: &str, disk: Disk| -> Result<Option<StorageDaemon>> {
        let Some(program) = peer else { return Ok(None) };
        let mut daemon = StorageDaemon::start_best(program, &directory, name, &disk, 1, bench.plan.trial)?;
        eprintln!("  peer: {}", daemon.settings);
        daemon.process.freeze()?;
        Ok(Some(daemon))
    };
    let mut their_null = start("peer-null", Disk::Null { bytes })?;
    let mut their_file = start("peer-file", Disk::File { path: their_file, cached: true })?;
    for store in STORES {
        // The peer has no store in memory; its fastest one that keeps what it is given is a file on tmpfs.
        let theirs = if store == "null" { &mut their_null } else { &mut their_file };
        let mut systems = vec![bench.ours(&mut ours, store)?];
        if let (Some(daemon), Some(program)) = (theirs, peer) {
            systems.push(bench.theirs(daemon, program)?);
        }
        if store == "ram" {
            systems.push(System::new(FLOOR, Kind::Copies, bench.common_params()));
        }
        for write in [false, true] {
            for depth in DEPTHS {
                bench.case(store, write, depth, &mut systems)?;
            }
        }
    }
    ours.process.end()
}

impl<'a> System<'a> {
    fn new(name: &'static str, kind: Kind<'a>, params: Params) -> Self {
        Self { name, kind, params, samples: Vec::new(), lines_ns: Vec::new(), waited: Vec::new() }
    }

    fn server(name: &'static str, process: &'a mut Process, socket: &Path, mut params: Params) -> Result<Self> {
        process.thaw()?;
        let slots = DEPTHS.iter().copied().max().unwrap_or(1);
        let client = BlkClient::connect(socket, &ClientOptions { slots, ..ClientOptions::default() })
            .with_context(|| format!("cannot use {name}"))?;
        process.freeze()?;
        params.insert("client_huge_pages".to_owned(), client.on_huge_pages().into());
        params.insert("features".to_owned(), format!("{:#x}", client.features()).into());
        Ok(Self::new(name, Kind::Server { process, client }, params))
    }
}

impl Bench {
    fn ours<'a>(&self, ours: &'a mut Sidecored, store: &str) -> Result<System<'a>> {
        let socket = ours.socket(store);
        System::server(OURS, &mut ours.process, &socket, self.common_params())
    }

    fn theirs<'a>(&self, daemon: &'a mut StorageDaemon, program: &Program) -> Result<System<'a>> {
        let mut params = self.common_params();
        params.extend(program.params());
        params.insert("settings".to_owned(), daemon.settings.clone().into());
        System::server(peer::NAME, &mut daemon.process, &daemon.socket, params)
    }

    fn case(&mut self, store: &str, write: bool, depth: u16, systems: &mut [System<'_>]) -> Result<()> {
        let case = format!("{store}/{}/qd{depth}", if write { "randwrite" } else { "randread" });
        let work = Work {
            write,
            depth,
            blocks: self.plan.store_bytes / u64::from(load::BLOCK_BYTES),
            touch: self.options.touch,
            duration: self.plan.run,
            ..Work::default()
        };
        for system in &mut *systems {
            system.samples.clear();
            system.lines_ns.clear();
            system.waited.clear();
        }
        for round in 0..self.plan.rounds {
            if round > 0 && self.begin.elapsed() > self.plan.budget {
                break;
            }
            for system in &mut *systems {
                self.round(system, &work)?;
            }
        }
        let mut line = format!("  {case:<20}");
        for system in &*systems {
            self.record(&case, system, &work);
            let iops = system.rounds(|sample| sample.iops).median();
            line.push_str(&format!("  {} {:.0} k/s", system.name, iops / 1e3));
        }
        if let Some((ours, others)) = systems.split_first() {
            for peer in others {
                self.record_ratios(&case, ours, peer, depth);
            }
        }
        eprintln!("{line}");
        Ok(())
    }

    fn round(&mut self, system: &mut System<'_>, work: &Work) -> Result<()> {
        match &mut system.kind {
            Kind::Server { process, client } => {
                let warm_up = Work { duration: self.plan.warm_up, ..*work };
                let clock = &self.clock;
                let gated = self.gate.run(|_| {
                    let watch = Watch::start(Some(process))?;
                    process.thaw()?;
                    let queue = client.queue(0).context("no queue")?;
                    load::run(queue, &warm_up, clock)?;
                    let sample = load::run(queue, work, clock)?;
                    process.freeze()?;
                    Ok((sample, watch.share(Some(process))?))
                });
                let gated = gated.with_context(|| format!("measuring {}", system.name))?;
                system.lines_ns.extend([gated.before_ns, gated.after_ns]);
                system.waited.push(gated.waited_share);
                system.samples.push((gated.result.clone(), gated.counts()));
            }
            Kind::Copies => {
                let gated = self.copy_once(work.write, false)?;
                let (ns, how) = gated.result;
                system.params.insert("how".to_owned(), how.into());
                system.samples.push((Sample { iops: 1e9 / ns, ..Sample::default() }, gated.counts()));
            }
        }
        Ok(())
    }

    fn record(&mut self, case: &str, system: &System<'_>, work: &Work) {
        for (metric, unit, alone, value) in METRICS {
            let is_copy = matches!(system.kind, Kind::Copies);
            if (alone && work.depth != 1) || (is_copy && metric != "iops") {
                continue;
            }
            let mut params = system.params.clone();
            params.insert("block_bytes".to_owned(), load::BLOCK_BYTES.into());
            params.insert("depth".to_owned(), work.depth.into());
            params.insert("touch".to_owned(), work.touch.into());
            params.insert("run_ms".to_owned(), (work.duration.as_millis() as u64).into());
            if !is_copy {
                params.insert("line_ns".to_owned(), crate::stats::median(&system.lines_ns).into());
                params.insert("waited_share".to_owned(), crate::stats::median(&system.waited).into());
            }
            let (median, params) = system.rounds(value).settle(params);
            self.records.measure(case, system.name, metric, median, unit, params);
        }
    }

    fn record_ratios(&mut self, case: &str, ours: &System<'_>, peer: &System<'_>, depth: u16) {
        for (metric, _, alone, value) in METRICS {
            if !RATIOS.contains(&metric) || (alone && (depth != 1 || peer.name == FLOOR)) {
                continue;
            }
            let mut rounds = Rounds::new();
            for ((ours, counts), (peer, peer_counts)) in ours.samples.iter().zip(&peer.samples) {
                rounds.add(value(ours) / value(peer), *counts && *peer_counts);
            }
            let (median, params) = rounds.settle(Params::new());
            self.records.ratio(case, metric, ours.name, peer.name, median, params);
        }
    }
}

impl System<'_> {
    fn rounds(&self, value: fn(&Sample) -> f64) -> Rounds {
        let mut rounds = Rounds::new();
        for (sample, counts) in &self.samples {
            rounds.add(value(sample), *counts);
        }
        rounds
    }
}

/// A file whose blocks are all there.
fn filled_file(path: &Path, bytes: u64) -> Result<PathBuf> {
    let file = std::fs::File::create(path)?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    Ok(path.to_owned())
}
