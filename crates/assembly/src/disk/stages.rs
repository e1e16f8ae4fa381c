//! Stages that come and go while the device is in use.
//!
//! They stand in front of the store that the device serves, which may have stages of its own by the
//! configuration and other users. A stage that is opened holds the device below it; so the stages
//! in front of one that comes or goes are opened again.

use std::sync::{Arc, MutexGuard, PoisonError};

use sidecore_block::{BlockDevice, Geometry, Meter, StageAccount};

use super::Disk;
use crate::operation::{ErrorKind, OperationError};
use crate::report::{
    FindingsReport, RecordingReport, StageChange, StageReport, StageStats, StagesReport,
};
use crate::spec::StageSpec;
use crate::swap::{NotSwapped, Swapped};

/// The largest number of stages that a device gets while it runs.
const STAGES_MAX: usize = 8;

/// A stage to be added, with its settings as reports show them: `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedStage {
    /// The stage.
    pub spec: StageSpec,
    /// The keys that were given, with their values.
    pub settings: Vec<String>,
}

/// A stage that was added, and the device that it makes of the one below it.
#[derive(Clone)]
struct LiveStage {
    added: AddedStage,
    device: Arc<dyn BlockDevice>,
}

/// The stages that were added to a device, and the store behind them.
#[derive(Clone, Default)]
pub(super) struct Live {
    /// `None` of a NIC, while the device is detached, and after it was closed.
    base: Option<Arc<dyn BlockDevice>>,
    /// In the order of a request.
    stages: Vec<LiveStage>,
}

impl Live {
    /// No stages in front of `base`.
    pub(super) fn new(base: Option<Arc<dyn BlockDevice>>) -> Self {
        Self { base, stages: Vec::new() }
    }

    /// The types of the stages, in the order of a request.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        self.stages.iter().map(|stage| stage.added.spec.word().to_owned())
    }

    /// The device that requests come to first.
    fn top(&self) -> Option<&Arc<dyn BlockDevice>> {
        self.stages.first().map(|stage| &stage.device).or(self.base.as_ref())
    }

    /// The same stages of the device of this name, the first `count` of which are opened again, on
    /// those below them.
    fn reopened(&self, name: &str, count: usize) -> Result<Self, OperationError> {
        let (front, kept) = self.stages.split_at(count.min(self.stages.len()));
        let mut live = Self { base: self.base.clone(), stages: kept.to_vec() };
        for stage in front.iter().rev() {
            live = live.with(name, &stage.added)?;
        }
        Ok(live)
    }

    /// These stages of the device of this name, with one more in front of them.
    fn with(mut self, name: &str, added: &AddedStage) -> Result<Self, OperationError> {
        let below = self.top().ok_or_else(detached)?;
        let word = added.spec.word();
        let opened = added.spec.open(name, Arc::clone(below));
        let device =
            opened.map_err(|error| OperationError::new(ErrorKind::Invalid, error.to_string()))?;
        if let Some(difference) = difference(&below.geometry(), &device.geometry()) {
            let message = format!(
                "stage \"{word}\" would change {difference} of a disk that its guest knows \
                 already; name the stage with the disk's store in the configuration"
            );
            return Err(OperationError::new(ErrorKind::Conflict, message));
        }
        self.stages.insert(0, LiveStage { added: added.clone(), device });
        Ok(self)
    }
}

/// The property that a guest would have to be told of anew.
fn difference(below: &Geometry, above: &Geometry) -> Option<&'static str> {
    let is_same = |of: fn(&Geometry) -> u64| of(below) == of(above);
    let same = [
        (is_same(|geometry| geometry.read_only.into()), "the write protection"),
        (is_same(|geometry| geometry.capacity_bytes), "the size"),
        (is_same(|geometry| geometry.block_bytes.into()), "the block size"),
        (is_same(|geometry| geometry.physical_block_bytes.into()), "the physical block size"),
        (is_same(|geometry| geometry.volatile_cache.into()), "the write cache"),
    ];
    let other = same.into_iter().find(|(is_same, _)| !is_same).map(|(_, property)| property);
    other.or_else(|| (below != above).then_some("the discards"))
}

fn detached() -> OperationError {
    OperationError::new(ErrorKind::Conflict, "the device has no store at present")
}

impl Disk {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The meters on the way of requests, if stages were added; else the store's are all.
    pub(super) fn live_meters(&self) -> Option<Vec<Arc<Meter>>> {
        let live = self.live();
        live.stages.first().map(|stage| stage.device.meters())
    }

    /// The accounts of all stages, in the order of a request.
    fn stage_accounts(&self) -> Vec<Arc<StageAccount>> {
        let top = self.live().top().cloned();
        top.map(|device| device.stages()).unwrap_or_default()
    }

