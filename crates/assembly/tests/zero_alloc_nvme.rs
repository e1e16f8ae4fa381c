//! The data path allocates nothing for a command of an NVMe function: reactor, queue, store and
//! completion.

mod common;
#[path = "common/host.rs"]
mod host;
#[path = "common/no_allocations.rs"]
mod no_allocations;

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::IdleMode;
use sidecore_counting_alloc::CountingAllocator;

use common::until;
use host::{ADAPTIVE, connect, function};
use no_allocations::{assert_none, spec};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_hundred_thousand_commands_allocate_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    // Mapped doorbells, and doorbells that are messages.
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let functions =
            ["ram", "file", "volume"].map(|store| function(directory.path(), store, idle));
        let spec = spec(directory.path(), functions.into());
        let assembly = Assembly::start(&spec).unwrap();
        for (index, device) in spec.devices.iter().enumerate() {
            let mut client = connect(&device.socket);
            assert_none(client.queue(0).unwrap(), &format!("store {}, {idle:?}", device.name));
            drop(client);
            // The end of a connection allocates, and must not be counted for the next connection.
            until(&assembly, index, |report| report.state == DeviceState::Waiting);
        }
        assembly.drain();
    }
}
