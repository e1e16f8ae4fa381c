//! NICs on a switch of a daemon: frames between drivers, addresses that are not theirs, VLANs, and
//! hostile rings.

mod common;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::Daemon;
use sidecore_control::report::{DeviceState, DropReport, DropWay, PortCounts, PortReport};
use sidecore_control::{CaptureQuery, NewDevice, TraceQuery};
use sidecore_driver::{NetClient, NetClientOptions, NetQueues, PacketHeader};
use sidecore_kit::wait;

const SOON: Duration = Duration::from_secs(20);
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

fn mac(station: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, station]
}

/// Four NICs in one VLAN, the last of them with a firewall, and one in another VLAN.
fn config() -> String {
    let mut text = "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"sc0\"\n\
                    [[switch]]\nname = \"lan\"\n"
        .to_owned();
    let rules = "rules = [\"ct state established accept\", \"from accept\", \"to drop\"]\n";
    for (station, more) in [(1, ""), (2, ""), (3, "mtu = 9000\n"), (4, "vlan = 10\n"), (6, rules)] {
        text += &format!(
            "[[device]]\nname = \"nic{station}\"\nfront_end = \"virtio-net\"\nswitch = \"lan\"\n\
             socket = \"nic{station}.sock\"\nmac = \"52:54:00:00:00:0{station}\"\npacked = true\n\
             queues = 8\n{more}"
        );
    }
    text
}

struct Rig {
    daemon: Daemon,
}

impl Rig {
    fn new() -> Self {
        Self { daemon: Daemon::start(tempfile::tempdir().unwrap(), &config()) }
    }

    fn connect(&self, station: u8, options: &NetClientOptions) -> NetClient {
        let path = self.daemon.directory.path().join(format!("nic{station}.sock"));
        NetClient::connect(path, options).unwrap()
    }

    fn port(&self, station: u8) -> PortReport {
        let name = format!("nic{station}");
        let mut switches = self.daemon.client().switches().unwrap();
        let mut ports = switches.swap_remove(0).ports.into_iter();
        ports.find(|port| port.name == name).unwrap()
    }

    fn counts(&self, station: u8) -> PortCounts {
        self.port(station).counters
    }
}

/// A frame whose payload says who sent it and which one it is, and can be checked.
fn frame(to: [u8; 6], from: [u8; 6], number: u32, len_bytes: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from, &ETHERTYPE, &number.to_be_bytes()].concat();
    let head = frame.len();
    frame.extend(
        (head..len_bytes).map(|at| (at as u32).wrapping_mul(31).wrapping_add(number) as u8),
    );
    frame
}

fn send(queues: &mut NetQueues, frame: &[u8]) {
    wait::until("there is a free slot", SOON, || {
        queues.publish().unwrap();
        queues.send(&PacketHeader::default(), frame).unwrap()
    });
    queues.publish().unwrap();
}

/// The next frame that a NIC gets.
fn receive(queues: &mut NetQueues) -> Vec<u8> {
    let (mut frame, end) = (Vec::new(), Instant::now() + SOON);
    while queues.receive(&mut frame).unwrap().is_none() {
        queues.wait(SOON).unwrap();
        assert!(Instant::now() < end, "no frame came");
    }
    queues.publish().unwrap();
    frame
}

#[test]
fn frames_arrive_whole_and_in_order_with_every_kind_of_ring() {
    for packed in [false, true] {
        for indirect in [false, true] {
            let rig = Rig::new();
            let options = NetClientOptions { packed, indirect, ..NetClientOptions::default() };
            let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
            let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
            for number in 0..500 {
                let len_bytes = 60 + (number as usize * 37) % 1455;
                let sent = frame(mac(2), mac(1), number, len_bytes);
                send(one, &sent);
                assert_eq!(receive(two), sent, "frame {number}, packed {packed}");
            }
            assert_eq!(rig.counts(1).in_frames, 500);
            assert_eq!((rig.counts(2).out_frames, rig.counts(2).out_discards()), (500, 0));
        }
    }
}

