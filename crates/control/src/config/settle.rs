//! From a draft without faults to what it means, with every default filled in.

use std::collections::HashMap;
use std::path::Path;

use sidecore_assembly::spec::{
    ControllerSpec, CoreId, CrashLogSpec, DEFAULT_SPIN_US, DeviceSpec, FileOptions, HostFileOptions, IdleMode, Nanos,
    SidecoreSpec, Spec, StoreKind, StoreSpec,
};
use toml::Spanned;

use super::Config;
use super::controller::{ControllerDraft, VolumeDraft};
use super::draft::{DEFAULT_CONTROL_SOCKET, DeviceDraft, Draft, FileMap, KindDraft, StoreDraft};

/// The configuration that a faultless draft means.
pub(super) fn settle(draft: Draft) -> Config {
    let control_socket = draft.control_socket.map_or_else(|| DEFAULT_CONTROL_SOCKET.into(), Spanned::into_inner);
    let mut load = Load::new(&draft.devices, draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name()));
    let spin_us: HashMap<String, u64> = draft
        .sidecores
        .iter()
        .filter_map(|sidecore| Some((sidecore.head.name()?.to_owned(), sidecore.spin_us.unwrap_or(DEFAULT_SPIN_US))))
        .collect();
    let devices = draft.devices.into_iter().filter_map(|device| settle_device(device, &mut load, &spin_us)).collect();
    let sidecores = draft.sidecores.into_iter().filter_map(|sidecore| {
        let cpu = sidecore.cpu.map(|cpu| CoreId(cpu.into_inner()));
        Some(SidecoreSpec { name: sidecore.head.name?.into_inner(), cpu })
    });
    let stores = draft.stores.into_iter().filter_map(settle_store);
    let controllers =
        draft.controllers.into_iter().filter_map(|controller| settle_controller(controller, &control_socket)).collect();
    let (sidecores, stores) = (sidecores.collect(), stores.collect());
    let control_access = draft.control_access.settle();
    Config { control_socket, control_access, spec: Spec { sidecores, stores, controllers, devices } }
}

/// The directory of the crash logs, next to the control socket unless told otherwise.
const CRASH_LOG: &str = "log";

fn settle_controller(controller: ControllerDraft, control_socket: &Path) -> Option<ControllerSpec> {
    let directory = controller.crash_log.unwrap_or_else(|| control_socket.with_file_name(CRASH_LOG));
    Some(ControllerSpec {
        name: controller.head.name?.into_inner(),
        store: controller.store?.into_inner(),
        format: controller.format,
        btlb_entries: controller.btlb_entries,
        tree_memory_bytes: controller.tree_memory_bytes,
        commit_interval: controller.commit_interval,
        warn_used_percent: controller.warn_used_percent,
        physical_function: controller.physical_function,
        crash_log: Some(CrashLogSpec { directory, size_bytes: controller.crash_log_bytes }),
    })
}

fn settle_store(store: StoreDraft) -> Option<StoreSpec> {
    let kind = match store.kind? {
        KindDraft::Null { size_bytes, block_bytes } => StoreKind::Null { size_bytes, block_bytes },
        KindDraft::Ram { size_bytes, block_bytes } => {
            StoreKind::Ram { size_bytes: size_bytes.into_inner(), block_bytes }
        }
        KindDraft::File(options, FileMap::File) => StoreKind::File(options.into_inner()),
        KindDraft::File(options, FileMap::HostFile) => {
            let FileOptions { path, read_only, predecessor_timeout, .. } = options.into_inner();
            StoreKind::HostFile(HostFileOptions { path, read_only, predecessor_timeout })
        }
        KindDraft::Store { store } => StoreKind::Store { store: store.into_inner() },
        KindDraft::Volume(volume) => StoreKind::Volume(VolumeDraft::settle(volume)),
        KindDraft::PhysicalFunction { controller } => {
            StoreKind::PhysicalFunction { controller: controller.into_inner() }
        }
    };
    Some(StoreSpec { stages: store.stages, ..StoreSpec::new(store.head.name?.into_inner(), kind) })
}

fn settle_device(device: DeviceDraft, load: &mut Load, spin_us: &HashMap<String, u64>) -> Option<DeviceSpec> {
    let mut sidecores: Vec<String> = device.sidecores.iter().map(|name| name.get_ref().clone()).collect();
    if sidecores.is_empty() {
        sidecores.push(load.least(device.spec.queues)?);
    }
    let usual = sidecores.iter().filter_map(|sidecore| spin_us.get(sidecore)).max().copied();
    device_on(device, sidecores, usual.unwrap_or(DEFAULT_SPIN_US))
}

/// The device that a faultless draft means, on these sidecores, which spin for so long.
pub(super) fn device_on(device: DeviceDraft, sidecores: Vec<String>, spin_us: u64) -> Option<DeviceSpec> {
    let idle = match device.idle {
        "poll" => IdleMode::Poll,
        "interrupt" => IdleMode::Interrupt,
        _ => IdleMode::Adaptive { spin: Nanos::from_micros(device.spin_us.unwrap_or(spin_us)) },
    };
    Some(DeviceSpec {
        name: device.head.name?.into_inner(),
        store: device.store?.into_inner(),
        socket: device.socket?.into_inner(),
        access: device.access.settle(),
        sidecores,
        idle,
        ..device.spec
    })
}

/// How many queues each sidecore serves: devices that name none go where there are fewest.
struct Load(Vec<(String, usize)>);

impl Load {
    /// What the devices that name their sidecores lay on them.
    fn new<'a>(devices: &[DeviceDraft], sidecores: impl Iterator<Item = &'a str>) -> Self {
        let queues_on = |sidecore: &str| {
            let share = |device: &DeviceDraft| {
                let position = device.sidecores.iter().position(|name| name.get_ref() == sidecore)?;
                Some((0..usize::from(device.spec.queues)).skip(position).step_by(device.sidecores.len()).count())
            };
            devices.iter().filter_map(share).fold(0, usize::saturating_add)
        };
        Self(sidecores.map(|sidecore| (sidecore.to_owned(), queues_on(sidecore))).collect())
    }

    /// Picks the sidecore with the fewest queues, the first of several, and gives it these.
    fn least(&mut self, queues: u16) -> Option<String> {
        let (name, load) = self.0.iter_mut().min_by_key(|(_, load)| *load)?;
        *load = load.saturating_add(usize::from(queues));
        Some(name.clone())
    }
}
