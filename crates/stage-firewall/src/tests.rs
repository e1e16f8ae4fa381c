//! The short way of a decision beside the long one, which has no memo and sees no runs.

#[expect(dead_code, reason = "others of them are for the tests outside of the crate")]
#[path = "../tests/packets/mod.rs"]
mod packets;

use std::any::Any;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use packets::*;
use sidecore_net::contract::{NIC, Received, Station};
use sidecore_net::{
    DropCause, FrameStage, Guard, PlainFlow, PortConfig, PortCounts, PortId, PortStats, StageFrame,
    StagePlace, Switch, SwitchOptions, Verdict,
};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

use crate::connection::ticks;
use crate::packet::Packet;
use crate::{Firewall, FirewallStats, Rules};

const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const A6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const B6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);

/// A generator of random numbers (xorshift64*).
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    pub(crate) fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

/// A firewall without a memo, which decides on each frame by itself.
struct Plain(Firewall);

impl FrameStage for Plain {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        self.0.memos = Default::default();
        self.0.frame(now, frame)
    }

    fn look(&mut self, now: Nanos) {
        self.0.look(now);
    }

    fn inherit(&mut self, old: &mut dyn FrameStage) {
        let old: &mut dyn Any = old;
        self.0.inherit(&mut old.downcast_mut::<Self>().unwrap().0);
    }
}

/// Two stations, the second of which has the firewall.
struct Net {
    switch: Switch,
    stations: [Station; 2],
    ports: [PortId; 2],
    stats: [Arc<PortStats>; 2],
    counts: Arc<FirewallStats>,
}

/// All that the stations and an operator see.
type Outcome = ([Vec<Received>; 2], [PortCounts; 2], Vec<u64>);

impl Net {
    fn new(now: Nanos) -> Self {
        let mut switch = Switch::new(SwitchOptions::new(7));
        let mut add = |number: u8| {
            let guard = Guard { mac: mac(number), ipv4: None, ipv6: None, router: false };
            let config = PortConfig { guard: Some(guard), ..PortConfig::station() };
            let stats = Arc::new(PortStats::default());
            let (station, queue) = Station::new(NIC, true);
            station.set_lends_each(true);
            let port = switch.add_port(now, "p", config, Arc::clone(&stats)).unwrap();
            switch.attach(port, Box::new(queue)).unwrap();
            (station, port, stats)
        };
        let (a, b) = (add(1), add(2));
        let (stations, ports, stats) = ([a.0, b.0], [a.1, b.1], [a.2, b.2]);
        let counts = Arc::new(FirewallStats::new(0));
        Self { switch, stations, ports, stats, counts }
    }

    fn set(&mut self, firewall: Firewall, wrap: impl FnOnce(Firewall) -> Box<dyn FrameStage>) {
        self.counts = Arc::clone(firewall.stats());
        let stage = Some(wrap(firewall));
        drop(self.switch.set_stage(self.ports[1], StagePlace::Firewall, stage).unwrap());
    }

    fn turn(&mut self, now: Nanos, from: usize, frames: &[Vec<u8>]) -> Outcome {
        for station in &self.stations {
            station.post(128 - station.free_buffers(), 2048);
        }
        for frame in frames {
            self.stations[from].send(frame);
        }
        self.switch.turn(now, 32);
        let received = self.stations.each_ref().map(Station::received);
        let all = self.counts.rules.iter().chain([&self.counts.unmatched]);
        let mut counts: Vec<_> = all.flat_map(|rule| [&rule.frames, &rule.bytes]).collect();
        counts.extend([&self.counts.table.opened, &self.counts.table.evicted]);
        let counts = counts.iter().map(|count| count.get());
        let counts = counts.chain([self.counts.table.connections.get()]).collect();
        (received, self.stats.each_ref().map(|stats| stats.counts()), counts)
    }
}

/// Sets of rules that replace each other.
const SETS: [&[&str]; 5] = [
    &[
        "ct state established,related accept",
        "ct state invalid drop",
        "from accept",
        "to tcp dport 22 ct state new accept",
        "to drop",
    ],
    &["ct state invalid drop", "to udp dport 53 drop", "ct state new udp sport 1000 drop"],
    &["from ct state new,established accept", "to ct state established accept", "drop"],
    &["to ip saddr 10.0.0.9 drop", "to udp dport 53-60 accept", "from tcp dport 80 drop"],
    &["to ct state established drop", "to ip6 saddr 2001:db8::/64 udp accept", "to icmp drop"],
];

/// A kind of packets that a station sends several times.
#[derive(Clone, Copy)]
struct Talk {
    from: usize,
    addresses: (Ipv4Addr, Ipv4Addr),
    ports: (u16, u16),
    kind: usize,
}

