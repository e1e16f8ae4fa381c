//! An Ethernet interface of the host on a switch: the way to another host's kernel.

use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use sidecore_assembly::Assembly;
use sidecore_assembly::report::{DeviceReport, DeviceState};
use sidecore_assembly::spec::{
    DeviceSpec, EthernetSpec, FrontEndSpec, SidecoreSpec, Spec, SwitchSpec, TapSpec,
};
use sidecore_kit::namespace::{End, Namespace};
use sidecore_kit::wait;
use sidecore_skip::skip;

const SOON: Duration = Duration::from_secs(20);

/// A switch with the host's kernel on it, as a station.
fn spec() -> Spec {
    let host = FrontEndSpec::Tap(Box::new(TapSpec {
        switch: "lan".to_owned(),
        interface: "tap0".to_owned(),
        is_uplink: false,
        ..TapSpec::default()
    }));
    let switch =
        SwitchSpec { name: "lan".to_owned(), sidecore: "sc0".to_owned(), ..SwitchSpec::default() };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        switches: vec![switch],
        devices: vec![DeviceSpec {
            name: "host".to_owned(),
            front_end: host,
            ..DeviceSpec::default()
        }],
        ..Spec::default()
    }
}

fn ethernet(interface: &str) -> DeviceSpec {
    member("wire", interface, None)
}

/// An Ethernet interface, of this team if it has one.
fn member(name: &str, interface: &str, team: Option<&str>) -> DeviceSpec {
    let own = EthernetSpec {
        switch: "lan".to_owned(),
        interface: interface.to_owned(),
        team: team.map(str::to_owned),
        probe: team.map(|_| "10.9.0.2".to_owned()),
        ..EthernetSpec::default()
    };
    DeviceSpec {
        name: name.to_owned(),
        front_end: FrontEndSpec::Ethernet(Box::new(own)),
        ..DeviceSpec::default()
    }
}

fn wire(assembly: &Assembly) -> DeviceReport {
    assembly.devices().into_iter().find(|device| device.name == "wire").unwrap()
}

/// A socket of this thread's namespace.
fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// Sends a word from the one to the other, again until it comes: the first ones may be lost while
/// the interfaces come up.
fn passes(from: &UdpSocket, to: &UdpSocket) {
    let address = to.local_addr().unwrap();
    wait::until("a word", SOON, || {
        // There may be no route yet.
        let _ = from.send_to(b"word", address);
        let mut bytes = [0; 16];
        to.recv_from(&mut bytes).is_ok_and(|(len_bytes, sender)| {
            (&bytes[..len_bytes], sender) == (&b"word"[..], from.local_addr().unwrap())
        })
    });
}

#[test]
fn an_interface_leads_to_another_host() {
    if !Path::new("/dev/net/tun").exists() {
        return skip("the kernel has no TAP");
    }
    let (here, there) = match (Namespace::new(), Namespace::new()) {
        (Ok(here), Ok(there)) => (here, there),
        (Err(error), _) | (_, Err(error)) => {
            return skip(format_args!("no network namespace: {error}"));
        }
    };
    let assembly = here.within(|| Assembly::start(&spec()).unwrap()).unwrap();
    let end = |interface, address| End { interface, address };
    let (near, far) = (end("eth1", "02:00:00:00:00:01"), end("eth0", "02:00:00:00:00:02"));
    here.connect(&near, &there, &far, 1500).unwrap();
    here.ip("addr add 10.9.0.1/24 dev tap0").unwrap();
    here.ip("link set tap0 up").unwrap();
    there.ip("addr add 10.9.0.2/24 dev eth0").unwrap();
    here.within(|| assembly.add_device(&ethernet("eth1"), None).unwrap()).unwrap();
    let report = wire(&assembly);
    assert_eq!((report.state, report.socket.as_str()), (DeviceState::Running, "eth1"));
    let one = here.within(|| socket("10.9.0.1:0")).unwrap();
    let other = there.within(|| socket("10.9.0.2:0")).unwrap();
    passes(&one, &other);
    passes(&other, &one);

    there.ip("link set eth0 down").unwrap();
    let warns = |words: &str| wire(&assembly).warnings.iter().any(|one| one.contains(words));
    wait::until("a warning", SOON, || warns("\"eth1\" has no carrier"));
    there.ip("link set eth0 up").unwrap();
    wait::until("no warning", SOON, || wire(&assembly).warnings.is_empty());
    passes(&one, &other);

    here.ip("link del eth1").unwrap();
    wait::until("the end", SOON, || wire(&assembly).state == DeviceState::Broken);
    assembly.remove_device("wire").unwrap();
    let missing = here.within(|| assembly.add_device(&ethernet("eth1"), None)).unwrap();
    let error = missing.unwrap_err().to_string();
    assert!(error.contains("interface \"eth1\"") && error.contains("`ip link show`"), "{error}");
    assert_eq!(assembly.devices().len(), 1);
}

