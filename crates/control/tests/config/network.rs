//! Switches, and the NICs on them.

use std::path::Path;

use sidecore_assembly::spec::{FrontEndSpec, IdleMode, Nanos, Spec};
use sidecore_control::{Config, Depth};

const TEXT: &str = r#"
[[sidecore]]
name = "sc0"
spin_us = 7
[[switch]]
name = "lan"
[[device]]
name = "one"
front_end = "virtio-net"
switch = "lan"
mac = "52:54:00:00:00:01"
socket = "/run/one.sock"
[[device]]
name = "two"
front_end = "virtio-net"
switch = "lan"
mac = "52:54:00:00:00:02"
socket = "/run/two.sock"
vlan = 5
trunk = [[10, 12]]
ipv4 = ["10.0.0.2"]
ipv6 = ["2001:db8::2", "2001:db8:1::/64"]
queues = 4
rules = ["ct state established,related accept", "to drop"]
[[device]]
name = "host"
front_end = "tap"
switch = "lan"
interface = "tap0"
trunk = [[10, 10]]
[[device]]
name = "wire"
front_end = "ethernet"
switch = "lan"
interface = "eth1"
team = "wan"
probe = "10.0.0.1"
"#;

fn parsed(text: &str) -> Result<Spec, String> {
    let config = Config::parse(Path::new("/disks.toml"), text, Depth::Text);
    config.map(|config| config.spec).map_err(|problems| problems.to_string())
}

#[test]
fn a_nic_is_on_a_switch_whose_sidecore_serves_it() {
    let spec = parsed(TEXT).unwrap();
    let switch = &spec.switches[0];
    assert_eq!((switch.sidecore.as_str(), switch.stations), ("sc0", 8192));
    assert_eq!(switch.idle, IdleMode::Adaptive { spin: Nanos::from_micros(7) });
    let [one, two] = [&spec.devices[0], &spec.devices[1]];
    assert_eq!((one.queues, two.queues, one.sidecores.len()), (16, 4, 0));
    let FrontEndSpec::VirtioNet(own) = &two.front_end else { panic!("{two:?}") };
    assert_eq!(own.mac().0, [0x52, 0x54, 0, 0, 0, 2]);
    assert_eq!(own.trunk().unwrap().collect::<Vec<_>>(), [10, 11, 12]);
    assert_eq!((own.rules.len(), own.connections), (2, 16_384));
    assert_eq!(own.ipv4().unwrap(), [std::net::Ipv4Addr::new(10, 0, 0, 2)]);
    let ipv6 = [("2001:db8::2", 128), ("2001:db8:1::", 64)];
    assert_eq!(own.ipv6().unwrap(), ipv6.map(|(address, bits)| (address.parse().unwrap(), bits)));
    let FrontEndSpec::Tap(own) = &spec.devices[2].front_end else { panic!("{spec:?}") };
    assert_eq!((own.interface.as_str(), own.is_uplink, own.mtu), ("tap0", true, None));
    assert!(own.rules.is_empty());
    assert_eq!(own.trunk().unwrap().collect::<Vec<_>>(), [10]);
    assert_eq!(spec.devices[2].queues, 1);
    let FrontEndSpec::Ethernet(own) = &spec.devices[3].front_end else { panic!("{spec:?}") };
    assert_eq!((own.interface.as_str(), own.is_uplink, own.vlan), ("eth1", true, 1));
    assert_eq!((own.team.as_deref(), own.probe.as_deref()), (Some("wan"), Some("10.0.0.1")));
}

