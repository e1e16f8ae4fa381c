//! Firewalls on ports of a switch: rules, connections, fragments, hostile headers.
#![forbid(unsafe_code)]

mod packets;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use packets::*;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::contract::{NIC, Station};
use sidecore_net::{
    DropReason, FrameStage, Guard, PortConfig, PortCounts, PortId, PortStats, StagePlace, Switch,
    SwitchOptions,
};
use sidecore_stage_firewall::{Firewall, FirewallStats, Rules, SNAPSHOT_MAX, Snapshot};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SEEDS: [u64; 2] = [0x1234_5678_9abc_def1, 0xfedc_ba98_7654_3211];
/// Connections of the tables here.
const CONNECTIONS: usize = 64;

/// Two stations, the second of which has a firewall.
struct Net {
    switch: Switch,
    now: Nanos,
    stations: [Station; 2],
    port: PortId,
    stats: Arc<PortStats>,
    counts: Arc<FirewallStats>,
}

impl Net {
    fn new(rules: &[&str]) -> Self {
        let now = Nanos::from_millis(1_000_000);
        let mut switch = Switch::new(SwitchOptions::new(7));
        let mut add = |number: u8| {
            let guard = Guard { mac: mac(number), ipv4: None, ipv6: None, router: false };
            let config = PortConfig { guard: Some(guard), ..PortConfig::station() };
            let stats = Arc::new(PortStats::default());
            let (station, queue) = Station::new(NIC, true);
            let port = switch.add_port(now, "p", config, Arc::clone(&stats)).unwrap();
            switch.attach(port, Box::new(queue)).unwrap();
            station.post(128, 2048);
            (station, port, stats)
        };
        let ((a, ..), (b, port, stats)) = (add(1), add(2));
        let counts = Arc::clone(firewall(&[]).stats());
        let mut net = Self { switch, now, stations: [a, b], port, stats, counts };
        net.set(rules);
        net
    }

    fn set(&mut self, rules: &[&str]) {
        let firewall = firewall(rules);
        self.counts = Arc::clone(firewall.stats());
        let stage: Box<dyn FrameStage> = Box::new(firewall);
        drop(self.switch.set_stage(self.port, StagePlace::Firewall, Some(stage)).unwrap());
    }

    fn wait_s(&mut self, seconds: u64) {
        self.now = self.now.after(Nanos::from_millis(seconds * 1000));
    }

    /// Sends a frame from a station. Returns whether the other one has got it.
    fn passes(&mut self, from: usize, frame: &[u8]) -> bool {
        self.stations[from].send(frame);
        self.now = self.now.after(Nanos::from_micros(1));
        self.switch.turn(self.now, 32);
        let got = self.stations[1 - from].received();
        self.stations[1 - from].post(128 - self.stations[1 - from].free_buffers(), 2048);
        assert!(got.iter().all(|got| got.frame == frame));
        !got.is_empty()
    }

    /// To the station with the firewall.
    fn to(&mut self, packet: &Ip) -> bool {
        self.passes(0, &packet.frame(1, 2))
    }

    /// From it.
    fn from(&mut self, packet: &Ip) -> bool {
        self.passes(1, &packet.frame(2, 1))
    }

    fn port(&self) -> PortCounts {
        self.stats.counts()
    }

    /// The frames that the rules have decided on.
    fn hits(&self) -> Vec<u64> {
        self.counts.rules.iter().map(|rule| rule.frames.get()).collect()
    }
}

fn firewall(rules: &[&str]) -> Firewall {
    Firewall::new(Arc::new(Rules::parse(rules).unwrap()), CONNECTIONS, SEEDS)
}

const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const A6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const B6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);

/// Accepts what the station asked for, SSH, and nothing else.
const USUAL: &[&str] = &[
    "ct state established,related accept",
    "ct state invalid drop",
    "from accept",
    "to tcp dport 22 ct state new accept",
    "to drop",
];

