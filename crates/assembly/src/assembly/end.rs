//! The end of an assembly, in order, and within a bounded time while an IOhost is away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::Assembly;
use crate::disk::Disk;
use crate::flush::{AWAY_PATIENCE, flush};
use crate::graph::{Graph, Occasion};
use crate::left::LeftDevice;
use crate::plan::{Action, Parts, Verb, find_store, plan};
use crate::remote::{GivenUp, waiting_below};
use crate::spec::Spec;

/// The time between two looks at devices that have not stopped.
const LOOK: Duration = Duration::from_millis(50);

/// Stops a device. Returns its exported client, if the client is to be exported.
type Stop = fn(&Disk) -> Option<LeftDevice>;

impl Assembly {
    /// Ends the assembly in order: closes connections, stops queues when their requests in flight
    /// are done, writes controllers' metadata, flushes files, and ends sidecores. Reports are
    /// answered meanwhile and afterwards. The second call does nothing.
    ///
    /// If an IOhost is away, the end waits a few seconds for requests and writes that need the
    /// IOhost, and then [gives them up](Self::given_up).
    pub fn drain(&self) {
        let left = self.end(|disk| {
            disk.end();
            None
        });
        left.into_iter().for_each(LeftDevice::disconnect);
    }

    /// Ends the assembly as [`Assembly::drain`] does, and exports the connected VMMs for another
    /// process. A device on a store in memory is not exported: its contents end with this process.
    /// Neither is a device whose answered writes may be lost.
    #[must_use]
    pub fn hand_over(&self) -> Vec<LeftDevice> {
        self.end(Disk::hand_over)
    }

    /// The stores that [`drain`](Self::drain) or [`hand_over`](Self::hand_over) has given up,
    /// because their IOhosts did not come back in time. Threads and memory of their devices stay:
    /// the process is to end.
    #[must_use]
    pub fn given_up(&self) -> Vec<GivenUp> {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn end(&self, stop: Stop) -> Vec<LeftDevice> {
        self.lists.remote.forget_unused(false);
        let mut left = self.end_graph(stop);
        // Clients of an earlier daemon that were not resumed: the next daemon may resume them.
        left.append(&mut self.graph().left);
        self.lists.remote.end();
        // A change that a host has requested may have waited for the graph, and finds it ended.
        self.lists.subsystems.end();
        left
    }

    fn end_graph(&self, stop: Stop) -> Vec<LeftDevice> {
        let mut actions = {
            let mut graph = self.graph();
            if std::mem::replace(&mut graph.ends, true) {
                return Vec::new();
            }
            plan(&graph.now(), &Spec::default())
        };
        self.lists.remote.part_from_clients();
        // One may wait for a leg, and the end of the control API waits for all.
        self.lists.mirrors.end_commands();
        let deadline = Instant::now() + AWAY_PATIENCE;
        // The graph is not locked meanwhile: a request of a host, which its function waits for, may
        // wait for the graph.
        let disks = self.lists.all_disks();
        let (left, stuck) = self.stop_disks(&disks, stop, deadline);
        self.lists.remote.wait_for_iohosts(&self.held(&stuck), deadline);
        let mut graph = self.graph();
        let mut held = self.held(&stuck);
        let mut unflushed = self.flush_remote(&mut graph, &mut held, deadline);
        let given_up = self.give_up(&held);
        unflushed.extend(given_up.iter().map(|store| store.store.clone()));
        unflushed.extend(self.mirrors_that_wait(&held));
        // Drained devices stay in the reports.
        actions.retain(|action| action.verb != Verb::StopDevice && self.can_end(action, &held));
        graph.close_devices(&stuck);
        // These actions only stop and close, which cannot fail.
        let closed = graph.apply(&actions, &Parts::of(&Spec::default()), Occasion::Late);
        unflushed.extend(closed.unwrap_or_default());
        let (lost, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|left| {
            let disk = disks.iter().find(|disk| disk.spec.name == left.name);
            disk.is_none_or(|disk| {
                let store = disk.configured();
                store.is_some_and(|store| graph.has_lost_writes(store, &unflushed))
            })
        });
        for left in lost {
            tracing::error!(
                device = left.name,
                "the guest loses the device, because its last writes may be lost"
            );
            left.disconnect();
        }
        if !held.is_empty() {
            // Its drop would wait for the IOhost.
            std::mem::forget(Arc::clone(&self.graph));
        }
        *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = given_up;
        left
    }

    /// Stops devices side by side, because each waits for the requests of its own guest. Returns
    /// the exported clients, and the devices that still wait for an IOhost at the deadline.
    fn stop_disks(
        &self,
        disks: &[Arc<Disk>],
        stop: Stop,
        deadline: Instant,
    ) -> (Vec<LeftDevice>, Vec<Arc<Disk>>) {
        let (sender, stopped) = channel();
        let mut running = BTreeMap::new();
        let mut left = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let (sender, its) = (sender.clone(), Arc::clone(disk));
            let run = move || drop(sender.send((index, stop(&its))));
            let thread = std::thread::Builder::new().name(format!("stop-{}", disk.spec.name));
            match thread.spawn(run) {
                Ok(_) => drop(running.insert(index, Arc::clone(disk))),
                Err(_) => left.extend(stop(disk)),
            }
        }
        drop(sender);
        let mut is_told = false;
        while !running.is_empty() {
            match stopped.recv_timeout(LOOK) {
                Ok((index, exported)) => {
                    running.remove(&index);
                    left.extend(exported);
                }
                // The thread of a device has panicked.
                Err(RecvTimeoutError::Disconnected) => running.clear(),
                Err(RecvTimeoutError::Timeout) => {
                    if !running.values().all(|disk| self.is_away(disk)) {
                        continue;
                    }
                    if Instant::now() >= deadline {
                        break;
                    }
                    if !std::mem::replace(&mut is_told, true) {
                        self.tell_of_iohosts();
                    }
                }
            }
        }
        (left, running.into_values().collect())
    }

