//! Plans between chosen specifications, and between arbitrary ones.

mod mirrors;
mod nics;

use proptest::collection::vec;
use proptest::prelude::*;

use super::uses::{Name, uses};
use super::*;
use crate::spec::{FileOptions, FrontEndSpec, MirrorSpec, RemoteSpec, VolumeSpec, VrioSpec};

fn store(name: &str, kind: StoreKind) -> StoreSpec {
    StoreSpec::new(name, kind)
}

fn ram() -> StoreKind {
    StoreKind::Ram { size_bytes: 1 << 20, block_bytes: 512 }
}

fn shared(inner: &str) -> StoreKind {
    StoreKind::Store { store: inner.to_owned() }
}

fn file(path: &str) -> StoreKind {
    StoreKind::File(FileOptions::new(path))
}

fn volume(controller: &str) -> StoreKind {
    StoreKind::Volume(VolumeSpec::new(controller, "root"))
}

fn sidecore(name: &str) -> SidecoreSpec {
    SidecoreSpec { name: name.to_owned(), cpu: None }
}

fn device(name: &str, store: &str, sidecore: &str) -> DeviceSpec {
    DeviceSpec {
        name: name.to_owned(),
        store: store.to_owned(),
        socket: format!("/run/{name}.sock").into(),
        sidecores: vec![sidecore.to_owned()],
        ..DeviceSpec::default()
    }
}

/// A pool on a file, a device on a volume of it, and a device on a ram store through another.
fn pool() -> Spec {
    Spec {
        sidecores: vec![sidecore("sc0")],
        stores: vec![
            store("slow", shared("mem")),
            store("root", volume("pool")),
            store("mem", ram()),
            store("unused", ram()),
            store("disk", file("/disk")),
        ],
        controllers: vec![ControllerSpec::new("pool", "disk")],
        devices: vec![device("one", "root", "sc0"), device("two", "slow", "sc0")],
        ..Spec::default()
    }
}

fn link(name: &str, sidecores: &[&str]) -> LinkSpec {
    let sidecores = sidecores.iter().map(|name| (*name).to_owned()).collect();
    LinkSpec { name: name.to_owned(), sidecores, ..LinkSpec::default() }
}

fn client(name: &str, links: &[&str]) -> ClientSpec {
    let links = links.iter().map(|name| (*name).to_owned()).collect();
    ClientSpec { name: name.to_owned(), links, ..ClientSpec::default() }
}

fn iohost(name: &str, link: &str) -> IohostSpec {
    IohostSpec { name: name.to_owned(), link: link.to_owned(), ..IohostSpec::default() }
}

fn exported(name: &str, store: &str, client: &str) -> DeviceSpec {
    let front_end =
        FrontEndSpec::Vrio(VrioSpec { client: client.to_owned(), ..VrioSpec::default() });
    DeviceSpec {
        name: name.to_owned(),
        store: store.to_owned(),
        front_end,
        ..DeviceSpec::default()
    }
}

/// Exports two devices, and uses one of another host.
fn remote() -> Spec {
    Spec {
        sidecores: vec![sidecore("io"), sidecore("vm")],
        stores: vec![
            store("mem", ram()),
            store("disk", file("/disk")),
            store("far", StoreKind::Remote(RemoteSpec::new("upstream"))),
        ],
        links: vec![
            link("down", &["io"]),
            link("side", &["io", "vm"]),
            link("up", &["vm"]),
            link("unused", &["io"]),
        ],
        clients: vec![client("near", &["down", "side"])],
        iohosts: vec![iohost("upstream", "up")],
        devices: vec![
            exported("one", "mem", "near"),
            exported("two", "disk", "near"),
            device("guest", "far", "vm"),
        ],
        ..Spec::default()
    }
}

/// Each device of `count` is on top of a longer chain of stores.
fn chain(count: usize) -> Spec {
    let store_at = |index: usize| match index {
        0 => store("s0", ram()),
        _ => store(&format!("s{index}"), shared(&format!("s{}", index - 1))),
    };
    let on = |index: usize| device(&format!("d{index}"), &format!("s{index}"), "sc0");
    Spec {
        sidecores: vec![sidecore("sc0")],
        stores: (0..count).map(store_at).collect(),
        devices: (0..count).map(on).collect(),
        ..Spec::default()
    }
}

const MANY: usize = 4096;

