//! Snapshots by schedules. Once a minute, the snapshots of each volume are compared with the rules
//! of its schedule, and the plan is carried out: first the new snapshot, then deletions.

mod report;
mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use sidecore_schedule::Unchanged;
use sidecore_volume::VolumeInfo;

use crate::AssemblyError;
use crate::controllers::{ControllerHandle, Controllers};
use crate::graph::{Lists, lock};
use crate::report::ScheduledVolumeReport;
use crate::spec::ScheduleSpec;
use crate::wanted::Wanted;
use run::{Ran, Run};

/// The schedules, and the results of their looks.
pub(crate) struct Schedules {
    controllers: Arc<Controllers>,
    wanted: Arc<Mutex<Wanted>>,
    /// A look ends when they are others than at its beginning.
    specs: Mutex<Arc<Vec<ScheduleSpec>>>,
    /// By the names of controllers. Locked while the schedules of the controller run.
    running: Mutex<BTreeMap<String, Arc<Mutex<()>>>>,
    /// The state of each controller that was looked at. Locked for a moment only.
    states: Mutex<BTreeMap<String, OnController>>,
    /// The minute of the last look; `None` if one is due.
    looked: Mutex<Option<u64>>,
    /// Warnings that the log has.
    warned: Mutex<BTreeSet<String>>,
}

#[derive(Default)]
struct OnController {
    /// By the numbers of volumes.
    volumes: BTreeMap<u64, VolumeState>,
    /// By the names of schedules.
    counts: BTreeMap<String, Counts>,
}

#[derive(Clone, Default)]
struct VolumeState {
    schedule: String,
    /// The look that found the volume to be as in its newest snapshot, if none was made since.
    unchanged: Option<Unchanged>,
    report: ScheduledVolumeReport,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    last_success_unix_s: Option<u64>,
    made: u64,
    deleted: u64,
    failures: u64,
}

impl Schedules {
    pub(crate) fn new(lists: &Lists, specs: &[ScheduleSpec]) -> Self {
        Self {
            controllers: Arc::clone(&lists.controllers),
            wanted: Arc::clone(&lists.wanted),
            specs: Mutex::new(Arc::new(specs.to_vec())),
            running: Mutex::default(),
            states: Mutex::default(),
            looked: Mutex::default(),
            warned: Mutex::default(),
        }
    }

