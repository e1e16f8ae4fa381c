//! The stages of a port, contained: a panic in the code of a stage fails the frames of its port,
//! and nothing else.
//!
//! A stage that has panicked is not called again. Its port drops all frames, because the stage
//! might have dropped them, until it is replaced or taken away. A capture decides on no frame: the
//! port goes on without it.

use std::cell::OnceCell;

use sidecore_reactor::caught;
use sidecore_units::Nanos;

use crate::held::HeldFrame;
use crate::{DropCause, Dropped, FrameStage, StageFrame, StagePlace, StageRun, Verdict, Way};

/// The failure of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageFailure {
    /// The place of the stage.
    pub place: StagePlace,
    /// The message of its panic.
    pub message: String,
}

impl StageFailure {
    /// Its consequence for the port, as the end of a sentence.
    #[must_use]
    pub const fn consequence(&self) -> &'static str {
        match self.place {
            StagePlace::Capture => ", and is left out",
            _ => ", and its frames are dropped until the stage is replaced or taken away",
        }
    }
}

struct PlacedStage {
    place: StagePlace,
    stage: Box<dyn FrameStage>,
    failure: OnceCell<StageFailure>,
    /// Whether the owner of the switch knows of the failure.
    is_known: bool,
}

impl PlacedStage {
    fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    #[cold]
    fn fail(&self, message: String) {
        // The first failure counts.
        let _ = self.failure.set(StageFailure { place: self.place, message });
    }
}

/// The stages of a port, in the order of their places.
pub(crate) struct Stages {
    placed: Vec<PlacedStage>,
    /// The failure of a capture, which is dropped, until its place has another stage or none.
    left_out: Option<StageFailure>,
}

impl Stages {
    pub fn new() -> Self {
        Self { placed: Vec::with_capacity(StagePlace::COUNT), left_out: None }
    }

    pub const fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    /// The failure of the port's stages, if any has failed.
    pub fn failure(&self) -> Option<&StageFailure> {
        self.placed.iter().find_map(|stage| stage.failure.get()).or(self.left_out.as_ref())
    }

    /// A failure that the owner of the switch does not know of yet.
    pub fn new_failure(&mut self) -> Option<StageFailure> {
        let stage = self.placed.iter_mut().find(|stage| !stage.is_known && stage.has_failed())?;
        stage.is_known = true;
        stage.failure.get().cloned()
    }

    /// Drops a capture that has failed, so that its reader learns of the end.
    pub fn leave_out(&mut self, failure: StageFailure) {
        let failed = self.placed.pop_if(|last| last.place == failure.place && last.has_failed());
        self.left_out = Some(failure);
        drop_stage(failed);
    }

    /// Replaces the stage at this place, whose state a new one takes over unless the old one has
    /// failed. Returns the old one, and whether it has failed.
    pub fn set(
        &mut self,
        place: StagePlace,
        stage: Option<Box<dyn FrameStage>>,
    ) -> Option<(Box<dyn FrameStage>, bool)> {
        self.left_out.take_if(|failure| failure.place == place);
        let at = self.placed.partition_point(|other| other.place < place);
        let is_there = self.placed.get(at).is_some_and(|other| other.place == place);
        let mut old = is_there.then(|| self.placed.remove(at));
        if let Some(stage) = stage {
            self.placed.insert(
                at,
                PlacedStage { place, stage, failure: OnceCell::new(), is_known: false },
            );
        }
        if let Some(old) = old.as_mut().filter(|old| !old.has_failed()) {
            let old = old.stage.as_mut();
            self.call_at(at, |stage| stage.inherit(old));
        }
        old.map(|old| {
            let has_failed = old.has_failed();
            (old.stage, has_failed)
        })
    }

    /// Whether one of them holds frames at times.
    pub fn hold(&mut self) -> bool {
        let held = |stages: &mut Self, at| stages.call_at(at, |stage| stage.held().is_some());
        (0..self.placed.len()).any(|at| held(self, at) == Some(true))
    }

    /// Whether a stage is shown the frames at their ends.
    pub fn show(&self) -> bool {
        self.placed
            .last()
            .is_some_and(|last| last.place == StagePlace::Capture && !last.has_failed())
    }

    /// Shows a frame to the capture, if there is one.
    pub fn decided(&mut self, now: Nanos, frame: &StageFrame<'_>, drop: Option<Dropped>) {
        if self.show() {
            let last = self.placed.len().wrapping_sub(1);
            self.call_at(last, |stage| stage.decided(now, frame, drop));
        }
    }

