//! Checks whether the legs of mirrors can be their legs.

use std::collections::{HashMap, HashSet};

use sidecore_assembly::spec::{
    Below, MirrorSpec, StoreKind, unfit_as_leg, unfit_number_of_legs, used_twice,
};

use super::check::{by_name, chain, known, refers, store_of};
use super::draft::{Draft, Part, StoreDraft};
use super::problem::Collector;

/// The mirrors among the stores.
fn mirrors(draft: &Draft) -> impl Iterator<Item = (&Part<StoreDraft>, &MirrorSpec)> {
    let stores = draft.stores.iter();
    stores.filter_map(|store| Some((store, store.spec.kind.as_ref()?.mirror()?)))
}

/// The names of the stores below mirrors: a mirror does without one that is not there.
pub(super) fn below_mirrors(draft: &Draft) -> HashSet<&str> {
    let stores = by_name(&draft.stores);
    let legs = mirrors(draft).flat_map(|(_, mirror)| &mirror.legs);
    legs.flat_map(|leg| chain(&stores, leg)).filter_map(|store| store.head.name()).collect()
}

/// Reports legs that are missing, that cannot be legs, or that something else uses.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    let parts = Parts { stores: by_name(&draft.stores), draft };
    let (stores, users) = (&parts.stores, users(draft));
    let mut reported = HashSet::new();
    for (store, mirror) in mirrors(draft) {
        let (head, subject) = (&store.head, &store.head.subject);
        if let (Some(unfit), Some(place)) =
            (unfit_number_of_legs(mirror.legs.len()), head.place("legs"))
        {
            problems.add(place, subject, unfit);
        }
        if let Some((read, place)) = refers(head, "read", mirror.read.as_deref())
            && !mirror.legs.iter().any(|leg| leg == read)
        {
            problems.add(place, subject, format!("\"{read}\" is none of its `legs`"));
        }
        let mut seen = HashSet::new();
        for (leg, place) in mirror.legs.iter().zip(head.places("legs").iter().cloned()) {
            known("store", (leg, place.clone()), stores.keys().copied(), subject, problems);
            let below = chain(stores, leg);
            let twice = || {
                let mut others =
                    below.iter().filter_map(|it| Some((it.head.name()?, other_user(it, &users)?)));
                // The other mirror of a leg of two has nothing to add.
                others.find(|(name, _)| reported.insert(*name)).map(|(_, why)| why)
            };
            let unfit = match seen.insert(leg) {
                false => Some(format!("leg \"{leg}\" is listed twice")),
                true => unfit_as_leg(leg, &parts).or_else(twice),
            };
            if let Some(unfit) = unfit {
                problems.add(place, subject, unfit);
            }
        }
    }
}

/// The parts of a draft that a leg can lie on.
struct Parts<'a> {
    stores: HashMap<&'a str, &'a Part<StoreDraft>>,
    draft: &'a Draft,
}

impl Below for Parts<'_> {
    fn store(&self, name: &str) -> Option<&StoreKind> {
        self.stores.get(name)?.spec.kind.as_ref()
    }

    fn store_of_controller(&self, controller: &str) -> Option<&str> {
        let mut controllers = self.draft.controllers.iter();
        let found = controllers.find(|found| found.head.name() == Some(controller))?;
        Some(&found.spec.store)
    }

    fn waits_for(&self, iohost: &str) -> bool {
        let mut iohosts = self.draft.iohosts.iter();
        let found = iohosts.find(|found| found.head.name() == Some(iohost));
        found.is_some_and(|found| found.spec.fail_after.is_none())
    }
}

/// The sections that use each store, or each volume, by its name.
type Users<'a> = HashMap<(&'a str, &'a str), Vec<&'a str>>;

fn users(draft: &Draft) -> Users<'_> {
    let mut users = Users::new();
    let mut add = |below, user| {
        let known: &mut Vec<&str> = users.entry(below).or_default();
        if !known.contains(&user) {
            known.push(user);
        }
    };
    for store in &draft.stores {
        let (Some(kind), subject) = (&store.spec.kind, &*store.head.subject) else { continue };
        kind.stores_below().for_each(|below| add(("", below), subject));
        if let Some(of) = kind.volume() {
            add((&of.controller, &of.volume), subject);
        }
    }
    for controller in &draft.controllers {
        add(("", &controller.spec.store), &controller.head.subject);
    }
    for (device, (store, _)) in draft.devices.iter().filter_map(|it| Some((it, store_of(it)?))) {
        add(("", store), &device.head.subject);
    }
    users
}

/// The other user of a store below a mirror, or of its volume.
fn other_user(store: &Part<StoreDraft>, users: &Users<'_>) -> Option<String> {
    let name = store.head.name()?;
    let volume = store.spec.kind.as_ref().and_then(StoreKind::volume);
    let volume = volume.map(|of| (&*of.controller, &*of.volume));
    [Some(("", name)), volume].into_iter().flatten().find_map(|of| {
        match users.get(&of)?.as_slice() {
            [one, other, ..] => Some(used_twice(of.1, one, other)),
            _ => None,
        }
    })
}
