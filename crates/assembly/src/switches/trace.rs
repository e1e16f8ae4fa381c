//! A trace of a switch or of one of its ports: the frames that it drops, by flow and reason.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use sidecore_net::{PortId, SwitchError, TraceId, Way};
use sidecore_stage_capture::{
    DropCounts, DropPlace, Group, TRACE_RING_WORDS, TraceReader, TraceRecorder,
};

use super::capture::time_of_day_ns;
use super::{RunningPort, RunningSwitch, lock};
use crate::operation::{ErrorKind, OperationError};
use crate::report::{DropReport, DropWay, FlowReport};

/// Frames of one flow in this time are reported together.
const PERIOD: Duration = Duration::from_secs(1);

/// The ports whose names are known at most: those that were removed lately among them.
const NAMES_MAX: usize = 1024;

/// The frames that a switch drops, as they are dropped. Its drop ends the trace, and waits for the
/// sidecore.
pub struct Trace {
    reader: TraceReader,
    /// The time of day at the sidecore's time 0, in nanoseconds since 1970.
    epoch_ns: u64,
    taken_at: Instant,
    /// The switch, or the port.
    part: String,
    names: BTreeMap<u64, String>,
    id: TraceId,
    /// The trace does not keep a switch that has stopped.
    switch: Weak<RunningSwitch>,
}

impl Trace {
    /// Counts frames until there are no more, or `most` of them. Returns their number, and waits
    /// for nothing.
    pub fn read(&mut self, most: u64) -> u64 {
        self.reader.read(most)
    }

    /// Whether it is time to [`take`](Self::take) the counts: a second is over.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.taken_at.elapsed() >= PERIOD
    }

    /// Takes the counts since the last call, in the order of time. Waits for nothing.
    pub fn take(&mut self) -> Vec<DropReport> {
        self.taken_at = Instant::now();
        let (counts, lost) = self.reader.take();
        if counts.is_empty() {
            return Vec::new();
        }
        let switch = self.switch.upgrade();
        // While the rules of a port are replaced, it is not known which ones a number is of.
        let changes = switch.as_ref().and_then(|switch| switch.changes.try_lock().ok());
        let ports = switch.as_ref().map(|switch| lock(&switch.ports).clone()).unwrap_or_default();
        self.note_names(&ports);
        let rule = |place: &DropPlace, counts: &DropCounts| {
            changes.as_ref()?;
            let port = ports.iter().find(|port| port.id.number() == place.port)?;
            Some(port.firewall.rule(place.dropped.rule?, counts.first_at)?.to_owned())
        };
        let reports = counts.iter().map(|(place, counts)| DropReport {
            rule_text: rule(place, counts),
            ..self.report(place, counts)
        });
        let mut reports: Vec<_> = reports.collect();
        if let Some(first) = reports.first_mut() {
            first.lost = lost;
        }
        reports
    }

    /// Whether the port or the switch is gone: no frames come after those that are there by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.reader.is_closed()
    }

    fn note_names(&mut self, ports: &[RunningPort]) {
        if self.names.len() > NAMES_MAX {
            self.names.clear();
        }
        self.names.extend(ports.iter().map(|port| (port.id.number(), port.name.clone())));
    }

    fn report(&self, place: &DropPlace, counts: &DropCounts) -> DropReport {
        let (flow, others) = match &place.group {
            Group::Flow(flow) => (Some(FlowReport::from(flow)), false),
            Group::Unread => (None, false),
            Group::Others => (None, true),
        };
        let name = |number: u64| self.names.get(&number).cloned();
        DropReport {
            first_ns: self.epoch_ns.saturating_add(counts.first_at.0),
            last_ns: self.epoch_ns.saturating_add(counts.last_at.0),
            port: name(place.port).unwrap_or_default(),
            way: match place.way {
                Way::FromStation => DropWay::From,
                Way::ToStation => DropWay::To,
            },
            sender: place.sender.and_then(name),
            vlan: place.vlan,
            flow,
            others,
            reason: place.dropped.reason.name().trim_start_matches("dropped_").to_owned(),
            rule: place.dropped.rule.map(|rule| u32::from(rule).saturating_add(1)),
            rule_text: None,
            frames: counts.frames,
            bytes: counts.bytes,
            lost: 0,
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Some(switch) = self.switch.upgrade() {
            let id = self.id;
            // This thread frees the ring.
            drop(switch.ask(move |unit| unit.switch_mut().remove_trace(id)));
        }
        tracing::info!(of = self.part, "trace ends");
    }
}

impl RunningSwitch {
    /// Begins a trace of a port.
    pub(super) fn trace_port(switch: &Arc<Self>, port: &str) -> Result<Trace, OperationError> {
        let id = lock(&switch.ports).iter().find(|found| found.name == port).map(|port| port.id);
        let gone = || OperationError::new(ErrorKind::NotFound, format!("port \"{port}\" is gone"));
        Self::trace(switch, port, Some(id.ok_or_else(gone)?))
    }

    /// Begins a trace of the port, or of all ports.
    pub(super) fn trace(
        switch: &Arc<Self>,
        part: &str,
        port: Option<PortId>,
    ) -> Result<Trace, OperationError> {
        let (recorder, reader) = TraceRecorder::new(TRACE_RING_WORDS);
        let begin = switch.ask(move |unit| unit.switch_mut().add_trace(port, Box::new(recorder)));
        let gone = || OperationError::new(ErrorKind::NotFound, format!("\"{part}\" is gone"));
        let id = begin.ok_or_else(gone)?.map_err(|error| match error {
            SwitchError::TooManyTraces => {
                OperationError::new(ErrorKind::Conflict, format!("\"{part}\": {error}"))
            }
            _ => gone(),
        })?;
        let mut trace = Trace {
            reader,
            epoch_ns: time_of_day_ns().saturating_sub(switch.now().0),
            taken_at: Instant::now(),
            part: part.to_owned(),
            names: BTreeMap::new(),
            id,
            switch: Arc::downgrade(switch),
        };
        trace.note_names(&lock(&switch.ports));
        tracing::info!(of = part, "trace begins");
        Ok(trace)
    }
}
