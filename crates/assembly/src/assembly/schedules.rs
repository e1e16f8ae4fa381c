//! Schedules of snapshots while the assembly runs.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Assembly;
use crate::AssemblyError;
use crate::report::ScheduleReport;
use crate::spec::ScheduleSpec;

/// The time between two looks at the clock, which may be set meanwhile.
const PERIOD: Duration = Duration::from_secs(1);

impl Assembly {
    /// Starts the thread that makes and deletes snapshots by the schedules, until the assembly
    /// ends. A time that was missed is made up for at once.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve_schedules(self: &Arc<Self>) -> Result<(), AssemblyError> {
        let weak = Arc::downgrade(self);
        let serve = move || {
            loop {
                let Some(assembly) = weak.upgrade() else { return };
                if assembly.graph().ends {
                    return;
                }
                assembly.schedules.tick(now_unix_s());
                drop(assembly);
                std::thread::park_timeout(PERIOD);
            }
        };
        std::thread::Builder::new()
            .name("schedules".to_owned())
            .spawn(serve)
            .map_err(AssemblyError::Threads)?;
        Ok(())
    }

    /// Reports the schedules, in the order of the configuration. Waits for no disk.
    #[must_use]
    pub fn schedules(&self) -> Vec<ScheduleReport> {
        self.schedules.report(now_unix_s())
    }

    /// Replaces all schedules. Snapshots of volumes without one stay.
    ///
    /// # Errors
    /// Two have one name, or a controller does not exist; nothing has changed then.
    pub fn set_schedules(&self, schedules: Vec<ScheduleSpec>) -> Result<(), AssemblyError> {
        self.schedules.replace(schedules)
    }

    /// Makes the snapshots that are due now, and deletes those that have expired. Returns when that
    /// is done; the reports have the failures.
    #[must_use]
    pub fn run_schedules(&self) -> Vec<ScheduleReport> {
        self.run_schedules_at(now_unix_s())
    }

    /// As [`run_schedules`](Self::run_schedules), at the caller's time in seconds since 1970.
    #[must_use]
    pub fn run_schedules_at(&self, now_unix_s: u64) -> Vec<ScheduleReport> {
        self.schedules.run_all(now_unix_s);
        self.schedules.report(now_unix_s)
    }
}

/// The time of day, in seconds since 1970.
fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