#[test]
fn the_first_rule_that_matches_decides_and_counts() {
    let mut net = Net::new(&[
        "to ip saddr 10.0.0.0/24 udp dport 53-54 drop",
        "from udp sport 53 drop",
        "udp accept",
        "to proto 47 drop",
    ]);
    assert!(!net.to(&udp(A, B, 9, 53)) && !net.to(&udp(A, B, 9, 54)));
    assert!(net.to(&udp(A, B, 9, 55)) && net.to(&udp([11, 0, 0, 1].into(), B, 9, 53)));
    assert!(!net.from(&udp(B, A, 53, 9)) && net.from(&udp(B, A, 54, 9)));
    assert!(!net.to(&Ip::v4(A, B, 47, &[0; 20])));
    assert!(net.to(&tcp(A, B, 9, 53, SYN)), "no rule matches");
    assert!(net.passes(0, &arp(1, 2)) && net.passes(0, &lldp(1, 2)));
    assert_eq!(net.hits(), [2, 1, 3, 1]);
    assert_eq!(net.counts.unmatched.frames.get(), 3);
    assert_eq!(net.counts.rules[0].bytes.get(), 2 * (14 + 20 + 8 + 10));
    let counts = net.port();
    assert_eq!((counts.drops(DropReason::Rule), counts.drops(DropReason::RuleOut)), (1, 3));
    assert_eq!(net.counts.table.opened.get(), 0, "no rule asks for a state");
}

#[test]
fn frames_that_are_not_ip_need_rules_of_their_own() {
    let mut net = Net::new(&["drop"]);
    assert!(net.passes(0, &arp(1, 2)) && net.passes(0, &lldp(1, 2)));
    assert!(net.to(&Ip::v6(A6, B6, 58, &[135, 0, 0, 0, 0, 0, 0, 0])));
    assert!(!net.to(&Ip::v6(A6, B6, 58, &[128, 0, 0, 0, 0, 0, 0, 0])));
    net.set(&["arp drop", "nd drop", "ether type 0x88cc drop"]);
    assert!(!net.passes(0, &arp(1, 2)) && !net.passes(0, &lldp(1, 2)));
    assert!(!net.to(&Ip::v6(A6, B6, 58, &[135, 0, 0, 0, 0, 0, 0, 0])));
    assert!(net.to(&Ip::v6(A6, B6, 58, &[128, 0, 0, 0, 0, 0, 0, 0])));
    assert_eq!(net.hits(), [1, 1, 1]);
}

#[test]
fn answers_pass_and_strangers_do_not() {
    let mut net = Net::new(USUAL);
    assert!(!net.to(&udp(A, B, 53, 4000)));
    assert!(net.from(&udp(B, A, 4000, 53)) && net.to(&udp(A, B, 53, 4000)));
    assert!(!net.to(&udp(A, B, 53, 4001)) && !net.to(&udp(A, B, 54, 4000)));
    assert!(net.from(&tcp(B, A, 5000, 80, SYN)));
    assert!(net.to(&tcp(A, B, 80, 5000, SYN | ACK)) && net.from(&tcp(B, A, 5000, 80, ACK)));
    assert!(net.to(&tcp(A, B, 7, 22, SYN)) && net.from(&tcp(B, A, 22, 7, SYN | ACK)));
    assert!(net.to(&tcp(A, B, 7, 22, ACK)) && net.to(&tcp(A, B, 7, 22, ACK)));
    assert!(!net.to(&tcp(A, B, 7, 23, SYN)));
    assert_eq!(net.hits(), [6, 0, 2, 1, 4]);
    assert_eq!(net.port().drops(DropReason::RuleOut), 4);
}

#[test]
fn an_echo_and_errors_about_a_connection_pass() {
    let mut net = Net::new(USUAL);
    assert!(!net.to(&echo(A, B, 8, 3)), "a stranger's");
    assert!(!net.to(&echo(A, B, 0, 3)), "an answer to no question is invalid");
    assert!(net.from(&echo(B, A, 8, 3)) && net.to(&echo(A, B, 0, 3)));
    assert!(!net.to(&echo(A, B, 0, 4)), "another identifier");
    let sent = udp(B, A, 4000, 53);
    assert!(net.from(&sent));
    let router = Ipv4Addr::new(10, 0, 0, 254);
    assert!(net.to(&unreachable(router, B, &sent)));
    assert!(!net.to(&unreachable(router, B, &udp(B, A, 4000, 54))), "about another one");
    assert!(!net.to(&unreachable(router, A, &sent)), "for another station");
    assert!(!net.to(&unreachable(router, B, &udp(A, B, 53, 4000))), "about a packet of this way");
    assert!(!net.from(&unreachable(B, A, &sent)), "by the way of the packet itself");
    // The error's own header ends within the quotation.
    let mut short = unreachable(router, B, &sent);
    short.truncate(20 + 8 + 20 + 3);
    assert!(!net.to(&short));
}