    /// Reads the counters of the stages.
    pub(crate) fn stage_stats(&self) -> Vec<StageStats> {
        let accounts = (1_usize..).zip(self.stage_accounts());
        let stats = accounts.map(|(position, account)| {
            let threads = account.threads();
            StageStats {
                device: self.spec.name.clone(),
                position,
                word: account.word().to_owned(),
                has_failed: account.failure().is_some(),
                longest_turn_ns: account.longest_turn().0,
                threads: threads.as_ref().map_or(0, |threads| threads.count()),
                threads_ran_ns: threads.map_or(0, |threads| threads.ran().0),
                recording: account.recording().map(|recording| RecordingReport::of(recording)),
                findings: account.findings().map(|findings| FindingsReport::of(findings)),
                counts: account.counts(),
            }
        });
        stats.collect()
    }

    /// The problems of stages without which requests go on.
    pub(super) fn stage_problems(&self) -> Vec<String> {
        let accounts = self.stage_accounts();
        let left_out = accounts.iter().filter(|account| account.is_left_out()).filter_map(|it| {
            let (word, failure) = (it.word(), it.failure()?);
            Some(format!("stage \"{word}\" is left out, {failure}"))
        });
        let recordings = accounts.iter().filter_map(|account| account.recording()?.problem());
        let threads = accounts.iter().filter_map(|account| account.threads()?.problem());
        let findings = accounts.iter().filter_map(|account| {
            Some(format!("stage \"{}\": {}", account.word(), account.findings()?.problem()?))
        });
        left_out.chain(recordings).chain(threads).chain(findings).collect()
    }

    /// Why the device's requests fail, if a stage has failed, and the remedy.
    pub(super) fn failed_stage(&self) -> Option<String> {
        let added = self.live().stages.len();
        let accounts = self.stage_accounts();
        let fails = |account: &StageAccount| account.failure().is_some() && !account.is_left_out();
        let (index, account) = accounts.iter().enumerate().find(|(_, account)| fails(account))?;
        let (word, name) = (account.word(), &self.spec.name);
        let remedy = match index.saturating_add(1) {
            position if position <= added => {
                format!("remove it with `sidecore stage remove {name} {position}`")
            }
            _ => "restart the daemon, which opens it again".to_owned(),
        };
        let failure = account.failure()?;
        Some(format!("all requests fail: stage \"{word}\" has failed, {failure}; {remedy}"))
    }

    /// The types of all stages, in the order of a request.
    pub(super) fn stage_words(&self) -> Vec<String> {
        self.live().words().chain(self.stages.iter().cloned()).collect()
    }