/// 9000 bytes in buffers of 2048: all of them show at once, or none.
#[test]
fn a_frame_that_is_larger_than_a_buffer_is_in_several() {
    for packed in [false, true] {
        let rig = Rig::new();
        let small = NetClientOptions { packed, ..NetClientOptions::default() };
        let large = NetClientOptions { buffer_bytes: 16 << 10, ..small.clone() };
        // NIC 3 has an MTU of 9000, NIC 1 one of 1500.
        let (mut three, mut one) = (rig.connect(3, &large), rig.connect(1, &small));
        let (three, one) = (three.pair(0).unwrap(), one.pair(0).unwrap());
        send(three, &frame(mac(1), mac(3), 1, 9014));
        wait::until("the MTU is counted", SOON, || rig.counts(1).dropped_mtu == 1);
        send(three, &frame(mac(1), mac(3), 2, 1514));
        assert_eq!(receive(one), frame(mac(1), mac(3), 2, 1514));
        send(one, &frame(mac(3), mac(1), 3, 1514));
        assert_eq!(receive(three), frame(mac(3), mac(1), 3, 1514));
    }
}

#[test]
fn another_vlan_and_a_borrowed_address_are_dropped_with_a_reason() {
    let rig = Rig::new();
    let options = NetClientOptions::default();
    let mut clients = [1, 2, 4].map(|station| rig.connect(station, &options));
    let [one, two, four] = clients.each_mut().map(|client| client.pair(0).unwrap());
    send(one, &frame(mac(2), mac(2), 1, 64));
    wait::until("the spoofed frame is counted", SOON, || rig.counts(1).dropped_spoofed_mac == 1);
    // In this VLAN the address of NIC 4 is one that the switch does not know.
    send(one, &frame(mac(4), mac(1), 2, 64));
    assert_eq!(receive(two)[14..18], 2_u32.to_be_bytes(), "to all ports, and nothing before it");
    send(one, &frame([0xff; 6], mac(1), 3, 64));
    assert_eq!(receive(two)[14..18], 3_u32.to_be_bytes(), "the broadcast");
    send(four, &frame([0xff; 6], mac(4), 4, 64));
    send(one, &frame(mac(2), mac(1), 5, 64));
    assert_eq!(receive(two)[14..18], 5_u32.to_be_bytes(), "nothing of the other VLAN");
    assert_eq!(rig.counts(4).out_frames, 0);
}

/// Runts, giants and lying headers cost their sender the frame; the port lives on.
#[test]
fn hostile_frames_are_dropped_and_counted_and_the_next_one_arrives() {
    let rig = Rig::new();
    let options = NetClientOptions { buffer_bytes: 4096, ..NetClientOptions::default() };
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
    let good = frame(mac(2), mac(1), 9, 64);
    for bytes in [&[1][..], &[0; 12], &[0; 20]] {
        assert!(one.send_bytes(bytes).unwrap());
    }
    assert!(one.send(&PacketHeader::default(), &frame(mac(2), mac(1), 1, 3000)).unwrap());
    let lies = [
        PacketHeader { gso_type: 1, ..PacketHeader::default() },
        PacketHeader { gso_type: 0x7f, gso_size: 100, ..PacketHeader::default() },
        PacketHeader { flags: 1, csum_start: 0xfff0, ..PacketHeader::default() },
        PacketHeader { flags: 1, csum_start: 60, csum_offset: 60, ..PacketHeader::default() },
    ];
    for lie in lies {
        assert!(one.send(&lie, &good).unwrap());
    }
    send(one, &good);
    assert_eq!(receive(two), good);
    let counts = rig.counts(1);
    assert_eq!(counts.dropped_runt, 3);
    assert_eq!((counts.dropped_too_long, counts.dropped_bad_offload), (1, 4));
    assert_eq!(rig.counts(2).out_frames, 1);
    assert!(!one.is_broken());
}