    /// Flushes the stores of IOhosts that are there, side by side. Returns those that may have lost
    /// writes. A store whose IOhost has gone away meanwhile is held from the deadline on.
    fn flush_remote(
        &self,
        graph: &mut Graph,
        held: &mut BTreeSet<String>,
        deadline: Instant,
    ) -> Vec<String> {
        let remote = &self.lists.remote;
        let (sender, flushed) = channel();
        let mut running = BTreeSet::new();
        for (name, store) in graph.stores.remote() {
            if held.contains(&name) || !remote.is_ready(&name) || store.geometry().read_only {
                continue;
            }
            let (sender, its) = (sender.clone(), name.clone());
            let run = move || {
                let is_flushed = flush(&its, store.as_ref());
                drop(store);
                let _ = sender.send((its, is_flushed));
            };
            if std::thread::Builder::new().name(format!("flush-{name}")).spawn(run).is_ok() {
                running.insert(name);
            }
        }
        drop(sender);
        let mut lost = Vec::new();
        while !running.is_empty() {
            match flushed.recv_timeout(LOOK) {
                Ok((name, is_flushed)) => {
                    running.remove(&name);
                    lost.extend((!is_flushed).then(|| name.clone()));
                    graph.flushed.insert(name);
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    held.extend(running.iter().filter(|name| !remote.is_ready(name)).cloned());
                    running.retain(|name| !held.contains(name));
                }
            }
        }
        lost
    }

    /// The stores that the end leaves as they are, for reports and the log.
    fn give_up(&self, held: &BTreeSet<String>) -> Vec<GivenUp> {
        let mut given_up = self.lists.remote.away();
        given_up.retain(|store| store.has_something() || held.contains(&store.store));
        for store in &given_up {
            tracing::error!("given up: {store}");
        }
        given_up
    }

