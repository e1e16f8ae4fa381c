//! Opens stores and controllers, on threads of their own where they may not answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use sidecore_block::BlockDevice;

use super::{Graph, Occasion, Opened, PATIENCE};
use crate::AssemblyError;
use crate::controllers::ControllerHandle;
use crate::mirrors::{LegDevice, MirrorInUse};
use crate::plan::{
    Part, Parts, Phase, bottom, device_below, find_store, has_far_bottom, is_leg, may_not_answer,
};
use crate::spec::{ControllerSpec, DeviceSpec, MirrorSpec, Spec, StoreSpec};
use crate::stores::{Progress, behind, open_file};

/// The call that opens a store while the graph is not locked.
pub(crate) type OpenAlone = Box<dyn FnOnce() -> Result<Arc<dyn BlockDevice>, AssemblyError>>;

/// Opens one file for a device that is added, and gives up after [`PATIENCE`].
fn open_file_alone(file: StoreSpec) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let (sender, receiver) = channel();
    let name = file.name.clone();
    let thread = std::thread::Builder::new().name(format!("open-{name}"));
    // After that time the receiver is dropped, and so is the file when it is open.
    thread.spawn(move || drop(sender.send(open_file(&file)))).map_err(AssemblyError::Threads)?;
    receiver.recv_timeout(PATIENCE).unwrap_or(Err(AssemblyError::NoAnswer { name }))
}