/// vhost-user, "Ring states": a disabled ring is processed without side effects.
#[test]
fn a_disabled_ring_is_drained_and_an_enabled_one_works_again() {
    let rig = Rig::new();
    let options = NetClientOptions::default();
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    one.enable_ring(1, false).unwrap();
    send(one.pair(0).unwrap(), &frame(mac(2), mac(1), 1, 64));
    wait::until("the frame comes back", SOON, || {
        let _ = one.pair(0).unwrap().reclaim().unwrap();
        one.pair(0).unwrap().in_flight() == 0
    });
    one.enable_ring(1, true).unwrap();
    send(one.pair(0).unwrap(), &frame(mac(2), mac(1), 2, 64));
    assert_eq!(receive(two.pair(0).unwrap())[14..18], 2_u32.to_be_bytes());
    assert_eq!(rig.counts(1).dropped_disabled, 1);
    let base = one.stop_ring(1).unwrap();
    one.start_ring(1, base).unwrap();
    send(one.pair(0).unwrap(), &frame(mac(2), mac(1), 3, 64));
    assert_eq!(receive(two.pair(0).unwrap())[14..18], 3_u32.to_be_bytes(), "where it stood");
    one.set_mtu(1000).unwrap();
    assert!(one.set_mtu(1501).is_err(), "more than the configuration allows");
    one.announce(mac(1)).unwrap();
    assert_eq!(receive(two.pair(0).unwrap())[6..12], mac(1), "a RARP of NIC 1");
}

#[test]
fn eight_pairs_of_queues_carry_frames() {
    let rig = Rig::new();
    let options = NetClientOptions { pairs: 8, slots: 16, ..NetClientOptions::default() };
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let mut seen = 0_u32;
    for pair in 0..8 {
        send(one.pair(pair).unwrap(), &frame(mac(2), mac(1), u32::from(pair), 64));
    }
    wait::until("all frames have come", SOON, || {
        for pair in 0..8 {
            let (queues, mut frame) = (two.pair(pair).unwrap(), Vec::new());
            while queues.receive(&mut frame).unwrap().is_some() {
                seen |= 1 << frame[17];
            }
        }
        seen == 0xff
    });
}

/// A datagram of UDP from one station's port to another's, with its number.
fn datagram(to: (u8, u16), from: (u8, u16), number: u32) -> Vec<u8> {
    let address = |station: u8| [10, 0, 0, station];
    let ip = [0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0];
    let [to_port, from_port] = [to.1, from.1].map(u16::to_be_bytes);
    [
        &mac(to.0)[..],
        &mac(from.0),
        &[8, 0],
        &ip,
        &address(from.0),
        &address(to.0),
        &from_port,
        &to_port,
        &[0, 12, 0, 0],
        &number.to_be_bytes(),
    ]
    .concat()
}

/// The rules of NIC 6 let answers in, and are replaced while frames pass.
#[test]
fn rules_decide_are_replaced_at_once_and_keep_connections() {
    let rig = Rig::new();
    let control = rig.daemon.client();
    let options = NetClientOptions::default();
    let (mut one, mut six) = (rig.connect(1, &options), rig.connect(6, &options));
    let (one, six) = (one.pair(0).unwrap(), six.pair(0).unwrap());
    send(one, &datagram((6, 53), (1, 9), 1));
    wait::until("a stranger is dropped", SOON, || rig.counts(6).dropped_rule_out == 1);
    send(six, &datagram((1, 9), (6, 53), 2));
    assert_eq!(receive(one), datagram((1, 9), (6, 53), 2));
    send(one, &datagram((6, 53), (1, 9), 3));
    assert_eq!(receive(six), datagram((6, 53), (1, 9), 3), "the answer");

    let texts = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>();
    let wrong = control.set_rules("nic6", texts(&["to drop", "to tcp dport 0x16 accept"]));
    assert!(wrong.unwrap_err().to_string().contains("rule 2, \"to tcp dport 0x16 accept\""));
    let unknown = control.set_rules("nic7", texts(&["to drop"])).unwrap_err().to_string();
    assert!(unknown.contains("there is no port \"nic7\""), "{unknown}");
    let before = control.rules("nic6").unwrap();
    let frames: Vec<u64> = before.rules.iter().map(|rule| rule.counters.frames).collect();
    assert_eq!((frames, before.unmatched.frames), (vec![1, 1, 1], 0));
    assert_eq!((before.table.opened, before.table.evicted), (1, 0));

    control
        .set_rules(
            "nic6",
            texts(&["ct  state established accept", "to udp dport 7 accept", "drop"]),
        )
        .unwrap();
    send(one, &datagram((6, 53), (1, 9), 4));
    assert_eq!(receive(six), datagram((6, 53), (1, 9), 4), "the connection is known");
    send(one, &datagram((6, 7), (1, 9), 5));
    assert_eq!(receive(six), datagram((6, 7), (1, 9), 5), "a new rule");
    send(six, &datagram((1, 9), (6, 54), 6));
    wait::until("nothing else goes out", SOON, || rig.counts(6).dropped_rule == 1);
    let metrics = control.metrics(false).unwrap();
    for line in [
        "rule_frames_total{switch=\"lan\",port=\"nic6\",rule=\"1\",text=\"ct state established \
         accept\"} 1",
        "rule_frames_total{switch=\"lan\",port=\"nic6\",rule=\"none\",text=\"\"} 0",
        "connections_opened_total{switch=\"lan\",port=\"nic6\"} 1",
    ] {
        assert!(metrics.contains(&format!("sidecore_firewall_{line}\n")), "{line}: {metrics}");
    }
    control.set_rules("nic6", Vec::new()).unwrap();
    send(six, &datagram((1, 9), (6, 54), 7));
    assert_eq!(receive(one), datagram((1, 9), (6, 54), 7), "no rules, no firewall");
    assert!(control.rules("nic6").unwrap().rules.is_empty());
}

