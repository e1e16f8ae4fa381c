//! Guests' NICs are served over a restart of the daemon, on the same connections.

use std::path::Path;
use std::time::{Duration, Instant};

use sidecore_assembly::report::{DeviceReport, DeviceState, PortReport};
use sidecore_assembly::spec::{
    DeviceSpec, FrontEndSpec, SidecoreSpec, Spec, SwitchSpec, TapSpec, VirtioNetSpec,
};
use sidecore_assembly::{Assembly, LeftDevice};
use sidecore_driver::{NetClient, NetClientOptions, PacketHeader};

use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::output_of;
use sidecore_kit::wait;
use sidecore_skip::skip;

const SOON: Duration = Duration::from_secs(20);

fn spec(directory: &Path) -> Spec {
    let nic = |station: u8| DeviceSpec {
        name: format!("nic{station}"),
        front_end: FrontEndSpec::VirtioNet(Box::new(VirtioNetSpec {
            switch: "lan".to_owned(),
            mac: format!("52:54:00:00:00:0{station}"),
            packed: station == 2,
            any_source: station == 3,
            ..VirtioNetSpec::default()
        })),
        socket: directory.join(format!("nic{station}.sock")),
        queues: 2,
        ..DeviceSpec::default()
    };
    let switch =
        SwitchSpec { name: "lan".to_owned(), sidecore: "sc0".to_owned(), ..SwitchSpec::default() };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        switches: vec![switch],
        devices: vec![nic(1), nic(2), nic(3)],
        ..Spec::default()
    }
}

/// Sends a frame with this number from the one NIC to the other.
fn pass(from: &mut NetClient, to: &mut NetClient, stations: [u8; 2], number: u8) {
    let [sender, receiver] = stations.map(|station| [0x52, 0x54, 0, 0, 0, station]);
    pass_frame(from, to, &[&receiver[..], &sender, &[0x88, 0xb5], &[number; 50]].concat());
}

fn pass_frame(from: &mut NetClient, to: &mut NetClient, frame: &[u8]) {
    let (from, to) = (from.pair(0).unwrap(), to.pair(0).unwrap());
    assert!(from.send(&PacketHeader::default(), frame).unwrap());
    from.publish().unwrap();
    let (mut got, end) = (Vec::new(), Instant::now() + SOON);
    while to.receive(&mut got).unwrap().is_none() {
        to.wait(SOON).unwrap();
        assert!(Instant::now() < end, "{frame:?} does not come");
    }
    to.publish().unwrap();
    assert_eq!(got, frame);
}

#[test]
fn frames_pass_before_and_after_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let mut assembly = Assembly::start(&spec).unwrap();
    let connect = |station: usize| {
        let options = NetClientOptions { packed: station == 2, ..NetClientOptions::default() };
        NetClient::connect(&spec.devices[station - 1].socket, &options).unwrap()
    };
    let (mut one, mut two, mut three) = (connect(1), connect(2), connect(3));
    // Station 9 is behind the guest of NIC 3.
    pass(&mut three, &mut one, [9, 1], 0);
    pass(&mut one, &mut two, [1, 2], 1);
    for restart in 0..3 {
        let mut left = assembly.hand_over();
        drop(assembly);
        assert_eq!(left.len(), 3);
        // No more than a service manager keeps.
        let keep = |LeftDevice { name, state, fds }| LeftDevice { name, state, fds };
        let mut left: Vec<_> = left.drain(..).map(keep).collect();
        assembly = Assembly::take_over(&spec, &mut left).unwrap();
        assert!(left.is_empty());
        // An address that is not known would be asked for on all ports.
        pass(&mut one, &mut three, [1, 9], 30 + restart);
        let counters = |port: usize| assembly.switches(true)[0].ports[port].counters.clone();
        assert_eq!((counters(0).in_floods, counters(1).out_frames), (0, 0));
        pass(&mut one, &mut two, [1, 2], 10 + restart);
        pass(&mut two, &mut one, [2, 1], 20 + restart);
    }
    let reports = assembly.switches(true);
    assert!(reports[0].ports.iter().all(|port| port.is_up && port.counters.out_frames == 1));
    let stations = &reports[0].stations;
    let learnt: Vec<_> = stations.iter().filter(|station| !station.is_fixed).collect();
    assert_eq!((stations.len(), learnt.len()), (3, 1));
    assert_eq!((learnt[0].mac.as_str(), learnt[0].port.as_str()), ("52:54:00:00:00:09", "nic3"));
}

/// A datagram of UDP between the first two stations.
fn datagram([from, to]: [u8; 2], ports: [u16; 2]) -> Vec<u8> {
    let [sender, receiver] = [from, to].map(|station| [0x52, 0x54, 0, 0, 0, station]);
    let ip = [0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, from, 10, 0, 0, to];
    let [source, target] = ports.map(u16::to_be_bytes);
    [&receiver[..], &sender, &[8, 0], &ip, &source, &target, &[0, 12, 0, 0], &[7; 18]].concat()
}

