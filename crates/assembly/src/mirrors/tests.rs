//! Commands for legs that are named by their stores and by their numbers.

use sidecore_block::{Geometry, RamStore};
use sidecore_linux::Clock;
use sidecore_mirror::{CreateOptions, Sleep, create};

use super::*;
use crate::operation::ErrorKind;

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

/// The open mirror `m` whose legs 0 to 2 are these stores. Its list begins with a store `1`, which
/// could not be opened.
fn with_store_named_1(names: [&str; 3]) -> Mirrors {
    let devices = names.map(|_| ram());
    let creation =
        CreateOptions { uuid: [5; 16], region_bytes: None, are_equal: true, force: false };
    create(&devices, &creation, &mut Sleep::default()).unwrap();
    let mut stores: BTreeMap<String, Opened> =
        names.into_iter().map(str::to_owned).zip(devices.map(Ok)).collect();
    stores.insert("1".to_owned(), Err("it is away".to_owned()));
    let legs: Vec<&str> = ["1"].into_iter().chain(names).collect();
    let remote = Arc::new(Remote::new(Clock::new(), "/keys".into(), None));
    let mirrors = Mirrors::default();
    let spec = MirrorSpec::new(legs);
    mirrors.begin("m", &spec, stores, (BTreeMap::new(), &remote)).open().unwrap();
    mirrors
}

/// The stores that are legs.
fn legs(mirrors: &Mirrors) -> Vec<String> {
    let report = mirrors.reports().remove(0);
    report.legs.iter().filter(|leg| leg.leg.is_some()).filter_map(|leg| leg.store.clone()).collect()
}

#[test]
fn the_name_of_a_store_is_no_number_of_another_ones_leg() {
    let mirrors = with_store_named_1(["a", "b", "c"]);
    let error = mirrors.remove("m", "1").unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("\"1\" is no leg of mirror \"m\""), "{error:?}");
    assert!(error.message.contains("rename the store"), "{error:?}");
    let error = mirrors.repair("m", ("a", "1"), (0, None)).unwrap_err();
    assert!(error.message.contains("rename the store"), "{error:?}");
    assert_eq!(legs(&mirrors), ["a", "b", "c"]);

    let error = mirrors.remove("m", "7").unwrap_err();
    assert!(!error.message.contains("rename"), "no store has this name: {error:?}");
    mirrors.remove("m", "2").unwrap();
    assert_eq!(legs(&mirrors), ["a", "b"]);
    mirrors.remove("m", "b").unwrap();
    assert_eq!(legs(&mirrors), ["a"]);
    mirrors.close(&["m"], RETRY);
}
