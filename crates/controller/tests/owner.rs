//! Two controllers of one store, of which one should have ended.

mod common;

use std::sync::{Arc, Mutex};

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_controller::{Controller, ControllerOptions, Ownership};
use sidecore_volume::Owner;

const MIB: u64 = 1 << 20;

#[test]
fn a_controller_whose_store_has_another_owner_says_so_and_makes_nothing_durable() {
    let store: Arc<dyn BlockDevice> =
        Arc::new(RamStore::new(Geometry::new(16 * MIB, 512)).unwrap());
    let open = |epoch| {
        let said: Arc<Mutex<Vec<String>>> = Arc::default();
        let hears = Arc::clone(&said);
        let ownership = Ownership {
            owner: Owner { series: 1, epoch },
            lost: Arc::new(move |why| hears.lock().unwrap().push(why.to_owned())),
        };
        let options = ControllerOptions {
            format: Some(common::format(1024)),
            ownership: Some(ownership),
            ..ControllerOptions::default()
        };
        (Controller::open("test", Arc::clone(&store), &options, None), said)
    };
    let (first, said) = open(1);
    let first = first.unwrap();
    first.create_volume("a", 4 * MIB, None).unwrap();
    assert_eq!(*said.lock().unwrap(), [""; 0]);

    let (second, successor_said) = open(2);
    let second = second.unwrap();
    first.create_volume("b", 4 * MIB, None).unwrap_err();
    let said = said.lock().unwrap().clone();
    assert!(matches!(&said[..], [why] if why.contains("epoch 2 of series")), "{said:?}");
    second.create_volume("c", 4 * MIB, None).unwrap();
    second.shutdown();
    assert_eq!(*successor_said.lock().unwrap(), [""; 0]);
    let refused = open(1).0.err().expect("an owner of before").to_string();
    assert!(refused.contains("was served in epoch 2"), "{refused}");
    let names: Vec<String> = open(3).0.unwrap().volumes().into_iter().map(|it| it.name).collect();
    assert_eq!(names, ["a", "c"]);
}
