//! The counts and the state of a stage that records requests, for reports.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_telemetry::counters;

use crate::sums::Sums;

counters! {
    /// The counters of a recorded channel, or of the writer of the file. Its thread alone writes
    /// them, any thread may read them.
    ///
    /// They lie on cache lines that no other thread writes to.
    #[repr(align(128))]
    pub struct RecordingStats;

    /// The counters of a recording at one moment: the sum over all channels that it ever had.
    pub struct RecordingCounts;

    /// Requests that the recording has.
    pub recorded: Counter = "recorded_total",
    /// Requests that the recording has not, because the writer of its file was too slow.
    pub dropped: Counter = "dropped_total",
}

/// The state of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecordingState {
    /// Requests are recorded.
    #[default]
    Running,
    /// The file has its largest size, and is complete.
    Full,
    /// The file cannot be written, for this reason.
    Failed(String),
}

/// A recording of requests, as reports show it.
#[derive(Debug, Default)]
pub struct Recording {
    file: PathBuf,
    file_bytes: AtomicU64,
    channels: Mutex<Sums<RecordingStats>>,
    state: Mutex<RecordingState>,
}

impl Recording {
    /// A recording of nothing yet, in this file.
    #[must_use]
    pub fn new(file: PathBuf) -> Self {
        Self { file, ..Self::default() }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The size of the file in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes.load(Ordering::Relaxed)
    }

    /// Sets the size of the file in bytes.
    pub fn set_file_bytes(&self, bytes: u64) {
        self.file_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The counters for one more channel, or for the writer. Their last owner but the recording is
    /// that.
    #[must_use]
    pub fn open_channel(&self) -> Arc<RecordingStats> {
        lock(&self.channels).open()
    }

    /// The counts of now.
    #[must_use]
    pub fn counts(&self) -> RecordingCounts {
        lock(&self.channels).counts()
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> RecordingState {
        lock(&self.state).clone()
    }

    /// Sets the state.
    pub fn set_state(&self, state: RecordingState) {
        *lock(&self.state) = state;
    }

    /// The problem that an operator should know of, if there is one.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match &*lock(&self.state) {
            RecordingState::Failed(reason) => {
                Some(format!("requests are not recorded to {}: {reason}", self.file.display()))
            }
            RecordingState::Running | RecordingState::Full => None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_all_channels_and_a_failure_is_a_problem() {
        let recording = Recording::new("/tmp/vd0.recording".into());
        let (one, two) = (recording.open_channel(), recording.open_channel());
        one.recorded.add(5);
        two.recorded.add(2);
        two.dropped.add(1);
        drop(one);
        assert_eq!(recording.counts(), RecordingCounts { recorded: 7, dropped: 1 });
        recording.set_state(RecordingState::Full);
        assert_eq!(recording.problem(), None);
        recording.set_state(RecordingState::Failed("no space".to_owned()));
        let problem = recording.problem().unwrap();
        assert!(problem.contains("/tmp/vd0.recording: no space"), "{problem}");
    }
}
