//! A device that is served, and its reports.

mod stages;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::UNIX_EPOCH;

use sidecore_block::{BlockDevice, Meter};
use sidecore_peer::Service;
use sidecore_reactor::IdleMode;
use sidecore_sidecore::Sidecore;

use crate::AssemblyError;
use crate::front_end::{FrontEnd, Nvme, NvmeParts, Place, Ublk, VirtioBlk, Vrio};
use crate::left::LeftDevice;
use crate::remote::Remote;
use crate::report::{DeviceReport, DeviceState, DeviceStats, DisconnectReport, QueueCounters};
use crate::spec::{DeviceSpec, FrontEndSpec, StoreKind, StoreSpec, VolumeSpec};

pub use stages::AddedStage;
use stages::Live;

/// A device of an assembly, with its front end.
pub(crate) struct Disk {
    pub(crate) spec: DeviceSpec,
    /// The store at the bottom of the device's configured store; `None` of a NIC.
    configured: Option<StoreSpec>,
    below: Mutex<Below>,
    /// For its warnings only: the front end keeps the store open.
    store: Weak<dyn BlockDevice>,
    store_type: &'static str,
    /// The types of the configured stages.
    stages: Vec<String>,
    /// The stages in front of those, which come and go.
    live: Mutex<Live>,
    /// Locked while stages come or go.
    changing: Mutex<()>,
    /// Whether the store's contents survive this process.
    outlives: bool,
    front_end: Box<dyn FrontEnd>,
    /// Whether clients can connect.
    is_served: AtomicBool,
}

/// The store that a disk serves at present. A host that manages volumes may attach another store,
/// or detach it.
struct Below {
    /// The store at the bottom; `None` while the device is detached.
    bottom: Option<StoreSpec>,
    /// Whether this is the configured store.
    as_configured: bool,
}