/// A limit is set while frames pass, and taken away.
#[test]
fn a_limit_drops_what_is_above_it() {
    let rig = Rig::new();
    let control = rig.daemon.client();
    let options = NetClientOptions::default();
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
    let limits = |text: &str| vec![text.to_owned()];
    let wrong = control.set_limits("nic1", limits("from 5 bits/s")).unwrap_err().to_string();
    assert!(wrong.contains("\"from 5 bits/s\""), "{wrong}");
    // A frame in the time of the test and more.
    control.set_limits("nic1", limits("from 1B/s burst 64B")).unwrap();
    for number in 0..3 {
        send(one, &frame(mac(2), mac(1), number, 640));
    }
    assert_eq!(receive(two), frame(mac(2), mac(1), 0, 640), "one passes a full bucket");
    wait::until("the others are counted", SOON, || rig.counts(1).dropped_limit == 2);
    let switches = control.switches().unwrap();
    let port = switches[0].ports.iter().find(|port| port.name == "nic1").unwrap();
    assert_eq!(port.limits, ["from 1B/s burst 64B"]);
    control.set_limits("nic1", Vec::new()).unwrap();
    send(one, &frame(mac(2), mac(1), 9, 640));
    assert_eq!(receive(two), frame(mac(2), mac(1), 9, 640));
}

/// The wire of a NIC is made a bad one, and a good one again.
#[test]
fn a_wire_loses_and_delays_frames_while_it_is_a_bad_one() {
    let rig = Rig::new();
    let control = rig.daemon.client();
    let options = NetClientOptions::default();
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
    let unknown = control.set_faults("nic2", "lose 1%").unwrap_err().to_string();
    assert!(unknown.contains("`lose` is no fault of a wire"), "{unknown}");
    control.set_faults("nic2", "to loss 100%").unwrap();
    send(one, &frame(mac(2), mac(1), 1, 64));
    wait::until("the loss is counted", SOON, || rig.counts(2).dropped_lost_out == 1);
    control.set_faults("nic2", "delay 20ms").unwrap();
    let start = Instant::now();
    send(one, &frame(mac(2), mac(1), 2, 1514));
    assert_eq!(receive(two), frame(mac(2), mac(1), 2, 1514));
    assert!(start.elapsed() >= Duration::from_millis(20), "{:?}", start.elapsed());
    send(two, &frame(mac(1), mac(2), 3, 64));
    assert_eq!(receive(one), frame(mac(1), mac(2), 3, 64));
    control.set_faults("nic2", "").unwrap();
    let port =
        control.switches().unwrap()[0].ports.iter().find(|port| port.name == "nic2").cloned();
    assert_eq!(port.unwrap().wire, None);
}

fn wait_for_capture(rig: &Rig, station: u8, is_on: bool) {
    wait::until("the capture begins or ends", SOON, || {
        rig.port(station).capture.is_some() == is_on
    });
}

