//! The thread of a run.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
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
pub(crate) struct Jobs(Mutex<Option<Arc<Shared>>>);

/// The state that a run's thread shares.
struct Shared {
    stop: AtomicBool,
    /// Its state is [`DedupState::Running`] until the thread has let go of everything else.
    report: Mutex<DedupReport>,
    ended: Condvar,
}

impl Shared {
    fn new(report: DedupReport) -> Self {
        Self { stop: AtomicBool::new(false), report: Mutex::new(report), ended: Condvar::new() }
    }

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

    /// Waits for the end of the run.
    fn wait(&self) -> DedupReport {
        let running = |report: &mut DedupReport| report.state == DedupState::Running;
        let ended = self.ended.wait_while(self.report(), running);
        ended.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Ends the run when it is dropped, also by a panic.
struct End {
    shared: Arc<Shared>,
    /// `None` while the thread is at work.
    state: Option<DedupState>,
}

impl Drop for End {
    fn drop(&mut self) {
        let state = self.state.take().unwrap_or_else(|| {
            tracing::error!("a deduplication has panicked");
            DedupState::Failed("it has panicked".to_owned())
        });
        self.shared.report().state = state;
        self.shared.ended.notify_all();
    }
}

/// Starts the thread of a run. The work returns the state that the run ends in.
fn spawn(
    shared: &Arc<Shared>,
    work: impl FnOnce() -> DedupState + Send + 'static,
) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    let thread = move || {
        let mut end = End { shared, state: None };
        end.state = Some(work());
    };
    // Those who wait for the end wait for the state, as there may be several.
    std::thread::Builder::new().name("dedup".to_owned()).spawn(thread).map(drop)
}

impl Jobs {
    fn job(&self) -> MutexGuard<'_, Option<Arc<Shared>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn start(
        &self,
        hypervisor: &Arc<Hypervisor>,
        store: &Arc<dyn BlockDevice>,
        options: &DedupOptions,
    ) -> Result<DedupReport, ControllerError> {
        let mut job = self.job();
        // Also while it is being stopped: the store has one guard.
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
        let shared = Arc::new(Shared::new(report));
        let work = Work {
            hypervisor: Arc::clone(hypervisor),
            store: Arc::clone(store),
            shared: Arc::clone(&shared),
            run,
            started: Instant::now(),
        };
        spawn(&shared, move || work.run())?;
        let report = shared.report().clone();
        *job = Some(shared);
        Ok(report)
    }

    pub(crate) fn report(&self) -> Option<DedupReport> {
        self.job().as_ref().map(|job| job.report().clone())
    }

    /// Stops the run and waits for its end, as others may do at the same time.
    pub(crate) fn stop(&self) -> Option<DedupReport> {
        let job = self.job().clone()?;
        job.stop.store(true, Ordering::Release);
        Some(job.wait())
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
    /// Returns the state that the run ends in.
    fn run(mut self) -> DedupState {
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
        report.took = self.started.elapsed();
        report.counts = self.run.counts();
        report.yields = false;
        drop(report);
        state
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
                    self.shared.sleep(pace.pause(bytes, began.elapsed()));
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

#[cfg(test)]
mod tests {
    use sidecore_block::{Geometry, RamStore};
    use sidecore_volume::FormatOptions;

    use super::*;
    use crate::{Controller, ControllerOptions};

    /// A controller with a run that does this.
    fn controller(
        work: impl FnOnce() -> DedupState + Send + 'static,
    ) -> (Arc<Controller>, Arc<Shared>) {
        let store = Arc::new(RamStore::new(Geometry::new(16 << 20, 512)).unwrap());
        let format =
            FormatOptions { block_bytes: 4096, label: String::new(), uuid: [7; 16], force: false };
        let options = ControllerOptions { format: Some(format), ..ControllerOptions::default() };
        let controller = Controller::open("pool", store, &options, None).unwrap();
        let shared = Arc::new(Shared::new(DedupReport {
            options: DedupOptions::default(),
            state: DedupState::Running,
            yields: false,
            took: Duration::ZERO,
            counts: DedupCounts::default(),
        }));
        spawn(&shared, work).unwrap();
        *controller.dedup_jobs.job() = Some(Arc::clone(&shared));
        (controller, shared)
    }

    #[test]
    fn all_who_stop_a_run_wait_for_its_end_and_none_starts_meanwhile() {
        let (end, ends) = mpsc::channel();
        let (controller, shared) = controller(move || {
            ends.recv().unwrap();
            DedupState::Stopped
        });
        std::thread::scope(|scope| {
            let stoppers = [(); 2].map(|()| scope.spawn(|| controller.stop_dedup().unwrap()));
            while !shared.should_stop() {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(50));
            let early = stoppers.iter().any(|stopper| stopper.is_finished());
            let state = controller.dedup().unwrap().state;
            let started = controller.start_dedup(&DedupOptions::default());
            end.send(()).unwrap();
            assert!(!early && state == DedupState::Running, "{state:?}");
            assert!(matches!(started, Err(ControllerError::DedupRuns)));
            for stopper in stoppers {
                assert_eq!(stopper.join().unwrap().state, DedupState::Stopped);
            }
        });
        controller.start_dedup(&DedupOptions::default()).unwrap();
    }

    #[test]
    fn a_run_that_panics_has_failed() {
        let (controller, _) = controller(|| panic!("as the test wants"));
        let failed = DedupState::Failed("it has panicked".to_owned());
        assert_eq!(controller.stop_dedup().unwrap().state, failed);
        controller.start_dedup(&DedupOptions::default()).unwrap();
    }
}
