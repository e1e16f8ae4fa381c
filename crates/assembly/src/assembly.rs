//! The running graph: started from its spec, changed while it runs, asked how it fares, drained.

use std::sync::{Arc, Mutex, MutexGuard};

use sidecore_linux::Clock;
use sidecore_sidecore::Sidecore;
use sidecore_units::Nanos;

use crate::AssemblyError;
use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::graph::{Graph, Lists, Occasion, lock, open_alone, serve_created};
use crate::left::LeftDevice;
use crate::plan::{Verb, bottom, check, find_store, is_file, plan};
use crate::report::{ClosedControllerReport, DeviceReport, DeviceState, SidecoreReport, Stats};
use crate::spec::{DeviceSpec, Spec, StoreSpec};
use crate::stores::Progress;

/// A daemon's sidecores, stores, controllers and devices. Dropping it drains it.
pub struct Assembly {
    clock: Clock,
    started_at: Nanos,
    sidecores: Vec<Sidecore>,
    lists: Lists,
    graph: Arc<Mutex<Graph>>,
}

impl Assembly {
    /// Opens the stores and the controllers, starts the sidecores, and serves each device on its
    /// socket. A volume that is damaged keeps no other device from being served: its own is listed
    /// with the reason. A store that does not answer within a few seconds, or has requests in flight
    /// of a daemon that was killed, is not waited for any longer: its devices come later, if
    /// [`Assembly::serve_late`] is called.
    ///
    /// # Errors
    /// The first thing that cannot be had; what was started until then is stopped again.
    pub fn start(spec: &Spec) -> Result<Self, AssemblyError> {
        Self::take_over(spec, &mut Vec::new())
    }

    /// The same, and resumes the VMMs that another process has [handed over](Assembly::hand_over).
    /// A VMM that cannot be resumed is disconnected, and the log says why.
    ///
    /// # Errors
    /// As [`Assembly::start`]. Connections that were not resumed by then are still in `left`: all of
    /// them, unless a socket cannot be made.
    pub fn take_over(spec: &Spec, left: &mut Vec<LeftDevice>) -> Result<Self, AssemblyError> {
        check(spec)?;
        let clock = Clock::new();
        let (started_at, lists) = (clock.now(), Lists::new(spec));
        let graph = Graph::new(clock.clone(), lists.clone());
        let mut assembly = Self { clock, started_at, sidecores: Vec::new(), lists, graph };
        assembly.graph().left.append(left);
        if let Err(error) = assembly.come_up(spec) {
            left.append(&mut assembly.graph().left);
            return Err(error);
        }
        Ok(assembly)
    }

    fn come_up(&mut self, spec: &Spec) -> Result<(), AssemblyError> {
        {
            let mut graph = lock(&self.graph);
            graph.open_in_time(spec)?;
            self.sidecores = graph.sidecores().collect();
            graph.come_to(spec, Occasion::Start)?;
        }
        serve_created(&self.graph, Occasion::Start)?;
        let mut graph = self.graph();
        let names: Vec<String> = graph.left.iter().map(|left| left.name.clone()).collect();
        for device in names.iter().filter(|name| self.lists.wanted().place(name) == usize::MAX) {
            tracing::warn!(device, "a VMM was connected to a device that is not configured any more");
            graph.disconnect(device);
        }
        for device in self.devices().iter().filter(|device| device.state == DeviceState::Opening) {
            tracing::warn!(device = device.name, store = device.store, "its store does not answer yet");
        }
        Ok(())
    }

