//! Links, clients, IOhosts, exported devices and remote stores.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sidecore_assembly::spec::{IdleMode, LinkKind, Nanos, RemoteSpec, StoreKind};
use sidecore_control::Depth;

use crate::{GOOD, parse};

/// Both sides of the remote channel without faults, to add to the good configuration.
const REMOTE: &str = r#"
[[link]]
name = "wire"
type = "packet"
interface = "eth1"
sidecores = ["sc1", "sc0"]
idle = "poll"
frame_size = 1500
[[link]]
name = "down"
type = "memory"
socket = "down.sock"
[[link]]
name = "up"
type = "udp"
listen = "127.0.0.1:0"
[[client]]
name = "vmhost1"
links = ["wire", "down"]
[[client]]
name = "vmhost2"
links = ["wire"]
encryption = "off"
[[device]]
name = "e1"
front_end = "vrio"
client = "vmhost1"
store = "mem"
[[iohost]]
name = "io1"
link = "up"
address = "127.0.0.1:34997"
client = "us"
encryption = "off"
replay_size = "1MiB"
on_disconnect = "fail"
fail_after_s = 5
[[store]]
name = "r1"
type = "remote"
iohost = "io1"
[[store]]
name = "r2"
type = "remote"
iohost = "io1"
device = "theirs"
"#;

fn problems(text: &str) -> String {
    match parse(Path::new("/"), &format!("{GOOD}{text}"), Depth::Text) {
        Ok(config) => panic!("no problem: {config:?}"),
        Err(problems) => problems.to_string(),
    }
}

#[test]
fn remote_devices_have_the_right_values() {
    let config = parse(Path::new("/"), &format!("{GOOD}{REMOTE}"), Depth::Text);
    let spec = config.unwrap_or_else(|problems| panic!("{problems}")).spec;
    let [wire, down, up] = &spec.links[..] else { panic!("{spec:?}") };
    assert_eq!((wire.sidecores.join(","), wire.frame_bytes), ("sc1,sc0".to_owned(), 1500));
    assert_eq!((down.sidecores.join(","), down.frame_bytes), ("sc0".to_owned(), 8100));
    let spin = Nanos::from_micros(50);
    assert_eq!((wire.idle, down.idle), (IdleMode::Poll, IdleMode::Adaptive { spin }));
    let own = format!("{GOOD}{REMOTE}").replace("idle = \"poll\"", "spin_us = 7");
    let own = parse(Path::new("/"), &own, Depth::Text).unwrap();
    let spin = Nanos::from_micros(7);
    assert_eq!(own.spec.links[0].idle, IdleMode::Adaptive { spin });
    assert!(matches!(&up.kind, LinkKind::Udp(udp) if udp.listen.port() == 0));
    let [one, two] = &spec.clients[..] else { panic!("{spec:?}") };
    assert!(one.encrypts(&wire.kind) && !one.encrypts(&down.kind) && !two.encrypts(&wire.kind));
    assert_eq!(spec.devices[1].front_end.client(), Some("vmhost1"));
    assert!(spec.devices[1].sidecores.is_empty());
    let kind = |index: usize| &spec.stores[index].kind;
    assert_eq!(kind(2), &StoreKind::Remote(RemoteSpec::new("io1")));
    let other = RemoteSpec { device: Some("theirs".to_owned()), ..RemoteSpec::new("io1") };
    assert_eq!(kind(3), &StoreKind::Remote(other));
    let iohost = &spec.iohosts[0];
    assert_eq!((iohost.replay_bytes, iohost.fail_after), (1 << 20, Some(Duration::from_secs(5))));
    assert_eq!((two.sessions, two.weight), (1, 1));
    let plan = parse(Path::new("/"), &format!("{GOOD}{REMOTE}"), Depth::Text).unwrap().plan();
    let plan = plan.unwrap().join(", ");
    for action in ["start link \"wire\"", "start client \"vmhost1\"", "start iohost \"io1\""] {
        assert!(plan.contains(action), "{plan}");
    }
}

