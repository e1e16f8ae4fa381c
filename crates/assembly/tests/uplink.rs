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
    let own = EthernetSpec {
        switch: "lan".to_owned(),
        interface: interface.to_owned(),
        ..EthernetSpec::default()
    };
    DeviceSpec {
        name: "wire".to_owned(),
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
