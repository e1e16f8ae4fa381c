//! The thread that writes the file.

use std::convert::Infallible;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sidecore_block::{Recording, RecordingState, RecordingStats};
use sidecore_recording::{EndReason, Record, checksum};
use sidecore_spool::{Consumer, Producer, ring};

use crate::entry::{Entry, WORDS};
use crate::file::{Output, Stop, directory_of};

/// How long the writer rests when all rings are empty. Nothing wakes it: that would be a system
/// call for a request.
const REST: Duration = Duration::from_millis(5);

/// How long an end waits for the last records: a filesystem that does not answer must not keep the
/// daemon from ending.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The most records that are taken from a ring before the next one has its turn.
const TURN: usize = 1024;

/// The most words in rings of queues that are gone, 256 MiB: a guest may start and stop queues
/// while the file's filesystem does not answer, and the writer frees no ring.
const LEFT_WORDS_MAX: usize = 32 << 20;

/// The state that the queues and the writer share.
pub(crate) struct Shared {
    /// The size of each ring.
    ring_words: usize,
    /// Set when no more is written.
    has_ended: AtomicBool,
    /// Queues that the writer has not taken over yet.
    arrived: Mutex<Vec<Queue>>,
    next_queue: AtomicU16,
    /// Rings of queues that are gone, which the writer has not freed.
    left: AtomicUsize,
    /// With so many, a new queue gets no ring.
    left_max: usize,
}

struct Queue {
    number: u16,
    ring: Consumer<WORDS>,
}

impl Shared {
    pub(crate) fn new(ring_words: usize) -> Self {
        Self {
            ring_words,
            has_ended: AtomicBool::new(false),
            arrived: Mutex::default(),
            next_queue: AtomicU16::new(0),
            left: AtomicUsize::new(0),
            left_max: LEFT_WORDS_MAX.checked_div(ring_words).unwrap_or(0),
        }
    }

    /// Whether no more is written.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Makes the ring of one more queue. `None` if no more is written, too many rings of former
    /// queues are not freed, or there are no more numbers.
    pub(crate) fn open_queue(&self) -> Option<Producer<WORDS>> {
        if self.has_ended() || self.left.load(Ordering::Relaxed) >= self.left_max {
            return None;
        }
        let next = |number: u16| number.checked_add(1);
        let numbered = self.next_queue.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let number = numbered.ok()?;
        let (producer, consumer) = ring(self.ring_words);
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        // The end empties the list.
        if self.has_ended() {
            return None;
        }
        arrived.push(Queue { number, ring: consumer });
        Some(producer)
    }

    /// Counts the ring of a queue that is about to go.
    pub(crate) fn left(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the queues that have come.
    fn take_arrived(&self) -> Vec<Queue> {
        std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The thread. Drop has it write what the rings have, and the end.
pub(crate) struct Writer {
    /// Dropped to end the thread.
    runs: Option<Sender<Infallible>>,
    /// Disconnected when the thread has ended; in a mutex because a receiver alone is not `Sync`.
    ended: Mutex<Receiver<Infallible>>,
    recording: Arc<Recording>,
}

impl Writer {
    pub(crate) fn start(
        output: Output,
        shared: Arc<Shared>,
        recording: Arc<Recording>,
    ) -> io::Result<Self> {
        let (runs, stop) = channel();
        let (alive, ended) = channel();
        let stats = recording.open_channel();
        let its = Arc::clone(&recording);
        let run = move || {
            let _alive = alive;
            Work { output, shared, recording: its, stats, queues: Vec::new(), data: Vec::new() }
                .run(&stop);
        };
        std::thread::Builder::new().name("recording".to_owned()).spawn(run)?;
        Ok(Self { runs: Some(runs), ended: Mutex::new(ended), recording })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.runs.take());
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let (file, seconds) = (self.recording.file().display(), END_PATIENCE.as_secs());
            tracing::error!(%file, "the end of a recording is not written after {seconds} s");
        }
    }
}

/// The thread's own part.
struct Work {
    output: Output,
    shared: Arc<Shared>,
    recording: Arc<Recording>,
    stats: Arc<RecordingStats>,
    queues: Vec<Queue>,
    data: Vec<u8>,
}

impl Work {
    fn run(mut self, stop: &Receiver<Infallible>) {
        let written = self.write(stop);
        // The queues no longer fill rings that nothing empties.
        self.shared.has_ended.store(true, Ordering::Relaxed);
        drop(self.shared.take_arrived());
        let dropped = self.recording.counts().dropped;
        let (reason, failure) = match written {
            Ok(()) => (EndReason::Closed, None),
            Err(Stop::Limit) => (EndReason::Limit, None),
            Err(Stop::Failed(error)) => (EndReason::Failed, Some(error)),
        };
        let directory = directory_of(self.recording.file());
        // Behind a failure the end is an attempt.
        let ended = match (self.output.end(directory, reason, dropped), failure) {
            (_, Some(error)) | (Err(Stop::Failed(error)), None) => Err(error),
            (Ok(()) | Err(Stop::Limit), None) => Ok(()),
        };
        self.show();
        let file = self.recording.file().display();
        match ended {
            Err(error) => {
                tracing::error!(%file, "a recording has ended, its file is not written: {error}");
                self.recording.set_state(RecordingState::Failed(error.to_string()));
            }
            Ok(()) if reason == EndReason::Limit => {
                let requests = self.output.written_requests();
                tracing::info!(%file, requests, "a recording is complete: it has `max_bytes`");
                self.recording.set_state(RecordingState::Full);
            }
            Ok(()) => {}
        }
    }