/// Real Wireshark reads the frames of both ways, and why they were dropped.
#[test]
fn a_capture_is_a_file_that_tshark_reads() {
    let rig = Rig::new();
    let options = NetClientOptions::default();
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
    let file = rig.daemon.directory.path().join("nic2.pcapng");
    let capture = {
        let (control, file) = (rig.daemon.client(), file.clone());
        let query = CaptureQuery { snaplen: 100, count: Some(4), seconds: None };
        std::thread::spawn(move || control.capture("nic2", &query, || File::create(file)))
    };
    wait_for_capture(&rig, 2, true);
    let (control, usual) = (rig.daemon.client(), CaptureQuery::default());
    let refused = |port: &str, query: &CaptureQuery| {
        let refused = control.capture(port, query, || -> std::io::Result<File> { unreachable!() });
        refused.unwrap_err().to_string()
    };
    assert!(refused("nic2", &usual).contains("has a capture already"));
    assert!(refused("nic9", &usual).contains("there is no port \"nic9\""));
    let nothing = CaptureQuery { snaplen: 0, ..usual };
    assert!(refused("nic1", &nothing).contains("`snaplen` is 0"));

    send(one, &frame(mac(2), mac(1), 1, 64));
    assert_eq!(receive(two), frame(mac(2), mac(1), 1, 64));
    send(two, &frame(mac(1), mac(2), 2, 1514));
    assert_eq!(receive(one), frame(mac(1), mac(2), 2, 1514));
    send(two, &frame(mac(1), mac(9), 3, 64));
    wait::until("the spoofed frame is counted", SOON, || rig.counts(2).dropped_spoofed_mac == 1);
    control.set_rules("nic2", vec!["to ether type 0x88b5 drop".to_owned()]).unwrap();
    send(one, &frame(mac(2), mac(1), 4, 70));
    capture.join().unwrap().unwrap();
    wait_for_capture(&rig, 2, false);

    let fields = ["frame.interface_name", "frame.packet_flags_direction", "frame.len"];
    let more = ["frame.cap_len", "eth.src", "data.data", "frame.comment"];
    let mut arguments = vec!["-r", file.to_str().unwrap(), "-T", "fields", "-E", "separator=|"];
    fields.iter().chain(&more).for_each(|field| arguments.extend(["-e", field]));
    let shown = sidecore_skip::run("tshark", &arguments).unwrap();
    let expected = [
        (2, 64, 64, 1, 1, ""),
        (1, 1514, 100, 2, 2, ""),
        (1, 64, 64, 9, 3, "dropped: spoofed_mac"),
        (2, 70, 70, 1, 4, "dropped: rule_out, rule 1"),
    ];
    let expected = expected.map(|(way, len, kept, from, number, comment)| {
        let bytes = frame(mac(3 - from.min(2)), mac(from), number, len);
        let payload: String = bytes[14..kept].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("nic2|0x0000000{way}|{len}|{kept}|52:54:00:00:00:0{from}|{payload}|{comment}")
    });
    assert_eq!(shown.lines().collect::<Vec<_>>(), expected);
}

/// A client that begins a capture and reads nothing of it.
#[test]
fn a_capture_without_a_reader_delays_no_frame_and_ends_with_its_client() {
    let rig = Rig::new();
    let options = NetClientOptions::default();
    let (mut one, mut two) = (rig.connect(1, &options), rig.connect(2, &options));
    let (one, two) = (one.pair(0).unwrap(), two.pair(0).unwrap());
    let mut client = UnixStream::connect(rig.daemon.directory.path().join("control.sock")).unwrap();
    client.write_all(b"GET /v1/ports/nic2/capture HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    wait_for_capture(&rig, 2, true);
    // More than the ring, the answer's parts and the socket's buffers have room for.
    for number in 0..6_000 {
        send(one, &frame(mac(2), mac(1), number, 1514));
        assert_eq!(receive(two)[14..18], number.to_be_bytes());
    }
    let counters = rig.port(2).capture.unwrap().counters;
    assert_eq!(counters.captured + counters.lost, 6_000);
    assert!(counters.lost > 0, "{counters:?}");
    assert_eq!(rig.counts(2).out_discards(), 0);
    drop(client);
    wait_for_capture(&rig, 2, false);

    // A client of a quiet port goes; the time of one that reads nothing is over; the port goes.
    let again = |query: &str| {
        let path = rig.daemon.directory.path().join("control.sock");
        let mut client = UnixStream::connect(path).unwrap();
        let request = format!("GET /v1/ports/nic2/capture{query} HTTP/1.1\r\nHost: x\r\n\r\n");
        client.write_all(request.as_bytes()).unwrap();
        let mut begun = [0; 12];
        client.read_exact(&mut begun).unwrap();
        assert_eq!(&begun, b"HTTP/1.1 200");
        client
    };
    drop(again(""));
    wait_for_capture(&rig, 2, false);
    let silent = again("?seconds=1");
    wait_for_capture(&rig, 2, false);
    drop(silent);
    let mut silent = again("");
    rig.daemon.client().remove_device("nic2").unwrap();
    // The end of the answer's last part.
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while !answer.ends_with(b"\r\n0\r\n\r\n") {
        let count = silent.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "the answer is cut off");
        answer.extend_from_slice(&buffer[..count]);
    }
}