#[test]
fn ipv6_is_tracked_behind_extension_headers() {
    let mut net = Net::new(USUAL);
    let options = [(0, vec![17, 0, 1, 4, 0, 0, 0, 0])];
    assert!(net.from(&udp6(B6, A6, 4000, 53)));
    assert!(net.to(&udp6(A6, B6, 53, 4000).behind(&options)));
    assert!(!net.to(&udp6(A6, B6, 53, 4001).behind(&options)));
    assert!(net.from(&Ip::v6(B6, A6, 58, &[128, 0, 0, 0, 0, 7, 0, 1])));
    assert!(net.to(&Ip::v6(A6, B6, 58, &[129, 0, 0, 0, 0, 7, 0, 1])));
    let mut error = vec![1, 4, 0, 0, 0, 0, 0, 0];
    error.extend(udp6(B6, A6, 4000, 53).0);
    assert!(net.to(&Ip::v6(A6, B6, 58, &error)));
    // A header that does not end.
    assert!(!net.to(&udp6(A6, B6, 53, 4000).behind(&[(0, vec![17, 9, 0, 0, 0, 0, 0, 0])])));
    assert_eq!(net.port().drops(DropReason::HeadersOut), 1);
}

#[test]
fn fragments_share_the_verdict_of_their_first_one() {
    let mut net = Net::new(USUAL);
    assert!(net.from(&udp(B, A, 4000, 53)));
    let answer = udp(A, B, 53, 4000);
    assert!(!net.to(&answer.fragment(9, 2, false)), "before the first one");
    assert!(net.to(&answer.fragment(9, 0, true)) && net.to(&answer.fragment(9, 2, false)));
    assert!(!net.to(&answer.fragment(8, 2, false)), "another packet");
    assert!(!net.from(&answer.fragment(9, 2, false)), "the other way");
    let stranger = udp(A, B, 53, 4001);
    assert!(!net.to(&stranger.fragment(7, 0, true)) && !net.to(&stranger.fragment(7, 2, false)));
    assert_eq!(net.port().drops(DropReason::FragmentOut), 3);
    assert_eq!(net.port().drops(DropReason::Fragment), 1);
    net.wait_s(20);
    assert!(!net.to(&answer.fragment(9, 4, false)), "too late");
    // A first fragment without the whole header, and one over it.
    let ssh = tcp(A, B, 7, 22, SYN);
    let mut tiny = ssh.fragment(6, 0, true);
    tiny.truncate(20 + 8);
    assert!(!net.to(&tiny), "the flags are in the next fragment");
    assert!(net.to(&ssh.fragment(5, 0, true)) && !net.to(&ssh.fragment(5, 1, false)));
    assert!(net.to(&ssh.fragment(5, 3, false)));
    // Without a table later fragments have no ports.
    net.set(&["to udp dport 1-65535 drop", "to udp accept"]);
    assert!(net.to(&answer.fragment(9, 2, false)) && !net.to(&answer.fragment(9, 0, true)));
}

#[test]
fn headers_that_are_wrong_or_cut_are_dropped() {
    let mut net = Net::new(&["from drop"]);
    let whole = tcp(A, B, 1, 2, SYN);
    let changed = |at: usize, to: u8| {
        let mut packet = whole.clone();
        packet.0[at] = to;
        packet
    };
    let cut = |len: usize| {
        let mut packet = whole.clone();
        packet.truncate(len);
        packet
    };
    let wrong = [
        changed(0, 0x65),
        changed(0, 0x44),
        changed(0, 0x4f),
        changed(3, 19),
        changed(3, 39),
        cut(19),
        cut(39),
        Ip::v4(A, B, 17, &[0; 7]),
        Ip::v4(A, B, 1, &[8; 7]),
        Ip(udp6(A6, B6, 1, 2).0[..39].to_vec(), 0x86dd),
        Ip(udp6(A6, B6, 1, 2).0[..47].to_vec(), 0x86dd),
    ];
    for (count, packet) in (1..).zip(&wrong) {
        assert!(!net.to(packet), "{packet:?}");
        assert_eq!(net.port().drops(DropReason::HeadersOut), count, "{packet:?}");
    }
    assert!(net.to(&whole) && net.to(&cut(40)));
    // Behind 256 bytes of extension headers the ports cannot be seen.
    let far = udp6(A6, B6, 1, 2).behind(&[(0, [&[17, 27][..], &[0; 222]].concat())]);
    assert!(!net.to(&far));
    assert!(!net.from(&whole) && net.port().drops(DropReason::Headers) == 0);
}

