//! The running graph: started from its specification, changed, reported and drained.

mod end;
mod mirrors;
mod parts;
mod patterns;
mod schedules;
mod stages;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use sidecore_linux::Clock;
use sidecore_sidecore::Sidecore;
use sidecore_units::Nanos;

use crate::AssemblyError;
use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::flush::flush_all;
use crate::front_end::remove_ublk_remnants;
use crate::graph::{Graph, Lists, Occasion, listen_early, lock, serve_created};
use crate::left::LeftDevice;
use crate::operation::OperationError;
use crate::plan::{check, find_store};
use crate::remote::GivenUp;
use crate::report::{
    ClosedControllerReport, DeviceReport, DeviceState, LinkMove, MeterReport, RemoteReport,
    SidecoreReport, Stats, SwitchReport,
};
use crate::schedules::Schedules;
use crate::spec::{DeviceSpec, Spec, StoreSpec};
use crate::stores::Progress;
use crate::switches::{Capture, Trace};
use patterns::Patterns;

/// A daemon's sidecores, stores, controllers and devices. `drop` drains the assembly.
pub struct Assembly {
    clock: Clock,
    started_at: Nanos,
    sidecores: Vec<Sidecore>,
    lists: Lists,
    graph: Arc<Mutex<Graph>>,
    /// Filled at the end.
    given_up: Mutex<Vec<GivenUp>>,
    patterns: Mutex<Patterns>,
    schedules: Arc<Schedules>,
}

impl Assembly {
    /// Opens the stores and the controllers, starts the sidecores, and serves each device on its
    /// socket. A damaged volume keeps no other device from being served; its own device is listed
    /// with the reason. The start waits a few seconds for a store that does not answer, or that has
    /// requests in flight of a killed daemon. The devices of such a store are served later, if
    /// [`Assembly::serve_late`] is called. So are the devices of an IOhost that is away: their
    /// sockets listen at once, and a VMM that connects waits for its first answer.
    ///
    /// # Errors
    /// The first failure that is not a store's own. All parts that were started are stopped again.
    pub fn start(spec: &Spec) -> Result<Self, AssemblyError> {
        Self::take_over(spec, &mut Vec::new())
    }

    /// Starts an assembly and resumes the VMMs that another process has exported by
    /// [`Assembly::hand_over`]. A VMM that cannot be resumed is disconnected, and the log has the
    /// reason.
    ///
    /// # Errors
    /// As [`Assembly::start`]. Connections that were not resumed by then stay in `left`: all of
    /// them, unless a socket cannot be made.
    pub fn take_over(spec: &Spec, left: &mut Vec<LeftDevice>) -> Result<Self, AssemblyError> {
        check(spec)?;
        let controllers = spec.controllers.iter().map(|controller| controller.name.as_str());
        Schedules::check(&spec.schedules, controllers)?;
        if let Some(device) = spec.devices.iter().find(|it| it.front_end.number().is_some()) {
            // Before the first thread, because threads inherit it.
            sidecore_linux::prepare_ublk_memory().map_err(|error| AssemblyError::Kernel {
                name: device.name.clone(),
                error: error.to_string(),
            })?;
        }
        let numbers: Vec<_> = spec.devices.iter().filter_map(|it| it.front_end.number()).collect();
        remove_ublk_remnants(&numbers);
        let clock = Clock::new();
        let (started_at, lists) = (clock.now(), Lists::new(&clock, spec));
        let graph = Graph::new(clock.clone(), lists.clone());
        let (given_up, patterns) = (Mutex::default(), Mutex::default());
        let schedules = Arc::new(Schedules::new(&lists, &spec.schedules));
        let sidecores = Vec::new();
        let mut assembly =
            Self { clock, started_at, sidecores, lists, graph, given_up, patterns, schedules };
        assembly.graph().left.append(left);
        if let Err(error) = assembly.come_up(spec) {
            left.append(&mut assembly.graph().left);
            return Err(error);
        }
        Ok(assembly)
    }

