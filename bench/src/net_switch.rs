//! The experiment `net-switch`: frames from guest to guest through one sidecore, beside Open
//! vSwitch with DPDK and dpdk-testpmd on the same core.
//!
//! The client is this project's driver, for all switches alike: it has the NICs of all guests on
//! one thread, writes each frame and checks what arrives.

mod cases;
mod client;
mod frames;
mod report;
mod systems;

use std::time::Duration;

use anyhow::{Context, Result};
use quanta::Clock;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cores::Gated;
pub use crate::experiment::CaseOptions as Options;
use crate::experiment::{Experiment, Report, Scale};
use crate::huge_pages::HugePages;
use crate::load::{Sample, Work};
use crate::record::{OURS, Records};
use crate::runs::{
    BYTES, LATENCY_MAX, LATENCY_P50, LATENCY_P99, LATENCY_P999, LATENCY_P9999, Metric, PACKETS,
    Runs, record_ratios_of,
};
use cases::{Case, Kind, SETTINGS, Setting};
use client::Client;
use systems::System;

const NAME: &str = "net-switch";
/// The peer that switches.
const OVS: &str = "ovs-dpdk";
/// The peer that passes every frame of one port on to the next one.
const TESTPMD: &str = "testpmd";
/// The peer of a case with several flows: this switch with one.
const ONE_FLOW: &str = "one-flow";
/// The peer of a case with rules: this switch without any.
const NO_RULES: &str = "no-rules";

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
}

impl Plan {
    const fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        match scale {
            Scale::Full => {
                let patience = Duration::from_secs(5 * 60);
                Self { run: ms(300), warm_up: ms(100), rounds: 7, patience }
            }
            Scale::Quick => {
                let patience = Duration::from_secs(30);
                Self { run: ms(60), warm_up: ms(30), rounds: 5, patience }
            }
            Scale::Tiny => Self { run: ms(3), warm_up: ms(1), rounds: 1, patience: Duration::ZERO },
        }
    }
}

const BOUNDS: [Bound<'static>; 14] = {
    const fn bound(case: &'static str, of: Of<'static>, limit: Limit) -> Bound<'static> {
        Bound { case, of, limit }
    }
    const PACKETS: Of<'static> = Of::Ratio("packets", OVS);
    const BYTES: Of<'static> = Of::Ratio("bytes", OVS);
    const P50: Of<'static> = Of::Ratio("latency_p50", OVS);
    const P99: Of<'static> = Of::Ratio("latency_p99", OVS);
    const FLOWS: Of<'static> = Of::Ratio("packets", ONE_FLOW);
    const RULES: Of<'static> = Of::Ratio("packets", NO_RULES);
    const CONNECTIONS: Of<'static> = Of::Ours("packets", "1/s");
    [
        bound("oneway/64/split", PACKETS, Limit::AtLeast(1.5)),
        bound("oneway/64/packed", PACKETS, Limit::AtLeast(1.3)),
        bound("oneway/1500/split/cold", BYTES, Limit::AtLeast(1.4)),
        bound("oneway/1500/packed/cold", BYTES, Limit::AtLeast(1.4)),
        bound("tso/65536/split", BYTES, Limit::AtLeast(1.4)),
        bound("tso/65536/packed", BYTES, Limit::AtLeast(1.4)),
        bound("rtt/64/split", P50, Limit::AtMost(0.85)),
        bound("rtt/64/split", P99, Limit::AtMost(1.0)),
        bound("oneway/64/split/f100000", FLOWS, Limit::AtLeast(0.8)),
        bound("oneway/64/packed/f100000", FLOWS, Limit::AtLeast(0.8)),
        bound("oneway/64/split/rules", RULES, Limit::AtLeast(0.75)),
        bound("oneway/64/packed/rules", RULES, Limit::AtLeast(0.75)),
        bound("oneway/64/split/f100000/rules", CONNECTIONS, Limit::AtLeast(1e6)),
        bound("oneway/64/packed/f100000/rules", CONNECTIONS, Limit::AtLeast(1e6)),
    ]
};

const RATES: [Metric; 2] = [PACKETS, BYTES];
const LATENCIES: [Metric; 5] = [LATENCY_P50, LATENCY_P99, LATENCY_P999, LATENCY_P9999, LATENCY_MAX];

/// The switches and the lengths of their runs.
struct Bench<'a> {
    plan: Plan,
    options: &'a Options,
    experiment: Experiment,
}

/// Runs the experiment and reports. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program fails, a frame is damaged, or the experiment was interrupted. All started programs
/// have ended then.
pub fn run(options: &Options) -> Result<bool> {
    if let Some(hold) = options.report_files(NAME, report)? {
        return Ok(hold);
    }
    let common = &options.programs.common;
    let mut plan = Plan::of(common.scale());
    (plan.run, plan.rounds) = against::runs(common, plan.run, plan.rounds);
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    let mut bench = Bench { plan, options, experiment };
    bench.measure()?;
    bench.experiment.conclude(report(&bench.experiment.records))
}

fn report(records: &Records) -> Report<'static> {
    Report::new(report::table(records), (OURS, &BOUNDS), &[])
}

/// A switch with the guests of a case.
struct Connected<'a> {
    system: &'a mut System,
    client: Client,
    case: Case,
}

