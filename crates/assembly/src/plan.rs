//! The difference between the state of an assembly and a specification, as a list of actions.
//!
//! [`plan`] is pure: it does no I/O and starts no threads. It assumes that each action succeeds,
//! with one exception: a file, a remote device or a controller is [`Phase::Opening`] until it
//! answers, and the plan has no action that needs it. The next plan, after the answer, has the
//! other actions. A plan is empty when no action is possible.

mod check;
mod stale;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::AssemblyError;
use crate::spec::{
    ClientSpec, ControllerSpec, DeviceSpec, IohostSpec, LinkSpec, SidecoreSpec, Spec, StoreKind,
    StoreSpec,
};

pub(crate) use check::check;
use stale::Stale;

/// The progress of a part whose opening can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A thread is opening the part.
    Opening,
    /// The part is open, or the device is served.
    Open,
    /// The part could not be opened, and is not tried again before it is closed. A refused device
    /// does not need its store.
    Refused,
}

/// The specification of a part, and its progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part<S> {
    pub(crate) spec: S,
    pub(crate) phase: Phase,
}

/// The parts of an assembly by their names. A part that was not started yet is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) sidecores: BTreeMap<String, SidecoreSpec>,
    /// The links to clients.
    pub(crate) links: BTreeMap<String, LinkSpec>,
    pub(crate) clients: BTreeMap<String, ClientSpec>,
    /// Each with its link.
    pub(crate) iohosts: BTreeMap<String, (IohostSpec, LinkSpec)>,
    pub(crate) stores: BTreeMap<String, Part<StoreSpec>>,
    pub(crate) controllers: BTreeMap<String, Part<ControllerSpec>>,
    /// Never in [`Phase::Opening`]: a device is absent until its store is open.
    pub(crate) devices: BTreeMap<String, Part<DeviceSpec>>,
    /// Devices that serve another store than their specification names, or none.
    pub(crate) detached: BTreeSet<String>,
}

/// A step from one state to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Action {
    pub(crate) verb: Verb,
    pub(crate) name: String,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.verb {
            Verb::StopDevice => "stop device",
            Verb::CloseStore => "close store",
            Verb::CloseController => "close controller",
            Verb::StopClient => "stop client",
            Verb::StopLink => "stop link",
            Verb::StopIohost => "stop iohost",
            Verb::StopSidecore => "stop sidecore",
            Verb::StartSidecore => "start sidecore",
            Verb::StartLink => "start link",
            Verb::StartClient => "start client",
            Verb::StartIohost => "start iohost",
            Verb::OpenStore => "open store",
            Verb::OpenController => "open controller",
            Verb::RefuseController => "refuse controller",
            Verb::StartDevice => "start device",
            Verb::RefuseDevice => "refuse device",
        };
        write!(f, "{verb} \"{}\"", self.name)
    }
}

/// The kind of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    StopDevice,
    CloseStore,
    CloseController,
    /// The IOhost serves the client no more.
    StopClient,
    StopLink,
    /// The sessions with an IOhost, and the link to it.
    StopIohost,
    StopSidecore,
    StartSidecore,
    /// A link to clients.
    StartLink,
    StartClient,
    /// The link to an IOhost, and the sessions with it.
    StartIohost,
    OpenStore,
    OpenController,
    /// The controller's store was refused.
    RefuseController,
    StartDevice,
    /// The device's store or controller was refused.
    RefuseDevice,
}

/// Returns the actions that lead from `now` towards `next`, in the order in which they are applied.
/// Stops come first, each part before those below it, and starts come last, each part after those
/// below it. A part whose specification has changed is stopped and started.
pub(crate) fn plan(now: &State, next: &Spec) -> Vec<Action> {
    let mut planner =
        Planner { state: now.clone(), next, stale: Stale::of(now, next), actions: Vec::new() };
    planner.stop();
    planner.start();
    planner.open();
    planner.start_devices();
    planner.actions
}

/// Lists the actions of a start in their order, without opening or starting a part. Every file and
/// controller is assumed to answer before the next part is tried.
///
/// # Errors
/// The parts of the specification do not fit together.
pub fn dry_run(spec: &Spec) -> Result<Vec<String>, AssemblyError> {
    check(spec)?;
    let (mut state, mut words) = (State::default(), Vec::new());
    loop {
        let actions = plan(&state, spec);
        if actions.is_empty() {
            return Ok(words);
        }
        for action in &actions {
            state.apply(action, spec);
            words.push(action.to_string());
        }
        state.settle();
    }
}

