//! The thread that writes records.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use sidecore_block::Meter;

use crate::recorder::Recorder;

/// How long an end waits for the last record: a filesystem that does not answer must not keep the
/// daemon from ending.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// A thread that writes a record at the end of each interval. Drop writes the last one.
pub(crate) struct RecordThread {
    /// Dropped to end the thread.
    runs: Option<Sender<Infallible>>,
    /// Disconnected when the thread has ended; in a mutex because a receiver alone is not `Sync`.
    ended: Mutex<Receiver<Infallible>>,
    meter: Arc<Meter>,
}

impl RecordThread {
    pub(crate) fn start(
        mut recorder: Recorder,
        meter: Arc<Meter>,
        interval: Duration,
    ) -> io::Result<Self> {
        let (runs, stop) = channel();
        let (alive, ended) = channel();
        recorder.prepare(&meter);
        let its = Arc::clone(&meter);
        let run = move || {
            let _alive = alive;
            write(&mut recorder, &its, interval, &stop);
        };
        std::thread::Builder::new().name("meter-records".to_owned()).spawn(run)?;
        Ok(Self { runs: Some(runs), ended: Mutex::new(ended), meter })
    }
}

impl Drop for RecordThread {
    fn drop(&mut self) {
        drop(self.runs.take());
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let (meter, seconds) = (self.meter.name(), END_PATIENCE.as_secs());
            tracing::error!(meter, "its last record is not written after {seconds} s");
        }
    }
}

fn write(recorder: &mut Recorder, meter: &Meter, interval: Duration, stop: &Receiver<Infallible>) {
    let mut due = Instant::now();
    loop {
        // An interval that passed while the file did not answer is part of the next record.
        due = due.checked_add(interval).unwrap_or(due).max(Instant::now());
        let timeout = due.saturating_duration_since(Instant::now());
        let ends = stop.recv_timeout(timeout) == Err(RecvTimeoutError::Disconnected);
        recorder.record(SystemTime::now(), meter);
        if ends {
            return;
        }
    }
}