#[test]
fn a_check_of_many_devices_takes_a_few_steps_for_each() {
    let mut spec = chain(MANY);
    for _ in 0..2 {
        let parts = Parts::of(&spec);
        check::Checker::of(&parts).check().unwrap();
        // The device and its sidecore; its store, and the store below that, are counted twice: they
        // are visited, and one is looked up.
        assert!(parts.steps.get() <= 6 * MANY, "{} steps", parts.steps.get());
        // From the end of the chain, the first device walks all of it, and the others nothing.
        spec.devices.reverse();
    }
    let last = &mut spec.devices[MANY - 1];
    last.socket = "/run//d0.sock".into();
    let refused = check(&spec).unwrap_err();
    assert!(
        matches!(&refused, AssemblyError::SocketTaken { name, other, .. }
        if name == "d4095" && other == "d0"),
        "{refused}"
    );
}

/// Plans from one specification to the next, and returns the number of actions. Fails if that took
/// more than some steps for each part.
fn plan_in_few_steps(state: &mut State, spec: &Spec) -> usize {
    let parts = Parts::of(spec);
    let actions = planner::Planner::new(state, &parts).plan();
    // Of each device and each store: whether it has changed, whether it is needed, its use, its
    // visit, the phases below, and the action.
    assert!(parts.steps.get() <= 24 * MANY, "{} steps", parts.steps.get());
    actions.iter().for_each(|action| state.apply(action, &parts));
    actions.len()
}

#[test]
fn a_plan_of_many_devices_takes_a_few_steps_for_each() {
    let mut spec = chain(MANY);
    for _ in 0..2 {
        let mut state = State::default();
        assert_eq!(plan_in_few_steps(&mut state, &spec), 2 * MANY + 1);
        assert_eq!(plan_in_few_steps(&mut state, &spec), 0);
        // All stores lie on the changed one.
        let first = spec.stores.iter().position(|store| store.name == "s0").unwrap();
        spec.stores[first].kind = StoreKind::Null { size_bytes: 1 << 20, block_bytes: 512 };
        assert_eq!(plan_in_few_steps(&mut state, &spec), 4 * MANY);
        spec.stores[first].kind = file("/disk");
        assert_eq!(plan_in_few_steps(&mut state, &spec), 2 * MANY + 1);
        // A refusal reaches each device from the bottom of its chain.
        state.stores.get_mut("s0").unwrap().phase = Phase::Refused;
        assert_eq!(plan_in_few_steps(&mut state, &spec), MANY);
        assert_eq!(plan_in_few_steps(&mut state, &Spec::default()), MANY + 2);
        assert_eq!(state, State::default());
        // In this order, each store needs one that is further down.
        spec.stores[first].kind = ram();
        spec.stores.reverse();
        spec.devices.reverse();
    }
}

/// Applies a plan and returns its actions as text.
fn step(state: &mut State, next: &Spec) -> Vec<String> {
    let actions = plan(state, next);
    actions.iter().for_each(|action| state.apply(action, &Parts::of(next)));
    actions.iter().map(|action| format!("{:?} {}", action.verb, action.name)).collect()
}

fn running(spec: &Spec) -> State {
    let mut state = State::default();
    while !step(&mut state, spec).is_empty() {
        state.settle();
    }
    state
}

#[test]
fn a_start_waits_only_for_files_and_controllers() {
    let (mut state, spec) = (State::default(), pool());
    let first = [
        "StartSidecore sc0",
        "OpenStore mem",
        "OpenStore disk",
        "OpenStore slow",
        "StartDevice two",
    ];
    assert_eq!(step(&mut state, &spec), first);
    assert!(step(&mut state, &spec).is_empty(), "the file is still being opened");
    state.settle();
    assert_eq!(step(&mut state, &spec), ["OpenController pool"]);
    state.settle();
    assert_eq!(step(&mut state, &spec), ["OpenStore root", "StartDevice one"]);
    assert!(step(&mut state, &spec).is_empty());
}

#[test]
fn a_dry_run_has_all_actions_of_a_start() {
    let all = [
        "start sidecore \"sc0\"",
        "open store \"mem\"",
        "open store \"disk\"",
        "open store \"slow\"",
        "start device \"two\"",
        "open controller \"pool\"",
        "open store \"root\"",
        "start device \"one\"",
    ];
    assert_eq!(dry_run(&pool()).unwrap(), all);
    let mut wrong = pool();
    wrong.devices[0].store = "nowhere".to_owned();
    assert!(dry_run(&wrong).unwrap_err().to_string().contains("nowhere"));
}