#[test]
fn tcp_without_a_connection_and_borrowed_addresses_are_invalid() {
    let mut net = Net::new(&["ct state invalid drop"]);
    for flags in [0, RST, RST | ACK, SYN | FIN, SYN | RST] {
        assert!(!net.to(&tcp(A, B, 1, 2, flags)), "{flags}");
    }
    assert!(net.to(&tcp(A, B, 1, 2, ACK)), "a connection that is older than the table");
    // The station sends as its peer, or the peer as the station.
    assert!(!net.from(&tcp(A, B, 1, 2, ACK)) && net.from(&tcp(B, A, 2, 1, ACK)));
    assert!(!net.to(&tcp(B, A, 2, 1, ACK)));
    assert_eq!(net.hits(), [7]);
}

#[test]
fn ports_of_an_ended_connection_begin_a_new_one() {
    let mut net = Net::new(USUAL);
    assert!(net.from(&tcp(B, A, 5000, 80, SYN)) && net.to(&tcp(A, B, 80, 5000, SYN | ACK)));
    assert!(!net.to(&tcp(A, B, 80, 5000, SYN)), "the other side begins anew: the rules decide");
    assert!(net.to(&tcp(A, B, 80, 5000, ACK)));
    assert!(net.from(&tcp(B, A, 5000, 80, FIN | ACK)) && net.to(&tcp(A, B, 80, 5000, FIN | ACK)));
    assert!(net.from(&tcp(B, A, 5000, 80, ACK)), "the last one");
    assert!(!net.to(&tcp(A, B, 80, 5000, SYN)), "no answer");
    assert!(net.from(&tcp(B, A, 5000, 80, SYN)) && net.to(&tcp(A, B, 80, 5000, SYN | ACK)));
}

#[test]
fn silent_connections_are_forgotten() {
    let mut net = Net::new(USUAL);
    let (ask, answer) = (udp(B, A, 4000, 53), udp(A, B, 53, 4000));
    assert!(net.from(&ask));
    net.wait_s(29);
    assert!(net.to(&answer));
    net.wait_s(170);
    assert!(net.to(&answer));
    net.wait_s(190);
    assert!(!net.to(&answer));
    assert!(net.from(&ask));
    net.wait_s(40);
    // Looks visit all buckets.
    for _ in 0..100 {
        net.wait_s(1);
        net.switch.turn(net.now, 32);
    }
    assert_eq!(net.counts.table.connections.get(), 0);
}

#[test]
fn a_flood_takes_no_place_of_connections_that_are_used() {
    let mut net = Net::new(USUAL);
    assert!(net.from(&tcp(B, A, 5000, 80, SYN)) && net.to(&tcp(A, B, 80, 5000, SYN | ACK)));
    for port in 0..5000 {
        assert!(net.to(&tcp(A, B, port, 22, SYN)));
    }
    assert!(net.to(&tcp(A, B, 80, 5000, ACK)), "the connection is there");
    net.now = net.now.after(Nanos::from_millis(2));
    net.switch.turn(net.now, 32);
    let counts = &net.counts.table;
    let (len, opened) = (counts.connections.get(), counts.opened.get());
    assert!(len <= CONNECTIONS as u64 && opened == 5001, "{len} {opened}");
    assert_eq!(counts.evicted.get(), opened - len);
}