#[test]
fn each_fault_of_the_remote_channel_is_named() {
    // A part of the good text, what it is replaced by, and the message.
    let faults: &[(&str, &str, &str)] = &[
        ("type = \"packet\"", "type = \"radio\"", "\"radio\" is not one of \"packet\", \"xdp\""),
        ("\"eth1\"", "\"eth 1\"", "is no interface"),
        ("frame_size = 1500", "frame_size = 1000", "from 1452 to 65000"),
        ("frame_size = 1500", "receive_frames = 1000", "write for instance 1024"),
        ("idle = \"poll\"", "idle = \"doze\"", "\"doze\" is not one of \"poll\", \"adaptive\""),
        ("idle = \"poll\"", "idle = \"poll\"\nspin_us = 5", "no meaning with idle"),
        ("idle = \"poll\"", "spin_us = -5", "`spin_us`"),
        ("[\"sc1\", \"sc0\"]", "[\"sc9\"]", "there is no sidecore \"sc9\"; did you mean"),
        ("[\"sc1\", \"sc0\"]", "[\"sc1\", \"sc1\"]", "\"sc1\" is listed twice"),
        ("[\"sc1\", \"sc0\"]", "[]", "`sidecores` is empty"),
        ("\"down.sock\"", "\"vd0.sock\"", "this socket is that of [[link]] \"down\""),
        ("\"127.0.0.1:0\"", "\"localhost\"", "is no IP address with a port"),
        ("name = \"vmhost1\"", "name = \"a-name-of-17bytes\"", "at most 16"),
        ("name = \"vmhost2\"", "name = \"vmhost1\"", "another [[client]] of this name"),
        ("[\"wire\", \"down\"]", "[]", "the client can never come"),
        ("[\"wire\", \"down\"]", "[\"wird\"]", "there is no link \"wird\"; did you mean \"wire\"?"),
        ("links = [\"wire\"]", "links = [\"up\"]", "leads to [[iohost]] \"io1\""),
        ("encryption = \"off\"\n[[device]]", "encryption = 0\n[[device]]", "a string in quotes"),
        ("client = \"vmhost1\"\n", "client = \"vmhost9\"\n", "there is no client \"vmhost9\""),
        ("client = \"vmhost1\"\n", "", "`client` is missing"),
        ("client = \"vmhost1\"\n", "client = \"vmhost1\"\nqueues = 4\n", "`queues` has no meaning"),
        (
            "front_end = \"vrio\"\n",
            "socket = \"e1.sock\"\n",
            "`client` has no meaning with front_end = \"virtio-blk\"",
        ),
        (
            "client = \"vmhost1\"\nstore = \"mem\"",
            "client = \"vmhost1\"\nstore = \"r1\"",
            "itself a device of an IOhost",
        ),
        ("link = \"up\"", "link = \"upp\"", "did you mean \"up\"?"),
        ("link = \"up\"", "link = \"down\"", "leave `address` out"),
        ("link = \"up\"", "link = \"wire\"", "is no Ethernet address"),
        ("address = \"127.0.0.1:34997\"\n", "", "`address` is missing"),
        (
            "address = \"127.0.0.1:34997\"",
            "address = \"127.0.0.1:0\"",
            "is no IP address with a port",
        ),
        ("client = \"us\"", "client = \"a-name-of-17bytes\"", "at most 16"),
        ("client = \"us\"\nencryption = \"off\"", "client = \"us\"", "sidecore remote invite"),
        (
            "client = \"us\"",
            "client = \"us\"\ninvitation = \"i\"",
            "`invitation` has no use with `encryption = \"off\"`",
        ),
        (
            "iohost = \"io1\"\n[[store]]",
            "iohost = \"io2\"\n[[store]]",
            "there is no iohost \"io2\"",
        ),
        ("device = \"theirs\"", "device = \"r1\"", "is that of [[store]] \"r1\" already"),
        ("on_disconnect = \"fail\"\n", "", "`fail_after_s` has no meaning"),
        ("replay_size = \"1MiB\"", "replay_size = 1", "not between 1MiB and 1GiB"),
    ];
    for (good, bad, message) in faults {
        assert_eq!(REMOTE.matches(good).count(), 1, "{good}");
        let said = problems(&REMOTE.replace(good, bad));
        assert!(said.contains(message), "{message}: {said}");
    }
}

#[test]
fn an_iohost_may_be_on_a_second_link() {
    let near = "[[link]]\nname = \"near\"\ntype = \"memory\"\nsocket = \"near.sock\"\n";
    let with = |keys: &str| {
        let address = "address = \"127.0.0.1:34997\"\n";
        let text = REMOTE.replace(address, &format!("{address}{keys}"));
        format!("{near}{text}")
    };
    let good = with("second_link = \"near\"\n");
    let config = parse(Path::new("/"), &format!("{GOOD}{good}"), Depth::Text).unwrap();
    let iohost = &config.spec.iohosts[0];
    assert_eq!(iohost.second, Some(("near".to_owned(), None)));
    assert_eq!(iohost.links().collect::<Vec<_>>(), ["up", "near"]);
    assert!(config.plan().unwrap().join(", ").contains("start iohost \"io1\""));
    let off = "encryption = \"off\"\nreplay_size";
    for (text, message) in [
        (with("second_link = \"neer\"\n"), "did you mean \"near\"?"),
        (with("second_link = \"up\"\n"), "give each IOhost a [[link]]"),
        (with("second_link = \"wire\"\n"), "`second_address` is missing"),
        (with("second_link = \"near\"\nsecond_address = \"a\"\n"), "leave `second_address` out"),
        (with("second_address = \"a\"\n"), "no meaning without a `second_link`"),
        (good.replace("near.sock\"\n", "near.sock\"\nsidecores = [\"sc1\"]\n"), "other sidecores"),
        (good.replace(off, "invitation = \"i\"\nreplay_size"), "`encryption` is missing"),
    ] {
        let said = problems(&text);
        assert!(said.contains(message), "{message}: {said}");
    }
}

