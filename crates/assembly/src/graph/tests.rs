//! Plans that are applied.

use super::*;

const MANY: usize = 1024;

/// Devices with a store each, which is a stage's on another one.
fn many() -> Spec {
    let null = || StoreKind::Null { size_bytes: 1 << 20, block_bytes: 512 };
    let inner = |index| StoreSpec::new(format!("bottom{index}"), null());
    let outer = |index: usize| {
        let kind = StoreKind::Store { store: format!("bottom{index}") };
        StoreSpec::new(format!("top{index}"), kind)
    };
    let device = |index: usize| DeviceSpec {
        name: format!("d{index}"),
        store: format!("top{index}"),
        socket: format!("/run/d{index}.sock").into(),
        sidecores: vec!["sc0".to_owned()],
        ..DeviceSpec::default()
    };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: (0..MANY).map(inner).chain((0..MANY).map(outer)).collect(),
        devices: (0..MANY).map(device).collect(),
        ..Spec::default()
    }
}

#[test]
fn a_plan_of_many_devices_is_applied_in_a_few_steps_for_each() {
    let (clock, spec) = (Clock::new(), many());
    let graph = Graph::new(clock.clone(), Lists::new(&clock, &spec));
    let mut graph = lock(&graph);
    let actions = plan(&graph.now(), &spec);
    assert_eq!(actions.len(), 1 + 3 * MANY);
    let parts = Parts::of(&spec);
    graph.apply(&actions, &parts, Occasion::Start).unwrap();
    assert_eq!(graph.lists.all_disks().len(), MANY);
    // Two stores to open; the device, its store, and the way down from it for the bottom and for
    // the stages.
    assert!(parts.steps.get() <= 10 * MANY, "{} steps", parts.steps.get());
    graph.lists.wanted().set(spec);
    assert!(plan(&graph.now(), &graph.lists.wanted().spec).is_empty());
    let stops = plan(&graph.now(), &Spec::default());
    graph.apply(&stops, &Parts::of(&Spec::default()), Occasion::Late).unwrap();
    assert!(graph.lists.all_disks().is_empty());
}
