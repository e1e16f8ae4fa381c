//! Helpers for the tests of whole assemblies.

use std::path::Path;
use std::time::Duration;

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceReport;
use sidecore_assembly::spec::{DeviceSpec, FrontEndSpec, VirtioBlkSpec};
use sidecore_kit::wait;

/// The limit of every wait, after which a test fails.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A disk in front of the store of the same name, with its socket in `directory`, on the sidecore
/// `sc0`.
pub fn device(directory: &Path, name: &str) -> DeviceSpec {
    let virtio = VirtioBlkSpec { queue_size_max: 256, packed: true, ..VirtioBlkSpec::default() };
    DeviceSpec {
        front_end: FrontEndSpec::VirtioBlk(virtio),
        name: name.to_owned(),
        store: name.to_owned(),
        socket: directory.join(format!("{name}.sock")),
        sidecores: vec!["sc0".to_owned()],
        ..DeviceSpec::default()
    }
}

/// Waits for a condition of the device's report, which changes after the socket's events.
#[allow(dead_code)]
pub fn until(
    assembly: &Assembly,
    device: usize,
    like: impl Fn(&DeviceReport) -> bool,
) -> DeviceReport {
    wait::succeed(PATIENCE, || {
        let report = assembly.devices().swap_remove(device);
        if like(&report) { Ok(report) } else { Err(format!("{report:?}")) }
    })
}