#[test]
fn new_rules_judge_old_connections_at_once() {
    let mut net = Net::new(USUAL);
    let (ask, answer) = (udp(B, A, 4000, 53), udp(A, B, 53, 4000));
    assert!(net.from(&ask) && net.to(&answer) && net.to(&answer));
    // The same rules: the connection stays.
    net.set(USUAL);
    assert!(net.to(&answer) && !net.to(&udp(A, B, 53, 4001)));
    // Without the first rule it is stopped, though its packets were decided on before.
    net.set(&["from ct state new,established accept", "to drop"]);
    assert!(!net.to(&answer) && !net.to(&answer) && net.from(&ask));
    net.set(USUAL);
    assert!(net.to(&answer));
    drop(net.switch.set_stage(net.port, StagePlace::Firewall, None).unwrap());
    assert!(net.to(&udp(A, B, 53, 4001)), "no firewall");
}

/// The connections that the firewall tracks, as text.
fn tracked(net: &mut Net) -> String {
    let (now, port) = (net.now, net.port);
    let snapshot = |firewall: &mut Firewall| firewall.snapshot(now).to_string();
    net.switch.with_stage(port, StagePlace::Firewall, snapshot).unwrap()
}

/// Gives the firewall connections of an earlier one. Returns how many it has entered.
fn resume(net: &mut Net, text: &str) -> usize {
    let (now, port, snapshot) = (net.now, net.port, Snapshot::parse(text).unwrap());
    let resume = |firewall: &mut Firewall| firewall.resume(now, &snapshot);
    net.switch.with_stage(port, StagePlace::Firewall, resume).unwrap()
}

#[test]
fn connections_go_on_in_another_firewall() {
    let mut old = Net::new(USUAL);
    assert!(old.from(&udp(B, A, 4000, 53)) && old.to(&udp(A, B, 53, 4000)));
    assert!(old.from(&udp6(B6, A6, 4000, 53)) && old.from(&echo(B, A, 8, 3)));
    assert!(old.to(&tcp(A, B, 7, 22, SYN)) && old.from(&tcp(B, A, 22, 7, SYN | ACK)));
    assert!(old.from(&tcp(B, A, 9, 80, SYN)) && old.to(&tcp(A, B, 80, 9, FIN | ACK)));
    assert!(old.to(&udp(A, B, 53, 4000).fragment(9, 0, true)));
    let text = tracked(&mut old);
    assert_eq!(text.lines().count(), 1 + 5, "{text}");
    assert!(text.contains("\n17 1 from answered 0 10.0.0.2 4000 10.0.0.1 53"), "{text}");
    assert!(text.contains("\n6 1 from closing 0 10.0.0.2 9 10.0.0.1 80"), "{text}");
    assert!(text.contains("\n17 1 from new 0 2001:db8::2 4000 2001:db8::1 53"), "{text}");

    let mut net = Net::new(USUAL);
    assert!(!net.to(&udp(A, B, 53, 4000)) && !net.to(&tcp(A, B, 80, 9, ACK)));
    assert_eq!(resume(&mut net, &text), 5);
    assert_eq!(resume(&mut net, &text), 0, "they are known");
    assert_eq!(net.counts.table.connections.get(), 5);
    assert!(net.to(&udp(A, B, 53, 4000)) && !net.to(&udp(A, B, 53, 4001)));
    assert!(net.to(&udp6(A6, B6, 53, 4000)) && net.to(&echo(A, B, 0, 3)));
    assert!(net.to(&tcp(A, B, 7, 22, ACK)) && net.to(&tcp(A, B, 80, 9, ACK)));
    assert!(!net.from(&udp(A, B, 53, 4000)), "from the wrong side");
    assert_eq!(net.hits()[0], 5);
    assert_eq!(tracked(&mut net).lines().count(), 1 + 5);
}

#[test]
fn times_go_on_in_another_firewall() {
    let mut old = Net::new(USUAL);
    assert!(old.from(&udp(B, A, 4000, 53)) && old.to(&udp(A, B, 53, 4000)));
    assert!(old.from(&udp(B, A, 4001, 53)));
    old.wait_s(25);
    let text = tracked(&mut old);
    assert!(text.contains("answered 24 ") || text.contains("answered 25 "), "{text}");
    let mut net = Net::new(USUAL);
    // Clocks of processes may begin anywhere.
    net.now = Nanos::from_millis(5);
    assert_eq!(resume(&mut net, &text), 2);
    net.wait_s(7);
    assert!(net.to(&udp(A, B, 53, 4000)) && !net.to(&udp(A, B, 53, 4001)), "one is over");
    // Those that are over by now are no connections.
    old.wait_s(6);
    assert_eq!(tracked(&mut old).lines().count(), 1 + 1);
    let over = "connections 1\n17 1 from answered 181 10.0.0.2 1 10.0.0.1 2";
    assert_eq!(resume(&mut net, over), 0);
}

