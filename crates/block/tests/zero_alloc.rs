//! The simple stores' requests allocate nothing, once the channel is warm.

use std::io;
use std::sync::Arc;

use sidecore_block::{
    BlockChannel, BlockDevice, BlockRequest, FilterChannel, Geometry, NullStore, RamStore, contain,
};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_reactor::CoreContext;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const GEOMETRY: Geometry = Geometry::new(1 << 20, 512);

#[test]
fn null() {
    allocates_nothing(&NullStore::new(GEOMETRY), allocations);
}

#[test]
fn ram_disk() {
    allocates_nothing(&RamStore::new(GEOMETRY).unwrap(), allocations);
}

/// The layers around a stage that passes everything on.
#[test]
fn a_contained_stage() {
    let ram = Arc::new(RamStore::new(GEOMETRY).unwrap());
    let stage = contain("pass", "disk", ram, |below| Ok(Arc::new(Pass(below)))).unwrap();
    allocates_nothing(&*stage, allocations);
}

struct Pass(Arc<dyn BlockDevice>);

impl BlockDevice for Pass {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.0.open_channel(core, depth)?;
        Ok(Box::new(FilterChannel::new(inner, depth, |_: &BlockRequest| Ok(()))))
    }
}
