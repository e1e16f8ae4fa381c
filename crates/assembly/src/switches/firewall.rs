//! The firewall of a port: from its rules to a stage, and its report.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use sidecore_net::FrameStage;
use sidecore_stage_firewall::{Firewall, FirewallStats, RuleError, Rules};
use sidecore_telemetry::CounterSet as _;

use super::{RunningSwitch, lock};
use crate::operation::{ErrorKind, OperationError};
use crate::report::{FirewallReport, RuleReport};

/// The keys of a port's firewall.
pub(crate) struct FirewallSpec<'a> {
    pub rules: &'a [String],
    pub connections: u32,
}

/// The firewall of a port, as threads besides its sidecore see it.
#[derive(Clone)]
pub(super) struct PortFirewall {
    connections: usize,
    /// None without rules: then there is no stage.
    running: Option<(Arc<Rules>, Arc<FirewallStats>)>,
}

/// Stages of a port.
pub(super) type Stages = Vec<Box<dyn FrameStage>>;

impl PortFirewall {
    /// The firewall with these keys, and its stage.
    pub(super) fn new(spec: &FirewallSpec<'_>) -> Result<(Self, Stages), RuleError> {
        let connections = usize::try_from(spec.connections).unwrap_or(usize::MAX);
        Self { connections, running: None }.with(spec.rules)
    }

    /// The same with other rules, and its stage.
    fn with(&self, rules: &[String]) -> Result<(Self, Stages), RuleError> {
        let (rules, connections) = (Arc::new(Rules::parse(rules)?), self.connections);
        if rules.texts().is_empty() {
            return Ok((Self { connections, running: None }, Vec::new()));
        }
        // The standard library's hash keys are the process's random numbers.
        let seeds = [0, 1].map(|number: u8| RandomState::new().hash_one(number));
        let stage = Firewall::new(Arc::clone(&rules), connections, seeds);
        let running = Some((rules, Arc::clone(stage.stats())));
        Ok((Self { connections, running }, vec![Box::new(stage)]))
    }

    pub(super) fn report(&self) -> Option<FirewallReport> {
        let (rules, stats) = self.running.as_ref()?;
        let rules = rules.texts().iter().zip(&stats.rules);
        let rules =
            rules.map(|(text, stats)| RuleReport { text: text.clone(), counters: stats.counts() });
        Some(FirewallReport {
            rules: rules.collect(),
            unmatched: stats.unmatched.counts(),
            table: stats.table.counts(),
        })
    }
}

impl RunningSwitch {
    /// Replaces the rules of a port between two frames.
    pub(super) fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError> {
        let _changes = lock(&self.changes);
        let found = lock(&self.ports).iter().find(|found| found.name == port).cloned();
        let gone = || OperationError::new(ErrorKind::NotFound, format!("port \"{port}\" is gone"));
        let found = found.ok_or_else(gone)?;
        let invalid = |error: RuleError| OperationError::new(ErrorKind::Invalid, error.to_string());
        let (firewall, stages) = found.firewall.with(rules).map_err(invalid)?;
        let id = found.id;
        // This thread frees the old stage: its table may be large.
        let old = self.ask(move |unit| unit.switch_mut().set_stages(id, stages));
        drop(old.ok_or_else(gone)?.map_err(|_| gone())?);
        if let Some(port) = lock(&self.ports).iter_mut().find(|port| port.id == id) {
            port.firewall = firewall;
        }
        Ok(())
    }
}
