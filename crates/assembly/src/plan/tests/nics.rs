//! NICs, and the parts that they need.

use super::*;
use crate::spec::{ClientSpec, IohostSpec, LinkSpec, RemoteNetSpec, VirtioNetSpec, VrioNetSpec};

fn words(state: &State, next: &Spec) -> Vec<String> {
    plan(state, next).iter().map(Action::to_string).collect()
}

/// A NIC needs its switch and no store; the switch needs its sidecore.
#[test]
fn a_nic_comes_and_goes_with_its_switch() {
    let nic = VirtioNetSpec { switch: "lan".to_owned(), ..VirtioNetSpec::default() };
    let mut spec = Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        switches: vec![SwitchSpec {
            name: "lan".to_owned(),
            sidecore: "sc0".to_owned(),
            ..SwitchSpec::default()
        }],
        devices: vec![DeviceSpec {
            name: "nic".to_owned(),
            front_end: FrontEndSpec::VirtioNet(Box::new(nic)),
            ..DeviceSpec::default()
        }],
        ..Spec::default()
    };
    check(&spec).unwrap();
    let mut state = State::default();
    let starts = ["start sidecore \"sc0\"", "start switch \"lan\"", "start device \"nic\""];
    assert_eq!(words(&state, &spec), starts);
    come_to(&mut state, &spec, None);
    spec.switches[0].age_s = 7;
    let renewed = ["stop device \"nic\"", "stop switch \"lan\"", starts[1], starts[2]];
    assert_eq!(words(&state, &spec), renewed);
    come_to(&mut state, &spec, None);
    let stops = ["stop device \"nic\"", "stop switch \"lan\"", "stop sidecore \"sc0\""];
    assert_eq!(words(&state, &Spec::default()), stops);
    spec.switches.clear();
    assert!(check(&spec).unwrap_err().to_string().contains("switch \"lan\""));
}

/// A remote NIC needs its client or its IOhost as well, and is stopped before them.
#[test]
fn a_remote_nic_comes_and_goes_with_the_remote_channel() {
    let [lan, wire, up] = ["lan", "wire", "up"].map(str::to_owned);
    let sidecores = vec!["sc0".to_owned()];
    let link = |name: &String| LinkSpec {
        name: name.clone(),
        sidecores: sidecores.clone(),
        ..LinkSpec::default()
    };
    let exported =
        VrioNetSpec { switch: lan.clone(), client: "vmhost1".to_owned(), ..VrioNetSpec::default() };
    let used =
        RemoteNetSpec { switch: lan.clone(), iohost: "io1".to_owned(), ..RemoteNetSpec::default() };
    let device = |name: &str, front_end| DeviceSpec {
        name: name.to_owned(),
        front_end,
        ..DeviceSpec::default()
    };
    let mut spec = Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        switches: vec![SwitchSpec {
            name: lan,
            sidecore: "sc0".to_owned(),
            ..SwitchSpec::default()
        }],
        links: vec![link(&wire), link(&up)],
        clients: vec![ClientSpec {
            name: "vmhost1".to_owned(),
            links: vec![wire],
            ..ClientSpec::default()
        }],
        iohosts: vec![IohostSpec { name: "io1".to_owned(), link: up, ..IohostSpec::default() }],
        devices: vec![
            device("guest", FrontEndSpec::VrioNet(Box::new(exported))),
            device("far", FrontEndSpec::RemoteNet(Box::new(used))),
        ],
        ..Spec::default()
    };
    check(&spec).unwrap();
    let mut state = State::default();
    let before = |words: &[String], first: &str, then: &str| {
        let at = |word: &str| words.iter().position(|other| other == word).unwrap();
        assert!(at(first) < at(then), "{words:?}");
    };
    let started = words(&state, &spec);
    before(&started, "start client \"vmhost1\"", "start device \"guest\"");
    before(&started, "start iohost \"io1\"", "start device \"far\"");
    come_to(&mut state, &spec, None);
    spec.iohosts[0].client = "another".to_owned();
    let renewed = words(&state, &spec);
    before(&renewed, "stop device \"far\"", "stop iohost \"io1\"");
    before(&renewed, "start iohost \"io1\"", "start device \"far\"");
    assert!(!renewed.iter().any(|word| word.contains("guest")), "{renewed:?}");
    come_to(&mut state, &spec, None);
    spec.clients[0].weight = 7;
    let renewed = words(&state, &spec);
    before(&renewed, "stop device \"guest\"", "stop client \"vmhost1\"");
    assert!(!renewed.iter().any(|word| word.contains("far")), "{renewed:?}");
    come_to(&mut state, &spec, None);
    let clients = std::mem::take(&mut spec.clients);
    assert!(check(&spec).unwrap_err().to_string().contains("client \"vmhost1\""));
    spec.clients = clients;
    spec.iohosts.clear();
    assert!(check(&spec).unwrap_err().to_string().contains("iohost \"io1\""));
}