    fn come_up(&mut self, spec: &Spec) -> Result<(), AssemblyError> {
        let created = {
            let mut graph = lock(&self.graph);
            graph.open_in_time(spec)?;
            self.sidecores = graph.sidecores().collect();
            graph.come_to(spec, Occasion::Start)?
        };
        serve_created(&self.graph, created, Occasion::Start)?;
        listen_early(&self.graph)?;
        let names: Vec<String> = self.graph().left.iter().map(|left| left.name.clone()).collect();
        self.make_again(&names);
        self.lists.remote.forget_unused(true);
        let mut graph = self.graph();
        for device in names.iter().filter(|name| self.lists.wanted().place(name) == usize::MAX) {
            tracing::warn!(
                device,
                "the VMM of a device that is no longer configured is disconnected"
            );
            graph.disconnect(device);
        }
        for device in self.devices().iter().filter(|device| device.state == DeviceState::Opening) {
            tracing::warn!(
                device = device.name,
                store = device.store,
                "its store does not answer yet"
            );
        }
        Ok(())
    }

    /// Starts a thread that serves devices when their stores answer, while some stores are being
    /// opened. A call does nothing while there is such a thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve_late(&self) -> Result<(), AssemblyError> {
        let mut graph = self.graph();
        if graph.in_flight == 0 {
            return Ok(());
        }
        let Some(receiver) = graph.receiver.take() else { return Ok(()) };
        let (weak, subsystems) = (Arc::downgrade(&self.graph), Arc::clone(&self.lists.subsystems));
        let serve = move || {
            let mut receiver = Some(receiver);
            while let Some(opened) = receiver.as_ref().and_then(|opened| opened.recv().ok()) {
                let Some(graph) = weak.upgrade() else { return };
                let mut locked = lock(&graph);
                if locked.ends {
                    return;
                }
                // Each failure is logged and tolerated on this occasion.
                let _ = locked.answer(opened, Occasion::Late);
                let created = locked.come_to_wanted();
                if locked.in_flight == 0 {
                    // For the thread of the next store. This one ends.
                    locked.receiver = receiver.take();
                }
                drop(locked);
                let _ = serve_created(&graph, created, Occasion::Late);
                subsystems.refresh();
            }
        };
        std::thread::Builder::new()
            .name("late-stores".to_owned())
            .spawn(serve)
            .map_err(AssemblyError::Threads)?;
        Ok(())
    }

    /// Serves one more device on sidecores that run already. A device that names no sidecore is
    /// served by the sidecore with the fewest queues. `store`, if given, belongs to the device: it
    /// is forgotten with the last device that leads to it.
    ///
    /// This opens stores and may take a while; reports are answered meanwhile. A device of an
    /// IOhost that is away is added all the same, and waits.
    ///
    /// # Errors
    /// A name or a socket is taken, a part is missing or cannot be opened, a second device would
    /// write to the same file or volume, or the assembly is ending. Nothing has changed then.
    pub fn add_device(
        &self,
        device: &DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<(), AssemblyError> {
        let added = self.add(device, store);
        let added =
            added.and_then(|created| serve_created(&self.graph, created, Occasion::Addition));
        let added = added.and_then(|()| self.wait_for_iohosts(&device.name));
        // After an error too: the device's volume may have been created.
        self.lists.subsystems.refresh();
        added.inspect(|()| {
            tracing::info!(device = device.name, socket = %device.socket.display(), "device added");
        })
    }

    /// Makes the socket of an added device that waits for its IOhost. An error removes the device.
    fn wait_for_iohosts(&self, added: &str) -> Result<(), AssemblyError> {
        self.serve_late().and_then(|()| listen_early(&self.graph)).inspect_err(|_| {
            let mut graph = self.graph();
            let _ = graph.unwant(added);
            graph.close_unneeded();
        })
    }

    /// Creates the device, which is not served yet, and makes it part of what is wanted.
    fn add(
        &self,
        device: &DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<Vec<Arc<Disk>>, AssemblyError> {
        let account = |error| AssemblyError::Account { name: device.name.clone(), error };
        device.access.resolve().map_err(account)?;
        let mut device = device.clone();
        let mut opened = None;
        loop {
            let (mut graph, next) = self.with(&mut device, store)?;
            if let Some(slow) = graph.slow_store(&device, &next) {
                if graph.stores.is_opening(&slow.name) {
                    return Err(AssemblyError::NoAnswer { name: slow.name.clone() });
                }
                // The graph is not locked while a file is opened, which may not answer, or the key
                // of a stage is derived, which takes a while.
                let Some(opened) = opened.take() else {
                    let open = graph.open_alone(slow)?;
                    drop(graph);
                    opened = Some(open()?);
                    continue;
                };
                graph.stores.set(slow, Progress::Open(opened));
            }
            return graph.create(&device, next);
        }
    }

    /// Returns the checked specification with one more device, and the locked graph.
    fn with(
        &self,
        device: &mut DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<(MutexGuard<'_, Graph>, Spec), AssemblyError> {
        let graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        if device.sidecores.is_empty() && device.front_end.switch().is_none() {
            device.sidecores.extend(self.least_loaded());
        }
        let wanted = self.lists.wanted();
        if let Some(store) = store.filter(|store| find_store(&wanted.spec, &store.name).is_some()) {
            return Err(AssemblyError::Duplicate { kind: "store", name: store.name.clone() });
        }
        let next = wanted.with(device, store);
        check(&next)?;
        Ok((graph, next))
    }

    /// Stops serving a device: removes its socket, stops its queues when their requests in flight
    /// are done, and closes stores that no other device leads to. The contents of a closed RAM
    /// store are lost.
    ///
    /// This waits for the device's requests; reports are answered meanwhile.
    ///
    /// # Errors
    /// The device does not exist, or another thread is removing it.
    pub fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        let unknown = || AssemblyError::NoDevice { name: name.to_owned() };
        // The graph is not locked meanwhile: a request of the device's host may wait for the graph.
        if let Some(disk) = self.lists.disk(name) {
            if !disk.stop() {
                return Err(unknown());
            }
            disk.close();
        }
        let mut graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        // Reports have no more of the device from here on: to close its store may take a while.
        graph.unwant(name).ok_or_else(unknown)?;
        graph.stop_device(name);
        let unneeded = graph.unneeded();
        let names: BTreeSet<String> = unneeded.iter().map(|(name, _)| name.clone()).collect();
        drop(graph);
        // Other changes go on meanwhile: the IOhost of a store may go away.
        flush_all(unneeded, (&self.lists.remote, &self.lists.mirrors));
        let mut graph = self.graph();
        if !graph.ends {
            // A store that another device has used meanwhile is flushed when that one is removed.
            let before = std::mem::replace(&mut graph.flushed, names);
            graph.close_unneeded();
            graph.flushed = before;
        }
        drop(graph);
        self.lists.subsystems.refresh();
        tracing::info!(device = name, "device removed");
        Ok(())
    }

    /// Serves clients that a device turns away because writes that an earlier process answered to
    /// them may be missing.
    ///
    /// # Errors
    /// The device does not exist, or no answered write is missing.
    pub fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        if self.lists.wanted().place(name) == usize::MAX {
            return Err(AssemblyError::NoDevice { name: name.to_owned() });
        }
        if !self.lists.disk(name).is_some_and(|disk| disk.accept_loss()) {
            return Err(AssemblyError::NothingMissing { name: name.to_owned() });
        }
        tracing::warn!(device = name, "the operator accepts the loss of answered writes");
        Ok(())
    }

    /// Reads all counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let now = self.clock.now();
        let disks = self.lists.all_disks();
        let mut devices: Vec<_> = disks.iter().map(|disk| disk.stats()).collect();
        self.sort(&mut devices, |device| &device.name);
        let mut stages: Vec<_> = disks.iter().flat_map(|disk| disk.stage_stats()).collect();
        self.sort(&mut stages, |stage| &stage.device);
        Stats {
            uptime_ns: now.since(self.started_at).0,
            interval_ns: None,
            sidecores: self
                .sidecores
                .iter()
                .map(|sidecore| SidecoreReport::of(sidecore, now))
                .collect(),
            devices,
            meters: MeterReport::all(disks.iter().flat_map(|disk| disk.meters())),
            stages,
        }
    }

    /// Reports the switches with the counters of their ports. If it `asks`, it waits for their
    /// sidecores, and has the states of the ports and the known addresses as well.
    #[must_use]
    pub fn switches(&self, asks: bool) -> Vec<SwitchReport> {
        self.lists.switches.reports(asks)
    }

    /// Replaces the rules of a port's firewall, all at once and without a frame in between. Its
    /// connections stay, if old and new rules ask for their states.
    ///
    /// # Errors
    /// There is no such port, or a rule is not understood; nothing has changed then.
    pub fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError> {
        self.lists.switches.set_rules(port, rules)
    }

    /// Changes the rate limits of a port.
    ///
    /// # Errors
    /// There is no such port, or a limit is not understood; nothing has changed then.
    pub fn set_limits(&self, port: &str, limits: &[String]) -> Result<(), OperationError> {
        self.lists.switches.set_limits(port, limits)
    }

    /// Changes the faults of a port's wire; frames on their way keep their times.
    ///
    /// # Errors
    /// There is no such port, or a word is not understood; nothing has changed then.
    pub fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError> {
        self.lists.switches.set_faults(port, faults)
    }

    /// Begins to capture the frames of a port, up to `snaplen` bytes of each.
    ///
    /// # Errors
    /// There is no such port, it has a capture already, or `snaplen` is too small or too large.
    pub fn capture(&self, port: &str, snaplen: u32) -> Result<Capture, OperationError> {
        self.lists.switches.capture(port, snaplen)
    }

    /// Begins a trace of the frames that are dropped from and to a port.
    ///
    /// # Errors
    /// There is no such port, or its switch has too many traces.
    pub fn trace_port(&self, port: &str) -> Result<Trace, OperationError> {
        self.lists.switches.trace_port(port)
    }

    /// Begins a trace of the frames that a switch drops.
    ///
    /// # Errors
    /// There is no such switch, or it has too many traces.
    pub fn trace_switch(&self, switch: &str) -> Result<Trace, OperationError> {
        self.lists.switches.trace_switch(switch)
    }

    /// Reports the devices, in the order of the configuration.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let with_warnings = |mut report: DeviceReport| {
            let controller = report.controller.as_deref().and_then(|name| self.controller(name));
            let waits = self.lists.waits_for(&report.store);
            report.warnings.extend(waits.filter(|_| report.state != DeviceState::Opening));
            report.warnings.extend(
                controller.iter().flat_map(|found| found.warnings(report.volume.as_deref())),
            );
            report
        };
        let disks = self.lists.all_disks();
        let mut devices: Vec<_> = disks.iter().map(|disk| with_warnings(disk.report())).collect();
        let unserved =
            self.lists.wanted().unserved(&devices, &self.lists.controllers, &self.lists.remote);
        devices.extend(unserved.into_iter().map(with_warnings));
        self.sort(&mut devices, |device| &device.name);
        devices
    }

    /// Sorts by the order of the configuration; added devices come last.
    fn sort<T>(&self, devices: &mut [T], name: impl Fn(&T) -> &String) {
        let wanted = self.lists.wanted();
        devices.sort_by_key(|device| wanted.place(name(device)));
    }

    /// Reports the links, the clients, the IOhosts, and the patterns.
    #[must_use]
    pub fn remote(&self) -> RemoteReport {
        let serves = self.lists.wanted().spec.serves.clone();
        let serves = lock(&self.patterns).report(&serves);
        RemoteReport { serves, ..self.lists.remote.report() }
    }

    /// Makes a key for a client, whom the text that this returns lets in. It is a secret.
    ///
    /// # Errors
    /// There is no such client, it is invited already or needs no invitation, or its key cannot be
    /// stored.
    pub fn invite(&self, client: &str) -> Result<String, OperationError> {
        self.lists.remote.invite(client)
    }

    /// Forgets a client's key, and ends its sessions.
    ///
    /// # Errors
    /// There is no such client, it was not invited, or its key cannot be removed.
    pub fn revoke(&self, client: &str) -> Result<(), OperationError> {
        self.lists.remote.revoke(client)
    }

    /// Takes no new requests of a client, waits until those in flight have ended, and flushes its
    /// stores. The client's requests wait until [`undrain_client`](Self::undrain_client).
    ///
    /// # Errors
    /// There is no such client, or a store does not answer or cannot be flushed. Requests of the
    /// client wait all the same.
    pub fn drain_client(&self, client: &str) -> Result<(), OperationError> {
        self.lists.remote.drain_client(client)
    }

    /// Takes requests of a drained client again.
    ///
    /// # Errors
    /// There is no such client, or it is not drained.
    pub fn undrain_client(&self, client: &str) -> Result<(), OperationError> {
        self.lists.remote.undrain_client(client)
    }

    /// Has new requests to an IOhost wait, and waits until all others are answered and the answered
    /// writes are flushed: then the IOhost can be taken away. Requests wait until
    /// [`undrain_iohost`](Self::undrain_iohost).
    ///
    /// # Errors
    /// There is no such IOhost, or it does not answer, or cannot flush. New requests wait all the
    /// same.
    pub fn drain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        self.lists.remote.drain_iohost(iohost)
    }

    /// Has requests to a drained IOhost go on.
    ///
    /// # Errors
    /// There is no such IOhost, or it is not drained.
    pub fn undrain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        self.lists.remote.undrain_iohost(iohost)
    }

    /// Moves the sessions with an IOhost to this link, one of its two, while guests use its
    /// devices.
    ///
    /// # Errors
    /// There is no such IOhost, the link does not lead to it, or it does not answer there: its
    /// sessions are where they were, or are looked for on both links.
    pub fn move_iohost(&self, iohost: &str, link: &str) -> Result<LinkMove, OperationError> {
        self.lists.remote.move_iohost(iohost, link)
    }

    /// The controllers that are open.
    #[must_use]
    pub fn controllers(&self) -> Vec<Arc<ControllerHandle>> {
        self.lists.controllers.all()
    }

    /// The controllers that are not open.
    #[must_use]
    pub fn closed_controllers(&self) -> Vec<ClosedControllerReport> {
        self.lists.controllers.closed()
    }

    /// The open controller of this name.
    #[must_use]
    pub fn controller(&self, name: &str) -> Option<Arc<ControllerHandle>> {
        self.lists.controllers.get(name)
    }

    /// The sidecore with the fewest queues, the first of several.
    fn least_loaded(&self) -> Option<String> {
        let disks = self.lists.all_disks();
        let load = |sidecore: &&Sidecore| {
            disks.iter().map(|disk| disk.queues_on(sidecore.name())).sum::<usize>()
        };
        self.sidecores.iter().min_by_key(load).map(|sidecore| sidecore.name().to_owned())
    }

    fn graph(&self) -> MutexGuard<'_, Graph> {
        lock(&self.graph)
    }
}

