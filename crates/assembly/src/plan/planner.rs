//! The actions of a plan, in their order.

use std::collections::{BTreeMap, BTreeSet};

use super::stale::Stale;
use super::uses::{Name, below, uses};
use super::{Action, Parts, Phase, State, Verb, can_give_up, links_to_clients};
use crate::spec::{LinkSpec, StoreSpec};

/// A store or controller in the list of its kind. All stores come before all controllers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Store(usize),
    Controller(usize),
}

pub(super) struct Planner<'a> {
    now: &'a State,
    next: &'a Parts<'a>,
    /// The state after the actions so far.
    state: State,
    /// Parts that are stopped when their users allow it. The plan starts no part above them.
    stale: Stale,
    /// The next stores and controllers directly above each one.
    above: BTreeMap<Name<'a>, Vec<Place>>,
    /// Stores that are not opened, because a part below was refused.
    refused: BTreeSet<&'a str>,
    actions: Vec<Action>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(now: &'a State, next: &'a Parts<'a>) -> Self {
        let mut above = BTreeMap::<_, Vec<_>>::new();
        let spec = next.spec();
        for (index, store) in spec.stores.iter().enumerate() {
            for below in below(store) {
                above.entry(below).or_default().push(Place::Store(index));
            }
        }
        for (index, controller) in spec.controllers.iter().enumerate() {
            let below = Name::Store(&controller.store);
            above.entry(below).or_default().push(Place::Controller(index));
        }
        Self {
            now,
            next,
            state: now.clone(),
            stale: Stale::of(now, next),
            above,
            refused: BTreeSet::new(),
            actions: Vec::new(),
        }
    }

    pub(super) fn plan(mut self) -> Vec<Action> {
        self.stop();
        self.start();
        self.find_refused();
        self.open();
        self.start_devices();
        self.actions
    }

    fn act(&mut self, verb: Verb, name: &str) {
        let action = Action { verb, name: name.to_owned() };
        self.state.apply(&action, self.next);
        self.actions.push(action);
    }

    fn stop(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        stale.devices.iter().for_each(|name| self.act(Verb::StopDevice, name));
        self.close(&stale);
        stale.clients.iter().for_each(|name| self.act(Verb::StopClient, name));
        // A store that cannot be closed yet keeps its IOhost, with the sidecores of the link to it.
        let stores = self.state.stores.values();
        let remotes = stores.filter_map(|part| part.spec.kind.remote());
        let used: BTreeSet<_> = remotes.map(|remote| remote.iohost.clone()).collect();
        for name in stale.iohosts.difference(&used) {
            self.act(Verb::StopIohost, name);
        }
        stale.links.iter().for_each(|name| self.act(Verb::StopLink, name));
        stale.switches.iter().for_each(|name| self.act(Verb::StopSwitch, name));
        let links = self.state.iohosts.values().flat_map(|(_, links)| links);
        let used: BTreeSet<_> = links.flat_map(|link| link.sidecores.iter().cloned()).collect();
        for name in stale.sidecores.difference(&used) {
            self.act(Verb::StopSidecore, name);
        }
        self.stale = stale;
        self.stale.stores.retain(|name| self.state.stores.contains_key(name));
        self.stale.controllers.retain(|name| self.state.controllers.contains_key(name));
        self.stale.iohosts.retain(|name| self.state.iohosts.contains_key(name));
        self.stale.sidecores.retain(|name| self.state.sidecores.contains_key(name));
    }

    /// Closes stale stores and controllers, each after its users. Of those without users, the first
    /// one by name is closed next, and stores before controllers.
    fn close(&mut self, stale: &Stale) {
        let (mut users, mut below) = (BTreeMap::<_, usize>::new(), BTreeMap::<_, Vec<_>>::new());
        for each in uses(self.now).filter(|each| each.is_open) {
            self.next.step();
            if !matches!(each.above, Name::Device(name) if stale.devices.contains(name)) {
                *users.entry(each.below).or_default() += 1;
                below.entry(each.above).or_default().push(each.below);
            }
        }
        let stores = self.now.stores.keys().filter(|name| stale.stores.contains(*name));
        let controllers =
            self.now.controllers.keys().filter(|name| stale.controllers.contains(*name));
        let parts = stores.map(|name| Name::Store(name));
        let parts = parts.chain(controllers.map(|name| Name::Controller(name)));
        let mut closable: BTreeSet<_> = parts.filter(|part| self.can_close(*part)).collect();
        let mut unused: BTreeSet<_> =
            closable.iter().copied().filter(|part| !users.contains_key(part)).collect();
        while let Some(part) = unused.pop_first() {
            self.next.step();
            closable.remove(&part);
            match part {
                Name::Store(name) => self.act(Verb::CloseStore, name),
                Name::Controller(name) => self.act(Verb::CloseController, name),
                Name::Device(_) => {}
            }
            for below in below.remove(&part).unwrap_or_default() {
                let left = users.get_mut(&below).map(|users| {
                    *users = users.saturating_sub(1);
                    *users
                });
                if left == Some(0) && closable.contains(&below) {
                    unused.insert(below);
                }
            }
        }
    }

    /// A file or controller cannot be closed while a thread opens it.
    fn can_close(&self, part: Name<'_>) -> bool {
        let has_answered = |phase: Phase| phase != Phase::Opening;
        match part {
            Name::Store(name) => {
                let part = self.now.stores.get(name);
                part.is_some_and(|part| has_answered(part.phase) || can_give_up(&part.spec))
            }
            Name::Controller(name) => {
                self.now.controllers.get(name).is_some_and(|part| has_answered(part.phase))
            }
            Name::Device(_) => false,
        }
    }

    fn store_phase(&self, name: &str) -> Option<Phase> {
        self.next.step();
        let part = self.state.stores.get(name)?;
        Some(if self.stale.stores.contains(name) { Phase::Opening } else { part.phase })
    }

    fn controller_phase(&self, name: &str) -> Option<Phase> {
        self.next.step();
        let part = self.state.controllers.get(name)?;
        Some(if self.stale.controllers.contains(name) { Phase::Opening } else { part.phase })
    }

    /// The phase of a store, or `Refused` if the store was not opened because a part below it was
    /// refused.
    fn phase(&self, store: &str) -> Phase {
        let refused = || self.refused.contains(store).then_some(Phase::Refused);
        self.store_phase(store).or_else(refused).unwrap_or(Phase::Opening)
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
            && store.kind.mirror().is_none_or(|mirror| self.has_tried(&mirror.legs))
    }

    /// Whether each leg of a mirror is open or refused, or is a device of an IOhost, which may come
    /// much later.
    fn has_tried(&self, legs: &[String]) -> bool {
        let is_remote = |leg| self.next.bottom(leg).is_some_and(|it| it.kind.remote().is_some());
        let is_stale = |leg: &String| self.stale.stores.contains(leg);
        legs.iter()
            .all(|leg| !is_stale(leg) && (self.phase(leg) != Phase::Opening || is_remote(leg)))
    }

    /// Starts sidecores, and the links on them with their users.
    fn start(&mut self) {
        let next = self.next;
        let spec = next.spec();
        for sidecore in &spec.sidecores {
            if !self.state.sidecores.contains_key(&sidecore.name) {
                self.act(Verb::StartSidecore, &sidecore.name);
            }
        }
        for switch in &spec.switches {
            if !self.state.switches.contains_key(&switch.name) && self.runs(&switch.sidecore) {
                self.act(Verb::StartSwitch, &switch.name);
            }
        }
        let links = links_to_clients(spec);
        for link in spec.links.iter().filter(|link| links.contains(&*link.name)) {
            if !self.state.links.contains_key(&link.name) && self.can_poll(link) {
                self.act(Verb::StartLink, &link.name);
            }
        }
        for client in &spec.clients {
            let runs = |name: &String| self.state.links.contains_key(name);
            if !self.state.clients.contains_key(&client.name) && client.links.iter().all(runs) {
                self.act(Verb::StartClient, &client.name);
            }
        }
        for iohost in &spec.iohosts {
            let links = next.links_of(iohost);
            if !self.state.iohosts.contains_key(&iohost.name)
                && links.is_some_and(|links| links.iter().all(|link| self.can_poll(link)))
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

    fn find_refused(&mut self) {
        let is_refused = |part: Name<'_>| match part {
            Name::Store(name) => self.store_phase(name) == Some(Phase::Refused),
            Name::Controller(name) => self.controller_phase(name) == Some(Phase::Refused),
            Name::Device(_) => false,
        };
        let parts: Vec<_> = self.above.keys().copied().filter(|part| is_refused(*part)).collect();
        for part in parts {
            self.refuse_above(part);
        }
    }

    /// Marks the stores above a refused part as refused. Returns the places of the controllers on
    /// them.
    fn refuse_above(&mut self, part: Name<'a>) -> Vec<Place> {
        let (mut parts, mut controllers) = (vec![part], Vec::new());
        while let Some(part) = parts.pop() {
            for place in self.above.get(&part).into_iter().flatten() {
                self.next.step();
                let Place::Store(index) = place else {
                    controllers.push(*place);
                    continue;
                };
                let Some(store) = self.next.spec().stores.get(*index) else { continue };
                // A mirror opens without some of its legs, or says why not.
                if store.kind.mirror().is_some() {
                    continue;
                }
                if self.store_phase(&store.name).is_none() && self.refused.insert(&store.name) {
                    parts.push(Name::Store(&store.name));
                }
            }
        }
        controllers
    }

    /// Opens stores and controllers. Passes through the lists follow one another, because a part
    /// may need another one that is further down; after the first pass, they visit only the parts
    /// above those of the pass before.
    fn open(&mut self) {
        let spec = self.next.spec();
        let needed = self.state.needed(self.next);
        let stores = (0..spec.stores.len()).map(Place::Store);
        let controllers = (0..spec.controllers.len()).map(Place::Controller);
        let mut visits: BTreeSet<_> = stores.chain(controllers).map(|place| (0, place)).collect();
        while let Some((pass, place)) = visits.pop_first() {
            self.next.step();
            let above = match place {
                Place::Store(index) => self.open_store(index, &needed),
                Place::Controller(index) => self.open_controller(index),
            };
            let pass_of = |above| if above > place { pass } else { pass + 1_usize };
            visits.extend(above.into_iter().map(|above| (pass_of(above), above)));
        }
    }

    /// Opens a store if that is possible. Returns the parts that this may allow to be opened.
    fn open_store(&mut self, index: usize, needed: &BTreeSet<&str>) -> Vec<Place> {
        let Some(store) = self.next.spec().stores.get(index) else { return Vec::new() };
        let is_open = self.state.stores.contains_key(&store.name);
        if is_open || !needed.contains(&*store.name) || !self.can_open(store) {
            return Vec::new();
        }
        self.act(Verb::OpenStore, &store.name);
        self.above.get(&Name::Store(&store.name)).cloned().unwrap_or_default()
    }

    /// Opens a controller, or refuses it, if its store has answered. Returns the controllers that
    /// this may allow to be refused.
    fn open_controller(&mut self, index: usize) -> Vec<Place> {
        let Some(controller) = self.next.spec().controllers.get(index) else { return Vec::new() };
        if self.state.controllers.contains_key(&controller.name) {
            return Vec::new();
        }
        match self.phase(&controller.store) {
            Phase::Opening => {}
            Phase::Open => self.act(Verb::OpenController, &controller.name),
            Phase::Refused => {
                self.act(Verb::RefuseController, &controller.name);
                return self.refuse_above(Name::Controller(&controller.name));
            }
        }
        Vec::new()
    }

    fn start_devices(&mut self) {
        for device in &self.next.spec().devices {
            let runs = |name: &String| self.runs(name);
            let serves = |client: &str| self.state.clients.contains_key(client);
            let is_used = |iohost: &str| self.state.iohosts.contains_key(iohost);
            if self.state.devices.contains_key(&device.name)
                || !device.sidecores.iter().all(runs)
                || !device.front_end.clients().all(serves)
                || !device.front_end.iohost().is_none_or(is_used)
            {
                continue;
            }
            if let Some(switch) = device.front_end.switch() {
                if self.state.switches.contains_key(switch) {
                    self.act(Verb::StartDevice, &device.name);
                }
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