    /// Writes what comes until the stage ends.
    fn write(&mut self, stop: &Receiver<Infallible>) -> Result<(), Stop> {
        let mut ends = false;
        loop {
            self.queues.append(&mut self.shared.take_arrived());
            if self.drain()? {
                self.show();
                continue;
            }
            self.output.flush()?;
            self.show();
            if ends {
                return Ok(());
            }
            // Drains once more: records may have come before the stop.
            ends = stop.recv_timeout(REST) == Err(RecvTimeoutError::Disconnected);
        }
    }

    /// Takes records from all rings. False if there were none.
    fn drain(&mut self) -> Result<bool, Stop> {
        let mut has_some = false;
        let mut queues = std::mem::take(&mut self.queues);
        for queue in &mut queues {
            for _ in 0..TURN {
                let Some(words) = queue.ring.pop(&mut self.data) else { break };
                has_some = true;
                self.append(words, queue.number)?;
            }
        }
        if !has_some {
            // A ring that is closed here may have got records since it was found empty.
            let count = queues.len();
            queues.retain(|queue| !queue.ring.is_closed() || !queue.ring.is_empty());
            let freed = count.saturating_sub(queues.len());
            self.shared.left.fetch_sub(freed, Ordering::Relaxed);
        }
        self.queues = queues;
        Ok(has_some)
    }

    fn append(&mut self, words: [u64; WORDS], queue: u16) -> Result<(), Stop> {
        let Some(Entry { mut request, lost }) = Entry::decode(words, queue) else {
            return Ok(());
        };
        if lost > 0 {
            let gap = Record::Gap { queue, at_ns: request.arrival_ns, requests: lost };
            self.output.append(&gap, &[])?;
        }
        if !self.data.is_empty() {
            request.checksum = Some(checksum(&self.data));
        }
        self.output.append(&Record::Request(request), &self.data)
    }

    /// Shows the progress to reports.
    fn show(&self) {
        self.recording.set_file_bytes(self.output.written_bytes());
        let recorded = self.output.written_requests().saturating_sub(self.stats.recorded.get());
        self.stats.recorded.add(recorded);
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::BlockRequest;
    use sidecore_recording::{DataMode, Header};
    use sidecore_units::Nanos;

    use super::*;
    use crate::file::create;
    use crate::recorder::Recorder;

    #[test]
    fn a_queue_of_a_recording_that_has_ended_takes_no_memory() {
        let shared = Shared::new(64);
        assert!(shared.open_queue().is_some());
        shared.has_ended.store(true, Ordering::Relaxed);
        assert!(shared.open_queue().is_none());
        assert_eq!(shared.take_arrived().len(), 1);
    }

    #[test]
    fn a_queue_without_a_number_has_no_ring() {
        let shared = Shared::new(64);
        shared.next_queue.store(u16::MAX - 1, Ordering::Relaxed);
        assert!(shared.open_queue().is_some());
        assert!(shared.open_queue().is_none() && shared.open_queue().is_none());
        assert_eq!(shared.take_arrived().len(), 1);
    }

    #[test]
    fn the_memory_of_queues_that_are_gone_is_bounded_until_the_writer_frees_it() {
        let directory = tempfile::tempdir().unwrap();
        let (file, path) = create(&directory.path().join("disk.recording")).unwrap();
        let Ok(output) = Output::new(file, &Header::default(), 1 << 20) else { panic!("no file") };
        let recording = Arc::new(Recording::new(path));
        let shared = Arc::new(Shared { left_max: 2, ..Shared::new(1024) });
        let mut work = Work {
            output,
            shared: Arc::clone(&shared),
            recording: Arc::clone(&recording),
            stats: recording.open_channel(),
            queues: Vec::new(),
            data: Vec::new(),
        };
        let record = |count: usize| {
            let mut recorders: Vec<Recorder> = std::iter::repeat_with(|| {
                let stats = recording.open_channel();
                Recorder::new(Arc::clone(&shared), stats, DataMode::None, Nanos::ZERO)
            })
            .take(count)
            .collect();
            for recorder in &mut recorders {
                recorder.record(&BlockRequest::blank(0), Nanos(1));
            }
            recording.counts().dropped
        };
        // All queues that a device has at once get rings.
        assert_eq!(record(3), 0);
        // Three are gone: no more until the writer has found them.
        assert_eq!((record(1), shared.left.load(Ordering::Relaxed)), (1, 3));
        work.queues = shared.take_arrived();
        assert!(work.drain().is_ok_and(|has_some| has_some));
        assert_eq!(record(1), 2, "what they have is not written yet");
        assert!(work.drain().is_ok_and(|has_some| !has_some) && work.queues.is_empty());
        assert_eq!(shared.left.load(Ordering::Relaxed), 0);
        assert_eq!(record(1), 2);
        work.output.flush().ok().unwrap();
        assert_eq!(work.output.written_requests(), 3);
    }
}