#[test]
fn an_end_closes_each_part_after_those_above() {
    let mut state = running(&pool());
    let all = [
        "StopDevice one",
        "StopDevice two",
        "CloseStore root",
        "CloseStore slow",
        "CloseStore mem",
        "CloseController pool",
        "CloseStore disk",
        "StopSidecore sc0",
    ];
    assert_eq!(step(&mut state, &Spec::default()), all);
    assert_eq!(state, State::default());
}

#[test]
fn a_store_that_is_being_opened_is_closed_when_it_has_answered() {
    let (mut state, spec) = (State::default(), pool());
    step(&mut state, &spec);
    let all = ["StopDevice two", "CloseStore slow", "CloseStore mem", "StopSidecore sc0"];
    assert_eq!(step(&mut state, &Spec::default()), all);
    state.settle();
    assert_eq!(step(&mut state, &Spec::default()), ["CloseStore disk"]);
}

#[test]
fn a_refusal_reaches_each_part_above_once() {
    let (mut state, spec) = (State::default(), pool());
    step(&mut state, &spec);
    state.stores.get_mut("disk").unwrap().phase = Phase::Refused;
    assert_eq!(step(&mut state, &spec), ["RefuseController pool", "RefuseDevice one"]);
    assert!(step(&mut state, &spec).is_empty());
    assert_eq!(state.devices["one"].phase, Phase::Refused);
    // The device is stopped, and started on a store that is open.
    let mut other = spec.clone();
    other.devices[0].store = "mem".to_owned();
    assert_eq!(step(&mut state, &other), ["StopDevice one", "StartDevice one"]);
}

#[test]
fn a_changed_part_restarts_the_parts_above_and_no_others() {
    let mut state = running(&pool());
    let mut next = pool();
    next.stores[2].kind = file("/mem");
    let all = ["StopDevice two", "CloseStore slow", "CloseStore mem", "OpenStore mem"];
    assert_eq!(step(&mut state, &next), all);
    state.settle();
    assert_eq!(step(&mut state, &next), ["OpenStore slow", "StartDevice two"]);
    assert_eq!(state, running(&next));
}

#[test]
fn a_detached_device_keeps_its_place_and_not_its_store() {
    let (mut state, spec) = (running(&pool()), pool());
    state.detached.insert("one".to_owned());
    assert_eq!(step(&mut state, &spec), ["CloseStore root"]);
    assert!(step(&mut state, &spec).is_empty());
}

#[test]
fn links_start_on_their_sidecores_and_before_their_users() {
    let (mut state, spec) = (State::default(), remote());
    let first = [
        "StartSidecore io",
        "StartSidecore vm",
        "StartLink down",
        "StartLink side",
        "StartClient near",
        "StartIohost upstream",
        "OpenStore mem",
        "OpenStore disk",
        "OpenStore far",
        "StartDevice one",
    ];
    assert_eq!(step(&mut state, &spec), first);
    assert!(step(&mut state, &spec).is_empty(), "the IOhost has not answered");
    state.settle();
    assert_eq!(step(&mut state, &spec), ["StartDevice two", "StartDevice guest"]);
    let end = [
        "StopDevice guest",
        "StopDevice one",
        "StopDevice two",
        "CloseStore disk",
        "CloseStore far",
        "CloseStore mem",
        "StopClient near",
        "StopIohost upstream",
        "StopLink down",
        "StopLink side",
        "StopSidecore io",
        "StopSidecore vm",
    ];
    assert_eq!(step(&mut state, &Spec::default()), end);
    assert_eq!(state, State::default());
}

#[test]
fn a_remote_device_that_never_came_is_given_up_and_a_file_is_not() {
    let (mut state, spec) = (State::default(), remote());
    step(&mut state, &spec);
    let mut next = spec.clone();
    next.devices.remove(2);
    assert_eq!(step(&mut state, &next), ["CloseStore far"]);
    next.devices.remove(1);
    assert!(step(&mut state, &next).is_empty(), "the kernel may be opening the file");
    state.settle();
    assert_eq!(step(&mut state, &next), ["CloseStore disk"]);
}

