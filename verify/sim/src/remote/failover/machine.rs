//! An IOhost: the supervisor that is a candidate, and the daemon that it has started.

use sidecore_ownership::Options as OwnershipOptions;
use sidecore_units::Nanos;

use super::Rule;
use super::process::Process;
use crate::ownership::candidate::Candidate;
use crate::ownership::etcd::STORE;

pub(super) struct Machine {
    pub(super) supervisor: Candidate,
    pub(super) daemon: Option<Process>,
    /// The end of the lease as the supervisor's main thread knows it, on the IOhost's clock.
    pub(super) until: Nanos,
    /// The numbers of the supervisor's former starts.
    pub(super) former: Vec<u64>,
}

/// The name of the candidate on an IOhost, which a fence command is given.
pub(super) fn name_of(machine: usize) -> String {
    format!("d{machine}")
}

impl Machine {
    pub(super) fn new(index: usize, clock: (u64, u64), options: OwnershipOptions) -> Self {
        let host = format!("h{index}");
        let names = (name_of(index), host);
        let supervisor = Candidate::new((&names.0, &names.1), index as u64 + 1, clock, options);
        Self { supervisor, daemon: None, until: Nanos::ZERO, former: Vec::new() }
    }

    /// The supervisor hears of the lease.
    pub(super) fn hear(&mut self, neglect: Option<Rule>) {
        let daemon = &self.supervisor.daemon;
        let until = match neglect {
            Some(Rule::Look) => daemon.serves_until(STORE).map(|(until, _)| until),
            _ => daemon.holds_until(STORE),
        };
        self.until = until.unwrap_or(self.until);
    }

    /// Whether the lease ends within `margin`.
    pub(super) fn is_over(&self, now: Nanos, margin: Nanos) -> bool {
        self.supervisor.clock(now).after(margin) >= self.until
    }

    /// Stops the supervisor, the daemon, or both, until then. The daemon is stopped after a step.
    pub(super) fn stop(&mut self, until: Nanos, (supervisor, after): (bool, Option<u64>)) {
        if supervisor {
            self.supervisor.runs_at = until;
        }
        if let (Some(daemon), Some(step)) = (&mut self.daemon, after) {
            daemon.stops = Some((step, until));
        }
    }
}
