//! The rate limits of a port: from their texts to a stage.

use sidecore_net::StagePlace;
use sidecore_stage_limit::{LimitStage, PortLimits};

use super::{RunningSwitch, Stage, invalid};
use crate::operation::OperationError;

/// The limits in these texts, and their stage.
pub(super) fn limits(texts: &[String]) -> Result<(Vec<String>, Stage), OperationError> {
    let limits = PortLimits::parse(texts).map_err(invalid)?;
    let shown = limits.texts().to_vec();
    let stage: Stage =
        if shown.is_empty() { None } else { Some(Box::new(LimitStage::new(&limits))) };
    Ok((shown, stage))
}

impl RunningSwitch {
    /// Changes the rate limits of a port between two frames.
    pub(super) fn set_limits(&self, port: &str, texts: &[String]) -> Result<(), OperationError> {
        let make = |_: &_| limits(texts);
        self.set_stage(port, StagePlace::Limit, make, |port, limits| port.limits = limits).map(drop)
    }
}