#[test]
fn parts_that_take_the_same_thing_are_refused() {
    let second_iohost = "[[iohost]]\nname = \"io2\"\nlink = \"up\"\naddress = \"127.0.0.1:1\"\n\
                         client = \"us\"\nencryption = \"off\"\n";
    let said = problems(&format!("{REMOTE}{second_iohost}"));
    assert!(said.contains("give each IOhost a [[link]]"), "{said}");
    let second_link = "[[link]]\nname = \"l\"\ntype = \"memory\"\nsocket = \"down.sock\"\n";
    let said = problems(&format!("{REMOTE}{second_link}"));
    assert!(said.contains("is that of [[link]] \"down\" already"), "{said}");
    let device = |name: &str| {
        format!("[[device]]\nname = \"{name}\"\nstore = \"r1\"\nsocket = \"{name}.sock\"\n")
    };
    let said = problems(&format!("{REMOTE}{}{}", device("a"), device("b")));
    assert!(said.contains("writes to the remote device of store \"r1\" too"), "{said}");
    let controller = "[[controller]]\nname = \"c\"\nstore = \"r1\"\n";
    let said = problems(&format!("{REMOTE}{controller}"));
    assert!(said.contains("is a device of an IOhost"), "{said}");
}

/// A pattern, after `GOOD` and `REMOTE`.
const SERVE: &str = "[[serve]]\nname = \"db\"\niohost = \"io1\"\npattern = \"db-*\"\nfront_end = \
                     \"nvme\"\nsocket = \"{device}.sock\"\nidle = \"poll\"\n";

#[test]
fn a_pattern_has_the_keys_of_its_devices() {
    let parsed = |serve: &str| {
        parse(Path::new("/"), &format!("{GOOD}{REMOTE}{serve}"), Depth::Text)
            .map_err(|problems| problems.to_string())
    };
    let spec = parsed(SERVE).unwrap().spec.serves.remove(0);
    assert_eq!((spec.name.as_str(), spec.iohost.as_str(), spec.devices_max), ("db", "io1", 64));
    assert_eq!(spec.device.socket, Path::new("/{device}.sock"));
    assert_eq!((spec.device.idle, spec.device.queues), (IdleMode::Poll, 64));
    assert!(spec.fits("db-1") && !spec.fits("web"));
    for (from, to, message) in [
        ("\"io1\"", "\"io9\"", "there is no iohost \"io9\""),
        ("\"{device}.sock\"", "\"x.sock\"", "has no `{device}` in it"),
        ("\"nvme\"", "\"vrio\"", "the IOhost exports its devices"),
        ("idle = \"poll\"", "store = \"s\"", "unknown key `store`"),
        ("idle = \"poll\"", "serial = \"s\"", "`serial` has no meaning here"),
        ("idle = \"poll\"", "devices_max = 0", "from 1 to 256"),
        ("idle = \"poll\"", "sidecores = [\"sc9\"]", "there is no sidecore \"sc9\""),
        ("name = \"db\"\n", "", "`name` is missing"),
    ] {
        assert!(SERVE.contains(from), "{from}");
        let said = parsed(&SERVE.replace(from, to)).unwrap_err();
        assert!(said.contains(message), "{message}: {said}");
    }
    let said = parsed(&format!("{SERVE}{SERVE}")).unwrap_err();
    assert!(said.contains("\"db\""), "{said}");
}

#[test]
fn a_pattern_has_stages_as_a_store_has() {
    let parsed = |stages: &str| {
        parse(Path::new("/"), &format!("{GOOD}{REMOTE}{SERVE}{stages}"), Depth::Text)
            .map_err(|problems| problems.to_string())
    };
    let encrypt = "[[serve.stage]]\ntype = \"encrypt\"\nheader = \"{device}.luks\"\n\
                   key_file = \"/k/{device}.key\"\n";
    let both = format!("{encrypt}[[serve.stage]]\ntype = \"delay\"\ndelay_us = 5\n");
    let stages = parsed(&both).unwrap().spec.serves.remove(0).stages;
    let words: Vec<&str> = stages.iter().map(|(word, _)| *word).collect();
    assert_eq!(words, ["encrypt", "delay"]);
    assert_eq!(stages[0].1.get("header"), Some(PathBuf::from("/{device}.luks")));
    for (from, to, message) in [
        ("delay_us = 5", "", "[[serve.stage]] of [[serve]] \"db\": `delay_us` is missing"),
        ("delay_us", "delays_us", "did you mean `delay_us`?"),
        ("\"delay\"", "\"tape\"", "type = \"tape\" is not one of \"delay\""),
    ] {
        assert!(both.contains(from), "{from}");
        let said = parsed(&both.replace(from, to)).unwrap_err();
        assert!(said.contains(message), "{message}: {said}");
    }
    let said = parsed(&encrypt.replace("[[serve.stage]]", "[serve.stage]")).unwrap_err();
    assert!(said.contains("write [[serve.stage]]"), "{said}");
}