#[test]
fn established_connections_live_through_restarts() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path());
    let FrontEndSpec::VirtioNet(two) = &mut spec.devices[1].front_end else { unreachable!() };
    two.rules = ["ct state established accept", "from accept", "to ip daddr 10.0.0.2 drop"]
        .map(str::to_owned)
        .into();
    let mut assembly = Assembly::start(&spec).unwrap();
    let connect = |station: usize| {
        let options = NetClientOptions { packed: station == 2, ..NetClientOptions::default() };
        NetClient::connect(&spec.devices[station - 1].socket, &options).unwrap()
    };
    let (mut one, mut two) = (connect(1), connect(2));
    // The guest with the rules asks.
    pass_frame(&mut two, &mut one, &datagram([2, 1], [4000, 53]));
    for restart in 0..3 {
        let mut left = assembly.hand_over();
        drop(assembly);
        let has_connections =
            |left: &LeftDevice| String::from_utf8_lossy(&left.state).contains("17 1 from ");
        assert_eq!(left.iter().filter(|left| has_connections(left)).count(), 1);
        assembly = Assembly::take_over(&spec, &mut left).unwrap();
        // A stranger's, which is dropped, and the answer behind it.
        let (stranger, answer) = (datagram([1, 2], [53, 4001]), datagram([1, 2], [53, 4000]));
        assert!(one.pair(0).unwrap().send(&PacketHeader::default(), &stranger).unwrap());
        pass_frame(&mut one, &mut two, &answer);
        let counters = assembly.switches(true)[0].ports[1].counters.clone();
        assert_eq!((counters.out_frames, counters.dropped_rule_out), (1, 1), "{restart}");
    }
    // A state that is not as daemons write it: the guest goes on, its connections do not.
    let mut left = assembly.hand_over();
    drop(assembly);
    for left in &mut left {
        let state = String::from_utf8(std::mem::take(&mut left.state)).unwrap();
        left.state = state.replace("17 1 from ", "17 1 by ").into_bytes();
    }
    assembly = Assembly::take_over(&spec, &mut left).unwrap();
    let counters = || assembly.switches(true)[0].ports[1].counters.clone();
    let answer = datagram([1, 2], [53, 4000]);
    let pair = one.pair(0).unwrap();
    assert!(pair.send(&PacketHeader::default(), &answer).unwrap());
    pair.publish().unwrap();
    wait::until("the drop", SOON, || counters().dropped_rule_out == 1);
    pass_frame(&mut two, &mut one, &datagram([2, 1], [4000, 53]));
    pass_frame(&mut one, &mut two, &answer);
    assert_eq!((counters().out_frames, counters().dropped_rule_out), (1, 1));
}

/// The report of the interface, and of its port.
fn host(assembly: &Assembly) -> (DeviceReport, PortReport) {
    let devices = assembly.devices().into_iter().find(|device| device.name == "host");
    let mut ports = assembly.switches(true).remove(0).ports.into_iter();
    (devices.unwrap(), ports.find(|port| port.name == "host").unwrap())
}

/// Runs ip(8) in this thread's namespace.
fn ip(words: &str) -> String {
    output_of("ip", &words.split_whitespace().collect::<Vec<_>>()).unwrap()
}

#[test]
fn the_hosts_interface_comes_and_goes_while_guests_stay() {
    if !Path::new("/dev/net/tun").exists() {
        return skip("the kernel has no TAP");
    }
    match Namespace::new() {
        Ok(namespace) => namespace.within(add_and_remove_the_host).unwrap(),
        Err(error) => skip(format_args!("no network namespace: {error}")),
    }
}

fn add_and_remove_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest =
        NetClient::connect(&spec.devices[0].socket, &NetClientOptions::default()).unwrap();
    let device = DeviceSpec {
        name: "host".to_owned(),
        front_end: FrontEndSpec::Tap(Box::new(TapSpec {
            switch: "lan".to_owned(),
            interface: "tap0".to_owned(),
            ..TapSpec::default()
        })),
        ..DeviceSpec::default()
    };
    for round in 1..=2 {
        assembly.add_device(&device, None).unwrap();
        if round == 1 {
            let (report, port) = host(&assembly);
            assert_eq!((report.state, report.socket.as_str()), (DeviceState::Running, "tap0"));
            assert!(!port.is_up && report.warnings[0].contains("ip link set tap0 up"));
            ip("link set tap0 up");
        }
        let (report, port) = host(&assembly);
        assert!(port.is_up && report.warnings.is_empty(), "{report:?}, {port:?}");
        // To all stations, so that the kernel takes it.
        let frame = [&[0xff; 6][..], &[0x52, 0x54, 0, 0, 0, 1, 0x88, 0xb5], &[1; 50]].concat();
        let pair = guest.pair(0).unwrap();
        assert!(pair.send(&PacketHeader::default(), &frame).unwrap());
        pair.publish().unwrap();
        wait::until("a frame", SOON, || host(&assembly).1.counters.out_frames == 1);
        assert_eq!(host(&assembly).1.counters.out_errors, 0);
        assembly.remove_device("host").unwrap();
        assert!(ip("link show tap0").contains("NO-CARRIER"), "it stays, without a daemon");
    }
    assembly.add_device(&device, None).unwrap();
    ip("link del tap0");
    assert_eq!(host(&assembly).0.state, DeviceState::Broken);
    assembly.remove_device("host").unwrap();
    let other = DeviceSpec {
        front_end: FrontEndSpec::Tap(Box::new(TapSpec {
            switch: "lan".to_owned(),
            interface: "lo".to_owned(),
            ..TapSpec::default()
        })),
        ..device
    };
    let error = assembly.add_device(&other, None).unwrap_err().to_string();
    assert!(error.contains("interface \"lo\"") && error.contains("is it a TAP"), "{error}");
    assert_eq!(assembly.devices().len(), 3);
}
