//! The faults of a port's wire: from their text to a stage, and its report.

use std::sync::Arc;

use sidecore_net::StagePlace;
use sidecore_stage_wire::{Wire, WireStage, WireStats};
use sidecore_telemetry::CounterSet as _;

use super::{RunningSwitch, Stage, invalid};
use crate::operation::{ErrorKind, OperationError};
use crate::report::WireReport;

/// The wire of a port, as threads besides its sidecore see it; nothing if it has no faults.
#[derive(Clone, Default)]
pub(super) struct PortWire(Option<(Wire, Arc<WireStats>)>);

impl PortWire {
    /// The wire with these faults, and its stage.
    pub(super) fn new(faults: &str) -> Result<(Self, Stage), OperationError> {
        let wire = Wire::parse(faults).map_err(invalid)?;
        if wire.is_perfect() {
            return Ok((Self(None), None));
        }
        let stage = WireStage::new(&wire).map_err(|error| {
            let why = format!("no memory for frames on their way: {error}");
            OperationError::new(ErrorKind::Failed, why)
        })?;
        Ok((Self(Some((wire, Arc::clone(stage.stats())))), Some(Box::new(stage))))
    }

    pub(super) fn report(&self) -> Option<WireReport> {
        let (wire, stats) = self.0.as_ref()?;
        Some(WireReport { faults: wire.text().to_owned(), counters: stats.counts() })
    }
}

impl RunningSwitch {
    /// Changes the faults of a port's wire between two frames.
    pub(super) fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError> {
        let make = |_: &_| PortWire::new(faults);
        self.set_stage(port, StagePlace::Wire, make, |port, wire| port.wire = wire).map(drop)
    }
}