fn talk(random: &mut Random) -> Talk {
    let from = random.below(2);
    // Now and then with the address of the other side.
    let is_own = random.below(12) > 0;
    let addresses = if (from == 0) == is_own { (A, B) } else { (B, A) };
    let other = if random.below(4) == 0 { random.below(400) as u16 } else { 1000 };
    let (here, there) = (other, random.of(&[22, 53, 80]));
    let ports = if random.below(2) == 0 { (here, there) } else { (there, here) };
    Talk { from, addresses, ports, kind: random.below(8) }
}

fn packet(random: &mut Random, talk: &Talk) -> Ip {
    let ((source, target), (from, to)) = (talk.addresses, talk.ports);
    let flags = [ACK, ACK, ACK, ACK, SYN, SYN | ACK, FIN | ACK, RST, RST | ACK, 0];
    let one = match talk.kind {
        0..4 => tcp(source, target, from, to, random.of(&flags)),
        4 | 5 => udp(source, target, from, to),
        6 if source == A => udp6(A6, B6, from, to),
        6 => udp6(B6, A6, from, to),
        _ => echo(source, target, random.of(&[0, 8]), to as u8),
    };
    match random.below(24) {
        0 => unreachable(source, target, &udp(target, source, to, from)),
        1 if talk.kind < 6 => one.fragment(7, 0, true),
        2 if talk.kind < 6 => one.fragment(7, 3, false),
        3 => Ip(one.0[..random.below(one.0.len())].to_vec(), one.1),
        4 => Ip::v4(source, target, 47, &[0; 20]),
        5 if talk.kind == 6 => one.behind(&[(0, vec![17, 0, 1, 4, 0, 0, 0, 0])]),
        6 => {
            let mut wrong = one;
            let at = random.below(wrong.0.len().min(34));
            wrong.0[at] ^= 1 << random.below(8);
            wrong
        }
        _ => one,
    }
}

fn firewall(rules: &[&str]) -> Firewall {
    Firewall::new(Arc::new(Rules::parse(rules).unwrap()), 64, [0x1234_5678_9abc, 0xfedc_ba98])
}

#[test]
fn a_memo_and_runs_change_no_decision() {
    let (mut passed, mut dropped) = (0, 0);
    for seed in 1..=8_u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut now = Nanos::from_millis(1_000_000);
        let (mut short, mut plain) = (Net::new(now), Net::new(now));
        let mut talks: Vec<Talk> = (0..3).map(|_| talk(&mut random)).collect();
        for step in 0..1_500 {
            if step == 0 || random.below(60) == 0 {
                let rules = random.of(&SETS);
                short.set(firewall(rules), |firewall| Box::new(firewall));
                plain.set(firewall(rules), |firewall| Box::new(Plain(firewall)));
            }
            if random.below(4) == 0 {
                let at = random.below(talks.len());
                talks[at] = talk(&mut random);
            }
            let from = random.below(2);
            let own: Vec<_> = talks.iter().filter(|talk| talk.from == from).copied().collect();
            let count = if own.is_empty() { 0 } else { random.of(&[1, 2, 8, 30]) };
            let mut one = own.first().copied();
            let mut frames = Vec::new();
            for _ in 0..count {
                if random.below(5) == 0 {
                    one = Some(random.of(&own));
                }
                let packet = one.map(|talk| packet(&mut random, &talk));
                frames.extend(packet.map(|it| it.frame(from as u8 + 1, 2 - from as u8)));
            }
            let millis = match random.below(30) {
                0 => random.of(&[100, 9_000, 31_000, 119_000, 181_000, 7_441_000]),
                1..4 => 140,
                _ => 0,
            };
            now = now.after(Nanos::from_millis(millis)).after(Nanos::from_micros(3));
            let (got, expected) = (short.turn(now, from, &frames), plain.turn(now, from, &frames));
            assert_eq!(got, expected, "seed {seed}, step {step}");
            let delivered = got.0.iter().map(Vec::len).sum::<usize>();
            (passed, dropped) = (passed + delivered, dropped + frames.len() - delivered);
        }
    }
    assert!(passed > 20_000 && dropped > 10_000, "{passed} passed, {dropped} did not");
}

/// A firewall whose memo is wrong: its frames are dropped as by rule 77. So the verdict shows by
/// which way it came.
struct Wrong(Firewall);

impl FrameStage for Wrong {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        self.0.memos.iter_mut().for_each(|memo| (memo.rule, memo.passes) = (Some(77), false));
        match self.0.frame(now, frame) {
            Verdict::Drop(DropCause::Rule(77)) => Verdict::Drop(DropCause::Lost),
            other => other,
        }
    }

    fn look(&mut self, now: Nanos) {
        self.0.look(now);
    }

    fn inherit(&mut self, old: &mut dyn FrameStage) {
        let old: &mut dyn Any = old;
        self.0.inherit(&mut old.downcast_mut::<Self>().unwrap().0);
    }
}

