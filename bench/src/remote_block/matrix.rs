//! The systems of each case in turn, between near cores.

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};

use super::cases::{self, Case, DEPTHS, Kind, LONG_BYTES};
use super::exchange::Exchange;
use super::iohost::{Build, Disk, Fault, Iohost, Setting};
use super::nbd::{self, NbdServer, Peer};
use super::wire::Wire;
use super::{Bench, LOCAL, LOSSLESS, P99_ROUND_TRIPS, PLAIN, UNFLOODED, handover, sealing};
use crate::against;
use crate::cores::Gated;
use crate::load::{self, Sample, Work};
use crate::record::OURS;
use crate::rounds::Pairs;
use crate::runs::{
    IOPS, LATENCY_MAX, LATENCY_MEAN, LATENCY_P50, LATENCY_P99, LATENCY_P999, Metric, Named, Runs,
    record_ratios,
};
use crate::sidecored::{Device, Sidecored};

const METRICS: [Metric; 6] =
    [IOPS, LATENCY_P50, LATENCY_P99, LATENCY_P999, LATENCY_MAX, LATENCY_MEAN];

/// The programs and links of all cases.
struct Systems {
    iohosts: Vec<Iohost>,
    local: Sidecored,
    disks: Vec<(Disk, BlkClient)>,
    exchanges: Vec<(Wire, Exchange)>,
    nbd_servers: Vec<NbdServer>,
}

impl Systems {
    fn iohost(&mut self, build: Build, setting: Setting) -> Result<&mut Iohost> {
        let is_it = |iohost: &&mut Iohost| (iohost.build, iohost.setting) == (build, setting);
        self.iohosts.iter_mut().find(is_it).context("no such IOhost")
    }

    fn nbd_server(&mut self, peer: Peer, disk: Disk) -> Option<&mut NbdServer> {
        self.nbd_servers.iter_mut().find(|server| (server.peer, server.disk) == (peer, disk))
    }

    /// Whether this machine has the system.
    fn have(&mut self, case: &Case, kind: Kind) -> bool {
        match kind {
            Kind::Nbd(peer) => self.nbd_server(peer, case.disk).is_some(),
            _ => true,
        }
    }
}

impl Bench {
    pub(super) fn measure(&mut self) -> Result<()> {
        let mut cases = cases::all(self.plan.run, self.plan.disk_bytes);
        cases.retain(|case| self.options.wants(&case.name()));
        if cases.is_empty() {
            return Ok(());
        }
        let builds = self.options.programs.common.against.is_some();
        let mut exchanges = Vec::new();
        for wire in Wire::ALL {
            match Exchange::new(wire) {
                Ok(exchange) => exchanges.push((wire, exchange)),
                Err(error) => {
                    eprintln!("  without {}: {error:#}", wire.name());
                    cases.retain(|case| case.setting.wire != wire);
                }
            }
        }
        let mut systems = self.start(&cases, builds, exchanges)?;
        for case in cases {
            self.case(&case, builds, &mut systems)?;
        }
        let Systems { iohosts, local, disks, nbd_servers, .. } = systems;
        drop(disks);
        nbd_servers.into_iter().try_for_each(NbdServer::end)?;
        for Iohost { clients, mut daemon, .. } in iohosts {
            daemon.process.thaw()?;
            drop(clients);
            daemon.process.end()?;
        }
        local.process.end()
    }

    /// Starts what the cases need.
    fn start(
        &self,
        cases: &[Case],
        builds: bool,
        exchanges: Vec<(Wire, Exchange)>,
    ) -> Result<Systems> {
        let bytes = self.plan.disk_bytes;
        let mut iohosts: Vec<Iohost> = Vec::new();
        let all = cases.iter().flat_map(|case| case.kinds(builds));
        for (_, kind) in all {
            let Kind::Remote(build, setting) = kind else { continue };
            if !iohosts.iter().any(|iohost| (iohost.build, iohost.setting) == (build, setting)) {
                iohosts.push(Iohost::start(&self.experiment, build, setting, bytes)?);
            }
        }
        let device = |disk: &Disk| Device::new(disk.name(), disk.store(bytes));
        let devices: Vec<Device> = Disk::ALL.iter().map(device).collect();
        let mut local = self.experiment.start_ours(LOCAL, &[], &devices)?;
        let options = ClientOptions {
            slots: DEPTHS.into_iter().max().unwrap_or(1),
            slot_bytes: LONG_BYTES,
            ..ClientOptions::default()
        };
        let connect = |disk: Disk| {
            let client = BlkClient::connect(local.socket(disk.name()), &options)?;
            Ok::<_, anyhow::Error>((disk, client))
        };
        let disks = Disk::ALL.into_iter().map(connect).collect::<Result<_>>()?;
        local.process.freeze()?;
        let nbd_servers = self.start_nbd(cases, builds)?;
        Ok(Systems { iohosts, local, disks, exchanges, nbd_servers })
    }

