//! Deduplication of a controller's volumes.

use sidecore_controller::{DedupOptions, DedupState};

use super::ControllerHandle;
use crate::operation::{ErrorKind, OperationError};
use crate::report::{DedupPhase, DedupReport};

/// Every method fails with an [`OperationError`]; then nothing has changed.
#[allow(clippy::missing_errors_doc)]
impl ControllerHandle {
    /// Starts a deduplication in the background.
    pub fn start_dedup(&self, options: &DedupOptions) -> Result<DedupReport, OperationError> {
        Ok(self.dedup_report(self.controller.start_dedup(options)?))
    }

    /// The deduplication in progress, or the last one since the daemon has started.
    pub fn dedup(&self) -> Result<DedupReport, OperationError> {
        let report = self.controller.dedup().ok_or_else(|| self.no_dedup())?;
        Ok(self.dedup_report(report))
    }

    /// Stops the deduplication in progress. Changes made so far stay.
    pub fn stop_dedup(&self) -> Result<DedupReport, OperationError> {
        let report = self.controller.stop_dedup().ok_or_else(|| self.no_dedup())?;
        Ok(self.dedup_report(report))
    }

    fn no_dedup(&self) -> OperationError {
        let message = format!(
            "controller \"{}\" was not deduplicated since the daemon has started",
            self.name()
        );
        OperationError::new(ErrorKind::NotFound, message)
    }

    fn dedup_report(&self, report: sidecore_controller::DedupReport) -> DedupReport {
        let (state, reason) = match report.state {
            DedupState::Running => (DedupPhase::Running, None),
            DedupState::Done => (DedupPhase::Done, None),
            DedupState::Stopped => (DedupPhase::Stopped, None),
            DedupState::Failed(why) => (DedupPhase::Failed, Some(why)),
        };
        DedupReport {
            controller: self.name().to_owned(),
            state,
            reason,
            volumes: report.options.volumes,
            across: report.options.across,
            dry_run: report.options.dry_run,
            rate_bytes_per_s: report.options.bytes_per_s,
            yields: report.yields,
            seconds: report.took.as_secs_f64(),
            counts: report.counts,
        }
    }
}
