//! Turns a draft without faults into a configuration, with every default filled in.

use sidecore_assembly::spec::{DeviceSpec, IdleMode, Nanos, Spec, StoreSpec};

use super::Config;
use super::draft::{Draft, Part, SidecoreDraft};

/// Makes the configuration of a draft without faults.
pub(super) fn settle(draft: Draft) -> Config {
    let mut load = Load::new(
        &draft.devices,
        draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name()),
    );
    let devices = draft.devices.into_iter();
    let devices =
        devices.filter_map(|device| settle_device(device, &mut load, &draft.sidecores)).collect();
    let stores = draft.stores.into_iter().filter_map(|store| {
        let (name, spec) = (store.head.name?, store.spec);
        Some(StoreSpec { stages: spec.stages, ..StoreSpec::new(name, spec.kind?) })
    });
    let first = draft.sidecores.first().map(|sidecore| sidecore.spec.spec.name.clone());
    let links = draft.links.into_iter().map(|Part { mut spec, head }| {
        if spec.sidecores.is_empty() {
            spec.sidecores.extend(first.clone());
        }
        if head.place("spin_us").is_none() {
            settle_spin(&mut spec.idle, &spec.sidecores, &draft.sidecores);
        }
        spec
    });
    let links = links.collect();
    let switches = draft.switches.into_iter().map(|Part { mut spec, head }| {
        if spec.sidecore.is_empty() {
            spec.sidecore.extend(first.clone());
        }
        if head.place("spin_us").is_none() {
            let serving = std::slice::from_ref(&spec.sidecore);
            settle_spin(&mut spec.idle, serving, &draft.sidecores);
        }
        spec
    });
    let switches = switches.collect();
    let serves = draft.serves.into_iter().map(|Part { mut spec, head }| {
        if head.place("spin_us").is_none() {
            settle_spin(&mut spec.device.idle, &spec.device.sidecores, &draft.sidecores);
        }
        spec
    });
    let serves = serves.collect();
    let spec = Spec {
        // Of the environment, not of the file.
        owner: None,
        stores: stores.collect(),
        controllers: draft.controllers.into_iter().map(|controller| controller.spec).collect(),
        schedules: draft.schedules.into_iter().filter_map(|schedule| schedule.spec).collect(),
        key_directory: draft.key_directory,
        recording_directory: draft.recording_directory,
        remote_state: Some(draft.remote_state),
        links,
        clients: draft.clients.into_iter().map(|client| client.spec).collect(),
        iohosts: draft.iohosts.into_iter().map(|iohost| iohost.spec).collect(),
        serves,
        switches,
        devices,
        sidecores: draft.sidecores.into_iter().map(|sidecore| sidecore.spec.spec).collect(),
    };
    Config { control_socket: draft.control_socket, control_access: draft.control_access, spec }
}

fn settle_device(
    device: Part<DeviceSpec>,
    load: &mut Load,
    sidecores: &[Part<SidecoreDraft>],
) -> Option<DeviceSpec> {
    let says_spin = device.head.place("spin_us").is_some();
    let mut spec = device.spec;
    if spec.front_end.client().is_some() || spec.front_end.switch().is_some() {
        return Some(spec);
    }
    if spec.sidecores.is_empty() {
        spec.sidecores.push(load.least(spec.queues)?);
    }
    if !says_spin {
        settle_spin(&mut spec.idle, &spec.sidecores, sidecores);
    }
    Some(spec)
}

/// Sets the spin time of an adaptive idle mode to the longest one of the serving sidecores.
fn settle_spin(idle: &mut IdleMode, serving: &[String], sidecores: &[Part<SidecoreDraft>]) {
    if let IdleMode::Adaptive { spin } = idle {
        let serving =
            sidecores.iter().filter(|sidecore| serving.contains(&sidecore.spec.spec.name));
        let spins = serving.map(|sidecore| Nanos::from_micros(sidecore.spec.spin_us));
        *spin = spins.max().unwrap_or(*spin);
    }
}

/// The number of queues on each sidecore. A device without named sidecores goes to the sidecore
/// with the fewest queues.
struct Load(Vec<(String, usize)>);

impl Load {
    /// Counts the queues of the devices that name their sidecores.
    fn new<'a>(devices: &[Part<DeviceSpec>], sidecores: impl Iterator<Item = &'a str>) -> Self {
        let queues_on = |sidecore: &str| {
            let share = |Part { spec, .. }: &Part<DeviceSpec>| {
                let position = spec.sidecores.iter().position(|name| name == sidecore)?;
                Some(
                    (0..usize::from(spec.queues))
                        .skip(position)
                        .step_by(spec.sidecores.len())
                        .count(),
                )
            };
            devices.iter().filter_map(share).fold(0, usize::saturating_add)
        };
        Self(sidecores.map(|sidecore| (sidecore.to_owned(), queues_on(sidecore))).collect())
    }

    /// Picks the sidecore with the fewest queues, the first of several, and adds `queues` to it.
    fn least(&mut self, queues: u16) -> Option<String> {
        let (name, load) = self.0.iter_mut().min_by_key(|(_, load)| *load)?;
        *load = load.saturating_add(usize::from(queues));
        Some(name.clone())
    }
}