#[test]
fn a_client_comes_and_goes_while_others_are_served() {
    let mut state = running(&remote());
    let mut next = remote();
    next.clients.push(client("new", &["down"]));
    next.devices.push(exported("three", "mem", "new"));
    assert_eq!(step(&mut state, &next), ["StartClient new", "StartDevice three"]);
    assert_eq!(step(&mut state, &remote()), ["StopDevice three", "StopClient new"]);
    // A changed client takes its own devices down, and its links stay.
    next = remote();
    next.clients[0].encryption = Some(false);
    let again = [
        "StopDevice one",
        "StopDevice two",
        "StopClient near",
        "StartClient near",
        "StartDevice one",
        "StartDevice two",
    ];
    assert_eq!(step(&mut state, &next), again);
}

#[test]
fn a_changed_link_restarts_its_users() {
    let mut state = running(&remote());
    let mut next = remote();
    next.links[2].frame_bytes = 1500;
    let stops = ["StopDevice guest", "CloseStore far", "StopIohost upstream"];
    let starts = ["StartIohost upstream", "OpenStore far"];
    assert_eq!(step(&mut state, &next), [&stops[..], &starts[..]].concat());
    // Without its last client, a link is closed.
    next.devices.retain(|device| device.front_end.client().is_none());
    next.clients.clear();
    state.settle();
    step(&mut state, &next);
    assert!(state.links.is_empty() && state.clients.is_empty());
    assert_eq!(state.iohosts.len(), 1);
}

