//! The data path allocates nothing for a request: reactor, queue, store and completion.

mod common;
#[path = "common/no_allocations.rs"]
mod no_allocations;

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_counting_alloc::CountingAllocator;
use sidecore_driver::{BlkClient, ClientOptions};

use common::{device, until};
use no_allocations::{assert_none, spec};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_hundred_thousand_requests_allocate_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let stores = ["null", "ram", "file", "delay", "fault", "volume"];
    let spec = spec(directory.path(), stores.map(|store| device(directory.path(), store)).into());
    let assembly = Assembly::start(&spec).unwrap();
    for (index, device) in spec.devices.iter().enumerate() {
        for packed in [false, true] {
            let options = ClientOptions { packed, huge_pages: false, ..ClientOptions::default() };
            let mut client = BlkClient::connect(&device.socket, &options).unwrap();
            assert_none(
                client.queue(0).unwrap(),
                &format!("store {}, packed {packed}", device.name),
            );
            drop(client);
            // The end of a connection allocates, and must not be counted for the next connection.
            until(&assembly, index, |report| report.state == DeviceState::Waiting);
        }
    }
    assembly.drain();
}
