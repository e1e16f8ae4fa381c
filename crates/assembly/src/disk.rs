//! A device that is being served, and what reports say about it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::UNIX_EPOCH;

use sidecore_block::BlockDevice;
use sidecore_peer::{Access, Service};
use sidecore_reactor::IdleMode;
use sidecore_sidecore::Sidecore;

use crate::AssemblyError;
use crate::front_end::{FrontEnd, Nvme, NvmeParts, VirtioBlk};
use crate::left::LeftDevice;
use crate::report::{DeviceReport, DeviceState, DeviceStats, DisconnectReport, QueueCounters};
use crate::spec::{DeviceSpec, FrontEndSpec, StoreKind, StoreSpec, VolumeSpec};

/// A device of an assembly.
pub(crate) struct Disk {
    pub(crate) spec: DeviceSpec,
    /// The store at the bottom of those that it leads to, as it was configured.
    configured: StoreSpec,
    below: Mutex<Below>,
    /// Asked for its fallback; whoever serves it keeps it open.
    store: Weak<dyn BlockDevice>,
    store_type: &'static str,
    /// Whether what is in its store is there after this process.
    outlives: bool,
    front_end: Box<dyn FrontEnd>,
}

/// What a disk serves at present: a manager of volumes may have it serve another one, or none.
struct Below {
    /// The store at the bottom.
    bottom: Option<StoreSpec>,
    /// Whether it is served as it was configured.
    as_configured: bool,
}

