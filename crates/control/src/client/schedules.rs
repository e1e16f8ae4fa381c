//! The client's requests for schedules of snapshots.

use hyper::Method;
use sidecore_assembly::report::ScheduleReport;

use super::{Client, ClientError, LONG_PATIENCE};
use crate::api::{NewSchedules, SCHEDULES_PATH, Schedules};

impl Client {
    /// Returns the schedules.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn schedules(&self) -> Result<Vec<ScheduleReport>, ClientError> {
        self.json::<Schedules>(SCHEDULES_PATH).map(|answer| answer.schedules)
    }

    /// Replaces all schedules until the daemon ends.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_schedules(&self, schedules: &NewSchedules) -> Result<(), ClientError> {
        self.put(SCHEDULES_PATH, schedules)
    }

    /// Makes the daemon make the snapshots that are due, and delete those that have expired.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn run_schedules(&self) -> Result<Vec<ScheduleReport>, ClientError> {
        let path = format!("{SCHEDULES_PATH}/run");
        let body = self.ask(Method::POST, &path, None, LONG_PATIENCE)?;
        self.parse::<Schedules>(&body).map(|answer| answer.schedules)
    }
}
