//! Controllers over memory, and guests that use their functions.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::sync::Arc;

use sidecore_block::{Batch, BlockDevice, BlockError, BlockRequest, Geometry, RamStore};
use sidecore_block_contract::Harness;
use sidecore_controller::{
    Controller, ControllerOptions, FunctionOptions, PhysicalDisk, VirtualFunction,
};
use sidecore_units::Nanos;
use sidecore_volume::FormatOptions;

/// How a test store is formatted.
pub fn format(block_bytes: u32) -> FormatOptions {
    FormatOptions { block_bytes, label: "test".to_owned(), uuid: [7; 16], force: false }
}

/// A controller of `size_bytes` in memory.
pub fn in_memory(size_bytes: u64, block_bytes: u32) -> (Arc<Controller>, Arc<dyn BlockDevice>) {
    let store: Arc<dyn BlockDevice> =
        Arc::new(RamStore::new(Geometry::new(size_bytes, 512)).unwrap());
    (over(&store, block_bytes), store)
}

/// A controller over `store`, formatted if it is blank.
pub fn over(store: &Arc<dyn BlockDevice>, block_bytes: u32) -> Arc<Controller> {
    let options =
        ControllerOptions { format: Some(format(block_bytes)), ..ControllerOptions::default() };
    Controller::open("test", Arc::clone(store), &options, None).unwrap()
}

/// A function of a volume.
pub fn function(controller: &Controller, volume: &str) -> Arc<VirtualFunction> {
    controller.open_function(&FunctionOptions::new(volume)).unwrap()
}

/// A guest on a function of a volume.
pub fn guest(controller: &Controller, volume: &str) -> (Harness, Arc<dyn BlockDevice>) {
    let device: Arc<dyn BlockDevice> = function(controller, volume);
    (Harness::new(&device, 16), device)
}

/// Steps the hypervisor side until `request` completes, or would need a commit.
pub fn until_commit(
    guest: &mut Harness,
    controller: &Controller,
    disk: &mut PhysicalDisk,
    request: Option<Box<BlockRequest>>,
) -> Option<Result<(), BlockError>> {
    let mut completed = Batch::new();
    guest.submit(&mut request.into_iter().collect());
    for now in 0..100 {
        guest.channel.poll(Nanos(now), &mut completed);
        if let Some(mut request) = completed.pop() {
            request.tag.take().unwrap().into_bits();
            return Some(request.result);
        }
        controller.step(disk);
    }
    None
}
