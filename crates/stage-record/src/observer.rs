//! The observer.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use sidecore_block::{BlockRequest, Observe, Observer, Recording};
use sidecore_reactor::{CoreClock, CoreContext};
use sidecore_recording::DataMode;
use sidecore_units::Nanos;

use crate::recorder::Recorder;
use crate::writer::{Shared, Writer};

/// Records requests when they have ended.
pub(crate) struct RecordObserver {
    pub(crate) recording: Arc<Recording>,
    /// `None` if the file could not be made.
    pub(crate) output: Option<Recorded>,
}

/// The way of records to the file.
pub(crate) struct Recorded {
    pub(crate) shared: Arc<Shared>,
    pub(crate) data: DataMode,
    /// Time 0 of the recording.
    pub(crate) started: Instant,
    /// The sidecores' time at time 0, which the first queue finds: one for all queues, whose times
    /// are compared.
    pub(crate) base: OnceLock<Nanos>,
    /// Its drop writes the end.
    pub(crate) _writer: Writer,
}

impl RecordObserver {
    fn recorder(&self, clock: Option<&CoreClock>) -> Option<Recorder> {
        let output = self.output.as_ref()?;
        if output.shared.has_ended() {
            return None;
        }
        let base = clock.map_or(Nanos::ZERO, |clock| {
            *output.base.get_or_init(|| clock().since(Nanos::from(output.started.elapsed())))
        });
        let stats = self.recording.open_channel();
        Some(Recorder::new(Arc::clone(&output.shared), stats, output.data, base))
    }
}

impl Observe for RecordObserver {
    fn open_channel(&self, core: &CoreContext) -> Box<dyn Observer> {
        let clock = core.clock();
        let recorder = self.recorder(clock.as_ref());
        Box::new(RecordChannel { clock, recorder })
    }

    fn recording(&self) -> Option<Arc<Recording>> {
        Some(Arc::clone(&self.recording))
    }
}

struct RecordChannel {
    clock: Option<CoreClock>,
    recorder: Option<Recorder>,
}

impl Observer for RecordChannel {
    fn completed(&mut self, now: Nanos, requests: &[Box<BlockRequest>]) {
        let Some(recorder) = &mut self.recorder else { return };
        if !recorder.is_on() {
            return;
        }
        // `now` is the time before the store worked.
        let now = self.clock.as_ref().map_or(now, |clock| clock());
        for request in requests {
            recorder.record(request, now);
        }
    }
}