impl Disk {
    /// A disk that nobody can connect to yet. `parts` gives what an NVMe function needs besides.
    pub(crate) fn new(
        spec: &DeviceSpec,
        store: Arc<dyn BlockDevice>,
        (store_type, bottom, outlives): (&'static str, StoreSpec, bool),
        sidecores: &[Sidecore],
        service: Arc<Service>,
        parts: impl FnOnce(Arc<Service>) -> Result<NvmeParts, AssemblyError>,
    ) -> Result<Self, AssemblyError> {
        let serving = sidecores_of(spec, sidecores);
        let weak = Arc::downgrade(&store);
        let front_end: Box<dyn FrontEnd> = match &spec.front_end {
            FrontEndSpec::VirtioBlk(own) => Box::new(VirtioBlk::new(spec, own, store, serving, service)),
            FrontEndSpec::Nvme(own) => Box::new(Nvme::new((spec, own), store, serving, parts(service)?)?),
        };
        let below = Mutex::new(Below { bottom: Some(bottom.clone()), as_configured: true });
        Ok(Self { spec: spec.clone(), configured: bottom, below, store: weak, store_type, outlives, front_end })
    }

    /// Makes its socket and serves whoever connects, or is connected since another process.
    pub(crate) fn serve(&self, access: Access, left: Option<LeftDevice>) -> Result<(), AssemblyError> {
        self.front_end.serve(&self.spec.socket, access, left)
    }

    /// Removes its socket and stops its queues, when what is in flight is done. False if it was stopped before; then it
    /// has stopped, too.
    pub(crate) fn stop(&self) -> bool {
        self.front_end.stop()
    }

    /// The same, and leaves the VMM that is connected to the next process, if its blocks will be there.
    pub(crate) fn hand_over(&self) -> Option<LeftDevice> {
        if self.outlives {
            return self.front_end.hand_over();
        }
        self.stop();
        None
    }

    /// Lets go of its store.
    pub(crate) fn close(&self) {
        self.front_end.close();
    }

    /// Clients that used it with an earlier process are served although answered writes may be missing. False if none
    /// are.
    pub(crate) fn accept_loss(&self) -> bool {
        self.front_end.accept_loss()
    }

    /// Its volume may have another size by now.
    pub(crate) fn refresh(&self) {
        self.front_end.refresh();
    }

    /// What it would destroy if another device did it as well: the file or volume that its guest writes to.
    pub(crate) fn writes_to(&self) -> Option<StoreSpec> {
        let geometry = self.front_end.geometry();
        self.bottom().filter(|_| !self.spec.read_only && !geometry.read_only)
    }

    /// The store at the bottom of what it serves, if it serves anything.
    pub(crate) fn bottom(&self) -> Option<StoreSpec> {
        self.below().bottom.clone()
    }

    /// The volume that it serves, if it serves one.
    pub(crate) fn volume(&self) -> Option<VolumeSpec> {
        self.bottom()?.kind.volume().cloned()
    }

    /// The store at the bottom of what it was configured to serve.
    pub(crate) fn configured(&self) -> &StoreSpec {
        &self.configured
    }

    /// It serves another store from now on, or none.
    pub(crate) fn set_bottom(&self, bottom: Option<StoreSpec>) {
        *self.below() = Below { bottom, as_configured: false };
    }

    /// Whether it serves another store than the one of its specification, or none.
    pub(crate) fn is_detached(&self) -> bool {
        !self.below().as_configured
    }

    /// A volume has another name.
    pub(crate) fn volume_renamed(&self, controller: &str, from: &str, to: &str) {
        if let Some(StoreSpec { kind: StoreKind::Volume(volume), .. }) = &mut self.below().bottom
            && (volume.controller == controller && volume.volume == from)
        {
            to.clone_into(&mut volume.volume);
        }
    }

    /// Whether it is a physical function whose host manages others.
    pub(crate) fn manages(&self) -> bool {
        self.nvme().is_some_and(Nvme::manages)
    }

    /// It, if it is an NVMe function.
    pub(crate) fn nvme(&self) -> Option<&Nvme> {
        self.front_end.nvme()
    }

    fn below(&self) -> MutexGuard<'_, Below> {
        self.below.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many of its queues the sidecore of this name was given.
    pub(crate) fn queues_on(&self, sidecore: &str) -> usize {
        self.front_end.queues_on(sidecore)
    }

    /// Its counters as of now.
    pub(crate) fn stats(&self) -> DeviceStats {
        let queues = self.front_end.queues().into_iter().filter(QueueCounters::is_used).collect();
        DeviceStats { name: self.spec.name.clone(), queues }
    }

    /// All about it as of now.
    pub(crate) fn report(&self) -> DeviceReport {
        let (spec, geometry) = (&self.spec, self.front_end.geometry());
        let broken = self.front_end.broken();
        let lost = |name: String| format!("sidecore \"{name}\" has ended, the log says why; restart the daemon");
        let needs_reset = broken.is_some();
        let offline = || "the host of its physical function has taken it offline".to_owned();
        let reason = self.front_end.lost_sidecore().map(lost);
        let reason = reason.or_else(|| self.front_end.is_offline().then(offline)).or(broken);
        let queues_running = self.front_end.running_count();
        let state = match (&reason, queues_running, self.front_end.is_connected()) {
            (Some(_), ..) => DeviceState::Broken,
            (None, 1.., _) => DeviceState::Running,
            (None, 0, true) => DeviceState::Connected,
            (None, 0, false) => DeviceState::Waiting,
        };
        DeviceReport {
            name: spec.name.clone(),
            front_end: spec.front_end.word().to_owned(),
            store: spec.store.clone(),
            store_type: self.store_type.to_owned(),
            controller: self.configured.kind.controller().map(str::to_owned),
            volume: self.volume().map(|volume| volume.volume),
            socket: spec.socket.display().to_string(),
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: geometry.block_bytes,
            read_only: geometry.read_only,
            queues: spec.queues,
            queues_running,
            sidecores: spec.sidecores.clone(),
            idle: idle_word(spec.idle).to_owned(),
            state,
            reason,
            warnings: self.warnings(),
            needs_reset,
            disconnect: self.front_end.disconnect().map(|disconnect| DisconnectReport {
                at_unix_s: disconnect.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
                reason: disconnect.reason,
            }),
            counters: self.counters(),
        }
    }

    /// What its operator should know though it is served.
    fn warnings(&self) -> Vec<String> {
        let loss = self.front_end.loss().map(|why| {
            format!(
                "writes that were answered may be missing ({why}): a client that relies on them is turned away; let its \
                 guest start anew, or take the loss with `sidecore device accept-loss {}`",
                self.spec.name
            )
        });
        self.store.upgrade().and_then(|store| store.fallback()).into_iter().chain(loss).collect()
    }

    /// The counters of its queues together, without the histogram.
    fn counters(&self) -> QueueCounters {
        let mut total = self.stats().total();
        total.counts.latency_ns.buckets = Vec::new();
        total
    }
}

/// The word for it in reports.
pub(crate) const fn idle_word(idle: IdleMode) -> &'static str {
    match idle {
        IdleMode::Poll => "poll",
        IdleMode::Adaptive { .. } => "adaptive",
        IdleMode::Interrupt => "interrupt",
    }
}

/// A sidecore for each of the device's queues. The specification was checked.
fn sidecores_of(device: &DeviceSpec, sidecores: &[Sidecore]) -> Vec<Sidecore> {
    let find = |name: &String| sidecores.iter().find(|sidecore| sidecore.name() == name);
    let named: Vec<_> = device.sidecores.iter().filter_map(find).collect();
    named.into_iter().cycle().take(usize::from(device.queues)).cloned().collect()
}