/// The state of a member of the team: whether it is up, and whether it stands by.
fn state(assembly: &Assembly, member: &str) -> (bool, bool) {
    let switch = assembly.switches(true).remove(0);
    let port = switch.ports.into_iter().find(|port| port.name == member).unwrap();
    (port.is_up, port.is_standby)
}

#[test]
fn of_two_interfaces_to_one_network_one_stands_by() {
    if !Path::new("/dev/net/tun").exists() {
        return skip("the kernel has no TAP");
    }
    let (here, there) = match (Namespace::new(), Namespace::new()) {
        (Ok(here), Ok(there)) => (here, there),
        (Err(error), _) | (_, Err(error)) => {
            return skip(format_args!("no network namespace: {error}"));
        }
    };
    if there.ip("link add br0 type bridge").is_err() {
        return skip("the kernel has no bridge");
    }
    // It answers from the first probe on.
    there.ip("addr add 10.9.0.2/24 dev br0").unwrap();
    there.ip("link set br0 up").unwrap();
    let assembly = here.within(|| Assembly::start(&spec()).unwrap()).unwrap();
    for (near, far, number) in [("eth1", "port1", 1), ("eth2", "port2", 2)] {
        let addresses = [format!("02:00:00:00:01:0{number}"), format!("02:00:00:00:02:0{number}")];
        let near_end = End { interface: near, address: &addresses[0] };
        here.connect(&near_end, &there, &End { interface: far, address: &addresses[1] }, 1500)
            .unwrap();
        there.ip(&format!("link set {far} master br0")).unwrap();
        let device = member(&format!("wire{number}"), near, Some("wan"));
        here.within(|| assembly.add_device(&device, None).unwrap()).unwrap();
    }
    here.ip("addr add 10.9.0.1/24 dev tap0").unwrap();
    here.ip("link set tap0 up").unwrap();
    let one = here.within(|| socket("10.9.0.1:0")).unwrap();
    let other = there.within(|| socket("10.9.0.2:0")).unwrap();
    passes(&one, &other);
    passes(&other, &one);
    let states = || [state(&assembly, "wire1"), state(&assembly, "wire2")];
    wait::until("both interfaces", SOON, || states() == [(true, false), (true, true)]);

    there.ip("link set port1 down").unwrap();
    wait::until("the second one", SOON, || states() == [(false, true), (true, false)]);
    passes(&other, &one);
    passes(&one, &other);
    there.ip("link set port1 up").unwrap();
    wait::until("the first one", SOON, || states() == [(true, true), (true, false)]);
    passes(&one, &other);
    // One way, with a carrier.
    assembly.set_faults("wire2", "to loss 100%").unwrap();
    wait::until("the way back", SOON, || states() == [(true, false), (true, true)]);
    passes(&one, &other);
    assembly.set_faults("wire2", "").unwrap();
    assembly.remove_device("wire2").unwrap();
    assert_eq!(state(&assembly, "wire1"), (true, false));
    passes(&other, &one);
}
