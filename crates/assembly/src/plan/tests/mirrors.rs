//! Mirrors, and the stores that are their legs.

use super::*;

/// A device on a mirror of a file and a remote device.
fn mirrored() -> Spec {
    let mut spec = remote();
    let fails = Some(std::time::Duration::from_secs(1));
    spec.iohosts[0].fail_after = fails;
    spec.stores.push(store("both", StoreKind::Mirror(MirrorSpec::new(["disk", "far"]))));
    spec.devices = vec![device("guest", "both", "vm")];
    spec.clients.clear();
    spec
}

#[test]
fn a_mirror_opens_when_its_local_legs_have_answered_and_closes_before_them() {
    let (mut state, spec) = (State::default(), mirrored());
    let opened = step(&mut state, &spec);
    assert!(opened.ends_with(&["OpenStore disk".to_owned(), "OpenStore far".to_owned()]));
    assert_eq!(step(&mut state, &spec), [""; 0]);
    // The remote device may come much later.
    state.stores.get_mut("disk").unwrap().phase = Phase::Open;
    assert_eq!(step(&mut state, &spec), ["OpenStore both"]);
    state.stores.get_mut("both").unwrap().phase = Phase::Open;
    assert_eq!(step(&mut state, &spec), ["StartDevice guest"]);
    let stopped = step(&mut state, &Spec::default());
    let stores = ["StopDevice guest", "CloseStore both", "CloseStore disk", "CloseStore far"];
    assert_eq!(stopped[..4], stores);
}

#[test]
fn a_mirror_opens_without_a_leg_that_was_refused() {
    let (mut state, spec) = (State::default(), mirrored());
    step(&mut state, &spec);
    state.stores.get_mut("disk").unwrap().phase = Phase::Refused;
    assert_eq!(step(&mut state, &spec), ["OpenStore both"]);
}

/// The mirror of a volume, on a controller of a stage in front of this store.
fn on_controller(spec: &mut Spec, bottom: &str) {
    spec.stores.pop();
    spec.stores.push(store("before", shared(bottom)));
    spec.controllers.push(ControllerSpec::new("pool", "before"));
    spec.stores.push(store("part", StoreKind::Volume(VolumeSpec::new("pool", "v"))));
    spec.stores.push(store("both", StoreKind::Mirror(MirrorSpec::new(["part"]))));
}

#[test]
fn the_iohost_below_the_controller_of_a_leg_is_known() {
    let mut spec = mirrored();
    on_controller(&mut spec, "far");
    assert!(dry_run(&spec).is_ok());
    let parts = Parts::of(&spec);
    let below = |leg: &str| {
        let (device, has_controller) = device_below(leg, &parts)?;
        Some((device.name.clone(), has_controller))
    };
    let far = |has_controller| Some(("far".to_owned(), has_controller));
    assert_eq!(
        ["part", "before", "far", "disk"].map(below),
        [far(true), far(false), far(false), None]
    );
}

#[test]
fn legs_that_cannot_be_legs_are_refused() {
    let said = |change: &dyn Fn(&mut Spec)| {
        let mut spec = mirrored();
        change(&mut spec);
        dry_run(&spec).unwrap_err().to_string()
    };
    let legs = |legs: &[&str]| StoreKind::Mirror(MirrorSpec::new(legs.iter().copied()));
    let with = |kind: StoreKind| {
        move |spec: &mut Spec| spec.stores.last_mut().unwrap().kind = kind.clone()
    };
    type Change<'a> = &'a dyn Fn(&mut Spec);
    let wrong: [(Change<'_>, &str); 13] = [
        (&with(legs(&[])), "store \"both\": a mirror has 1 to 8 legs, not 0"),
        (&with(legs(&["disk", "x"])), "store \"both\" names store \"x\""),
        (&with(legs(&["disk", "disk"])), "leg \"disk\" is listed twice"),
        (&with(legs(&["disk", "mem"])), "leg \"mem\" loses its bytes"),
        (&with(legs(&["disk", "both"])), "leg \"both\" is a mirror itself"),
        (&|spec| spec.iohosts[0].fail_after = None, "set `on_disconnect = \"fail\"` there"),
        (
            &|spec| spec.devices.push(device("other", "disk", "vm")),
            "store \"disk\" is used by store \"both\" and by device \"other\"",
        ),
        (
            &|spec| spec.controllers.push(ControllerSpec::new("pool", "far")),
            "store \"far\" is used by store \"both\" and by controller \"pool\"",
        ),
        (
            &|spec| spec.stores.push(store("two", StoreKind::Mirror(MirrorSpec::new(["disk"])))),
            "store \"disk\" is used by store \"both\" and by store \"two\"",
        ),
        (
            &|spec| {
                let read = Some("mem".to_owned());
                let mirror = MirrorSpec { read, ..MirrorSpec::new(["disk", "far"]) };
                spec.stores.last_mut().unwrap().kind = StoreKind::Mirror(mirror);
            },
            "`read` names \"mem\", which is none of its legs",
        ),
        (
            &|spec| {
                spec.stores.push(store("in", shared("both")));
                spec.stores.iter_mut().find(|it| it.name == "disk").unwrap().kind = shared("in");
            },
            "leg \"disk\" is a mirror itself",
        ),
        (
            &|spec| {
                on_controller(spec, "far");
                spec.iohosts[0].fail_after = None;
            },
            "leg \"part\" lies on store \"before\" of controller \"pool\", which is a device of \
             iohost \"upstream\"",
        ),
        (
            &|spec| on_controller(spec, "mem"),
            "leg \"part\" lies on store \"before\" of controller \"pool\", which loses its bytes",
        ),
    ];
    for (change, wanted) in wrong {
        let said = said(change);
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
}
