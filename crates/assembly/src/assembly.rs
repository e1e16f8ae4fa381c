//! The running graph: started from its spec, asked how it fares, drained.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_linux::Clock;
use sidecore_reactor::IdleMode;
use sidecore_units::Nanos;
use sidecore_vhost_user::Server;
use sidecore_virtio::VirtioDevice;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, QueueStats};

use crate::AssemblyError;
use crate::report::{DeviceReport, DeviceState, DeviceStats, Latency, QueueCounters, Stats};
use crate::served::ServedBlk;
use crate::sidecore::{Sidecore, SidecoreThread};
use crate::spec::{DeviceSpec, Spec};
use crate::stores::{CachedStore, Stores};

/// A daemon's sidecores, stores and devices. Dropping it drains it.
pub struct Assembly {
    clock: Clock,
    started_at: Nanos,
    sidecores: Vec<Sidecore>,
    disks: Vec<Disk>,
    /// What is taken apart when it is drained, in this order.
    running: Mutex<Running>,
}

/// A device, and what reports say about it besides its counters.
struct Disk {
    spec: DeviceSpec,
    store_type: &'static str,
    served: Arc<ServedBlk>,
}

#[derive(Default)]
struct Running {
    /// One for each disk, in the same order.
    servers: Vec<Server>,
    cached: Vec<CachedStore>,
    threads: Vec<SidecoreThread>,
}

impl Assembly {
    /// Opens the stores, starts the sidecores, and serves each device on its socket.
    ///
    /// # Errors
    /// The first thing that cannot be had; what was started until then is stopped again.
    pub fn start(spec: &Spec) -> Result<Self, AssemblyError> {
        let clock = Clock::new();
        let mut stores = Stores::new(&spec.stores);
        // Stores first: they take longest, and fail most often.
        let mut opened = Vec::new();
        for device in &spec.devices {
            opened.push(stores.open(&device.store, &format!("device \"{}\"", device.name))?);
        }
        let mut running = Running::default();
        for sidecore in &spec.sidecores {
            running.threads.push(SidecoreThread::start(sidecore, &clock)?);
        }
        let sidecores: Vec<Sidecore> = running.threads.iter().map(|thread| thread.sidecore().clone()).collect();
        let mut disks = Vec::new();
        for (device, store) in spec.devices.iter().zip(opened) {
            let serving = sidecores_of(device, &sidecores)?;
            let blk = BlkDevice::new(&device.name, options(device)?, store.geometry());
            let served = ServedBlk::new(blk, store, device.idle, device.queue_size_max, serving.into_iter());
            let store_type = stores.kind(&device.store).unwrap_or_default();
            disks.push(Disk { spec: device.clone(), store_type, served: Arc::new(served) });
        }
        running.cached = stores.into_cached();
        for disk in &disks {
            let server = Server::start(&disk.spec.socket, Arc::clone(&disk.served) as Arc<dyn VirtioDevice>);
            let server = server.map_err(|error| AssemblyError::Server { name: disk.spec.name.clone(), error })?;
            running.servers.push(server);
        }
        let started_at = clock.now();
        Ok(Self { clock, started_at, sidecores, disks, running: Mutex::new(running) })
    }

    /// Ends it in order: no more connections, queues stopped when what is in flight is done, files flushed, sidecores
    /// ended. Reports go on to be answered. The second call does nothing.
    pub fn drain(&self) {
        let Running { servers, cached, threads } = std::mem::take(&mut *self.running());
        // Side by side, because each waits for its own guest's requests.
        std::thread::scope(|scope| {
            for server in servers {
                scope.spawn(|| server.shutdown());
            }
        });
        std::thread::scope(|scope| {
            for store in &cached {
                scope.spawn(|| store.flush());
            }
        });
        drop(threads);
    }

    /// All counters as of now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let now = self.clock.now();
        Stats {
            uptime_ns: now.since(self.started_at).0,
            sidecores: self.sidecores.iter().map(|sidecore| sidecore.report(now)).collect(),
            devices: self.disks.iter().map(Disk::stats).collect(),
        }
    }

    /// The devices as of now.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let connected: Vec<bool> = self.running().servers.iter().map(Server::is_connected).collect();
        let report = |(index, disk): (usize, &Disk)| disk.report(connected.get(index).copied().unwrap_or(false));
        self.disks.iter().enumerate().map(report).collect()
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Assembly {
    fn drop(&mut self) {
        self.drain();
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

impl Disk {
    fn stats(&self) -> DeviceStats {
        let device = self.served.device();
        let queue = |index| device.queue_stats(index).map(|stats| counters(index, stats));
        DeviceStats { name: self.spec.name.clone(), queues: (0..self.spec.queues).filter_map(queue).collect() }
    }

    fn report(&self, connected: bool) -> DeviceReport {
        let (spec, geometry) = (&self.spec, self.served.device().geometry());
        let broken = self.served.device().broken();
        let lost = |name| format!("sidecore \"{name}\" has ended, the log says why; restart the daemon");
        let needs_reset = broken.is_some();
        let reason = self.served.lost_sidecore().map(lost).or(broken);
        let queues_running = self.served.running_count();
        let state = match (&reason, queues_running, connected) {
            (Some(_), ..) => DeviceState::Broken,
            (None, 1.., _) => DeviceState::Running,
            (None, 0, true) => DeviceState::Connected,
            (None, 0, false) => DeviceState::Waiting,
        };
        DeviceReport {
            name: spec.name.clone(),
            store: spec.store.clone(),
            store_type: self.store_type.to_owned(),
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
