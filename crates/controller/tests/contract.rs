//! A virtual function fulfils the contract of every block device, on each kind of store.

mod common;

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_block_contract::{self as contract, Options};
use sidecore_controller::Controller;
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

const MIB: u64 = 1 << 20;

/// A function of a fresh volume, which keeps its controller alive.
struct Served {
    function: Arc<dyn BlockDevice>,
    _controller: Arc<Controller>,
}

impl BlockDevice for Served {
    fn geometry(&self) -> Geometry {
        self.function.geometry()
    }

    fn open_channel(
        &self,
        core: &sidecore_reactor::CoreContext,
        depth: usize,
    ) -> std::io::Result<Box<dyn sidecore_block::BlockChannel>> {
        self.function.open_channel(core, depth)
    }
}

fn serve(store: Arc<dyn BlockDevice>, block_bytes: u32) -> Arc<dyn BlockDevice> {
    let controller = common::over(&store, block_bytes);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let function = common::function(&controller, "v");
    Arc::new(Served { function, _controller: controller })
}

#[test]
fn over_memory_at_every_granularity() {
    for block_bytes in [512, 1024, 4096] {
        let open =
            || serve(Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap()), block_bytes);
        contract::check(&open, &Options::default());
    }
}

#[test]
fn over_a_store_that_takes_its_time() {
    let open = || {
        let ram = Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap());
        serve(Arc::new(DelayStore::new(ram, Nanos::from_micros(20))), 1024)
    };
    contract::check(&open, &Options::default());
}

#[test]
fn over_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let open = || {
        let _ = std::fs::remove_file(&path);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(16 * MIB).unwrap();
        serve(Arc::new(FileStore::open(&FileOptions::new(&path)).unwrap()), 4096)
    };
    contract::check(&open, &Options::default());
}

#[test]
fn a_snapshot_is_a_disk_that_cannot_be_written() {
    let open = || -> Arc<dyn BlockDevice> {
        let store: Arc<dyn BlockDevice> =
            Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap());
        let controller = common::over(&store, 1024);
        controller.create_volume("v", 4 * MIB, None).unwrap();
        controller.snapshot_volume("v", "s").unwrap();
        let function = common::function(&controller, "s");
        Arc::new(Served { function, _controller: controller })
    };
    contract::check(&open, &Options::default());
}

#[test]
fn an_idle_channel_polls_its_store() {
    let ram = Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap());
    contract::passes_idle_polls(ram, |store| serve(store, 1024));
}