/// Begins a trace of a port or of the switch, which ends after so many frames.
fn trace(rig: &Rig, part: &'static str, count: u64) -> JoinHandle<Vec<DropReport>> {
    let (control, (sender, begun)) = (rig.daemon.client(), mpsc::channel());
    let tracing = std::thread::spawn(move || {
        let (mut lines, query) = (Vec::new(), TraceQuery { count: Some(count), seconds: None });
        let file = &mut lines;
        let open = move || {
            sender.send(()).unwrap();
            Ok(file)
        };
        match part {
            "lan" => control.trace_switch(part, &query, open).unwrap(),
            port => control.trace_port(port, &query, open).unwrap(),
        }
        let lines = String::from_utf8(lines).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    });
    begun.recv_timeout(SOON).unwrap();
    tracing
}

/// Four kinds of drops: by a rule, before a guest, by a limit, and for the receiver's MTU.
#[test]
fn a_trace_has_the_flow_the_reason_and_the_rule_of_each_drop() {
    let rig = Rig::new();
    let options = NetClientOptions::default();
    let large = NetClientOptions { buffer_bytes: 16 << 10, ..options.clone() };
    let nics = [(1, &options), (2, &options), (3, &large), (6, &options)];
    let mut nics = nics.map(|(station, options)| rig.connect(station, options));
    let [one, two, three, _six] = nics.each_mut().map(|nic| nic.pair(0).unwrap());
    let only = vec!["from 1B/s burst 64B".to_owned()];
    rig.daemon.client().set_limits("nic2", only).unwrap();
    let (of_lan, of_six) = (trace(&rig, "lan", 6), trace(&rig, "nic6", 3));
    let unknown =
        rig.daemon.client().trace_port("nic9", &TraceQuery::default(), || Ok(std::io::sink()));
    assert!(unknown.unwrap_err().to_string().contains("there is no port \"nic9\""));
    let unknown =
        rig.daemon.client().trace_switch("wan", &TraceQuery::default(), || Ok(std::io::sink()));
    assert!(unknown.unwrap_err().to_string().contains("there is no switch \"wan\""));

    for number in 0..3 {
        send(one, &datagram((6, 53), (1, 9), number));
    }
    send(two, &frame(mac(1), mac(9), 1, 64));
    send(three, &frame(mac(1), mac(3), 2, 9014));
    send(two, &frame(mac(1), mac(2), 3, 64));
    assert_eq!(receive(one), frame(mac(1), mac(2), 3, 64));
    send(two, &frame(mac(1), mac(2), 4, 64));

    // Frames of a flow are in one line, or in two if a second ends between them.
    let sums = |reports: Vec<DropReport>| {
        let mut sums: Vec<DropReport> = Vec::new();
        for report in reports {
            assert!(report.first_ns <= report.last_ns && report.last_ns > 1 << 60, "{report:?}");
            let known = sums.iter_mut().find(|known| known.reason == report.reason);
            match known {
                Some(known) => {
                    known.frames += report.frames;
                    known.bytes += report.bytes;
                }
                None => sums.push(report),
            }
        }
        sums
    };
    let of_six = sums(of_six.join().unwrap());
    let mut of_lan = sums(of_lan.join().unwrap());
    of_lan.sort_by(|one, other| one.reason.cmp(&other.reason));
    let [limit, mtu, rule, spoofed] = &of_lan[..] else { panic!("{of_lan:#?}") };
    let facts = |report: &DropReport| {
        let sender = report.sender.clone().unwrap();
        (report.reason.clone(), sender, report.port.clone(), report.frames, report.bytes)
    };
    let expected = |reason: &str, sender: &str, port: &str, frames, bytes| {
        (reason.to_owned(), sender.to_owned(), port.to_owned(), frames, bytes)
    };
    assert_eq!(facts(limit), expected("limit", "nic2", "nic2", 1, 64));
    assert_eq!(facts(mtu), expected("mtu", "nic3", "nic1", 1, 9014));
    assert_eq!(facts(rule), expected("rule_out", "nic1", "nic6", 3, 3 * 46));
    assert_eq!(facts(spoofed), expected("spoofed_mac", "nic2", "nic2", 1, 64));
    assert_eq!((rule.way, spoofed.way, mtu.vlan), (DropWay::To, DropWay::From, Some(1)));
    assert_eq!((rule.rule, rule.rule_text.as_deref()), (Some(3), Some("to drop")));
    assert_eq!((spoofed.rule, mtu.rule), (None, None));
    let flow = rule.flow.as_ref().unwrap();
    let ends = (flow.source.as_deref(), flow.source_port, flow.target.as_deref(), flow.target_port);
    assert_eq!(ends, (Some("10.0.0.1"), Some(9), Some("10.0.0.6"), Some(53)));
    assert_eq!((flow.protocol, flow.ether_type), (Some(17), 0x800));
    let flow = spoofed.flow.as_ref().unwrap();
    assert_eq!((flow.source_mac.as_str(), flow.ether_type), ("52:54:00:00:00:09", 0x88b5));
    assert_eq!(of_six.iter().map(facts).collect::<Vec<_>>(), [facts(rule)]);
}