    /// Starts the servers of NBD that the cases need and this machine has.
    fn start_nbd(&self, cases: &[Case], builds: bool) -> Result<Vec<NbdServer>> {
        let mut wanted: Vec<(Peer, Disk)> = Vec::new();
        for case in cases {
            for (_, kind) in case.kinds(builds) {
                let Kind::Nbd(peer) = kind else { continue };
                if !wanted.contains(&(peer, case.disk)) {
                    wanted.push((peer, case.disk));
                }
            }
        }
        if wanted.is_empty() || !self.experiment.measures_peers() {
            return Ok(Vec::new());
        }
        let programs = nbd::Programs::find(self.experiment.find_peer());
        let directory = self.experiment.directory();
        let (bytes, trial) = (self.plan.disk_bytes, self.plan.run);
        let found = wanted.into_iter().filter(|(peer, _)| programs.has(*peer));
        found
            .map(|which| NbdServer::start_best(&programs, directory, which, bytes, trial))
            .collect()
    }

    fn case(&mut self, case: &Case, builds: bool, systems: &mut Systems) -> Result<()> {
        let name = case.name();
        let mut kinds = case.kinds(builds);
        kinds.retain(|(_, kind)| systems.have(case, *kind));
        let mut runs: Vec<Runs> = kinds.iter().map(|_| Runs::default()).collect();
        for round in 0..self.plan.rounds {
            for turn in 0..kinds.len() {
                let index = if builds { against::index(turn, round) } else { turn };
                let (system, kind) = kinds.get(index).context("no such system")?;
                let run = self.round(case, *kind, systems);
                let run = run.with_context(|| format!("measuring {system}, {name}"))?;
                runs.get_mut(index).context("no such system")?.add(run);
            }
        }
        let lost_share = systems
            .iohost(Build::This, case.setting)
            .map_or(0.0, |iohost| iohost.clients.lost_share());
        let systems: Vec<_> = kinds.iter().map(|(name, _)| name.as_str()).zip(&runs).collect();
        self.record(&name, case, &systems);
        if builds {
            against::record_pairs(&mut self.experiment.records, &name, &case.work, &systems);
        } else if let Some((ours, peers)) = systems.split_first() {
            for peer in peers {
                let is_alone = case.work.depth == 1;
                let records = &mut self.experiment.records;
                record_ratios(records, &name, &case.work, is_alone, *ours, *peer);
                match peer.0 {
                    PLAIN if is_alone => self.sealing(&name, case, ours.1, peer.1)?,
                    LOSSLESS => self.round_trips(&name, *ours, *peer, lost_share),
                    UNFLOODED => self.tails(&name, *ours, *peer),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn round(&mut self, case: &Case, kind: Kind, systems: &mut Systems) -> Result<Gated<Sample>> {
        let (warm_up, work) = (self.plan.warm_up, case.work);
        let clock = self.experiment.clock.clone();
        match kind {
            Kind::Remote(build, setting) => {
                let iohost = systems.iohost(build, setting)?;
                let work = if setting == case.setting { work } else { case.of_one_client() };
                let Iohost { clients, daemon, .. } = iohost;
                let load = |work: &Work, clock: &Clock| match setting.fault {
                    Fault::Flood => clients.run_flooded(case.disk, work, clock),
                    _ => clients.run(case.disk, work, clock),
                };
                self.experiment.round(&mut daemon.process, warm_up, &work, load)
            }
            Kind::Unflooded => {
                let Iohost { clients, daemon, .. } = systems.iohost(Build::This, case.setting)?;
                let load = |work: &Work, clock: &Clock| clients.run(case.disk, work, clock);
                self.experiment.round(&mut daemon.process, warm_up, &work, load)
            }
            Kind::Local => {
                let is_it = |(disk, _): &&mut (Disk, BlkClient)| *disk == case.disk;
                let (_, client) = systems.disks.iter_mut().find(is_it).context("no such disk")?;
                let load = |work: &Work, clock: &Clock| {
                    load::run(client.queue(0).context("no queue")?, work, clock)
                };
                self.experiment.round(&mut systems.local.process, warm_up, &work, load)
            }
            Kind::Nbd(peer) => {
                let server = systems.nbd_server(peer, case.disk).context("no such server")?;
                let NbdServer { client, process, .. } = server;
                let load = |work: &Work, clock: &Clock| client.run(work, clock);
                // Its threads sleep and wake each other: that they wait is no disturbance.
                let work = Work { yields: true, ..work };
                self.experiment.round(process, warm_up, &work, load)
            }
            Kind::Exchange => self.exchange(case, systems, &clock),
            Kind::Handover => handover::run(&mut self.experiment.gate, &work, &clock),
        }
    }

    /// Exchanges the frames of a case through the bare link.
    fn exchange(
        &mut self,
        case: &Case,
        systems: &mut Systems,
        clock: &Clock,
    ) -> Result<Gated<Sample>> {
        let is_memory = case.setting.wire == Wire::Memory;
        let is_floor = |wire: &Wire| match wire {
            Wire::Memory => is_memory,
            Wire::Packet | Wire::Xdp => !is_memory,
            Wire::Udp => false,
        };
        let mut best: Option<Gated<Sample>> = None;
        for (_, exchange) in systems.exchanges.iter_mut().filter(|(wire, _)| is_floor(wire)) {
            let run = exchange.run(&mut self.experiment.gate, &case.work, clock)?;
            if best.as_ref().is_none_or(|best| best.result.iops < run.result.iops) {
                best = Some(run);
            }
        }
        best.context("no link to exchange frames through")
    }

    /// Compares the time that seals take with the library's own.
    fn sealing(&mut self, name: &str, case: &Case, sealed: &Runs, plain: &Runs) -> Result<()> {
        let mut pairs = Pairs::default();
        for (sealed, plain) in sealed.all().iter().zip(plain.all()) {
            let library_ns = sealing::library_ns(&case.work, self.plan.warm_up)?;
            let added_ns = sealed.result.latency_p50_ns - plain.result.latency_p50_ns;
            pairs.add(added_ns, library_ns, sealed.counts() && plain.counts());
        }
        let (ratio, params) = pairs.settle(self.experiment.params());
        let records = &mut self.experiment.records;
        records.ratio(name, sealing::METRIC, OURS, sealing::LIBRARY, ratio, params);
        eprintln!("  {name:<32}  seals take {ratio:.2} of the library's time");
        Ok(())
    }

    /// Records how many round trips of a lossless wire the slowest requests of a lossy one take.
    fn round_trips(&mut self, name: &str, ours: Named<'_>, lossless: Named<'_>, lost_share: f64) {
        let p99 = ours
            .1
            .compared(lossless.1, |ours, lossless| ours.latency_p99_ns / lossless.latency_p50_ns);
        let mut params = self.experiment.params();
        params.insert("lost_share".to_owned(), lost_share.into());
        let (value, params) = p99.settle(params);
        eprintln!("  {name:<32}  99 % within {value:.1} round trips, {lost_share:.4} lost");
        self.experiment.records.measure(name, ours.0, P99_ROUND_TRIPS, value, "", params);
    }

    /// Compares the 99th percentiles of the latency.
    fn tails(&mut self, name: &str, ours: Named<'_>, unflooded: Named<'_>) {
        let mut pairs = Pairs::default();
        for (ours, peer) in ours.1.all().iter().zip(unflooded.1.all()) {
            let [ours_ns, peer_ns] = [ours, peer].map(|run| run.result.latency_p99_ns);
            pairs.add(ours_ns, peer_ns, ours.counts() && peer.counts());
        }
        let (ratio, params) = pairs.settle(self.experiment.params());
        eprintln!("  {name:<32}  99 % within {ratio:.2} of the time without a flood");
        let records = &mut self.experiment.records;
        records.ratio(name, LATENCY_P99.name, ours.0, unflooded.0, ratio, params);
    }

    fn record(&mut self, name: &str, case: &Case, systems: &[(&str, &Runs)]) {
        let mut line = format!("  {name:<32}");
        for (system, runs) in systems {
            let has_latencies = case.work.depth == 1 || case.setting.fault != Fault::None;
            for metric in METRICS.iter().filter(|metric| has_latencies || !metric.alone) {
                let mut params = runs.params(&case.work, self.experiment.params());
                params.insert("block_bytes".to_owned(), case.work.bytes.into());
                params.insert("clients".to_owned(), case.setting.clients.into());
                let (median, params) = runs.settle(metric, &case.work, params);
                let records = &mut self.experiment.records;
                records.measure(name, system, metric.name, median, metric.unit, params);
            }
            let iops = runs.rounds(|sample| sample.iops).median();
            line.push_str(&format!("  {system} {:.0} k/s", iops / 1e3));
        }
        eprintln!("{line}");
    }
}