impl Graph {
    /// The store of a device that is added which takes a while to open, if it is not open: a file,
    /// or a store with a stage whose parts below are open.
    pub(crate) fn slow_store<'a>(
        &self,
        device: &DeviceSpec,
        next: &'a Spec,
    ) -> Option<&'a StoreSpec> {
        let is_closed = |store: &&StoreSpec| self.stores.get(&store.name).is_none();
        let is_file = |bottom: &&StoreSpec| bottom.kind.remote().is_none();
        let far = bottom(next, &device.store).filter(|bottom| has_far_bottom(bottom));
        if let Some(far) = far {
            return Some(far).filter(is_file).filter(is_closed);
        }
        let top = find_store(next, &device.store).filter(is_closed)?;
        if top.kind.mirror().is_some() {
            return None;
        }
        let is_below = top.kind.inner().is_none_or(|inner| self.stores.get(inner).is_some());
        Some(top).filter(|top| may_not_answer(top) && is_below)
    }

    /// The call that opens a [slow store](Self::slow_store).
    ///
    /// # Errors
    /// A part below is missing.
    pub(crate) fn open_alone(&self, slow: &StoreSpec) -> Result<OpenAlone, AssemblyError> {
        let spec = slow.clone();
        if has_far_bottom(slow) {
            return Ok(Box::new(move || open_file_alone(spec)));
        }
        let bottom = self.stores.bottom(slow, &self.lists.controllers)?;
        Ok(Box::new(move || behind(&spec, bottom)))
    }

    /// The call that opens a store which may not answer, for a thread of its own.
    fn opening(
        &self,
        spec: &StoreSpec,
        next: &Parts<'_>,
    ) -> Result<Box<dyn FnOnce() -> Opened + Send>, AssemblyError> {
        let spec = spec.clone();
        if let Some(mirror) = spec.kind.mirror() {
            let mirror = self.mirror(&spec.name, mirror, next);
            return Ok(Box::new(move || {
                let opened = mirror.open().and_then(|bottom| behind(&spec, bottom));
                Opened::Store(spec, opened)
            }));
        }
        if let Some(remote) = spec.kind.remote() {
            let opening = self.lists.remote.open_store(&spec.name, remote)?;
            return Ok(Box::new(move || match opening.wait() {
                Some(store) => {
                    let store = behind(&spec, store);
                    Opened::Store(spec, store)
                }
                None => Opened::GivenUp,
            }));
        }
        if has_far_bottom(&spec) {
            return Ok(Box::new(move || {
                let opened = open_file(&spec);
                Opened::Store(spec, opened)
            }));
        }
        let bottom = self.stores.bottom(&spec, &self.lists.controllers)?;
        Ok(Box::new(move || {
            let opened = behind(&spec, bottom);
            Opened::Store(spec, opened)
        }))
    }

    /// A mirror that is to be opened, with the legs that are open by now.
    fn mirror(&self, name: &str, mirror: &MirrorSpec, next: &Parts<'_>) -> Arc<MirrorInUse> {
        let (mut stores, mut devices) = (BTreeMap::new(), BTreeMap::new());
        for leg in &mirror.legs {
            let refusal = self.refusal(leg, next);
            if let Some(store) = self.stores.get(leg) {
                stores.insert(leg.clone(), Ok(Arc::clone(store)));
            } else if !refusal.is_empty() {
                stores.insert(leg.clone(), Err(refusal));
            }
            if let Some((device, has_controller)) = device_below(leg, next) {
                let store = device.name.clone();
                devices.insert(leg.clone(), LegDevice { store, has_controller });
            }
        }
        let remote = (devices, &self.lists.remote);
        self.lists.mirrors.begin(name, mirror, stores, remote)
    }

    /// Tells the mirror whose leg a store is that the store was opened or refused.
    fn tell_mirror(&self, store: &str) {
        if let Some(opened) = self.stores.get(store) {
            self.lists.mirrors.came(store, Ok(Arc::clone(opened)));
        } else if let Some(why) = self.stores.refusal(store) {
            self.lists.mirrors.came(store, Err(why.to_owned()));
        }
    }

    /// Opens a store, or starts a thread that opens one that may not answer. The caller who adds a
    /// device waits for its stages. False if the store was refused.
    pub(super) fn open_store(
        &mut self,
        spec: &StoreSpec,
        next: &Parts<'_>,
        occasion: Occasion,
    ) -> Result<bool, AssemblyError> {
        let is_mirror = spec.kind.mirror().is_some();
        let waits = occasion == Occasion::Addition && !has_far_bottom(spec) && !is_mirror;
        let opened = if may_not_answer(spec) && !waits {
            let spawned = self.opening(spec, next).and_then(|open| self.spawn(&spec.name, open));
            spawned.map(|()| Progress::Opening)
        } else {
            self.stores.open(spec, &self.lists.controllers).map(Progress::Open)
        };
        let progress = match opened {
            Err(error) if occasion.tolerates(&error) || is_leg(&spec.name, next) => {
                Progress::Refused(error.to_string())
            }
            opened => opened?,
        };
        let is_refused = progress.phase() == Phase::Refused;
        self.stores.set(spec, progress);
        self.tell_mirror(&spec.name);
        Ok(!is_refused)
    }

    pub(super) fn open_controller(
        &mut self,
        name: &str,
        next: &Parts<'_>,
        occasion: Occasion,
    ) -> Result<(), AssemblyError> {
        let Some(spec) = next.controller(name).cloned() else { return Ok(()) };
        let Some(store) = self.stores.get(&spec.store).cloned() else { return Ok(()) };
        let bottom = next.bottom(&spec.store).cloned();
        let owner = self.lists.controllers.owner;
        let spawned = self.spawn(name, move || {
            Opened::Controller(
                spec.name.clone(),
                ControllerHandle::open(spec, store, bottom.as_ref(), owner),
            )
        });
        let progress = match spawned {
            Ok(()) => Progress::Opening,
            Err(error) if occasion.tolerates(&error) => Progress::Refused(error.to_string()),
            Err(error) => return Err(error),
        };
        self.lists.controllers.set(name, progress);
        Ok(())
    }

    fn spawn(
        &mut self,
        name: &str,
        open: impl FnOnce() -> Opened + Send + 'static,
    ) -> Result<(), AssemblyError> {
        let opened = self.opened.clone();
        let thread = std::thread::Builder::new().name(format!("open-{name}"));
        // The receiver is dropped when the assembly ends.
        thread.spawn(move || drop(opened.send(open()))).map_err(AssemblyError::Threads)?;
        self.in_flight = self.in_flight.saturating_add(1);
        Ok(())
    }

    /// Whether a file or a controller is being opened. An IOhost may come much later.
    fn is_opening_local(&self) -> bool {
        let now = self.now();
        let is_local = |part: &Part<StoreSpec>| {
            part.phase == Phase::Opening && part.spec.kind.remote().is_none()
        };
        let is_opening = |part: &Part<ControllerSpec>| part.phase == Phase::Opening;
        now.stores.values().any(is_local) || now.controllers.values().any(is_opening)
    }

    /// Opens the files and controllers of a start, and waits for them for [`PATIENCE`].
    pub(crate) fn open_in_time(&mut self, spec: &Spec) -> Result<(), AssemblyError> {
        let deadline = Instant::now() + PATIENCE;
        self.come_to(spec, Occasion::Opening)?;
        while self.is_opening_local()
            && let Some(receiver) = &self.receiver
            && let Ok(opened) =
                receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            self.answer(opened, Occasion::Opening)?;
            self.come_to(spec, Occasion::Opening)?;
        }
        Ok(())
    }

    /// Records the answer of a store or controller.
    pub(crate) fn answer(
        &mut self,
        opened: Opened,
        occasion: Occasion,
    ) -> Result<(), AssemblyError> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let refused = |error: AssemblyError| match occasion.tolerates(&error) {
            true => Ok(error.to_string()),
            false => Err(error),
        };
        match opened {
            Opened::GivenUp => {}
            Opened::Store(spec, opened) => {
                let is_leg = || is_leg(&spec.name, &Parts::of(&self.lists.wanted().spec));
                let opened = match opened {
                    Err(error) if is_leg() => Err(error.to_string()),
                    Err(error) => Err(refused(error)?),
                    Ok(store) => Ok(store),
                };
                self.stores.answered(&spec, opened);
                self.tell_mirror(&spec.name);
            }
            Opened::Controller(name, Ok(controller)) => {
                let controller = Arc::new(controller);
                self.follow_volumes(&controller);
                self.lists.controllers.set(&name, Progress::Open(controller));
            }
            Opened::Controller(name, Err(error)) => {
                self.lists.controllers.set(&name, Progress::Refused(refused(error)?));
            }
        }
        Ok(())
    }
}
