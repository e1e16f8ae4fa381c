//! The observer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{BlockRequest, Meter, MeterStats, Observe, Observer};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::recorder::Recorder;
use crate::thread::RecordThread;

/// Counts requests that have ended.
pub struct MeterObserver {
    meter: Arc<Meter>,
    /// Its drop writes the last record.
    _records: Option<RecordThread>,
}

impl MeterObserver {
    /// Counts in `meter`.
    #[must_use]
    pub fn new(meter: Arc<Meter>) -> Self {
        Self { meter, _records: None }
    }

    /// The same, with a record at the end of each `interval` and one when the observer is dropped.
    ///
    /// # Errors
    /// The thread for the records cannot be started.
    pub fn recorded(meter: Arc<Meter>, recorder: Recorder, interval: Duration) -> io::Result<Self> {
        let records = RecordThread::start(recorder, Arc::clone(&meter), interval)?;
        Ok(Self { meter, _records: Some(records) })
    }
}

impl Observe for MeterObserver {
    fn open_channel(&self, _: &CoreContext) -> Box<dyn Observer> {
        Box::new(MeterChannel(self.meter.open_channel()))
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        vec![Arc::clone(&self.meter)]
    }

    fn takes_mapped(&self) -> bool {
        true
    }
}

struct MeterChannel(Arc<MeterStats>);

impl Observer for MeterChannel {
    #[inline]
    fn completed(&mut self, _: Nanos, requests: &[Box<BlockRequest>]) {
        self.0.count(requests);
    }
}
