//! The firewall of a port: from its rules to a stage, and its report.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use sidecore_net::{PortId, StagePlace};
use sidecore_stage_firewall::{Firewall, FirewallStats, RuleError, Rules, Snapshot};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

use super::{RunningPort, RunningSwitch, Stage, StagesSpec, invalid};
use crate::operation::OperationError;
use crate::report::{FirewallReport, RuleReport};

/// The firewall of a port, as threads besides its sidecore see it.
#[derive(Clone)]
pub(super) struct PortFirewall {
    connections: usize,
    /// None without rules: then there is no stage.
    running: Option<(Arc<Rules>, Arc<FirewallStats>)>,
    /// When the rules were replaced, or later; by the sidecore's clock.
    since: Nanos,
}

impl PortFirewall {
    /// The firewall with these keys, and its stage.
    pub(super) fn new(spec: &StagesSpec<'_>) -> Result<(Self, Stage), RuleError> {
        let connections = usize::try_from(spec.connections).unwrap_or(usize::MAX);
        Self { connections, running: None, since: Nanos::ZERO }.with(spec.rules)
    }

    /// The same with other rules, and its stage.
    fn with(&self, rules: &[String]) -> Result<(Self, Stage), RuleError> {
        let (rules, connections) = (Arc::new(Rules::parse(rules)?), self.connections);
        if rules.texts().is_empty() {
            return Ok((Self { connections, running: None, since: self.since }, None));
        }
        // The standard library's hash keys are the process's random numbers.
        let seeds = [0, 1].map(|number: u8| RandomState::new().hash_one(number));
        let stage = Firewall::new(Arc::clone(&rules), connections, seeds);
        let running = Some((rules, Arc::clone(stage.stats())));
        Ok((Self { connections, running, since: self.since }, Some(Box::new(stage))))
    }

    /// The rule of this number that has decided at this time, if it is one of those now.
    pub(super) fn rule(&self, number: u16, at: Nanos) -> Option<&str> {
        let (rules, _) = self.running.as_ref().filter(|_| at > self.since)?;
        rules.texts().get(usize::from(number)).map(String::as_str)
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
        let make = |port: &RunningPort| {
            let invalid = |error: RuleError| invalid(error.to_string());
            port.firewall.with(rules).map_err(invalid)
        };
        let note = |port: &mut RunningPort, firewall| {
            port.firewall = PortFirewall { since: self.now(), ..firewall };
        };
        self.set_stage(port, StagePlace::Firewall, make, note).map(drop)
    }

    /// The connections of a port's firewall as text; empty if there are none.
    pub(crate) fn connections(&self, port: PortId) -> String {
        let now = self.now();
        let snapshot = self.ask(move |unit| {
            let switch = unit.switch_mut();
            let place = StagePlace::Firewall;
            switch.with_stage(port, place, |firewall: &mut Firewall| firewall.snapshot(now))
        });
        let snapshot = snapshot.flatten().filter(|snapshot| !snapshot.is_empty());
        snapshot.map(|snapshot| snapshot.to_string()).unwrap_or_default()
    }

    /// Enters connections that the firewall of an earlier process has tracked on this port. Text
    /// that is not as [`connections`](Self::connections) writes it has none.
    pub(crate) fn resume_connections(&self, name: &str, port: PortId, connections: &str) {
        if connections.is_empty() {
            return;
        }
        let snapshot = match Snapshot::parse(connections) {
            Ok(snapshot) => snapshot,
            Err(error) => {
                tracing::error!(
                    port = name,
                    %error,
                    "the connections of the earlier daemon's firewall cannot be read, and are \
                     forgotten"
                );
                return;
            }
        };
        let (now, all) = (self.now(), snapshot.len());
        let known = self.ask(move |unit| {
            let resume = |firewall: &mut Firewall| firewall.resume(now, &snapshot);
            unit.switch_mut().with_stage(port, StagePlace::Firewall, resume)
        });
        let known = known.flatten().unwrap_or(0);
        tracing::info!(port = name, known, all, "connections of the earlier daemon's firewall");
    }
}