/// Whether the memo decides on the frame.
fn is_by_memo(net: &mut Net, now: Nanos, from: usize, packet: &Ip) -> bool {
    let frame = packet.frame(from as u8 + 1, 2 - from as u8);
    let lost = |net: &Net| {
        let counts = net.stats[1].counts();
        let reasons = [sidecore_net::DropReason::Lost, sidecore_net::DropReason::LostOut];
        reasons.map(|reason| counts.drops(reason)).iter().sum::<u64>()
    };
    let before = lost(net);
    net.turn(now, from, &[frame]);
    lost(net) > before
}

#[test]
fn a_memo_holds_until_something_changes() {
    let mut now = Nanos::from_millis(1_000_000);
    let mut net = Net::new(now);
    let wrong = |firewall| -> Box<dyn FrameStage> { Box::new(Wrong(firewall)) };
    net.set(firewall(SETS[0]), wrong);
    let (ask, answer) = (udp(B, A, 4000, 53), udp(A, B, 53, 4000));
    assert!(!is_by_memo(&mut net, now, 1, &ask), "the first one");
    assert!(is_by_memo(&mut net, now, 1, &ask) && is_by_memo(&mut net, now, 1, &ask));
    assert!(!is_by_memo(&mut net, now, 0, &answer), "the other way");
    assert!(!is_by_memo(&mut net, now, 1, &ask), "the connection was answered");
    assert!(is_by_memo(&mut net, now, 1, &ask));
    assert!(!is_by_memo(&mut net, now, 1, &udp(B, A, 4000, 54)), "another port");
    assert!(!is_by_memo(&mut net, now, 1, &ask), "another connection has begun");
    let mut other = ask.clone();
    other.0[19] = 9;
    assert!(!is_by_memo(&mut net, now, 1, &other), "another address");
    assert!(!is_by_memo(&mut net, now, 1, &ask) && is_by_memo(&mut net, now, 1, &ask));
    let tick = Nanos(u64::from(ticks(now) + 1) << 27);
    now = tick;
    assert!(!is_by_memo(&mut net, now, 1, &ask), "the time is noted again");
    assert!(is_by_memo(&mut net, now, 1, &ask));
    net.set(firewall(SETS[0]), wrong);
    assert!(!is_by_memo(&mut net, now, 1, &ask), "other rules");
    assert!(is_by_memo(&mut net, now, 1, &ask));
    assert!(!is_by_memo(&mut net, now, 1, &ask.fragment(3, 0, true)), "a fragment");
    assert!(!is_by_memo(&mut net, now, 1, &ask.fragment(3, 3, false)), "a later one");
    let mut longer = ask.clone();
    longer.0.extend([0; 12]);
    assert!(!is_by_memo(&mut net, now, 1, &longer), "the fragment is in the table");
    assert!(is_by_memo(&mut net, now, 1, &longer), "the size is no matter");
}

#[test]
fn flags_of_tcp_go_the_long_way() {
    let now = Nanos::from_millis(1_000_000);
    let mut net = Net::new(now);
    net.set(firewall(SETS[0]), |firewall| Box::new(Wrong(firewall)));
    let mut by_memo = |from: usize, flags: u8| {
        let packet = if from == 1 { tcp(B, A, 9, 80, flags) } else { tcp(A, B, 80, 9, flags) };
        is_by_memo(&mut net, now, from, &packet)
    };
    assert!(!by_memo(1, SYN) && !by_memo(0, SYN | ACK) && !by_memo(1, ACK));
    assert!(by_memo(1, ACK) && !by_memo(0, ACK) && by_memo(0, ACK));
    for flags in [0, SYN, SYN | ACK, FIN | ACK, RST, RST | ACK] {
        assert!(!by_memo(1, flags), "{flags}");
    }
    assert!(!by_memo(1, ACK), "the connection is closing");
    assert!(by_memo(1, ACK));
    assert!(!by_memo(1, SYN), "a new one");
    assert!(!by_memo(1, ACK) && by_memo(1, ACK));
}

#[test]
fn a_flow_has_the_facts_of_its_packet() {
    let mut random = Random(5);
    let mut flows = 0;
    for _ in 0..20_000 {
        let talk = talk(&mut random);
        let Ip(mut bytes, ether_type) = packet(&mut random, &talk);
        if random.below(2) == 0 && !bytes.is_empty() {
            let at = random.below(bytes.len());
            bytes[at] = random.below(256) as u8;
        }
        if let Some((flow, tcp_flags)) = PlainFlow::read(ether_type, &bytes) {
            let packet = Packet::read(ether_type, &bytes);
            assert_eq!(packet, Ok(Packet::plain(&flow, tcp_flags)), "{bytes:?}");
            flows += 1;
        }
    }
    assert!(flows > 5_000, "{flows}");
}