    /// Those of the stores that are mirrors whose requests wait, for the log.
    fn mirrors_that_wait(&self, held: &BTreeSet<String>) -> Vec<String> {
        let waits = |name: &String| Some((name.clone(), self.lists.mirrors.waits(name)?));
        let waiting = held.iter().filter_map(waits);
        waiting
            .map(|(store, why)| {
                tracing::error!(store, "given up with requests that have no answer: {why}");
                store
            })
            .collect()
    }

    fn tell_of_iohosts(&self) {
        for store in self.lists.remote.away() {
            let seconds = AWAY_PATIENCE.as_secs();
            tracing::warn!("{store}; after {seconds} s the daemon ends without them");
        }
    }

    /// Whether a device's store waits for an IOhost, or for legs of a mirror.
    fn is_away(&self, disk: &Disk) -> bool {
        let wanted = self.lists.wanted();
        let below = waiting_below(&wanted.spec, &disk.spec.store);
        below.is_some_and(|store| !self.lists.is_ready(store))
    }

    /// The stores that wait for their IOhosts or legs, and cannot be closed before: those below
    /// devices that have not stopped, and below open controllers. With a mirror all that is below
    /// it is held: it uses its legs.
    fn held(&self, stuck: &[Arc<Disk>]) -> BTreeSet<String> {
        let wanted = self.lists.wanted();
        let is_open = |name: &&String| self.lists.controllers.get(name).is_some();
        let controllers = wanted.spec.controllers.iter();
        let controllers = controllers.filter(|spec| is_open(&&spec.name)).map(|spec| &spec.store);
        let tops = stuck.iter().map(|disk| &disk.spec.store).chain(controllers);
        let below = tops.filter_map(|store| waiting_below(&wanted.spec, store));
        let waiting = below.filter(|store| !self.lists.is_ready(store));
        let parts = Parts::of(&wanted.spec);
        let legs_too = waiting.flat_map(|store| with_legs(store, &parts));
        legs_too.map(str::to_owned).collect()
    }

    /// Whether an action can be applied while these stores cannot be closed.
    fn can_end(&self, action: &Action, held: &BTreeSet<String>) -> bool {
        let wanted = self.lists.wanted();
        let spec = &wanted.spec;
        let leads =
            |store: &str| waiting_below(spec, store).is_some_and(|name| held.contains(name));
        match action.verb {
            Verb::CloseStore => !held.contains(&action.name) && !leads(&action.name),
            Verb::CloseController => {
                let mut controllers = spec.controllers.iter();
                let found = controllers.find(|controller| controller.name == action.name);
                let below = found.map(|controller| &controller.store);
                !below.is_some_and(|store| held.contains(store) || leads(store))
            }
            Verb::StopIohost => {
                let iohost = |store: &String| Some(&find_store(spec, store)?.kind.remote()?.iohost);
                !held.iter().any(|store| iohost(store) == Some(&action.name))
            }
            Verb::StopSidecore => held.is_empty(),
            _ => true,
        }
    }
}

/// A store, and if it is a mirror, all that is below it, also through the controllers of volumes.
fn with_legs<'a>(name: &'a str, parts: &Parts<'a>) -> Vec<&'a str> {
    let mut found = vec![name];
    let mirror = parts.store(name).and_then(|store| store.kind.mirror());
    let mut tops: Vec<&str> =
        mirror.iter().flat_map(|mirror| &mirror.legs).map(String::as_str).collect();
    while let Some(top) = tops.pop() {
        for store in parts.down(top).filter(|store| store.name != name) {
            if found.contains(&store.name.as_str()) {
                continue;
            }
            found.push(&store.name);
            let controllers = &parts.spec().controllers;
            let of = store.kind.controller();
            let below = controllers.iter().find(|controller| Some(&*controller.name) == of);
            tops.extend(below.map(|controller| controller.store.as_str()));
        }
    }
    found
}