/// Finds the store at the bottom of the one with this name.
pub(crate) fn bottom<'a>(spec: &'a Spec, name: &str) -> Option<&'a StoreSpec> {
    let mut store = find_store(spec, name)?;
    // Each step reaches a new store, unless the stores form a cycle, which has no bottom.
    for _ in 0..spec.stores.len() {
        match store.kind.inner() {
            Some(inner) => store = find_store(spec, inner)?,
            None => return Some(store),
        }
    }
    None
}

/// The types of the stages between the store of this name and its bottom.
pub(crate) fn stages(spec: &Spec, name: &str) -> Vec<String> {
    let mut stages = Vec::new();
    let mut next = find_store(spec, name);
    for _ in 0..spec.stores.len() {
        let Some(store) = next else { break };
        stages.extend(store.stages.iter().map(|stage| stage.word().to_owned()));
        next = store.kind.inner().and_then(|inner| find_store(spec, inner));
    }
    stages
}

/// Whether a store is opened on a thread of its own, because it may not answer.
pub(crate) fn may_not_answer(store: &StoreSpec) -> bool {
    matches!(store.kind, StoreKind::File(_) | StoreKind::HostFile(_) | StoreKind::Remote(_))
}

/// Whether the attempt to open a store can be given up: a device of an IOhost, but not a file,
/// which the kernel may be opening.
fn can_give_up(store: &StoreSpec) -> bool {
    matches!(store.kind, StoreKind::Remote(_))
}

pub(crate) fn find_link<'a>(spec: &'a Spec, name: &str) -> Option<&'a LinkSpec> {
    spec.links.iter().find(|link| link.name == name)
}

/// The names of the links on which clients may come.
fn links_to_clients(spec: &Spec) -> BTreeSet<&str> {
    spec.clients.iter().flat_map(|client| client.links.iter().map(String::as_str)).collect()
}

pub(crate) fn find_store<'a>(spec: &'a Spec, name: &str) -> Option<&'a StoreSpec> {
    spec.stores.iter().find(|store| store.name == name)
}

impl State {
    /// Changes the state as the action does if it succeeds.
    pub(crate) fn apply(&mut self, action: &Action, next: &Spec) {
        let Action { verb, name } = action;
        let named = || name.clone();
        match verb {
            Verb::StopDevice => {
                self.devices.remove(name);
                self.detached.remove(name);
            }
            Verb::CloseStore => drop(self.stores.remove(name)),
            Verb::CloseController => drop(self.controllers.remove(name)),
            Verb::StopClient => drop(self.clients.remove(name)),
            Verb::StopLink => drop(self.links.remove(name)),
            Verb::StopIohost => drop(self.iohosts.remove(name)),
            Verb::StopSidecore => drop(self.sidecores.remove(name)),
            Verb::StartLink => {
                let spec = next.links.iter().find(|spec| spec.name == *name);
                self.links.extend(spec.map(|spec| (named(), spec.clone())));
            }
            Verb::StartClient => {
                let spec = next.clients.iter().find(|spec| spec.name == *name);
                self.clients.extend(spec.map(|spec| (named(), spec.clone())));
            }
            Verb::StartIohost => {
                let spec = next.iohosts.iter().find(|spec| spec.name == *name);
                self.iohosts.extend(spec.and_then(|spec| {
                    Some((named(), (spec.clone(), find_link(next, &spec.link)?.clone())))
                }));
            }
            Verb::StartSidecore => {
                let spec = next.sidecores.iter().find(|spec| spec.name == *name);
                self.sidecores.extend(spec.map(|spec| (named(), spec.clone())));
            }
            Verb::OpenStore => {
                let spec = find_store(next, name);
                let phase = |spec| if may_not_answer(spec) { Phase::Opening } else { Phase::Open };
                self.stores.extend(
                    spec.map(|spec| (named(), Part { spec: spec.clone(), phase: phase(spec) })),
                );
            }
            Verb::OpenController | Verb::RefuseController => {
                let spec = next.controllers.iter().find(|spec| spec.name == *name);
                let phase =
                    if *verb == Verb::OpenController { Phase::Opening } else { Phase::Refused };
                self.controllers
                    .extend(spec.map(|spec| (named(), Part { spec: spec.clone(), phase })));
            }
            Verb::StartDevice | Verb::RefuseDevice => {
                let spec = next.devices.iter().find(|spec| spec.name == *name);
                let phase = if *verb == Verb::StartDevice { Phase::Open } else { Phase::Refused };
                self.devices.extend(spec.map(|spec| (named(), Part { spec: spec.clone(), phase })));
            }
        }
    }

    /// Lets every store and controller answer that is being opened.
    fn settle(&mut self) {
        let stores = self.stores.values_mut().map(|part| &mut part.phase);
        let phases = stores.chain(self.controllers.values_mut().map(|part| &mut part.phase));
        phases.filter(|phase| **phase == Phase::Opening).for_each(|phase| *phase = Phase::Open);
    }