#[test]
fn names_of_missing_parts_of_the_remote_channel_are_refused() {
    let said = |change: &dyn Fn(&mut Spec)| {
        let mut spec = remote();
        change(&mut spec);
        dry_run(&spec).unwrap_err().to_string()
    };
    type Change<'a> = &'a dyn Fn(&mut Spec);
    let wrong: [(Change<'_>, &str); 7] = [
        (&|spec| spec.links[0].sidecores[0] = "x".to_owned(), "link \"down\" names sidecore \"x\""),
        (&|spec| spec.clients[0].links[0] = "x".to_owned(), "client \"near\" names link \"x\""),
        (&|spec| spec.iohosts[0].link = "x".to_owned(), "iohost \"upstream\" names link \"x\""),
        (&|spec| spec.devices[0] = exported("one", "mem", "x"), "names client \"x\""),
        (
            &|spec| spec.clients[0].links = vec!["up".to_owned()],
            "link \"up\" leads to iohost \"upstream\" already: give client \"near\" a link",
        ),
        (
            &|spec| spec.iohosts.push(iohost("zwei", "up")),
            "link \"up\" leads to iohost \"upstream\" already: give iohost \"zwei\" a link",
        ),
        (&|spec| spec.iohosts.clear(), "store \"far\" names iohost \"upstream\""),
    ];
    for (change, wanted) in wrong {
        let said = said(change);
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Specifications with unique names. Some of their parts lead to missing stores, or to themselves.
fn specs() -> impl Strategy<Value = Spec> {
    let kind = (0..7, 0..4_usize).prop_map(|(kind, name)| match kind {
        6 => StoreKind::Mirror(MirrorSpec::new([NAMES[name], NAMES[(name + 1) % 4]])),
        0 => ram(),
        1 => file(NAMES[name]),
        2 | 3 => shared(NAMES[name]),
        4 => StoreKind::Remote(RemoteSpec::new(NAMES[name])),
        _ => volume(NAMES[name]),
    });
    let sidecores = vec(any::<bool>(), 2);
    let devices = vec(proptest::option::of((0..4_usize, 0..2_usize, 0..4_usize)), 4);
    let wires = (
        vec(proptest::option::of(0..2_usize), 3),
        vec(proptest::option::of(0..3_usize), 2),
        vec(proptest::option::of(0..3_usize), 2),
    );
    let controllers = vec(proptest::option::of(0..4_usize), 2);
    (sidecores, vec(proptest::option::of(kind), 4), controllers, devices, wires).prop_map(
        |(sidecores, stores, controllers, devices, (links, clients, iohosts))| Spec {
            sidecores: NAMES
                .into_iter()
                .zip(sidecores)
                .filter(|(_, is)| *is)
                .map(|(name, _)| sidecore(name))
                .collect(),
            stores: NAMES
                .into_iter()
                .zip(stores)
                .filter_map(|(name, kind)| Some(store(name, kind?)))
                .collect(),
            controllers: NAMES
                .into_iter()
                .zip(controllers)
                .filter_map(|(name, store)| Some(ControllerSpec::new(name, NAMES[store?])))
                .collect(),
            devices: NAMES
                .into_iter()
                .zip(devices)
                .filter_map(|(name, on)| {
                    // Some of the devices are exported to clients, of which some do not exist.
                    on.map(|(store, place, kind)| match kind {
                        0 => exported(name, NAMES[store], NAMES[place]),
                        _ => device(name, NAMES[store], NAMES[place]),
                    })
                })
                .collect(),
            links: NAMES
                .into_iter()
                .zip(links)
                .filter_map(|(name, sidecore)| Some(link(name, &[NAMES[sidecore?]])))
                .collect(),
            clients: NAMES
                .into_iter()
                .zip(clients)
                .filter_map(|(name, link)| Some(client(name, &[NAMES[link?]])))
                .collect(),
            iohosts: NAMES
                .into_iter()
                .zip(iohosts)
                .filter_map(|(name, link)| Some(iohost(name, NAMES[link?])))
                .collect(),
            ..Spec::default()
        },
    )
}

/// Whether the parts below a store are open.
fn is_founded(state: &State, kind: &StoreKind, next: &Spec) -> bool {
    let is_open = |name: &str| {
        let part = &state.stores[name];
        part.phase == Phase::Open && next.stores.contains(&part.spec)
    };
    let controls = |name: &str| {
        let part = &state.controllers[name];
        part.phase == Phase::Open && next.controllers.contains(&part.spec)
    };
    let leads = |remote: &RemoteSpec| {
        let (iohost, links) = &state.iohosts[&remote.iohost];
        next.iohosts.contains(iohost) && links.iter().all(|link| next.links.contains(link))
    };
    kind.inner().is_none_or(is_open)
        && kind.controller().is_none_or(controls)
        && kind.remote().is_none_or(leads)
}

/// Whether a part above is open, or being opened.
fn is_used(state: &State, part: Name<'_>) -> bool {
    uses(state).any(|each| each.is_open && each.below == part)
}

/// Checks that every part that an action needs is open, and that no user is left of a part that is
/// stopped.
fn check_order(state: &State, action: &Action, next: &Spec) {
    let Action { verb, name } = action;
    match verb {
        Verb::OpenStore => {
            assert!(is_founded(state, &find_store(next, name).unwrap().kind, next), "{action:?}");
        }
        Verb::OpenController | Verb::StartDevice => {
            let device =
                next.devices.iter().find(|spec| *verb == Verb::StartDevice && spec.name == *name);
            if let Some(switch) = device.and_then(|device| device.front_end.switch()) {
                assert!(state.switches.contains_key(switch), "{action:?}");
                return;
            }
            let controller = next.controllers.iter().find(|spec| spec.name == *name);
            let store = device.map_or_else(|| &controller.unwrap().store, |device| &device.store);
            let part = &state.stores[store];
            assert!(part.phase == Phase::Open && next.stores.contains(&part.spec), "{action:?}");
            let sidecores = device.map_or(&[][..], |device| &device.sidecores);
            assert!(sidecores.iter().all(|name| state.sidecores.contains_key(name)), "{action:?}");
            let client = device.and_then(|device| device.front_end.client());
            assert!(client.is_none_or(|name| state.clients.contains_key(name)), "{action:?}");
        }
        Verb::CloseStore => assert!(!is_used(state, Name::Store(name)), "{action:?}"),
        Verb::CloseController => assert!(!is_used(state, Name::Controller(name)), "{action:?}"),
        Verb::StopSidecore => {
            let on = |part: &Part<DeviceSpec>| part.spec.sidecores.contains(name);
            assert!(!state.devices.values().any(on), "{action:?}");
            let mut links =
                state.links.values().chain(state.iohosts.values().flat_map(|(_, links)| links));
            assert!(!links.any(|link| link.sidecores.contains(name)), "{action:?}");
        }
        Verb::StopLink => {
            let on = |client: &ClientSpec| client.links.contains(name);
            assert!(!state.clients.values().any(on), "{action:?}");
        }
        Verb::StopClient => {
            let to = |part: &Part<DeviceSpec>| part.spec.front_end.client() == Some(name);
            assert!(!state.devices.values().any(to), "{action:?}");
        }
        Verb::StopIohost => {
            let on = |part: &Part<StoreSpec>| {
                part.spec.kind.remote().is_some_and(|remote| remote.iohost == *name)
            };
            assert!(!state.stores.values().any(on), "{action:?}");
        }
        Verb::StartLink | Verb::StartIohost => {
            let link =
                next.links.iter().find(|link| *verb == Verb::StartLink && link.name == *name);
            let mut iohosts = next.iohosts.iter();
            let links = || Parts::of(next).links_of(iohosts.find(|of| of.name == *name)?);
            let links = link.map(|link| vec![link]).or_else(links).unwrap();
            let runs = |name: &String| state.sidecores.contains_key(name);
            assert!(links.iter().flat_map(|link| &link.sidecores).all(runs), "{action:?}");
        }
        Verb::StopSwitch => {
            let on = |part: &Part<DeviceSpec>| part.spec.front_end.switch() == Some(name);
            assert!(!state.devices.values().any(on), "{action:?}");
        }
        Verb::StartSwitch => {
            let switch = next.switches.iter().find(|switch| switch.name == *name).unwrap();
            assert!(state.sidecores.contains_key(&switch.sidecore), "{action:?}");
        }
        Verb::StartClient => {
            let client = next.clients.iter().find(|client| client.name == *name).unwrap();
            let runs = |name: &String| state.links.contains_key(name);
            assert!(client.links.iter().all(runs), "{action:?}");
        }
        Verb::StopDevice | Verb::StartSidecore | Verb::RefuseController | Verb::RefuseDevice => {}
    }
}

/// Plans, applies and settles until no action is left, and checks the order of each plan. Stores
/// with the name `refused` are refused.
fn come_to(state: &mut State, next: &Spec, refused: Option<&str>) {
    for _ in 0..20 {
        let actions = plan(state, next);
        for action in &actions {
            check_order(state, action, next);
            state.apply(action, &Parts::of(next));
            if action.verb == Verb::OpenStore && Some(&*action.name) == refused {
                // The rest of the plan is out of date.
                state.stores.get_mut(&action.name).unwrap().phase = Phase::Refused;
                break;
            }
        }
        if refused.is_none() {
            assert!(plan(state, next).is_empty(), "a plan contains every possible action");
        }
        state.settle();
        if actions.is_empty() && plan(state, next).is_empty() {
            return;
        }
    }
    panic!("no end: {state:?}");
}

proptest! {
    #![proptest_config(
        ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() }
    )]

    #[test]
    fn plans_lead_from_any_specification_to_any_other(
        one in specs(),
        two in specs(),
        pause in 0..3_usize,
    ) {
        let mut state = State::default();
        // Some files of the first specification are still being opened when the second one comes.
        for _ in 0..pause {
            plan(&state, &one).iter().for_each(|action| state.apply(action, &Parts::of(&one)));
            state.settle();
        }
        plan(&state, &one).iter().for_each(|action| state.apply(action, &Parts::of(&one)));
        come_to(&mut state, &two, None);
        prop_assert_eq!(&state, &running(&two));
        if check(&two).is_ok() {
            let parts = Parts::of(&two);
            let needed = state.needed(&parts);
            prop_assert!(two.devices.iter().all(|spec| state.devices[&spec.name].spec == *spec));
            prop_assert!(
                two.controllers.iter().all(|spec| state.controllers[&spec.name].spec == *spec)
            );
            prop_assert_eq!(state.stores.len(), needed.len());
        }
        come_to(&mut state, &Spec::default(), None);
        prop_assert_eq!(state, State::default());
    }

    #[test]
    fn a_refused_store_keeps_no_plan_from_coming_to_its_end(
        one in specs(),
        two in specs(),
        refused in 0..4_usize,
    ) {
        let (mut state, refused) = (State::default(), Some(NAMES[refused]));
        come_to(&mut state, &one, refused);
        come_to(&mut state, &two, refused);
        if check(&two).is_ok() {
            for device in &two.devices {
                let part = &state.devices[&device.name];
                prop_assert!(
                    part.phase == Phase::Refused || state.stores[&device.store].phase == Phase::Open
                );
            }
        }
        come_to(&mut state, &Spec::default(), refused);
        prop_assert_eq!(state, State::default());
    }
}