    /// Refuses schedules of one name, and those of missing controllers.
    pub(crate) fn check<'a>(
        specs: &[ScheduleSpec],
        controllers: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), AssemblyError> {
        let mut names = BTreeSet::new();
        for spec in specs {
            if !names.insert(&spec.name) {
                let name = spec.name.clone();
                return Err(AssemblyError::Duplicate { kind: "schedule", name });
            }
            if let Some(name) = &spec.controller
                && !controllers.clone().any(|there| there == name)
            {
                let (user, name) = (format!("schedule \"{}\"", spec.name), name.clone());
                return Err(AssemblyError::Unknown { user, kind: "controller", name });
            }
        }
        Ok(())
    }

    /// Replaces all schedules. Those that are due run at once. A look by the former ones ends with
    /// the change of a volume that it is at.
    pub(crate) fn replace(&self, specs: Vec<ScheduleSpec>) -> Result<(), AssemblyError> {
        let names: Vec<String> = self.controllers.names();
        Self::check(&specs, names.iter().map(String::as_str))?;
        let specs = Arc::new(specs);
        *lock(&self.specs) = Arc::clone(&specs);
        for state in lock(&self.states).values_mut() {
            state.counts.retain(|name, _| specs.iter().any(|spec| spec.name == *name));
        }
        *lock(&self.looked) = None;
        Ok(())
    }

    /// Whether the schedules are those, and were not replaced since.
    fn are(&self, specs: &Arc<Vec<ScheduleSpec>>) -> bool {
        Arc::ptr_eq(specs, &lock(&self.specs))
    }

    /// Looks at each controller once in a minute of the clock, on threads of their own: a store
    /// that does not answer delays no other one.
    pub(crate) fn tick(self: &Arc<Self>, now_unix_s: u64) {
        let minute = now_unix_s / 60;
        if lock(&self.looked).replace(minute) == Some(minute) || lock(&self.specs).is_empty() {
            return;
        }
        for controller in self.controllers.all() {
            let this = Arc::clone(self);
            let run = move || {
                let running = this.running(controller.name());
                let running = match running.try_lock() {
                    Ok(running) => running,
                    // The thread that held it has panicked.
                    Err(TryLockError::Poisoned(error)) => error.into_inner(),
                    Err(TryLockError::WouldBlock) => return,
                };
                this.run(&controller, &running, now_unix_s);
            };
            if let Err(error) = std::thread::Builder::new().name("schedules".to_owned()).spawn(run)
            {
                tracing::warn!("no snapshot is made in this minute: {error}");
            }
        }
    }

    /// Looks at all controllers now, and returns when all is done.
    pub(crate) fn run_all(&self, now_unix_s: u64) {
        for controller in self.controllers.all() {
            let running = self.running(controller.name());
            self.run(&controller, &lock(&running), now_unix_s);
        }
    }

    fn running(&self, controller: &str) -> Arc<Mutex<()>> {
        Arc::clone(lock(&self.running).entry(controller.to_owned()).or_default())
    }

    fn run(&self, controller: &ControllerHandle, _running: &MutexGuard<'_, ()>, now: u64) {
        let specs = Arc::clone(&lock(&self.specs));
        let volumes = controller.infos();
        let mut failed = BTreeSet::new();
        let mut found = BTreeSet::new();
        for volume in volumes.iter().filter(|volume| !volume.read_only) {
            let fits = |spec: &&ScheduleSpec| spec.fits(controller.name(), &volume.name);
            let Some(spec) = specs.iter().find(fits) else { continue };
            if !self.are(&specs) {
                return;
            }
            let run =
                Run { schedules: self, controller, specs: &specs, spec, volume, volumes: &volumes };
            let ran = run.run(now, &self.state(controller.name(), volume));
            if ran.is_ending {
                return;
            }
            if ran.report.error.is_some() {
                failed.insert(spec.name.as_str());
            }
            found.insert(volume.id.0);
            self.note(controller, spec, volume, ran);
        }
        if !self.are(&specs) {
            return;
        }
        if let Some(state) = lock(&self.states).get_mut(controller.name()) {
            state.volumes.retain(|id, _| found.contains(id));
        }
        self.succeed(controller.name(), &specs, &failed, now);
        self.warn(now);
    }

    /// The volumes that stores are configured on, whether or not they are open: each with the name
    /// of the store.
    fn configured(&self, controller: &str) -> BTreeMap<String, String> {
        let wanted = lock(&self.wanted);
        let stores = wanted.spec.stores.iter();
        let volumes = stores.filter_map(|store| Some((store.kind.volume()?, &store.name)));
        let its = volumes.filter(|(volume, _)| volume.controller == controller);
        its.map(|(volume, store)| (volume.volume.clone(), store.clone())).collect()
    }

    /// The result of the last look at a volume.
    fn state(&self, controller: &str, volume: &VolumeInfo) -> VolumeState {
        let states = lock(&self.states);
        let of_volume = states.get(controller).and_then(|state| state.volumes.get(&volume.id.0));
        of_volume.cloned().unwrap_or_default()
    }

    /// Keeps the result of a volume's run, and makes an event of a failure and of its end.
    fn note(
        &self,
        controller: &ControllerHandle,
        spec: &ScheduleSpec,
        volume: &VolumeInfo,
        ran: Ran,
    ) {
        let error = ran.report.error.clone();
        let mut states = lock(&self.states);
        let state = states.entry(controller.name().to_owned()).or_default();
        let counts = state.counts.entry(spec.name.clone()).or_default();
        counts.made = counts.made.saturating_add(ran.made.into());
        counts.deleted = counts.deleted.saturating_add(ran.deleted);
        counts.failures = counts.failures.saturating_add(error.is_some().into());
        let next = VolumeState {
            schedule: spec.name.clone(),
            unchanged: ran.unchanged,
            report: ran.report,
        };
        let before = state.volumes.insert(volume.id.0, next);
        drop(states);
        let before = before.and_then(|before| before.report.error);
        match (before, error) {
            (before, Some(error)) if before.as_ref() != Some(&error) => controller.note(format!(
                "schedule \"{}\" failed at volume \"{}\", and is repeated: {error}",
                spec.name, volume.name
            )),
            (Some(_), None) => controller.note(format!(
                "schedule \"{}\" has succeeded again at volume \"{}\"",
                spec.name, volume.name
            )),
            _ => {}
        }
    }

    /// Notes the success of the schedules that have not failed at a volume of this controller.
    fn succeed(&self, controller: &str, specs: &[ScheduleSpec], failed: &BTreeSet<&str>, now: u64) {
        let mut states = lock(&self.states);
        let state = states.entry(controller.to_owned()).or_default();
        for spec in specs.iter().filter(|spec| !failed.contains(spec.name.as_str())) {
            if spec.controller.as_deref().is_none_or(|wanted| wanted == controller) {
                let counts = state.counts.entry(spec.name.clone()).or_default();
                counts.last_success_unix_s = Some(now);
            }
        }
    }

    /// Logs the warnings of reports, each once while it lasts.
    fn warn(&self, now: u64) {
        let reports = self.report(now);
        let warnings: BTreeSet<String> = reports
            .into_iter()
            .filter_map(|report| Some(format!("schedule \"{}\": {}", report.name, report.warning?)))
            .collect();
        let mut warned = lock(&self.warned);
        for warning in warnings.difference(&warned) {
            tracing::warn!("{warning}");
        }
        *warned = warnings;
    }
}