    /// The stores that must be open. A refused or detached device needs none.
    fn needed<'a>(&self, next: &'a Spec) -> BTreeSet<&'a str> {
        let is_refused =
            |name: &str| self.devices.get(name).is_some_and(|part| part.phase == Phase::Refused);
        needed(next, |device| !is_refused(device) && !self.detached.contains(device))
    }

    fn uses_store(&self, name: &str) -> bool {
        let by_device = |part: &Part<DeviceSpec>| {
            part.spec.store == name
                && part.phase == Phase::Open
                && !self.detached.contains(&part.spec.name)
        };
        self.devices.values().any(by_device)
            || self
                .stores
                .values()
                .any(|part| part.spec.kind.inner() == Some(name) && part.phase != Phase::Refused)
            || self
                .controllers
                .values()
                .any(|part| part.spec.store == name && part.phase != Phase::Refused)
    }

    fn uses_iohost(&self, name: &str) -> bool {
        let is_there = |part: &Part<StoreSpec>| {
            part.spec.kind.remote().is_some_and(|remote| remote.iohost == name)
        };
        self.stores.values().any(is_there)
    }

    fn uses_controller(&self, name: &str) -> bool {
        let by_store = |part: &Part<StoreSpec>| part.spec.kind.controller() == Some(name);
        self.stores.values().any(|part| by_store(part) && part.phase != Phase::Refused)
    }
}

/// The stores below the controllers, and below the devices that count.
pub(crate) fn needed(next: &Spec, counts: impl Fn(&str) -> bool) -> BTreeSet<&str> {
    let devices = next.devices.iter().filter(|device| counts(&device.name));
    let tops = devices.map(|device| device.store.as_str());
    let mut needed = BTreeSet::new();
    for top in tops.chain(next.controllers.iter().map(|controller| controller.store.as_str())) {
        let mut name = Some(top);
        while let Some(spec) =
            name.and_then(|name| find_store(next, name)).filter(|spec| needed.insert(&*spec.name))
        {
            name = spec.kind.inner();
        }
    }
    needed
}

struct Planner<'a> {
    state: State,
    next: &'a Spec,
    /// Parts that are stopped when their users allow it. The plan starts no part above them.
    stale: Stale,
    actions: Vec<Action>,
}