impl Drop for Assembly {
    fn drop(&mut self) {
        self.drain();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{SidecoreSpec, StoreKind};

    fn states(assembly: &Assembly) -> Vec<(String, DeviceState)> {
        assembly.devices().into_iter().map(|report| (report.name, report.state)).collect()
    }

    /// Each change serves its own device, also if the changes overlap: the failure of one change is
    /// not reported to the other.
    #[test]
    fn additions_side_by_side_fail_each_for_itself() {
        let directory = tempfile::tempdir().unwrap();
        let device = |name: &str, socket: &str| DeviceSpec {
            name: name.to_owned(),
            store: "mem".to_owned(),
            socket: directory.path().join(socket),
            ..DeviceSpec::default()
        };
        let spec = Spec {
            sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
            stores: vec![StoreSpec::new(
                "mem",
                StoreKind::Ram { size_bytes: 1 << 20, block_bytes: 512 },
            )],
            ..Spec::default()
        };
        let assembly = Assembly::start(&spec).unwrap();
        let (bad, good) = (device("bad", "no/such/socket"), device("good", "socket"));
        let bad = assembly.add(&bad, None).unwrap();
        let good = assembly.add(&good, None).unwrap();
        // A device that waits for its VMM can be connected to.
        let unserved = [("bad", DeviceState::Opening), ("good", DeviceState::Opening)];
        assert_eq!(states(&assembly), unserved.map(|(name, state)| (name.to_owned(), state)));
        let served = serve_created(&assembly.graph, bad, Occasion::Addition);
        assert!(served.unwrap_err().to_string().contains("bad"));
        serve_created(&assembly.graph, good, Occasion::Addition).unwrap();
        assert_eq!(states(&assembly), [("good".to_owned(), DeviceState::Waiting)]);
        assert!(directory.path().join("socket").exists());
        assembly.remove_device("good").unwrap();
        assert!(assembly.devices().is_empty());
    }
}
