//! Stores whose IOhosts are away when the daemon ends.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

use super::Remote;
use crate::plan::find_store;
use crate::spec::Spec;

/// A store that the daemon gave up at its end, because the IOhost did not come back in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// The name of the store.
    pub store: String,
    /// The IOhost's name in the configuration.
    pub iohost: String,
    /// The name of the device at the IOhost.
    pub device: String,
    /// The condition that the store waited for.
    pub waits_for: String,
    /// Requests of guests that have no answer.
    pub requests: u64,
    /// Answered writes that no flush covers. They are lost if the IOhost has lost them, too.
    pub kept_writes: u64,
}

impl GivenUp {
    /// Whether an end without the IOhost would give something up.
    pub(crate) fn has_something(&self) -> bool {
        self.requests > 0 || self.kept_writes > 0
    }
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, iohost, device, waits_for, requests, kept_writes } = self;
        write!(
            f,
            "store \"{store}\" (device \"{device}\" of iohost \"{iohost}\") waits for {waits_for}: \
             {requests} requests have no answer, and {kept_writes} answered writes are covered by \
             no flush"
        )
    }
}

impl Remote {
    /// The stores that wait for their IOhosts, with the requests and writes that they hold. Waits
    /// for the sidecores of the sessions.
    pub(crate) fn away(&self) -> Vec<GivenUp> {
        let parts = self.lock();
        let mut away = Vec::new();
        for (iohost, used) in &parts.iohosts {
            let waiting = used.stores.iter().filter_map(|(store, used)| {
                Some((store, used, used.canceller.status().waiting?.waits_for.to_string()))
            });
            for (store, device, waits_for) in waiting {
                let unit = used.sessions.get(device.session).map(|(_, unit)| unit);
                let report = unit.and_then(|unit| unit.ask(|unit| unit.report()).ok().flatten());
                let opened = report.map(|report| report.opened).unwrap_or_default();
                let opened = opened.into_iter().find(|opened| opened.device == device.device);
                let (requests, kept_writes) =
                    opened.map_or((0, 0), |opened| (opened.in_flight as u64, opened.kept_writes));
                away.push(GivenUp {
                    store: store.clone(),
                    iohost: iohost.clone(),
                    device: device.device.clone(),
                    waits_for,
                    requests,
                    kept_writes,
                });
            }
        }
        away
    }

    /// Waits until `deadline` for the IOhosts of stores that hold requests or writes, and of those
    /// in `needed`.
    pub(crate) fn wait_for_iohosts(&self, needed: &BTreeSet<String>, deadline: Instant) {
        loop {
            let mut away = self.away();
            away.retain(|store| store.has_something() || needed.contains(&store.store));
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(first) = away.first().filter(|_| !left.is_zero()) else { return };
            let canceller = {
                let parts = self.lock();
                let mut stores = parts.iohosts.values().filter_map(|iohost| {
                    let used = iohost.stores.get(&first.store)?;
                    Some(used.canceller.clone())
                });
                stores.next()
            };
            if let Some(canceller) = canceller {
                // One after the other: the time is that of all of them.
                let _ = canceller.wait_until_ready(left);
            }
        }
    }
}

/// The store below another one, also through controllers, whose requests may wait for long: a
/// device of an IOhost, or a mirror. `None` if there is none.
pub(crate) fn waiting_below<'a>(spec: &'a Spec, store: &str) -> Option<&'a str> {
    let mut store = find_store(spec, store)?;
    // Each step reaches a new part, unless the parts form a cycle.
    for _ in 0..=spec.stores.len() {
        if store.kind.remote().is_some() || store.kind.mirror().is_some() {
            return Some(&store.name);
        }
        let controller = store.kind.controller();
        let below = controller
            .and_then(|name| spec.controllers.iter().find(|controller| controller.name == name))
            .map(|controller| controller.store.as_str());
        store = find_store(spec, store.kind.inner().or(below)?)?;
    }
    None
}