impl Planner<'_> {
    fn act(&mut self, verb: Verb, name: &str) {
        let action = Action { verb, name: name.to_owned() };
        self.state.apply(&action, self.next);
        self.actions.push(action);
    }

    fn stop(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        stale.devices.iter().for_each(|name| self.act(Verb::StopDevice, name));
        // A file or controller cannot be closed while a thread opens it.
        loop {
            let can_close = |phase: Phase| phase != Phase::Opening;
            let is_unused = |name: &&String| {
                let part = self.state.stores.get(*name);
                part.is_some_and(|part| can_close(part.phase) || can_give_up(&part.spec))
                    && !self.state.uses_store(name)
            };
            if let Some(name) = stale.stores.iter().find(is_unused) {
                self.act(Verb::CloseStore, name);
                continue;
            }
            let is_unused = |name: &&String| {
                let part = self.state.controllers.get(*name);
                part.is_some_and(|part| can_close(part.phase)) && !self.state.uses_controller(name)
            };
            let Some(name) = stale.controllers.iter().find(is_unused) else { break };
            self.act(Verb::CloseController, name);
        }
        stale.clients.iter().for_each(|name| self.act(Verb::StopClient, name));
        // A store that cannot be closed yet keeps its IOhost, with the sidecores of the link to it.
        for name in &stale.iohosts {
            if !self.state.uses_iohost(name) {
                self.act(Verb::StopIohost, name);
            }
        }
        stale.links.iter().for_each(|name| self.act(Verb::StopLink, name));
        for name in &stale.sidecores {
            let mut links = self.state.iohosts.values().map(|(_, link)| link);
            if !links.any(|link| link.sidecores.contains(name)) {
                self.act(Verb::StopSidecore, name);
            }
        }
        self.stale = stale;
        self.stale.stores.retain(|name| self.state.stores.contains_key(name));
        self.stale.controllers.retain(|name| self.state.controllers.contains_key(name));
        self.stale.iohosts.retain(|name| self.state.iohosts.contains_key(name));
        self.stale.sidecores.retain(|name| self.state.sidecores.contains_key(name));
    }

    fn store_phase(&self, name: &str) -> Option<Phase> {
        let part = self.state.stores.get(name)?;
        Some(if self.stale.stores.contains(name) { Phase::Opening } else { part.phase })
    }

    fn controller_phase(&self, name: &str) -> Option<Phase> {
        let part = self.state.controllers.get(name)?;
        Some(if self.stale.controllers.contains(name) { Phase::Opening } else { part.phase })
    }

    /// The phase of a store, or `Refused` if the store was not opened because a part below it was
    /// refused.
    fn phase(&self, store: &str) -> Phase {
        let mut name = store;
        // Each step reaches a new store, unless the stores form a cycle.
        for _ in 0..=self.next.stores.len() {
            match self.store_phase(name) {
                Some(phase) if name == store || phase == Phase::Refused => return phase,
                Some(_) => break,
                None => {}
            }
            let Some(spec) = find_store(self.next, name) else { break };
            match (
                spec.kind.inner(),
                spec.kind.controller().and_then(|name| self.controller_phase(name)),
            ) {
                (Some(inner), _) => name = inner,
                (None, Some(Phase::Refused)) => return Phase::Refused,
                _ => break,
            }
        }
        Phase::Opening
    }

    fn can_open(&self, store: &StoreSpec) -> bool {
        let is_open = |name: &str| self.store_phase(name) == Some(Phase::Open);
        let controls = |name: &str| self.controller_phase(name) == Some(Phase::Open);
        let leads = |iohost: &str| {
            self.state.iohosts.contains_key(iohost) && !self.stale.iohosts.contains(iohost)
        };
        store.kind.inner().is_none_or(is_open)
            && store.kind.controller().is_none_or(controls)
            && store.kind.remote().is_none_or(|remote| leads(&remote.iohost))
    }

    /// Starts sidecores, and the links on them with their users.
    fn start(&mut self) {
        for sidecore in &self.next.sidecores {
            if !self.state.sidecores.contains_key(&sidecore.name) {
                self.act(Verb::StartSidecore, &sidecore.name);
            }
        }
        let links = links_to_clients(self.next);
        for link in self.next.links.iter().filter(|link| links.contains(&*link.name)) {
            if !self.state.links.contains_key(&link.name) && self.can_poll(link) {
                self.act(Verb::StartLink, &link.name);
            }
        }
        for client in &self.next.clients {
            let runs = |name: &String| self.state.links.contains_key(name);
            if !self.state.clients.contains_key(&client.name) && client.links.iter().all(runs) {
                self.act(Verb::StartClient, &client.name);
            }
        }
        for iohost in &self.next.iohosts {
            let link = find_link(self.next, &iohost.link);
            if !self.state.iohosts.contains_key(&iohost.name)
                && link.is_some_and(|link| self.can_poll(link))
            {
                self.act(Verb::StartIohost, &iohost.name);
            }
        }
    }

    fn can_poll(&self, link: &LinkSpec) -> bool {
        link.sidecores.iter().all(|name| self.runs(name))
    }

    /// Whether a sidecore runs that this plan keeps.
    fn runs(&self, sidecore: &String) -> bool {
        self.state.sidecores.contains_key(sidecore) && !self.stale.sidecores.contains(sidecore)
    }

    fn open(&mut self) {
        let needed = self.state.needed(self.next);
        let mut planned = None;
        // A store may need a store or controller that is further down in the list.
        while planned != Some(self.actions.len()) {
            planned = Some(self.actions.len());
            for store in self.next.stores.iter().filter(|store| needed.contains(&*store.name)) {
                if !self.state.stores.contains_key(&store.name) && self.can_open(store) {
                    self.act(Verb::OpenStore, &store.name);
                }
            }
            for controller in &self.next.controllers {
                if self.state.controllers.contains_key(&controller.name) {
                    continue;
                }
                match self.phase(&controller.store) {
                    Phase::Opening => {}
                    Phase::Open => self.act(Verb::OpenController, &controller.name),
                    Phase::Refused => self.act(Verb::RefuseController, &controller.name),
                }
            }
        }
    }

    fn start_devices(&mut self) {
        for device in &self.next.devices {
            let runs = |name: &String| self.runs(name);
            let serves = |client: &str| self.state.clients.contains_key(client);
            if self.state.devices.contains_key(&device.name)
                || !device.sidecores.iter().all(runs)
                || !device.front_end.client().is_none_or(serves)
            {
                continue;
            }
            match self.phase(&device.store) {
                Phase::Opening => {}
                Phase::Open => self.act(Verb::StartDevice, &device.name),
                Phase::Refused => self.act(Verb::RefuseDevice, &device.name),
            }
        }
    }
}

/// The name of a device in error messages.
pub(crate) fn subject(device: &DeviceSpec) -> String {
    format!("device \"{}\"", device.name)
}

#[cfg(test)]
mod tests;