    /// Decides on a frame by the stages behind `behind`, if it was held there, or by all of them.
    /// Returns whether it goes on now.
    ///
    /// # Errors
    /// A stage drops it, or has failed.
    pub fn pass(
        &mut self,
        now: Nanos,
        frame: &StageFrame<'_>,
        behind: Option<StagePlace>,
    ) -> Result<bool, Dropped> {
        let way = frame.way();
        for number in 0..self.placed.len() {
            let at = self.at(number, way);
            let Some(place) = self.placed.get(at).map(|stage| stage.place) else { break };
            let is_behind = behind.is_none_or(|behind| match way {
                Way::FromStation => place > behind,
                Way::ToStation => place < behind,
            });
            if !is_behind {
                continue;
            }
            match self.call_at(at, |stage| stage.frame(now, frame)) {
                Some(Verdict::Pass) => {}
                Some(Verdict::Held) => return Ok(false),
                Some(Verdict::Drop(cause)) => return Err(cause.dropped(way)),
                None if place == StagePlace::Capture => {}
                None => return Err(DropCause::Failed.dropped(way)),
            }
        }
        Ok(true)
    }

    /// Decides on the frames of a run.
    #[inline]
    pub fn run(&mut self, now: Nanos, way: Way, run: &mut StageRun<'_>) {
        run.set_way(way);
        for number in 0..self.placed.len() {
            let at = self.at(number, way);
            if self.call_at(at, |stage| stage.run(now, run)).is_none() {
                self.stop(at, run);
            }
        }
    }

    /// Ends a run at a stage that has failed: in what state it has left the run is unknown.
    #[cold]
    fn stop(&self, at: usize, run: &mut StageRun<'_>) {
        if self.placed.get(at).is_some_and(|stage| stage.place == StagePlace::Capture) {
            return;
        }
        for number in 0..run.len() {
            if run.frame(number).is_some() {
                run.decide(number, Verdict::Drop(DropCause::Failed));
            }
        }
    }

    /// The stage that is the `number`-th on this way.
    #[inline]
    fn at(&self, number: usize, way: Way) -> usize {
        match way {
            Way::FromStation => number,
            Way::ToStation => self.placed.len().wrapping_sub(number).wrapping_sub(1),
        }
    }

    /// Runs about once a millisecond.
    pub fn look(&mut self, now: Nanos) {
        for at in 0..self.placed.len() {
            self.call_at(at, |stage| stage.look(now));
        }
    }

    /// Takes the first frame that a stage has held until now. Returns the place of the stage, too.
    pub fn take_held(&mut self, now: Nanos) -> Option<(StagePlace, Box<HeldFrame>)> {
        (0..self.placed.len()).find_map(|at| {
            let place = self.placed.get(at)?.place;
            Some((place, self.call_at(at, |stage| stage.held()?.due(now)).flatten()?))
        })
    }

    /// Takes a frame that a stage which has failed still holds, if the stage can be asked for it.
    pub fn take_left(&mut self) -> Option<Box<HeldFrame>> {
        let mut failed = self.placed.iter_mut().filter(|stage| stage.has_failed());
        failed.find_map(|stage| take_all_held(stage.stage.as_mut()))
    }

    /// When the next held frame goes on.
    pub fn next_release(&self) -> Option<Nanos> {
        let asked = self.placed.iter().filter(|stage| !stage.has_failed());
        let next = |stage: &PlacedStage| {
            let next = caught(|| stage.stage.next_release());
            next.map_err(|message| stage.fail(message)).ok().flatten()
        };
        asked.filter_map(next).min()
    }

    /// Gives the memory of a frame that is no longer held back to the stage at this place.
    pub fn give_back(&mut self, place: StagePlace, frame: Box<HeldFrame>) {
        let at = self.placed.iter().position(|stage| stage.place == place);
        at.and_then(|at| self.call_at(at, |stage| stage.held().map(|held| held.give_back(frame))));
    }

    /// Runs `task` with the stage at this place; `None` if there is none of this type, or it has
    /// failed.
    pub fn with<S: FrameStage, T>(
        &mut self,
        place: StagePlace,
        task: impl FnOnce(&mut S) -> T,
    ) -> Option<T> {
        let at = self.placed.iter().position(|stage| stage.place == place)?;
        self.call_at(at, |stage| {
            let stage: &mut dyn std::any::Any = stage;
            stage.downcast_mut().map(task)
        })?
    }

    /// Calls a stage. `None` if it has failed, perhaps now.
    #[inline]
    fn call_at<T>(&mut self, at: usize, call: impl FnOnce(&mut dyn FrameStage) -> T) -> Option<T> {
        let found = self.placed.get_mut(at).filter(|stage| !stage.has_failed())?;
        caught(|| call(found.stage.as_mut())).map_err(|message| found.fail(message)).ok()
    }
}

/// Takes the first frame that a stage holds, which has left its port or has failed.
pub(crate) fn take_all_held(stage: &mut dyn FrameStage) -> Option<Box<HeldFrame>> {
    caught(|| stage.held()?.due(Nanos(u64::MAX))).ok().flatten()
}

impl Drop for Stages {
    fn drop(&mut self) {
        for stage in self.placed.drain(..) {
            drop_stage(stage);
        }
    }
}

fn drop_stage<T>(stage: T) {
    if let Err(message) = caught(|| drop(stage)) {
        tracing::error!("a stage of a port has panicked as it was dropped: {message}");
    }
}
