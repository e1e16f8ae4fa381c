//! The difference between the state of an assembly and a specification, as a list of actions.
//!
//! [`plan`] is pure: it does no I/O and starts no threads. It assumes that each action succeeds,
//! with one exception: a file, a remote device or a controller is [`Phase::Opening`] until it
//! answers, and the plan has no action that needs it. The next plan, after the answer, has the
//! other actions. A plan is empty when no action is possible.

mod check;
mod mirrors;
mod parts;
mod planner;
mod stale;
mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::AssemblyError;
use crate::spec::{
    ClientSpec, ControllerSpec, DeviceSpec, IohostSpec, LinkSpec, SidecoreSpec, Spec, StageSpec,
    StoreKind, StoreSpec, SwitchSpec,
};

pub(crate) use check::check;
pub(crate) use mirrors::{device_below, is_leg};
pub(crate) use parts::Parts;
use planner::Planner;

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
    /// Each with its links.
    pub(crate) iohosts: BTreeMap<String, (IohostSpec, Vec<LinkSpec>)>,
    pub(crate) switches: BTreeMap<String, SwitchSpec>,
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
            Verb::StopSwitch => "stop switch",
            Verb::StopSidecore => "stop sidecore",
            Verb::StartSidecore => "start sidecore",
            Verb::StartSwitch => "start switch",
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
    StopSwitch,
    StopSidecore,
    StartSidecore,
    StartSwitch,
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
    Planner::new(now, &Parts::of(next)).plan()
}

/// Lists the actions of a start in their order, without opening or starting a part. Every file and
/// controller is assumed to answer before the next part is tried.
///
/// # Errors
/// The parts of the specification do not fit together.
pub fn dry_run(spec: &Spec) -> Result<Vec<String>, AssemblyError> {
    check(spec)?;
    let (mut state, mut words) = (State::default(), Vec::new());
    let parts = Parts::of(spec);
    loop {
        let actions = Planner::new(&state, &parts).plan();
        if actions.is_empty() {
            return Ok(words);
        }
        for action in &actions {
            state.apply(action, &parts);
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

/// Whether a store is opened on a thread of its own, because it may not answer.
pub(crate) fn may_not_answer(store: &StoreSpec) -> bool {
    has_far_bottom(store)
        || store.kind.mirror().is_some()
        || store.stages.iter().any(StageSpec::may_not_answer)
}

/// Whether the bottom of a store may not answer: a file, or a device of an IOhost.
pub(crate) fn has_far_bottom(store: &StoreSpec) -> bool {
    matches!(store.kind, StoreKind::File(_) | StoreKind::HostFile(_) | StoreKind::Remote(_))
}

/// Whether the attempt to open a store can be given up: a device of an IOhost, but not a file,
/// which the kernel may be opening.
fn can_give_up(store: &StoreSpec) -> bool {
    matches!(store.kind, StoreKind::Remote(_))
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
    pub(crate) fn apply(&mut self, action: &Action, next: &Parts<'_>) {
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
            Verb::StopSwitch => drop(self.switches.remove(name)),
            Verb::StopSidecore => drop(self.sidecores.remove(name)),
            Verb::StartSwitch => {
                self.switches.extend(next.switch(name).map(|spec| (named(), spec.clone())));
            }
            Verb::StartLink => {
                self.links.extend(next.link(name).map(|spec| (named(), spec.clone())));
            }
            Verb::StartClient => {
                self.clients.extend(next.client(name).map(|spec| (named(), spec.clone())));
            }
            Verb::StartIohost => {
                self.iohosts.extend(next.iohost(name).and_then(|spec| {
                    let links = next.links_of(spec)?.into_iter().cloned().collect();
                    Some((named(), (spec.clone(), links)))
                }));
            }
            Verb::StartSidecore => {
                self.sidecores.extend(next.sidecore(name).map(|spec| (named(), spec.clone())));
            }
            Verb::OpenStore => {
                let phase = |spec| if may_not_answer(spec) { Phase::Opening } else { Phase::Open };
                self.stores.extend(
                    next.store(name)
                        .map(|spec| (named(), Part { spec: spec.clone(), phase: phase(spec) })),
                );
            }
            Verb::OpenController | Verb::RefuseController => {
                let phase =
                    if *verb == Verb::OpenController { Phase::Opening } else { Phase::Refused };
                let part = |spec: &ControllerSpec| Part { spec: spec.clone(), phase };
                self.controllers.extend(next.controller(name).map(|spec| (named(), part(spec))));
            }
            Verb::StartDevice | Verb::RefuseDevice => {
                let phase = if *verb == Verb::StartDevice { Phase::Open } else { Phase::Refused };
                let part = |spec: &DeviceSpec| Part { spec: spec.clone(), phase };
                self.devices.extend(next.device(name).map(|spec| (named(), part(spec))));
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
    fn needed<'a>(&self, next: &Parts<'a>) -> BTreeSet<&'a str> {
        let is_refused =
            |name: &str| self.devices.get(name).is_some_and(|part| part.phase == Phase::Refused);
        needed(next, |device| !is_refused(device) && !self.detached.contains(device))
    }
}

/// The stores below the controllers, and below the devices that count.
pub(crate) fn needed<'a>(next: &Parts<'a>, counts: impl Fn(&str) -> bool) -> BTreeSet<&'a str> {
    let spec = next.spec();
    let devices = spec.devices.iter().filter(|device| counts(&device.name));
    let tops = devices.map(|device| device.store.as_str());
    let mut needed = BTreeSet::new();
    let controllers = spec.controllers.iter().map(|controller| controller.store.as_str());
    let mut names: Vec<&str> = tops.chain(controllers).collect();
    while let Some(name) = names.pop() {
        let store = next.store(name).filter(|store| needed.insert(&*store.name));
        names.extend(store.into_iter().flat_map(|store| store.kind.stores_below()));
    }
    needed
}

/// The name of a device in error messages.
pub(crate) fn subject(device: &DeviceSpec) -> String {
    format!("device \"{}\"", device.name)
}

#[cfg(test)]
mod tests;
