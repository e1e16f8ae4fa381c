//! The thread of a run.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sidecore_block::BlockDevice;

use super::pace::{Pace, WINDOW};
use super::{DedupCounts, DedupOptions, DedupReport, DedupRun, DedupState, DedupStep};
use crate::ControllerError;
use crate::hypervisor::Hypervisor;
use crate::physical::PhysicalDisk;

/// The pause between two looks whether writes have ended, or the run is to stop.
const SHORT_PAUSE: Duration = Duration::from_micros(500);
const LONG_PAUSE: Duration = Duration::from_millis(20);
/// The longest wait for writes to blocks that are to be compared.
const PATIENCE: Duration = Duration::from_secs(1);

/// The run of a controller: at most one, kept after its end for reports.
#[derive(Default)]
pub(crate) struct Jobs(Mutex<Option<Job>>);

struct Job {
    shared: Arc<Shared>,
    /// `None` once it was waited for.
    thread: Option<JoinHandle<()>>,
}

/// The state that a run's thread shares.
struct Shared {
    stop: AtomicBool,
    report: Mutex<DedupReport>,
}

impl Shared {
    fn report(&self) -> MutexGuard<'_, DedupReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Sleeps, or returns early to stop.
    fn sleep(&self, mut time: Duration) {
        while !time.is_zero() && !self.should_stop() {
            let now = time.min(LONG_PAUSE);
            std::thread::sleep(now);
            time = time.saturating_sub(now);
        }
    }
}

impl Job {
    /// The run's report; of a thread that has panicked, as it was left.
    fn report(&self) -> DedupReport {
        let mut report = self.shared.report();
        let is_over = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        if is_over && report.state == DedupState::Running {
            report.state = DedupState::Failed("it has panicked".to_owned());
        }
        report.clone()
    }
}

impl Jobs {
    fn job(&self) -> MutexGuard<'_, Option<Job>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn start(
        &self,
        hypervisor: &Arc<Hypervisor>,
        store: &Arc<dyn BlockDevice>,
        options: &DedupOptions,
    ) -> Result<DedupReport, ControllerError> {
        let mut job = self.job();
        if job.as_ref().is_some_and(|job| job.report().state == DedupState::Running) {
            return Err(ControllerError::DedupRuns);
        }
        let key = RandomState::new().hash_one("the key of a run");
        let run = DedupRun::new(hypervisor, options, key)?;
        let report = DedupReport {
            options: options.clone(),
            state: DedupState::Running,
            yields: false,
            took: Duration::ZERO,
            counts: run.counts(),
        };
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), report: Mutex::new(report) });
        let work = Work {
            hypervisor: Arc::clone(hypervisor),
            store: Arc::clone(store),
            shared: Arc::clone(&shared),
            run,
            started: Instant::now(),
        };
        let thread =
            std::thread::Builder::new().name("dedup".to_owned()).spawn(move || work.run())?;
        let started = Job { shared, thread: Some(thread) };
        let report = started.report();
        *job = Some(started);
        Ok(report)
    }

    pub(crate) fn report(&self) -> Option<DedupReport> {
        self.job().as_ref().map(Job::report)
    }

    pub(crate) fn stop(&self) -> Option<DedupReport> {
        let (shared, thread) = {
            let mut job = self.job();
            let job = job.as_mut()?;
            job.shared.stop.store(true, Ordering::Release);
            (Arc::clone(&job.shared), job.thread.take())
        };
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a deduplication has panicked");
        }
        let report = shared.report().clone();
        Some(report)
    }
}

/// The work of a run's thread.
struct Work {
    hypervisor: Arc<Hypervisor>,
    store: Arc<dyn BlockDevice>,
    shared: Arc<Shared>,
    run: DedupRun,
    started: Instant,
}

impl Work {
    fn run(mut self) {
        let ended = self.take_steps();
        self.run.give_up(&self.hypervisor);
        // A run that was stopped or has failed has changed mappings as well.
        let durable = if self.run.counts().remaps > 0 { self.commit() } else { Ok(()) };
        let state = match ended.and_then(|state| durable.map(|()| state)) {
            Ok(state) => state,
            Err(error) => DedupState::Failed(error.to_string()),
        };
        self.note(&state);
        let mut report = self.shared.report();
        report.state = state;
        report.took = self.started.elapsed();
        report.counts = self.run.counts();
        report.yields = false;
    }

    fn take_steps(&mut self) -> Result<DedupState, ControllerError> {
        let mut disk = PhysicalDisk::open(&self.store)?;
        let dedup = &mut self.run;
        let options = self.shared.report().options.clone();
        let mut pace = Pace::new(options.bytes_per_s, self.hypervisor.requests());
        let (mut counted, mut waiting) = (Instant::now(), None);
        while !self.shared.should_stop() {
            let began = Instant::now();
            match dedup.step(&self.hypervisor, &mut disk)? {
                DedupStep::Done => return Ok(DedupState::Done),
                DedupStep::Worked(bytes) => {
                    waiting = None;
                    let time = pace.time_for(bytes).saturating_sub(began.elapsed());
                    self.shared.sleep(time);
                }
                DedupStep::Waits => {
                    let since = *waiting.get_or_insert(began);
                    if since.elapsed() > PATIENCE {
                        dedup.pass(&self.hypervisor);
                    }
                    std::thread::sleep(SHORT_PAUSE);
                }
                DedupStep::NeedsCommit => {
                    commit(&self.hypervisor)?;
                    self.shared.sleep(LONG_PAUSE);
                }
            }
            if counted.elapsed() >= WINDOW {
                pace.note(self.hypervisor.requests(), counted.elapsed());
                counted = Instant::now();
            }
            let mut report = self.shared.report();
            report.counts = dedup.counts();
            report.yields = pace.is_busy();
            report.took = self.started.elapsed();
        }
        Ok(DedupState::Stopped)
    }

    fn commit(&self) -> Result<(), ControllerError> {
        commit(&self.hypervisor)
    }

    /// Adds an event about the end of the run.
    fn note(&self, state: &DedupState) {
        let DedupCounts { saved_bytes, unreadable_bytes, passed_bytes, .. } = self.run.counts();
        let dry_run = self.shared.report().options.dry_run;
        let saved = if dry_run { "would save" } else { "has freed" };
        let mut what = format!(
            "a deduplication {saved} {saved_bytes} bytes of {passed_bytes} that it has passed"
        );
        match state {
            DedupState::Stopped => what.push_str("; it was stopped"),
            DedupState::Failed(why) => what.push_str(&format!("; it has failed: {why}")),
            DedupState::Running | DedupState::Done => {}
        }
        if unreadable_bytes > 0 {
            what.push_str(&format!("; {unreadable_bytes} bytes could not be read, and were left"));
        }
        self.hypervisor.events.note(&self.hypervisor.name, what);
    }
}

/// Makes everything durable that was changed until now.
fn commit(hypervisor: &Hypervisor) -> Result<(), ControllerError> {
    let (reply, answer) = mpsc::sync_channel(1);
    hypervisor.commits.ask_for_operation(reply);
    match answer.recv() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(ControllerError::Commit(why)),
        Err(_) => Err(ControllerError::Down),
    }
}
