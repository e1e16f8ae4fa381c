//! The account of one stage.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use sidecore_reactor::panic_message;
use sidecore_telemetry::counters;
use sidecore_units::Nanos;

use super::floor::Lower;
use crate::sums::Sums;
use crate::{Findings, Recording};

counters! {
    /// The counters of one channel of a stage. Its sidecore alone writes them, any thread may read
    /// them.
    ///
    /// They lie on cache lines that no other sidecore writes to.
    #[repr(align(128))]
    pub struct ChannelStats;

    /// The counters of a stage at one moment: the sum over all channels that it ever had.
    pub struct StageCounts;

    /// Requests that the stage has taken.
    pub requests: Counter = "requests_total",
    /// Turns of sidecores, or of threads of the stage's own, in which the stage did something.
    pub turns: Counter = "turns_total",
    /// Time that the stage took itself, of sidecores or of threads of its own, without the store
    /// behind it.
    pub busy_ns: Counter = "busy_seconds_total",
    /// Turns of which the stage took over a millisecond, in which other disks waited.
    pub long_turns: Counter = "long_turns_total",
}

/// Threads of their own that a stage runs on, for reports.
pub trait StageThreads: Send + Sync {
    /// Their number.
    fn count(&self) -> usize;

    /// The time for which they have run, also without work, by the kernel's account.
    fn ran(&self) -> Nanos;

    /// Why requests wait for a thread in vain, if they may. Never waits.
    fn problem(&self) -> Option<String>;
}

/// The account of a stage that is open: its cost, and whether it has failed. All channels of the
/// stage share it.
#[derive(Debug)]
pub struct StageAccount {
    word: &'static str,
    store: String,
    failure: OnceLock<String>,
    is_left_out: AtomicBool,
    recording: OnceLock<Arc<Recording>>,
    findings: OnceLock<Arc<Findings>>,
    threads: OnceLock<Weak<dyn StageThreads>>,
    channels: Mutex<Sums<ChannelStats>>,
    longest_turn_ns: AtomicU64,
}

impl StageAccount {
    pub(crate) fn new(word: &'static str, store: &str) -> Self {
        Self {
            word,
            store: store.to_owned(),
            failure: OnceLock::new(),
            is_left_out: AtomicBool::new(false),
            recording: OnceLock::new(),
            findings: OnceLock::new(),
            threads: OnceLock::new(),
            channels: Mutex::default(),
            longest_turn_ns: AtomicU64::new(0),
        }
    }

    /// The counters for one more channel.
    pub(crate) fn open_channel(&self) -> Arc<ChannelStats> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).open()
    }

    /// The counts of now.
    #[must_use]
    pub fn counts(&self) -> StageCounts {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).counts()
    }

    pub(crate) fn set_recording(&self, recording: Option<Arc<Recording>>) {
        let Some(recording) = recording else { return };
        let _ = self.recording.set(recording);
    }

    /// The recording that the stage makes, if it makes one.
    #[must_use]
    pub fn recording(&self) -> Option<&Arc<Recording>> {
        self.recording.get()
    }

    pub(super) fn set_findings(&self, findings: Option<Arc<Findings>>) {
        let Some(findings) = findings else { return };
        let _ = self.findings.set(findings);
    }

    /// The bad blocks that the stage has found, if it checks blocks.
    #[must_use]
    pub fn findings(&self) -> Option<&Arc<Findings>> {
        self.findings.get()
    }

    /// Says which threads the stage runs on, before its first channel is opened.
    pub fn set_threads(&self, threads: Weak<dyn StageThreads>) {
        let _ = self.threads.set(threads);
    }

    /// The threads that the stage runs on, unless it runs on sidecores.
    #[must_use]
    pub fn threads(&self) -> Option<Arc<dyn StageThreads>> {
        self.threads.get()?.upgrade()
    }

    /// The longest time that the stage took of a turn, if that was over a millisecond once.
    #[must_use]
    pub fn longest_turn(&self) -> Nanos {
        Nanos(self.longest_turn_ns.load(Ordering::Relaxed))
    }

    /// Counts a turn of which the stage took too much, and writes it to the log each time that
    /// their number has doubled: a slow stage must not turn the sidecore into a log writer. No
    /// disk waits for turns of threads of the stage's own.
    #[cold]
    pub(crate) fn long_turn(&self, stats: &ChannelStats, took: Nanos) {
        if self.threads.get().is_some() {
            return;
        }
        self.longest_turn_ns.fetch_max(took.0, Ordering::Relaxed);
        stats.long_turns.add(1);
        let long_turns = stats.long_turns.get();
        if long_turns.is_power_of_two() {
            tracing::warn!(
                stage = self.word,
                store = self.store,
                took_us = took.0 / 1_000,
                long_turns,
                "a stage has taken over a millisecond of a turn, in which other disks of its \
                 sidecore wait"
            );
        }
    }

    /// The stage's word in the configuration.
    #[must_use]
    pub fn word(&self) -> &'static str {
        self.word
    }

    /// Why all requests fail, if the stage has failed, or why it [is left
    /// out](Self::is_left_out).
    #[must_use]
    #[inline]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Calls the stage. `None` if it has panicked; then it has failed.
    #[inline]
    pub(super) fn contain<T>(&self, lower: &Lower, call: impl FnOnce() -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.panicked(lower, panic);
                None
            }
        }
    }

    #[cold]
    fn panicked(&self, lower: &Lower, panic: Box<dyn Any + Send>) {
        if lower.is_inside() {
            // A panic of the store, of whose requests in flight nothing is known then.
            resume_unwind(panic);
        }
        self.fail(format!("it has panicked: {}", panic_message(panic)));
    }

    /// Notes that an observer has panicked, and looks at no further request.
    #[cold]
    pub(crate) fn leave_out(&self, message: &str) {
        self.is_left_out.store(true, Ordering::Relaxed);
        if self.failure.set(format!("it has panicked: {message}")).is_ok() {
            tracing::error!(
                stage = self.word,
                store = self.store,
                "a stage has failed, and is left out: {}",
                self.failure().unwrap_or_default()
            );
        }
    }

    /// Whether the requests of a stage that has failed go on without it.
    #[must_use]
    pub fn is_left_out(&self) -> bool {
        self.is_left_out.load(Ordering::Relaxed)
    }

    /// Sets the reason why the stage's requests fail from now on. The first one counts.
    #[cold]
    pub(super) fn fail(&self, reason: String) {
        if self.failure.set(reason).is_ok() {
            tracing::error!(
                stage = self.word,
                store = self.store,
                "a stage has failed, and so do the requests of its device: {}",
                self.failure().unwrap_or_default()
            );
        }
    }
}
