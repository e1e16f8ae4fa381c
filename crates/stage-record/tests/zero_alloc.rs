//! Requests that are recorded allocate nothing, whatever is recorded of them.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore, Stage as _};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_recording::DataMode;
use sidecore_stage_record::RecordStage;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn record() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk.recording");
    for data in [DataMode::None, DataMode::Checksum, DataMode::Full] {
        // With data, the ring is full at times, and the file before the run ends.
        let stage = RecordStage {
            file: file.clone(),
            data,
            max_bytes: Some(16 << 20),
            buffer_mib: Some(1),
        };
        let ram = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
        let device = stage.open("disk", ram).unwrap();
        allocates_nothing(&*device, allocations);
        let recording = device.stages()[0].recording().cloned().unwrap();
        drop(device);
        let counts = recording.counts();
        assert!(counts.recorded > 0, "{counts:?}");
    }
}