/// A client that begins a trace and goes, and the port of another one that goes.
#[test]
fn a_trace_ends_with_its_client_and_with_its_port() {
    let rig = Rig::new();
    let path = rig.daemon.directory.path().join("control.sock");
    let begin = || {
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"GET /v1/ports/nic2/trace HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut begun = [0; 12];
        client.read_exact(&mut begun).unwrap();
        (client, begun)
    };
    let clients: Vec<_> = (0..8).map(|_| begin()).collect();
    assert!(clients.iter().all(|(_, begun)| begun == b"HTTP/1.1 200"));
    assert_eq!(&begin().1, b"HTTP/1.1 409", "a switch has eight");
    drop(clients);
    let mut last = None;
    wait::until("the traces have ended", SOON, || {
        let (client, begun) = begin();
        last = Some(client);
        &begun == b"HTTP/1.1 200"
    });
    rig.daemon.client().remove_device("nic2").unwrap();
    let (mut answer, mut client) = (Vec::new(), last.unwrap());
    let mut buffer = [0; 4096];
    while !answer.ends_with(b"\r\n0\r\n\r\n") {
        let count = client.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "the answer is cut off");
        answer.extend_from_slice(&buffer[..count]);
    }
}

#[test]
fn nics_come_and_go_while_the_daemon_runs() {
    let rig = Rig::new();
    let control = rig.daemon.client();
    let path = rig.daemon.directory.path().join("nic5.sock");
    let nic = NewDevice::new("nic5", &path)
        .with("front_end", "virtio-net")
        .with("switch", "lan")
        .with("mac", "52:54:00:00:00:05");
    assert_eq!(control.add_device(&nic).unwrap().state, DeviceState::Waiting);
    let options = NetClientOptions::default();
    let (mut one, mut five) = (rig.connect(1, &options), rig.connect(5, &options));
    send(five.pair(0).unwrap(), &frame(mac(1), mac(5), 1, 64));
    assert_eq!(receive(one.pair(0).unwrap())[6..12], mac(5));
    let again = control.add_device(&nic.clone().with("name", "nic8").with("socket", "/tmp/x.sock"));
    assert!(again.unwrap_err().to_string().contains("52:54:00:00:00:05"), "the address is taken");
    control.remove_device("nic5").unwrap();
    assert!(control.switches().unwrap()[0].ports.iter().all(|port| port.name != "nic5"));
    assert!(
        control
            .metrics(false)
            .unwrap()
            .contains("sidecore_port_in_frames_total{switch=\"lan\",port=\"nic1\"} 0\n")
    );
}
