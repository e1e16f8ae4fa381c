//! Specifications for the tests of NVMe functions.

use std::path::Path;

use sidecore_assembly::spec::{
    ControllerSpec, FileOptions, FormatSpec, IdleMode, SidecoreSpec, Spec, StageKind, StoreKind,
    StoreSpec, VolumeSpec,
};
use sidecore_driver::{NvmeClient, NvmeQueue};
use sidecore_stage_delay::DelayStage;

use crate::host::function;

/// The size of each device's store.
pub const DISK_BYTES: u64 = 8 << 20;
const POOL_BYTES: u64 = 64 << 20;

fn store(name: &str, kind: StoreKind) -> StoreSpec {
    StoreSpec::new(name, kind)
}

fn ram(name: &str, size_bytes: u64) -> StoreSpec {
    store(name, StoreKind::Ram { size_bytes, block_bytes: 512 })
}

fn slow(name: &str, below: &str, millis: u64) -> StoreSpec {
    StoreSpec::in_front_of(name, below, StageKind::Delay(DelayStage { delay_us: millis * 1000 }))
}

fn volume(name: &str) -> StoreSpec {
    let volume = VolumeSpec { size_bytes: Some(DISK_BYTES), ..VolumeSpec::new("pool", name) };
    store(name, StoreKind::Volume(volume))
}

/// Functions in front of a store in memory, a file, and two volumes of one controller, whose store
/// is a file as well.
pub fn spec(directory: &Path, idle: IdleMode, served: &[&str]) -> Spec {
    let file = |name: &str, len: u64| {
        let path = directory.join(format!("{name}.img"));
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        }
        store(name, StoreKind::File(FileOptions { direct: false, ..FileOptions::new(path) }))
    };
    Spec {
        sidecores: ["sc0", "sc1"]
            .map(|name| SidecoreSpec { name: name.to_owned(), cpu: None })
            .to_vec(),
        stores: vec![
            ram("mem", DISK_BYTES),
            file("file", DISK_BYTES),
            file("below", POOL_BYTES),
            volume("one"),
            volume("two"),
            slow("slow", "mem", 30),
        ],
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "below")
        }],
        devices: served.iter().map(|name| function(directory, name, idle)).collect(),
        ..Spec::default()
    }
}

/// The client's first queue.
pub fn queue(client: &mut NvmeClient) -> &mut NvmeQueue {
    client.queue(0).unwrap()
}