impl Disk {
    /// Creates a disk without a socket. `parts` returns the additional parts of an NVMe function.
    pub(crate) fn new(
        spec: &DeviceSpec,
        store: Arc<dyn BlockDevice>,
        (store_type, stages, bottom, outlives): (&'static str, Vec<String>, StoreSpec, bool),
        sidecores: &[Sidecore],
        (service, remote): (Arc<Service>, Arc<Remote>),
        parts: impl FnOnce(Arc<Service>) -> Result<NvmeParts, AssemblyError>,
    ) -> Result<Self, AssemblyError> {
        let serving = sidecores_of(spec, sidecores);
        let weak = Arc::downgrade(&store);
        let live = Mutex::new(Live::new(Some(Arc::clone(&store))));
        let front_end: Box<dyn FrontEnd> = match &spec.front_end {
            FrontEndSpec::VirtioBlk(own) => {
                Box::new(VirtioBlk::new(spec, own, store, serving, service))
            }
            FrontEndSpec::Vrio(own) => Box::new(Vrio::new(spec, own, store, remote)),
            FrontEndSpec::Ublk(own) => Box::new(Ublk::new(spec, own, (store, outlives), serving)),
            // A NIC has no store, see `Disk::nic`.
            FrontEndSpec::VirtioNet(_)
            | FrontEndSpec::Tap(_)
            | FrontEndSpec::Ethernet(_)
            | FrontEndSpec::VrioNet(_)
            | FrontEndSpec::RemoteNet(_) => {
                let name = spec.name.clone();
                return Err(AssemblyError::Device { name, why: "a NIC has no store" });
            }
            FrontEndSpec::Nvme(own) => {
                Box::new(Nvme::new((spec, own), store, serving, parts(service)?)?)
            }
        };
        let below = Mutex::new(Below { bottom: Some(bottom.clone()), as_configured: true });
        let (spec, configured) = (spec.clone(), Some(bottom));
        let is_served = AtomicBool::new(false);
        Ok(Self {
            spec,
            configured,
            below,
            store: weak,
            store_type,
            stages,
            live,
            changing: Mutex::new(()),
            outlives,
            front_end,
            is_served,
        })
    }

    /// Creates a NIC without a socket.
    pub(crate) fn nic(spec: &DeviceSpec, front_end: Box<dyn FrontEnd>) -> Self {
        let below = Mutex::new(Below { bottom: None, as_configured: true });
        let store: Weak<dyn BlockDevice> = Weak::<sidecore_block::NullStore>::new();
        Self {
            spec: spec.clone(),
            configured: None,
            below,
            store,
            store_type: "",
            stages: Vec::new(),
            live: Mutex::default(),
            changing: Mutex::new(()),
            outlives: true,
            front_end,
            is_served: AtomicBool::new(false),
        }
    }

    /// Serves the clients of the device's socket, which is made if it does not listen already, or
    /// resumes the client that another process has exported.
    pub(crate) fn serve(
        &self,
        place: Place,
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError> {
        self.front_end.serve(&self.spec.socket, place, left)?;
        self.is_served.store(true, Ordering::Release);
        Ok(())
    }

    /// Removes the socket and stops the queues when their requests in flight are done. False if the
    /// device was stopped before; then its queues have stopped, too.
    pub(crate) fn stop(&self) -> bool {
        self.front_end.stop()
    }

    /// Stops the device because the daemon ends. A block device of the kernel stays, if the store's
    /// contents survive this process.
    pub(crate) fn end(&self) {
        self.end_stages();
        if self.outlives {
            self.front_end.end();
        } else {
            self.stop();
        }
    }

    /// Stops the device and exports its connected VMM, if the store's contents survive this
    /// process.
    pub(crate) fn hand_over(&self) -> Option<LeftDevice> {
        self.end_stages();
        if self.outlives {
            return self.front_end.hand_over();
        }
        self.stop();
        None
    }

    /// Drops the store. No queue can be started afterwards.
    pub(crate) fn close(&self) {
        self.front_end.close();
        self.close_stages();
    }

    /// Serves clients that an earlier process served, although answered writes may be missing.
    /// False if none are missing.
    pub(crate) fn accept_loss(&self) -> bool {
        self.front_end.accept_loss()
    }

    /// Notifies the guest if the volume has another size.
    pub(crate) fn refresh(&self) {
        self.front_end.refresh();
    }

    /// The file or volume that the guest writes to. A second writer would destroy its contents.
    pub(crate) fn writes_to(&self) -> Option<StoreSpec> {
        let geometry = self.front_end.geometry();
        self.bottom().filter(|_| !self.spec.read_only && !geometry.read_only)
    }

    /// The store at the bottom of the one that is served; `None` while the device is detached.
    pub(crate) fn bottom(&self) -> Option<StoreSpec> {
        self.below().bottom.clone()
    }

    /// The volume that is served, if any.
    pub(crate) fn volume(&self) -> Option<VolumeSpec> {
        self.bottom()?.kind.volume().cloned()
    }

    /// The store at the bottom of the device's configured store; `None` of a NIC.
    pub(crate) fn configured(&self) -> Option<&StoreSpec> {
        self.configured.as_ref()
    }

    /// Replaces the store that is served, with the specification of its bottom; `None` detaches the
    /// device.
    pub(crate) fn set_bottom(&self, store: Option<(Arc<dyn BlockDevice>, StoreSpec)>) {
        let (base, bottom) = store.unzip();
        self.set_base(base);
        *self.below() = Below { bottom, as_configured: false };
    }

    /// Whether the device serves another store than its specification names, or none.
    pub(crate) fn is_detached(&self) -> bool {
        !self.below().as_configured
    }

    /// Follows a rename of the served volume.
    pub(crate) fn volume_renamed(&self, controller: &str, from: &str, to: &str) {
        if let Some(StoreSpec { kind: StoreKind::Volume(volume), .. }) = &mut self.below().bottom
            && (volume.controller == controller && volume.volume == from)
        {
            to.clone_into(&mut volume.volume);
        }
    }

    /// Whether the device is a physical function whose host manages others.
    pub(crate) fn manages(&self) -> bool {
        self.nvme().is_some_and(Nvme::manages)
    }

    /// The NVMe function, if the device is one.
    pub(crate) fn nvme(&self) -> Option<&Nvme> {
        self.front_end.nvme()
    }

    fn below(&self) -> MutexGuard<'_, Below> {
        self.below.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the device's queues that the sidecore of this name serves.
    pub(crate) fn queues_on(&self, sidecore: &str) -> usize {
        self.front_end.queues_on(sidecore)
    }

    /// Reads the device's counters.
    pub(crate) fn stats(&self) -> DeviceStats {
        let queues = self.front_end.queues().into_iter().filter(QueueCounters::is_used).collect();
        DeviceStats { name: self.spec.name.clone(), queues }
    }

    /// Reports the device's settings, state and counters.
    pub(crate) fn report(&self) -> DeviceReport {
        let (spec, geometry) = (&self.spec, self.front_end.geometry());
        let broken = self.front_end.broken();
        let lost = |name: String| {
            format!("sidecore \"{name}\" has ended, the log says why; restart the daemon")
        };
        let needs_reset = broken.is_some();
        let offline = || "the host of its physical function has taken it offline".to_owned();
        let reason = self.front_end.lost_sidecore().map(lost);
        let reason = reason.or_else(|| self.front_end.is_offline().then(offline)).or(broken);
        let reason = reason.or_else(|| self.failed_stage());
        let queues_running = self.front_end.running_count();
        let state = match &reason {
            Some(_) => DeviceState::Broken,
            None => state_of(&*self.front_end, self.is_served.load(Ordering::Acquire)),
        };
        let reason = reason.or_else(|| unserved_reason(state).map(str::to_owned));
        DeviceReport {
            name: spec.name.clone(),
            front_end: spec.front_end.word().to_owned(),
            store: spec.store.clone(),
            store_type: self.store_type.to_owned(),
            stages: self.stage_words(),
            controller: self
                .configured()
                .and_then(|store| store.kind.controller())
                .map(str::to_owned),
            volume: self.volume().map(|volume| volume.volume),
            switch: spec.front_end.switch().map(str::to_owned),
            socket: self.front_end.node().as_ref().unwrap_or(&spec.socket).display().to_string(),
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: geometry.block_bytes,
            read_only: geometry.read_only,
            queues: spec.queues,
            queues_running,
            sidecores: self.front_end.sidecores().unwrap_or_else(|| spec.sidecores.clone()),
            idle: idle_word(self.front_end.idle().unwrap_or(spec.idle)).to_owned(),
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

    /// The conditions that an operator should know of while the device is served.
    fn warnings(&self) -> Vec<String> {
        let loss = self.front_end.loss().map(|why| {
            format!(
                "writes that were answered may be missing ({why}): a client that relies on them is \
                 turned away; reboot its guest, or accept the loss with `sidecore device \
                 accept-loss {}`",
                self.spec.name
            )
        });
        let fallback = self.store.upgrade().and_then(|store| store.fallback());
        let meters = self.meters();
        let problems = meters.iter().filter_map(|meter| meter.problem());
        let warnings = fallback.into_iter().chain(loss).chain(self.front_end.warning());
        warnings.chain(problems).chain(self.stage_problems()).collect()
    }

    /// The meters on the way of the device's requests.
    pub(crate) fn meters(&self) -> Vec<Arc<Meter>> {
        let of_store = || self.store.upgrade().map(|store| store.meters());
        self.live_meters().or_else(of_store).unwrap_or_default()
    }

    /// The sum of all queues' counters, without the histogram's buckets.
    fn counters(&self) -> QueueCounters {
        let mut total = self.stats().total();
        total.counts.latency_ns.buckets = Vec::new();
        total
    }
}

/// The state of a device that is not broken. `is_served`: clients can connect.
pub(crate) fn state_of(front_end: &dyn FrontEnd, is_served: bool) -> DeviceState {
    // The queues of a block device of this host run before the kernel shows the device.
    match (front_end.running_count(), front_end.is_connected()) {
        _ if front_end.is_starting() => DeviceState::Starting,
        (1.., _) => DeviceState::Running,
        (0, true) => DeviceState::Connected,
        (0, false) if is_served => DeviceState::Waiting,
        (0, false) => DeviceState::Opening,
    }
}

/// Why a device that is not broken is not served, if its state says more than its clients do.
const fn unserved_reason(state: DeviceState) -> Option<&'static str> {
    match state {
        DeviceState::Opening => Some("its store is open, and its socket is about to be made"),
        DeviceState::Starting => Some("the kernel does not show its block device yet"),
        _ => None,
    }
}

/// The word for an idle mode in reports.
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
