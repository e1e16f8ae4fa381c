//! The parts of the time of one request: client, link and IOhost in one process and on one core,
//! with readings of the time stamp counter between the stages.
//!
//! All data are in that core's caches, so the stages are the work alone: a request between two
//! cores takes longer by the time in which cache lines move from one to the other. A reading costs
//! some nanoseconds, which are in the numbers of a single request in flight.

use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::Result;
use sidecore_block::{Geometry, NullStore, Operation};

use super::Bench;
use super::rig::{Execution, Rig, Stages};
use crate::cores;
use crate::load::BLOCK_BYTES;
use crate::process::watched;
use crate::record::{OURS, Record, Records, params};
use crate::rounds::Rounds;

const DISK_BYTES: u64 = 64 << 20;

/// The stages of a request, in their order.
const STAGES: [&str; 4] =
    ["client_submits", "iohost_receives", "iohost_answers", "client_receives"];
const PREFIX: &str = "breakdown/memory/null/";
const DEPTHS: [u64; 2] = [1, 32];

impl Bench {
    /// Measures the stages of requests.
    pub(super) fn breakdown(&mut self) -> Result<()> {
        for (operation, name) in [(Operation::Read, "randread"), (Operation::Write, "randwrite")] {
            for (bytes, size) in [(512, "512"), (BLOCK_BYTES, "")] {
                for depth in DEPTHS {
                    let case = format!("{PREFIX}{name}{size}/qd{depth}");
                    if self.options.wants(&case) {
                        self.stages(&case, (operation, bytes.into(), depth))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn stages(&mut self, case: &str, work: (Operation, u64, u64)) -> Result<()> {
        let clock = self.experiment.clock.clone();
        let store = Arc::new(NullStore::new(Geometry::new(DISK_BYTES, 512)));
        let mut rig = Rig::new(&clock, store, Execution::Here)?;
        let mut stages: Vec<Rounds> = STAGES.iter().map(|_| Rounds::new()).collect();
        let mut whole = Rounds::new();
        rig.run(work, self.plan.stages / 10)?;
        for _ in 0..self.plan.rounds {
            let (stages_ns, waited_share) = watched(|| rig.run(work, self.plan.stages))?;
            let Stages { client_submits, iohost_receives, iohost_answers, client_receives, .. } =
                stages_ns;
            let ns = [client_submits, iohost_receives, iohost_answers, client_receives];
            let counts = waited_share < cores::UNDISTURBED_SHARE;
            stages.iter_mut().zip(ns).for_each(|(rounds, ns)| rounds.add(ns, counts));
            whole.add(ns.iter().sum(), counts);
        }
        let mut line = format!("  {case:<44}");
        for (metric, rounds) in STAGES.iter().copied().zip(&stages).chain([("whole", &whole)]) {
            let how = params([("how", "stamps on one core".into()), ("depth", work.2.into())]);
            let (median, params) = rounds.settle(how);
            line.push_str(&format!("  {metric} {median:.0} ns"));
            self.experiment.records.measure(case, OURS, metric, median, "ns", params);
        }
        eprintln!("{line}");
        Ok(())
    }
}

/// The stages, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::from("| ns of one request, on one core |");
    STAGES.iter().for_each(|stage| page.push_str(&format!(" {} |", stage.replace('_', " "))));
    page.push_str(" whole |\n| --- | --- | --- | --- | --- | --- |\n");
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.metric != "whole" || !measure.case.starts_with(PREFIX) {
            continue;
        }
        let _ = write!(page, "| {} |", measure.case.trim_start_matches(PREFIX));
        for metric in STAGES.iter().copied().chain(["whole"]) {
            let found = records.find(&measure.case, OURS, metric);
            let _ = write!(page, " {:.0} |", found.map_or(0.0, |measure| measure.value));
        }
        page.push('\n');
    }
    page
}