impl Bench<'_> {
    fn measure(&mut self) -> Result<()> {
        let mut cases = cases::all();
        // An older build need not know rules.
        let builds = self.options.programs.common.against.is_some();
        cases.retain(|case| self.options.wants(&case.name()) && !(case.rules && builds));
        let is_tiny = self.options.programs.common.tiny;
        let _huge_pages = (!is_tiny).then(|| HugePages::reserve(systems::HUGE_PAGES));
        let has_peers = self.experiment.measures_peers() && !cases.is_empty();
        let may_fetch = !self.options.programs.common.quick;
        let programs = has_peers.then(|| systems::Programs::find(may_fetch)).flatten();
        for setting in SETTINGS {
            let of_setting: Vec<Case> =
                cases.iter().copied().filter(|case| case.setting() == setting).collect();
            if of_setting.is_empty() {
                continue;
            }
            let mut systems = self.start(setting, programs.as_ref())?;
            for case in of_setting {
                self.case(case, &mut systems)
                    .with_context(|| format!("measuring {}", case.name()))?;
            }
            systems.into_iter().try_for_each(System::end)?;
        }
        Ok(())
    }

    fn start(&self, setting: Setting, programs: Option<&systems::Programs>) -> Result<Vec<System>> {
        let mut systems = systems::ours(&self.experiment, "switch", setting)?;
        systems.iter_mut().try_for_each(|system| system.process.freeze())?;
        if setting.rules {
            let plain = Setting { rules: false, ..setting };
            for mut system in systems::ours(&self.experiment, NO_RULES, plain)? {
                system.name = NO_RULES.to_owned();
                system.process.freeze()?;
                systems.push(system);
            }
            return Ok(systems);
        }
        for name in [OVS, TESTPMD] {
            if setting.large && name == TESTPMD {
                continue;
            }
            let directory = self.experiment.directory();
            if let Some(mut system) =
                programs.and_then(|programs| programs.start(name, directory, setting))
            {
                system.process.freeze()?;
                systems.push(system);
            }
        }
        Ok(systems)
    }

    fn case(&mut self, case: Case, systems: &mut [System]) -> Result<()> {
        let work = Work {
            bytes: case.bytes,
            depth: if case.kind == Kind::RoundTrip { 1 } else { 32 },
            duration: self.plan.run,
            ..Work::default()
        };
        let mut runs = Vec::new();
        let mut connected = Vec::new();
        for system in systems {
            system.process.thaw()?;
            let name = system.name.clone();
            let client = Client::connect(&system.sockets, &case).with_context(|| {
                format!("connecting to {name}, which says:\n{}", system.process.output())
            })?;
            system.process.freeze()?;
            runs.push((name, Runs::default()));
            connected.push(Connected { system, client, case });
        }
        let count = connected.len();
        // A switch with one flow is the same process with the same guests.
        let builds = self.options.programs.common.against.is_some();
        if case.peers().contains(&ONE_FLOW) && !builds {
            runs.push((ONE_FLOW.to_owned(), Runs::default()));
        }
        for round in 0..self.plan.rounds {
            for turn in 0..runs.len() {
                let index = if builds { against::index(turn, round) } else { turn };
                let flows = if index < count { case.flows } else { 1 };
                let connected = connected
                    .get_mut(if index < count { index } else { 0 })
                    .context("no system")?;
                let run = self.round(connected, flows, &work)?;
                runs.get_mut(index).context("no such system")?.1.add(run);
            }
        }
        let lost: Vec<f64> =
            connected.iter().map(|connected| connected.client.lost_share()).collect();
        for Connected { system, client, .. } in connected {
            system.process.thaw()?;
            drop(client);
            system.process.freeze()?;
        }
        self.record(case, &work, &runs, &lost);
        Ok(())
    }

    fn round(
        &mut self,
        connected: &mut Connected<'_>,
        flows: u32,
        work: &Work,
    ) -> Result<Gated<Sample>> {
        let Connected { system, client, case } = connected;
        let kind = case.kind;
        client.set_flows(flows);
        let load = |work: &Work, clock: &Clock| client.run(kind, work, clock);
        self.experiment
            .round(&mut system.process, self.plan.warm_up, work, load)
            .with_context(|| format!("measuring {}", system.name))
    }

    fn record(&mut self, case: Case, work: &Work, runs: &[(String, Runs)], lost: &[f64]) {
        let name = case.name();
        let mut line = format!("  {name:<28}");
        let is_alone = case.kind == Kind::RoundTrip;
        let metrics = || RATES.iter().chain(LATENCIES.iter().filter(|_| is_alone));
        for (index, (system, runs)) in runs.iter().enumerate() {
            for metric in metrics() {
                let mut params = runs.params(work, self.experiment.params());
                params.insert("frame_bytes".to_owned(), case.bytes.into());
                let lost = lost.get(index).copied().unwrap_or(0.0);
                params.insert("lost_share".to_owned(), lost.into());
                let (median, params) = runs.settle(metric, work, params);
                let records = &mut self.experiment.records;
                records.measure(&name, system, metric.name, median, metric.unit, params);
            }
            let packets = runs.rounds(|sample| sample.iops).median();
            line.push_str(&format!("  {system} {:.2} M/s", packets / 1e6));
            if let Some(lost) = lost.get(index).filter(|lost| **lost > 0.0) {
                line.push_str(&format!(" ({:.4} % lost)", 100.0 * lost));
            }
        }
        eprintln!("{line}");
        let systems: Vec<_> = runs.iter().map(|(name, runs)| (name.as_str(), runs)).collect();
        let records = &mut self.experiment.records;
        if self.options.programs.common.against.is_some() {
            against::record_pairs(records, &name, work, &systems);
        } else if let Some((ours, peers)) = systems.split_first() {
            for peer in peers {
                record_ratios_of(records, &name, work, metrics(), *ours, *peer);
            }
        }
    }
}
