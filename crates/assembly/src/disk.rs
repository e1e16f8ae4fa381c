//! A device that is being served, and what reports say about it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use sidecore_block::BlockDevice;
use sidecore_reactor::IdleMode;
use sidecore_vhost_user::Server;
use sidecore_virtio::VirtioDevice;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, QueueStats};

use crate::AssemblyError;
use crate::report::{DeviceReport, DeviceState, DeviceStats, Latency, QueueCounters};
use crate::served::ServedBlk;
use crate::sidecore::Sidecore;
use crate::spec::{DeviceSpec, StoreSpec};

/// A device of an assembly.
pub(crate) struct Disk {
    pub(crate) spec: DeviceSpec,
    /// The store at the bottom of those that it leads to.
    bottom: StoreSpec,
    store_type: &'static str,
    served: Arc<ServedBlk>,
    /// Locked for as long as it takes to stop it.
    server: Mutex<Option<Server>>,
}

impl Disk {
    /// A disk that nobody can connect to yet.
    pub(crate) fn new(
        spec: &DeviceSpec,
        store: Arc<dyn BlockDevice>,
        (store_type, bottom): (&'static str, StoreSpec),
        sidecores: &[Sidecore],
    ) -> Result<Self, AssemblyError> {
        let serving = sidecores_of(spec, sidecores)?;
        let blk = BlkDevice::new(&spec.name, options(spec)?, store.geometry());
        let served = ServedBlk::new(blk, store, spec.idle, spec.queue_size_max, serving.into_iter());
        Ok(Self { spec: spec.clone(), bottom, store_type, served: Arc::new(served), server: Mutex::new(None) })
    }

    /// Makes its socket and serves whoever connects.
    pub(crate) fn serve(&self) -> Result<(), AssemblyError> {
        let server = Server::start(&self.spec.socket, Arc::clone(&self.served) as Arc<dyn VirtioDevice>);
        let server = server.map_err(|error| AssemblyError::Server { name: self.spec.name.clone(), error })?;
        *self.server() = Some(server);
        Ok(())
    }

    /// Removes its socket and stops its queues, when what is in flight is done. False if it was stopped before; then it
    /// has stopped, too.
    pub(crate) fn stop(&self) -> bool {
        let mut server = self.server();
        let Some(server) = server.take() else { return false };
        server.shutdown();
        true
    }

    /// Lets go of its store.
    pub(crate) fn close(&self) {
        self.served.close();
    }

    /// What it would destroy if another device did it as well: the file or volume that its guest writes to.
    pub(crate) fn writes_to(&self) -> Option<&StoreSpec> {
        let geometry = self.served.device().geometry();
        (!self.spec.read_only && !geometry.read_only).then_some(&self.bottom)
    }

    /// How many of its queues the sidecore of this name was given.
    pub(crate) fn queues_on(&self, sidecore: &str) -> usize {
        self.served.queues_on(sidecore)
    }

    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a VMM is connected; of a device that is being stopped nobody waits for the answer.
    fn is_connected(&self) -> bool {
        match self.server.try_lock() {
            Ok(server) => server.as_ref().is_some_and(Server::is_connected),
            Err(TryLockError::Poisoned(server)) => server.into_inner().as_ref().is_some_and(Server::is_connected),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// Its counters as of now.
    pub(crate) fn stats(&self) -> DeviceStats {
        let device = self.served.device();
        let queue = |index| device.queue_stats(index).map(|stats| counters(index, stats));
        DeviceStats { name: self.spec.name.clone(), queues: (0..self.spec.queues).filter_map(queue).collect() }
    }

    /// All about it as of now.
    pub(crate) fn report(&self) -> DeviceReport {
        let (spec, geometry) = (&self.spec, self.served.device().geometry());
        let broken = self.served.device().broken();
        let lost = |name| format!("sidecore \"{name}\" has ended, the log says why; restart the daemon");
        let needs_reset = broken.is_some();
        let reason = self.served.lost_sidecore().map(lost).or(broken);
        let queues_running = self.served.running_count();
        let state = match (&reason, queues_running, self.is_connected()) {
            (Some(_), ..) => DeviceState::Broken,
            (None, 1.., _) => DeviceState::Running,
            (None, 0, true) => DeviceState::Connected,
            (None, 0, false) => DeviceState::Waiting,
        };
        DeviceReport {
            name: spec.name.clone(),
            store: spec.store.clone(),
            store_type: self.store_type.to_owned(),
            controller: self.bottom.kind.controller().map(str::to_owned),
            volume: self.bottom.kind.volume().map(|volume| volume.volume.clone()),
            socket: spec.socket.display().to_string(),
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: geometry.block_bytes,
            read_only: geometry.read_only,
            queues: spec.queues,
            queues_running,
            sidecores: spec.sidecores.clone(),
            idle: match spec.idle {
                IdleMode::Poll => "poll",
                IdleMode::Adaptive { .. } => "adaptive",
                IdleMode::Interrupt => "interrupt",
            }
            .to_owned(),
            state,
            reason,
            needs_reset,
            counters: self.stats().total(),
        }
    }
}

/// A sidecore for each of the device's queues.
fn sidecores_of(device: &DeviceSpec, sidecores: &[Sidecore]) -> Result<Vec<Sidecore>, AssemblyError> {
    let find = |name: &String| {
        sidecores.iter().find(|sidecore| sidecore.name() == name).ok_or_else(|| AssemblyError::Unknown {
            user: format!("device \"{}\"", device.name),
            kind: "sidecore",
            name: name.clone(),
        })
    };
    let named = device.sidecores.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    if named.is_empty() {
        return Err(AssemblyError::Device { name: device.name.clone(), why: "it has no sidecore" });
    }
    Ok(named.into_iter().cycle().take(usize::from(device.queues)).cloned().collect())
}

fn options(device: &DeviceSpec) -> Result<BlkOptions, AssemblyError> {
    let usual = BlkOptions::default();
    if !(1..=crate::spec::QUEUES_MAX).contains(&device.queues) {
        return Err(AssemblyError::Device { name: device.name.clone(), why: "it needs 1 to 64 queues" });
    }
    // A serial number longer than there is room for is cut: what differs is more often in front.
    let serial = device.serial.as_ref().unwrap_or(&device.name);
    Ok(BlkOptions {
        queues: device.queues,
        seg_max: device.seg_max.unwrap_or(usual.seg_max),
        size_max_bytes: device.size_max_bytes,
        serial: serial.chars().take(crate::spec::SERIAL_MAX_BYTES).collect(),
        packed: device.packed,
        read_only: device.read_only,
    })
}

fn counters(index: u16, stats: &QueueStats) -> QueueCounters {
    let (bytes_read, bytes_written) = (stats.bytes_read.get(), stats.bytes_written.get());
    let latency = stats.latency.summary();
    QueueCounters {
        index,
        kicks: stats.kicks.get(),
        calls: stats.calls.get(),
        polls: stats.polls.get(),
        empty_polls: stats.empty_polls.get(),
        batches: stats.batches.get(),
        requests: stats.requests.get(),
        reads: stats.reads.get(),
        writes: stats.writes.get(),
        flushes: stats.flushes.get(),
        discards: stats.discards.get(),
        write_zeroes: stats.write_zeroes.get(),
        errors: stats.errors.get(),
        rejected: stats.rejected.get(),
        bytes_read,
        bytes_written,
        bytes: bytes_read.saturating_add(bytes_written),
        latency_ns: Latency {
            count: latency.count,
            mean: latency.mean_ns as f64,
            p50: latency.p50_ns,
            p90: latency.p90_ns,
            p99: latency.p99_ns,
            p99_9: latency.p99_9_ns,
            p99_99: latency.p99_99_ns,
            max: latency.max_ns,
        },
    }
}
