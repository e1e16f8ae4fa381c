//! The data path allocates nothing for a request: reactor, queue, store and completion.

mod common;
#[path = "common/no_allocations.rs"]
mod no_allocations;

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::StageKind;
use sidecore_assembly::{AddedStage, Assembly};
use sidecore_counting_alloc::CountingAllocator;
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_stage_delay::DelayStage;

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
            if device.name == "ram" && !packed {
                // A stage that came in use, and what is left when it has gone.
                let spec = StageKind::Delay(DelayStage { delay_us: 1 }).into();
                let added =
                    assembly.add_stage("ram", &AddedStage { spec, settings: Vec::new() }, 1);
                assert_eq!(added.unwrap().queues, 1);
                assert_none(client.queue(0).unwrap(), "a stage that was added");
                assert_eq!(assembly.remove_stage("ram", "delay").unwrap().queues, 1);
                assert_none(client.queue(0).unwrap(), "a stage that was removed");
            }
            drop(client);
            // The end of a connection allocates, and must not be counted for the next connection.
            until(&assembly, index, |report| report.state == DeviceState::Waiting);
        }
    }
    assembly.drain();
}