#[test]
fn each_fault_of_a_switch_or_a_nic_is_named() {
    for (good, bad, message) in [
        ("switch = \"lan\"\n", "", "`switch` is missing"),
        ("switch = \"lan\"\n", "switch = \"lam\"\n", "did you mean \"lan\"?"),
        ("mac = \"52:54:00:00:00:01\"\n", "", "`mac` is missing"),
        ("00:00:00:01\"", "00:00:00:02\"", "this address is that of"),
        ("\"52:54:00:00:00:01\"", "\"53:54:00:00:00:01\"", "is not the address of a NIC"),
        ("vlan = 5\n", "vlan = 4095\n", "from 1 to 4094"),
        ("[[10, 12]]", "[[4000, 4095]]", "no range of VLANs"),
        ("\"10.0.0.2\"", "\"10.0.0\"", "no IPv4 address"),
        ("\"10.0.0.1\"", "\"router\"", "\"router\" in `probe` is no IPv4 address"),
        ("\"wan\"", "\"\"", "`team` is no name"),
        ("2001:db8::2", "2001:db8::2/129", "no IPv6 address or network"),
        ("1::/64", "1::/x", "no IPv6 address or network"),
        ("queues = 4\n", "queues = 17\n", "at most 16 pairs"),
        (
            "\"to drop\"",
            "\"to drop it\"",
            "`rules`: rule 2, \"to drop it\": `it` behind the verdict",
        ),
        ("queues = 4\n", "connections = 63\n", "from 64 to 1048576"),
        ("queues = 4\n", "limits = [\"to 1MB/s\"]\n", "`limits`: \"to 1MB/s\": `1MB` has a unit"),
        ("queues = 4\n", "faults = \"loss 1\"\n", "`faults`: `1` is no share behind `loss`"),
        ("vlan = 5\n", "mtu = 67\n", "from 68 to 9216"),
        ("vlan = 5\n", "store = \"x\"\n", "`store` has no meaning"),
        ("vlan = 5\n", "sidecore = \"sc0\"\n", "`sidecore` has no meaning"),
        ("\"tap0\"", "\"a/b\"", "is no name of an interface"),
        ("\"tap0\"", "\"sixteen-byte-name\"", "is no name of an interface"),
        ("interface = \"tap0\"\n", "", "`interface` is missing"),
        ("interface =", "socket = \"/run/tap.sock\"\ninterface =", "`socket` has no meaning"),
        ("interface =", "queues = 2\ninterface =", "`queues` has no meaning"),
        ("interface =", "idle = \"poll\"\ninterface =", "`idle` has no meaning"),
        ("interface =", "mac = \"52:54:00:00:00:03\"\ninterface =", "`mac`"),
        (
            "[[device]]\nname = \"host\"",
            "[[device]]\nname = \"other\"\nfront_end = \"tap\"\nswitch = \"lan\"\n\
             interface = \"tap0\"\n[[device]]\nname = \"host\"",
            "this interface is that of",
        ),
        ("name = \"lan\"\n", "name = \"lan\"\nsidecore = \"sc1\"\n", "no sidecore \"sc1\""),
        ("name = \"lan\"\n", "name = \"lan\"\nage_s = 0\n", "from 1 to 1000000"),
    ] {
        assert!(TEXT.contains(good), "{good}");
        let problems = parsed(&TEXT.replacen(good, bad, 1)).unwrap_err();
        assert!(problems.contains(message), "{message}: {problems}");
    }
    let without_store = TEXT.replacen("front_end = \"virtio-net\"\n", "", 1);
    assert!(parsed(&without_store).unwrap_err().contains("`store` is missing"));
}

/// An IOhost with a NIC of its client's, and the client.
const FAR: &str = r#"
[[sidecore]]
name = "sc0"
[[switch]]
name = "lan"
[[link]]
name = "wire"
type = "memory"
socket = "/run/wire.sock"
[[link]]
name = "up"
type = "memory"
socket = "/run/up.sock"
[[client]]
name = "vmhost1"
links = ["wire"]
[[iohost]]
name = "io1"
link = "up"
client = "me"
[[device]]
name = "guest"
front_end = "vrio-net"
client = "vmhost1"
switch = "lan"
mac = "52:54:00:00:00:01"
vlan = 5
[[device]]
name = "far"
front_end = "remote-net"
iohost = "io1"
switch = "lan"
mtu = 9000
"#;

#[test]
fn a_remote_nic_is_a_port_at_both_ends() {
    let spec = parsed(FAR).unwrap();
    let FrontEndSpec::VrioNet(own) = &spec.devices[0].front_end else { panic!("{spec:?}") };
    assert_eq!((own.client.as_str(), own.vlan, own.mtu), ("vmhost1", 5, 1500));
    let FrontEndSpec::RemoteNet(own) = &spec.devices[1].front_end else { panic!("{spec:?}") };
    assert_eq!((own.iohost.as_str(), own.device.as_deref(), own.mtu), ("io1", None, 9000));
    assert!(own.is_uplink);
    for (from, to, message) in [
        ("client = \"vmhost1\"\nswitch", "client = \"vmhost9\"\nswitch", "vmhost9"),
        ("iohost = \"io1\"", "iohost = \"io9\"", "io9"),
        ("iohost = \"io1\"\n", "", "iohost"),
        ("mtu = 9000", "socket = \"/run/far.sock\"", "the remote channel leads"),
        ("vlan = 5", "store = \"s\"", "a port has no store"),
        ("mtu = 9000", "device = \"\"", "1 to 64"),
    ] {
        assert!(FAR.contains(from), "{from}");
        let error = parsed(&FAR.replace(from, to)).unwrap_err();
        assert!(error.contains(message), "{to}: {error}");
    }
    let twice = format!(
        "{FAR}[[device]]\nname = \"again\"\nfront_end = \"remote-net\"\n\
                         iohost = \"io1\"\ndevice = \"far\"\nswitch = \"lan\"\n"
    );
    assert!(parsed(&twice).unwrap_err().contains("give each its own"));
    let same = format!(
        "{FAR}[[device]]\nname = \"near\"\nfront_end = \"virtio-net\"\n\
                        switch = \"lan\"\nmac = \"52:54:00:00:00:01\"\nsocket = \"/run/n.sock\"\n"
    );
    assert!(parsed(&same).unwrap_err().contains("this address is that of"));
}