    /// Serves the devices whose stores were not open at the start as soon as they are, on a thread
    /// of its own. Without such a device, and the second time, it does nothing.
    ///
    /// # Errors
    /// There is no thread.
    pub fn serve_late(&self) -> Result<(), AssemblyError> {
        let mut graph = self.graph();
        let Some(receiver) = graph.receiver.take().filter(|_| graph.in_flight > 0) else { return Ok(()) };
        let (weak, lists) = (Arc::downgrade(&self.graph), self.lists.clone());
        let serve = move || {
            while let Ok(opened) = receiver.recv() {
                let Some(graph) = weak.upgrade() else { return };
                let mut locked = lock(&graph);
                if locked.ends {
                    return;
                }
                // This occasion tolerates every failure.
                let _ = locked.answer(opened, Occasion::Late);
                locked.come_to_wanted();
                let is_done = locked.in_flight == 0;
                drop(locked);
                let _ = serve_created(&graph, Occasion::Late);
                lists.subsystems.refresh();
                if is_done {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("late-stores".to_owned()).spawn(serve).map_err(AssemblyError::Threads)?;
        Ok(())
    }

    /// Serves one more device, on sidecores that are there already; one that names none is served by the sidecore with
    /// the fewest queues. `store`, if given, comes with it: it is forgotten when no device leads to it any more.
    ///
    /// This opens stores and may take a while; reports go on to be answered.
    ///
    /// # Errors
    /// A name or a socket is taken, something that is named is not there or cannot be had, a second device would write
    /// to the same file or volume, or the assembly is coming to its end. Nothing has changed then.
    pub fn add_device(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<(), AssemblyError> {
        let added = self.add(device, store).and_then(|()| {
            serve_created(&self.graph, Occasion::Addition).inspect_err(|_| {
                let mut wanted = self.lists.wanted();
                wanted.without(&device.name).into_iter().for_each(|next| wanted.set(next));
            })
        });
        if added.is_err() {
            let mut graph = self.graph();
            if !graph.ends {
                graph.come_to_wanted();
            }
        }
        // On an error too: its volume may have been made by then.
        self.lists.subsystems.refresh();
        added.inspect(|()| {
            tracing::info!(device = device.name, socket = %device.socket.display(), "device added");
        })
    }

    fn add(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<(), AssemblyError> {
        let account = |error| AssemblyError::Account { name: device.name.clone(), error };
        device.access.resolve().map_err(account)?;
        let mut device = device.clone();
        let next = self.with(&mut device, store)?.1;
        let file = bottom(&next, &device.store).filter(|bottom| is_file(bottom));
        // Not with the graph locked: a file may not answer.
        let is_open = |file: &&StoreSpec| self.graph().stores.get(&file.name).is_some();
        let opened = match file.filter(|file| !is_open(file)) {
            Some(file) => Some((file, open_alone(file.clone())?)),
            None => None,
        };
        let (mut graph, next) = self.with(&mut device, store)?;
        if let Some((file, opened)) = opened
            && graph.stores.get(&file.name).is_none()
        {
            graph.stores.set(file, Progress::Open(opened));
        }
        graph.come_to(&next, Occasion::Addition)?;
        if self.lists.disk(&device.name).is_none() {
            return Err(graph.obstacle(&device, &next));
        }
        self.lists.wanted().set(next);
        Ok(())
    }

    /// The specification with one more device, which is checked, and the graph to bring up to it.
    fn with(
        &self,
        device: &mut DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<(MutexGuard<'_, Graph>, Spec), AssemblyError> {
        let graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        if device.sidecores.is_empty() {
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

    /// Serves a device no longer: its socket is removed, its queues stop when what is in flight is done, and a store
    /// that nothing else leads to is closed, which for one in memory means that its contents are gone.
    ///
    /// This waits for the device's requests; reports go on to be answered.
    ///
    /// # Errors
    /// There is no such device, or somebody else is removing it.
    pub fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        let unknown = || AssemblyError::NoDevice { name: name.to_owned() };
        // Not with the graph locked: a request of the device's host may wait for the graph.
        if let Some(disk) = self.lists.disk(name) {
            if !disk.stop() {
                return Err(unknown());
            }
            disk.close();
        }
        let mut graph = self.graph();
        let next = self.lists.wanted().without(name).ok_or_else(unknown)?;
        graph.come_to(&next, Occasion::Late)?;
        // The device may have waited for its store.
        graph.disconnect(name);
        self.lists.wanted().set(next);
        drop(graph);
        self.lists.subsystems.refresh();
        tracing::info!(device = name, "device removed");
        Ok(())
    }

    /// Serves the clients that a device turns away because writes that an earlier process answered to them may be missing.
    ///
    /// # Errors
    /// There is no such device, or it misses none.
    pub fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        if self.lists.wanted().place(name) == usize::MAX {
            return Err(AssemblyError::NoDevice { name: name.to_owned() });
        }
        if !self.lists.disk(name).is_some_and(|disk| disk.accept_loss()) {
            return Err(AssemblyError::NothingMissing { name: name.to_owned() });
        }
        tracing::warn!(device = name, "its operator takes the loss of writes that were answered");
        Ok(())
    }

    /// Ends it in order: no more connections, queues stopped when what is in flight is done, controllers' metadata
    /// written, files flushed, sidecores ended. Reports go on to be answered. The second call does nothing.
    pub fn drain(&self) {
        let left = self.end(|disk| {
            disk.stop();
            None
        });
        left.into_iter().for_each(LeftDevice::disconnect);
    }

    /// The same, and hands the VMMs that are connected over to another process, as far as what they see is there after
    /// this one: not if it is in memory. What has been acknowledged is as it is after [`Assembly::drain`].
    #[must_use]
    pub fn hand_over(&self) -> Vec<LeftDevice> {
        self.end(Disk::hand_over)
    }

    fn end(&self, stop: impl Fn(&Disk) -> Option<LeftDevice> + Sync) -> Vec<LeftDevice> {
        let mut left = self.end_graph(stop);
        // The clients of an earlier daemon that were not resumed: the next one may resume them.
        left.append(&mut self.graph().left);
        // A change that a host has requested may have waited for the graph, and finds that it has ended.
        self.lists.subsystems.end();
        left
    }

    fn end_graph(&self, stop: impl Fn(&Disk) -> Option<LeftDevice> + Sync) -> Vec<LeftDevice> {
        let mut actions = {
            let mut graph = self.graph();
            if std::mem::replace(&mut graph.ends, true) {
                return Vec::new();
            }
            plan(&graph.now(), &Spec::default())
        };
        // Drained devices are still reported.
        actions.retain(|action| action.verb != Verb::StopDevice);
        // Not with the graph locked: a request of a host, which its function waits for, may wait for
        // the graph. Side by side, because each device waits for the requests of its own guest.
        let disks = self.lists.all_disks();
        let left: Vec<LeftDevice> = std::thread::scope(|scope| {
            let stop = &stop;
            let threads: Vec<_> = disks.iter().map(|disk| scope.spawn(move || stop(disk))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
        });
        let mut graph = self.graph();
        graph.close_devices();
        // Nothing is opened, and nothing else fails.
        let unflushed = graph.apply(&actions, &Spec::default(), Occasion::Late).unwrap_or_default();
        let (lost, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|left| {
            let disk = disks.iter().find(|disk| disk.spec.name == left.name);
            disk.is_none_or(|disk| graph.has_lost_writes(disk.configured(), &unflushed))
        });
        for left in lost {
            tracing::error!(device = left.name, "its guest loses the device, what it has written may not be there");
            left.disconnect();
        }
        left
    }

    /// All counters as of now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let now = self.clock.now();
        let mut devices: Vec<_> = self.lists.all_disks().iter().map(|disk| disk.stats()).collect();
        self.sort(&mut devices, |device| &device.name);
        Stats {
            uptime_ns: now.since(self.started_at).0,
            interval_ns: None,
            sidecores: self.sidecores.iter().map(|sidecore| SidecoreReport::of(sidecore, now)).collect(),
            devices,
        }
    }

    /// The devices as of now.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let with_warnings = |mut report: DeviceReport| {
            let controller = report.controller.as_deref().and_then(|name| self.controller(name));
            report.warnings.extend(controller.iter().flat_map(|found| found.warnings(report.volume.as_deref())));
            report
        };
        let disks = self.lists.all_disks();
        let mut devices: Vec<_> = disks.iter().map(|disk| with_warnings(disk.report())).collect();
        let unserved = self.lists.wanted().unserved(&devices, &self.lists.controllers);
        devices.extend(unserved.into_iter().map(with_warnings));
        self.sort(&mut devices, |device| &device.name);
        devices
    }

    /// In the order of the configuration, those that were added since last.
    fn sort<T>(&self, devices: &mut [T], name: impl Fn(&T) -> &String) {
        let wanted = self.lists.wanted();
        devices.sort_by_key(|device| wanted.place(name(device)));
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

    /// The sidecore that the fewest queues were given to, the first of several.
    fn least_loaded(&self) -> Option<String> {
        let disks = self.lists.all_disks();
        let load = |sidecore: &&Sidecore| disks.iter().map(|disk| disk.queues_on(sidecore.name())).sum::<usize>();
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
