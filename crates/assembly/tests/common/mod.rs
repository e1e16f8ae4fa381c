//! What the tests of a whole assembly share.

use std::path::Path;

use sidecore_assembly::spec::{DeviceSpec, IdleMode, Nanos};

/// A disk in front of the store of the same name, with its socket in `directory`, on the sidecore `sc0`.
pub fn device(directory: &Path, name: &str) -> DeviceSpec {
    DeviceSpec {
        name: name.to_owned(),
        store: name.to_owned(),
        socket: directory.join(format!("{name}.sock")),
        queues: 1,
        queue_size_max: 256,
        sidecores: vec!["sc0".to_owned()],
        idle: IdleMode::Adaptive { spin: Nanos::from_micros(50) },
        packed: true,
        read_only: false,
        seg_max: None,
        size_max_bytes: None,
        serial: None,
    }
}
