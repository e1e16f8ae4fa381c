//! A mirror over a restart that its guest does not notice: the next process opens the legs when the
//! keeper of the one before has closed them, and has nothing to copy.

#[allow(dead_code, reason = "it uses a part")]
mod common;

use std::path::Path;

use sidecore_assembly::report::{DeviceState, LegWord, MirrorState};
use sidecore_assembly::spec::{
    FileOptions, MirrorSpec, Sector, SidecoreSpec, Spec, StoreKind, StoreSpec,
};
use sidecore_assembly::{Assembly, offline};
use sidecore_driver::Status;
use sidecore_kit::{guest, wait};

use common::{PATIENCE, device};

fn spec(directory: &Path) -> Spec {
    let file = |name: &str| {
        let path = directory.join(name);
        std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let kind = StoreKind::File(FileOptions { direct: false, ..FileOptions::new(path) });
        StoreSpec::new(name, kind)
    };
    let mirror = StoreKind::Mirror(MirrorSpec::new(["a", "b"]));
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![StoreSpec::new("m", mirror), file("a"), file("b")],
        devices: vec![device(directory, "m")],
        ..Spec::default()
    }
}

#[test]
fn a_guest_keeps_its_mirror_over_restarts_and_nothing_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let options = offline::MirrorOptions { uuid: [9; 16], are_equal: true, ..Default::default() };
    offline::create_mirror(&spec, "m", &options).unwrap();
    let error = offline::create_mirror(&spec, "m", &options).unwrap_err().to_string();
    assert!(error.contains("has the header of a mirror already") && error.contains("--force"));
    let mut assembly = Assembly::start(&spec).unwrap();
    let mut client = guest::connect(&spec.devices[0].socket);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for round in 1..=3_u8 {
        for page in 0..64 {
            queue.write_data(slot, 0, &[round; 4096]);
            queue.submit_write(slot, Sector(page * 8), 4096).unwrap();
            assert_eq!(guest::complete(queue).status, Status::Ok);
        }
        let error = offline::create_mirror(&spec, "m", &options).unwrap_err().to_string();
        assert!(error.contains("leg \"a\""), "the daemon has it: {error}");
        let mut left = assembly.hand_over();
        drop(assembly);
        assert_eq!(left.len(), 1);
        assembly = Assembly::take_over(&spec, &mut left).unwrap();
        assert_eq!(assembly.devices()[0].state, DeviceState::Running);
        let mirror = assembly.mirrors().remove(0);
        assert_eq!(mirror.state, MirrorState::Running);
        assert!(mirror.legs.iter().all(|leg| leg.state == LegWord::InSync), "{mirror:?}");
        assert_eq!((mirror.copied_bytes, mirror.leg_failures), (0, 0));
        queue.submit_read(slot, Sector(8), 4096).unwrap();
        assert_eq!(guest::complete(queue).status, Status::Ok);
        let mut back = [0; 4096];
        queue.read_data(slot, 0, &mut back);
        assert!(back == [round; 4096]);
    }
    drop(client);
    assembly.drain();
    wait::until("the legs are closed", PATIENCE, || {
        offline::create_mirror(&spec, "m", &options)
            .is_err_and(|error| error.to_string().contains("has the header"))
    });
}
