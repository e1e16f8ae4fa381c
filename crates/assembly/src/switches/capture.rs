//! A capture of a port: its stage, the reader of its frames, and its end.

use std::sync::{Arc, Weak};
use std::time::SystemTime;

use sidecore_net::{PortId, StagePlace};
use sidecore_stage_capture::{CaptureReader, CaptureStage, CaptureStats, RING_WORDS, SNAPLEN_MAX};
use sidecore_telemetry::CounterSet as _;

use super::{RunningPort, RunningSwitch, free, invalid, lock};
use crate::operation::{ErrorKind, OperationError};
use crate::report::CaptureReport;

/// The capture of a port, as reports see it; nothing if there is none.
#[derive(Clone, Default)]
pub(super) struct PortCapture(Option<Arc<CaptureStats>>);

impl PortCapture {
    pub(super) fn report(&self) -> Option<CaptureReport> {
        self.0.as_ref().map(|stats| CaptureReport { counters: stats.counts() })
    }
}

/// Frames of a port as they pass, in a pcapng file. Its drop ends it, and waits for the sidecore:
/// from then on the port costs what it did before.
pub struct Capture {
    reader: CaptureReader,
    port: String,
    id: PortId,
    /// The capture does not keep a switch that has stopped.
    switch: Weak<RunningSwitch>,
}

impl Capture {
    /// Appends the beginning of the file.
    pub fn start(&self, out: &mut Vec<u8>) {
        self.reader.start(out, &self.port);
    }

    /// Appends frames to the file until there are no more, or `most` of them, or `out` has
    /// `len_bytes` bytes. Returns their number, and waits for nothing.
    pub fn read(&mut self, out: &mut Vec<u8>, most: u64, len_bytes: usize) -> u64 {
        self.reader.read(out, most, len_bytes)
    }

    /// Whether the port is gone: no frames come after those that are there by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.reader.is_closed()
    }

    /// Appends the end of the file.
    pub fn end(&self, out: &mut Vec<u8>) {
        self.reader.end(out, time_of_day_ns());
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(switch) = self.switch.upgrade() {
            switch.end_capture(&self.port, self.id);
        }
        tracing::info!(port = self.port, "capture ends");
    }
}

pub(super) fn time_of_day_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl RunningSwitch {
    /// Begins to capture the frames of a port.
    pub(super) fn capture(
        switch: &Arc<Self>,
        port: &str,
        snaplen: u32,
    ) -> Result<Capture, OperationError> {
        if !(1..=SNAPLEN_MAX).contains(&snaplen) {
            return Err(invalid(format!("`snaplen` is {snaplen}; it is 1 to {SNAPLEN_MAX} bytes")));
        }
        let mut reader = None;
        let make = |found: &RunningPort| {
            if found.capture.0.is_some() {
                let why = format!("port \"{port}\" has a capture already; end that one first");
                return Err(OperationError::new(ErrorKind::Conflict, why));
            }
            let (stage, of_stage) = CaptureStage::new(snaplen, RING_WORDS);
            let shown = PortCapture(Some(Arc::clone(of_stage.stats())));
            reader = Some(of_stage);
            Ok((shown, Some(Box::new(stage) as _)))
        };
        let note = |port: &mut RunningPort, capture| port.capture = capture;
        let id = switch.set_stage(port, StagePlace::Capture, make, note)?;
        let gone = || OperationError::new(ErrorKind::NotFound, format!("port \"{port}\" is gone"));
        let mut reader = reader.ok_or_else(gone)?;
        reader.set_epoch(time_of_day_ns().saturating_sub(switch.now().0));
        Ok(Capture { reader, port: port.to_owned(), id, switch: Arc::downgrade(switch) })
    }

    /// Ends the capture of a port that may be gone.
    fn end_capture(&self, port: &str, id: PortId) {
        let _changes = lock(&self.changes);
        // This thread frees the stage with its ring. One that has failed is gone already.
        let stage =
            self.ask(move |unit| unit.switch_mut().set_stage(id, StagePlace::Capture, None));
        if let Some(Ok(stage)) = stage {
            free(port, stage);
        }
        if let Some(port) = lock(&self.ports).iter_mut().find(|port| port.id == id) {
            port.capture = PortCapture::default();
        }
    }
}