    /// Replaces the store behind the stages, which are dropped: they belonged to the former one.
    pub(super) fn set_base(&self, base: Option<Arc<dyn BlockDevice>>) {
        // A change that has begun ends before.
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *self.live(), Live::new(base));
        for word in before.words() {
            tracing::warn!(device = self.spec.name, stage = word, "removed, with its store");
        }
    }

    /// Logs the stages that were added: the daemon ends, and they go with it.
    pub(super) fn end_stages(&self) {
        for word in self.live().words() {
            tracing::warn!(
                device = self.spec.name,
                stage = word,
                "a stage that was added at run time ends with this daemon"
            );
        }
    }

    /// Reports the stages, in the order of a request.
    pub(crate) fn stages(&self) -> StagesReport {
        let accounts = self.stage_accounts();
        let account = |position: usize| accounts.get(position.checked_sub(1)?);
        let live = self.live();
        let added = live.stages.iter().map(|LiveStage { added, .. }| {
            (added.spec.word().to_owned(), true, added.settings.clone())
        });
        let configured = self.stages.iter().map(|word| (word.clone(), false, Vec::new()));
        let stages = (1_usize..).zip(added.chain(configured));
        StagesReport {
            device: self.spec.name.clone(),
            stages: stages
                .map(|(position, (word, is_live, settings))| StageReport {
                    position,
                    word,
                    is_live,
                    settings,
                    threads: account(position)
                        .and_then(|it| it.threads())
                        .map_or(0, |threads| threads.count()),
                    failure: account(position).and_then(|it| it.failure()).map(str::to_owned),
                    recording: account(position)
                        .and_then(|it| it.recording())
                        .map(|recording| RecordingReport::of(recording)),
                    findings: account(position)
                        .and_then(|it| it.findings())
                        .map(|findings| FindingsReport::of(findings)),
                })
                .collect(),
        }
    }

    /// Adds a stage at a position among those that were added; 1 is the first that a request meets.
    pub(crate) fn add_stage(
        &self,
        added: &AddedStage,
        position: usize,
    ) -> Result<StageChange, OperationError> {
        let refuse = |kind, why: String| Err(OperationError::new(kind, why));
        let (word, name) = (added.spec.word(), &self.spec.name);
        if self.spec.front_end.switch().is_some() {
            return refuse(
                ErrorKind::Invalid,
                format!("\"{name}\" is a NIC, and stages are of disks; see `sidecore net --help`"),
            );
        }
        if added.spec.transforms() {
            return refuse(
                ErrorKind::Invalid,
                format!(
                    "stage \"{word}\" changes the bytes that its store holds, so it cannot come or \
                     go while the disk has data: name it with the disk's store in the configuration"
                ),
            );
        }
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.live().clone();
        let count = before.stages.len();
        if count >= STAGES_MAX {
            return refuse(
                ErrorKind::Conflict,
                format!("\"{name}\" has {STAGES_MAX} added stages already; remove one"),
            );
        }
        let Some(index) = position.checked_sub(1).filter(|index| *index <= count) else {
            let most = count.saturating_add(1);
            return refuse(
                ErrorKind::Invalid,
                format!(
                    "position {position} is none of 1 to {most}: an added stage is in front of \
                     those of the store, which may have other users"
                ),
            );
        };
        let kept = before.stages.get(index..).unwrap_or_default().to_vec();
        let mut after = Live { base: before.base.clone(), stages: kept }.with(name, added)?;
        after.stages.splice(0..0, before.stages.iter().take(index).cloned());
        let swapped = self.go_on_with(&before, after.reopened(&self.spec.name, index)?)?;
        Ok(self.changed(word, position, swapped))
    }

    /// Removes an added stage, which `which` names by its type or its position.
    pub(crate) fn remove_stage(&self, which: &str) -> Result<StageChange, OperationError> {
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.live().clone();
        let index = self.find_stage(&before, which)?;
        let mut after = before.clone();
        let removed = after.stages.remove(index);
        let swapped = self.go_on_with(&before, after.reopened(&self.spec.name, index)?)?;
        Ok(self.changed(removed.added.spec.word(), index.saturating_add(1), swapped))
    }

    /// Finds an added stage by its type or its position.
    fn find_stage(&self, live: &Live, which: &str) -> Result<usize, OperationError> {
        let name = &self.spec.name;
        let shown: String = which.chars().filter(|c| !c.is_control()).take(40).collect();
        let refuse = |kind, why: &str| {
            let why = format!("stage \"{shown}\" of \"{name}\" {why}");
            Err(OperationError::new(kind, why))
        };
        let words: Vec<String> = live.words().collect();
        let all = self.stages.len().saturating_add(words.len());
        let index = match which.parse::<usize>() {
            Ok(position) if position <= all => position.checked_sub(1),
            Ok(_) => None,
            Err(_) => {
                let mut found = (0..words.len()).filter(|index| words[*index] == which);
                match (found.next(), found.next()) {
                    (Some(_), Some(_)) => {
                        let why = "is there several times; name its position, which `sidecore \
                                   stage list` shows";
                        return refuse(ErrorKind::Conflict, why);
                    }
                    (Some(index), None) => Some(index),
                    (None, _) => self.stages.iter().any(|word| word == which).then_some(all),
                }
            }
        };
        match index {
            None => refuse(ErrorKind::NotFound, "does not exist; see `sidecore stage list`"),
            Some(index) if index >= words.len() => {
                let why = "belongs to its store: remove it in the configuration, and restart the \
                           daemon";
                refuse(ErrorKind::Conflict, why)
            }
            Some(index) => Ok(index),
        }
    }

    /// Has the queues go on with other stages.
    fn go_on_with(&self, before: &Live, after: Live) -> Result<Swapped, OperationError> {
        let (Some(from), Some(to)) = (before.top(), after.top()) else { return Err(detached()) };
        let swapped = self.front_end.swap_store(from, to).map_err(|error| {
            let kind = match &error {
                NotSwapped::Channel(_) | NotSwapped::StillInFlight => ErrorKind::Failed,
                NotSwapped::FrontEnd(_) | NotSwapped::Changed => ErrorKind::Conflict,
            };
            OperationError::new(kind, format!("\"{}\": {error}", self.spec.name))
        })?;
        let mut live = self.live();
        // Closed meanwhile, if there is no base.
        if live.base.is_some() {
            *live = after;
        }
        Ok(swapped)
    }

    fn changed(&self, word: &str, position: usize, swapped: Swapped) -> StageChange {
        let Swapped { queues, opening, paused, closing } = swapped;
        let pause_ns = u64::try_from(swapped.pause().as_nanos()).unwrap_or(u64::MAX);
        let device = self.spec.name.clone();
        tracing::info!(
            device,
            stage = word,
            position,
            queues,
            ?opening,
            ?paused,
            ?closing,
            "stages changed"
        );
        StageChange { device, word: word.to_owned(), position, queues, pause_ns }
    }

    /// Lets go of the store.
    pub(super) fn close_stages(&self) {
        let live = std::mem::take(&mut *self.live());
        // Without the lock: the stages' own code runs here, and may take long.
        drop(live);
    }
}