#[test]
fn a_snapshot_takes_no_place_of_another_connection_and_bad_ones_are_refused() {
    let line = |port: usize| format!("\n17 1 to new 0 10.0.0.1 {port} 10.0.0.2 22");
    let text: String = (1..=1000).map(line).collect();
    let mut net = Net::new(USUAL);
    assert!(net.from(&udp(B, A, 4000, 53)));
    let entered = resume(&mut net, &format!("connections 1{text}"));
    assert!(entered < CONNECTIONS && entered > CONNECTIONS / 2, "{entered}");
    assert_eq!(net.counts.table.connections.get(), entered as u64 + 1);
    assert!(net.to(&udp(A, B, 53, 4000)), "the connection is there");
    let refused = |text: &str| Snapshot::parse(text).unwrap_err().line;
    assert_eq!((refused(""), refused("connections 2"), refused("connections 1\n\n")), (1, 1, 2));
    let good = "17 1 to new 0 10.0.0.1 1 10.0.0.2 22";
    assert_eq!(Snapshot::parse(&format!("connections 1\n{good}")).unwrap().len(), 1);
    for (part, other) in [
        ("17 ", "256 "),
        ("17 1", "17 0"),
        ("17 1", "17 4095"),
        ("to", "over"),
        ("new", "old"),
        ("new 0", "new -1"),
        ("new 0", "new 1000001"),
        ("10.0.0.1", "10.0.0"),
        ("10.0.0.1", "::1"),
        (" 22", ""),
        (" 22", " 65536"),
        (" 22", " 22 1"),
    ] {
        let bad = format!("connections 1\n{good}\n{}", good.replacen(part, other, 1));
        assert_eq!(refused(&bad), 3, "{bad}");
    }
    let many: String = (0..=SNAPSHOT_MAX).map(|port| line(port % 60_000)).collect();
    assert_eq!(refused(&format!("connections 1{many}")), SNAPSHOT_MAX + 2);
}

#[test]
fn nothing_is_allocated_for_a_frame() {
    let mut net = Net::new(USUAL);
    let [a, b] = net.stations.each_ref();
    let ask = a.send(&udp(A, B, 1, 2).frame(1, 2));
    let ssh = a.send(&tcp(A, B, 1, 22, SYN).frame(1, 2));
    let out = b.send(&udp(B, A, 2, 1).frame(2, 1));
    let (ask_bytes, ssh_bytes) = (udp(A, B, 1, 2).frame(1, 2).len(), 14 + 40);
    net.switch.turn(net.now, 32);
    let mut counted = 0;
    for round in 0..500 {
        for station in &net.stations {
            station.discard();
            station.post(128 - station.free_buffers(), 2048);
        }
        net.stations[0].resend(ask, ask_bytes);
        net.stations[0].resend(ssh, ssh_bytes);
        net.stations[1].resend(out, ask_bytes);
        net.wait_s(round % 60);
        let before = allocations();
        net.switch.turn(net.now, 32);
        counted += allocations() - before;
    }
    assert_eq!(counted, 0);
    assert!(net.counts.table.opened.get() > 100 && net.hits()[0] > 100);
}

#[test]
fn rules_are_refused_with_their_number() {
    let rules = Rules::parse(&["ct state new drop"]).unwrap();
    assert!(rules.tracks() && rules.texts() == ["ct state new drop"]);
    let error = Rules::parse(&["accept", "to tcp dport ssh drop"]).unwrap_err();
    assert_eq!(error.index, 1);
    assert!(error.to_string().starts_with("rule 2, \"to tcp dport ssh drop\": `ssh`"), "{error}");
    let many = vec!["drop"; 1025];
    assert_eq!(Rules::parse(&many).unwrap_err().index, 1024);
}
