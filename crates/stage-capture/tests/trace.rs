//! Traces of the frames that a switch drops.
#![forbid(unsafe_code)]

mod net;

use net::{Filter, Net, frame, mac};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::contract::NIC;
use sidecore_net::{
    DropReason, PortConfig, PortId, Properties, StagePlace, SwitchError, TRACES_MAX, TraceId,
    Vlans, WAIT_TURNS, Way,
};
use sidecore_stage_capture::{
    DropCounts, DropPlace, FLOWS_MAX, Flow, Group, TRACE_RING_WORDS, TraceReader, TraceRecorder,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn begin(
    net: &mut Net,
    port: Option<PortId>,
    ring_words: usize,
) -> Result<(TraceReader, TraceId), SwitchError> {
    let (recorder, reader) = TraceRecorder::new(ring_words);
    net.switch.add_trace(port, Box::new(recorder)).map(|id| (reader, id))
}

fn trace(net: &mut Net, port: Option<PortId>) -> TraceReader {
    begin(net, port, TRACE_RING_WORDS).unwrap().0
}

/// The drops that the trace has seen, in the order of time.
fn seen(reader: &mut TraceReader) -> Vec<(DropPlace, DropCounts)> {
    reader.read(u64::MAX);
    reader.take().0
}

/// A drop: port and port of the sender, reason, rule, and the number of frames.
type Line = (usize, Option<usize>, DropReason, Option<u16>, u64);

/// The ports by their places in the net, the reason, the rule, and the number of frames.
fn summary(net: &Net, reader: &mut TraceReader) -> Vec<Line> {
    let place = |number| net.ports.iter().position(|port| port.number() == number).unwrap();
    let line = |(drop, counts): (DropPlace, DropCounts)| {
        let way = if drop.dropped.reason.is_ingress() { Way::FromStation } else { Way::ToStation };
        assert_eq!(drop.way, way);
        let (reason, rule) = (drop.dropped.reason, drop.dropped.rule);
        (place(drop.port), drop.sender.map(place), reason, rule, counts.frames)
    };
    seen(reader).into_iter().map(line).collect()
}

/// A frame of TCP from a port of station `from`.
fn tcp(to: usize, from: usize, port: u16) -> Vec<u8> {
    let address = |station: usize| [10, 0, 0, station as u8 + 1];
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
    packet.extend([address(from), address(to)].concat());
    packet.extend(port.to_be_bytes());
    packet.extend([0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0]);
    let mut frame = frame(mac(to), from, &packet);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame
}

#[test]
fn a_trace_has_every_kind_of_drop_with_its_ports_and_nothing_else() {
    let mut net = Net::new(&[Vlans::Access(1), Vlans::Access(1)]);
    net.add(Vlans::Access(1), Properties { frame_bytes: 518, ..NIC }, 1);
    net.set(1, StagePlace::Firewall, Some(Box::new(Filter)));
    let mut all = trace(&mut net, None);
    let last = net.ports[2];
    let mut of_two = trace(&mut net, Some(last));
    net.send(0, &frame(mac(1), 0, &[1; 46]));
    net.send(1, &frame(mac(0), 1, &[1; 46]));
    assert_eq!(seen(&mut all), [], "frames that arrive are not shown");
    // By a rule, before a station, for its size, for lack of buffers, and by the queue itself.
    net.send(0, &frame(mac(1), 0, &[0xee; 46]));
    net.send(0, &frame(mac(1), 0, &[0xee; 46]));
    net.send(0, &frame(mac(1), 7, &[1; 46]));
    net.send(1, &frame(mac(2), 1, &[1; 600]));
    net.send(1, &frame(mac(2), 1, &[1; 46]));
    net.send(1, &frame(mac(2), 1, &[2; 46]));
    for _ in 0..WAIT_TURNS {
        net.turn();
    }
    net.stations[2].send_fault(DropReason::Disabled);
    net.turn();
    let of_station_two = [
        (2, Some(1), DropReason::Mtu, None, 1),
        (2, Some(1), DropReason::NoBuffers, None, 1),
        (2, Some(2), DropReason::Disabled, None, 1),
    ];
    let others = [
        (1, Some(0), DropReason::RuleOut, Some(0), 2),
        (0, Some(0), DropReason::SpoofedMac, None, 1),
    ];
    assert_eq!(summary(&net, &mut all), [&others[..], &of_station_two].concat());
    assert_eq!(summary(&net, &mut of_two), of_station_two);
    // A trace of a port ends with it, after the frames that waited for it.
    net.send(0, &frame(mac(2), 0, &[1; 46]));
    drop(net.switch.remove_port(net.ports[2]).unwrap());
    assert!(of_two.is_closed() && !all.is_closed());
    let last = [(2, Some(0), DropReason::NoBuffers, None, 1)];
    assert_eq!((summary(&net, &mut of_two), summary(&net, &mut all)), (last.into(), last.into()));
    net.switch.close();
    assert!(all.is_closed());
}

#[test]
fn frames_of_a_flow_are_counted_together_with_times_and_vlan() {
    let trunk = || Vlans::Trunk { native: None, allowed: [5].into_iter().collect() };
    let mut net = Net::new(&[Vlans::Access(1), trunk()]);
    let mut reader = trace(&mut net, None);
    let start = net.now;
    let mut spoofed = tcp(1, 0, 4242);
    spoofed[11] = 9;
    let sent_bytes = spoofed.len() as u64;
    net.send(0, &spoofed);
    net.send(0, &spoofed);
    // In a VLAN that no other port has; without a tag; and a part of a header.
    let mut tagged = tcp(0, 1, 1);
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    net.send(1, &tagged);
    net.send(1, &tcp(0, 1, 1));
    net.send(1, &tagged[..13]);
    let drops = seen(&mut reader);
    let reasons = drops.iter().map(|(place, _)| (place.dropped.reason, place.vlan));
    let expected = [
        (DropReason::SpoofedMac, Some(1)),
        (DropReason::NoDestination, Some(5)),
        (DropReason::VlanIngress, None),
        (DropReason::Runt, None),
    ];
    assert_eq!(reasons.collect::<Vec<_>>(), expected);
    let times =
        (start.after(sidecore_units::Nanos(1_000)), start.after(sidecore_units::Nanos(2_000)));
    let (first_at, last_at) = times;
    let counts = DropCounts { first_at, last_at, frames: 2, bytes: 2 * sent_bytes };
    assert_eq!(drops[0].1, counts);
    assert_eq!(drops[0].0.group, Group::Flow(Flow::read(&spoofed).unwrap()));
    assert_eq!(drops[1].0.group, Group::Flow(Flow::read(&tagged).unwrap()));
    assert_eq!(drops[3].0.group, Group::Unread);
}

/// More flows than a trace counts, and more drops than its ring has room for: memory is bounded,
/// and the numbers are right.
#[test]
fn a_scan_of_ports_is_counted_in_bounded_memory_and_allocates_nothing_for_a_frame() {
    let mut net = Net::new(&[Vlans::Access(1), Vlans::Access(1)]);
    let isolated = PortConfig { is_isolated: true, floods: None, ..PortConfig::station() };
    for port in net.ports.clone() {
        net.switch.change_port(net.now, port, isolated.clone()).unwrap();
    }
    net.send(1, &frame(mac(0), 1, &[1; 46]));
    let mut reader = trace(&mut net, None);
    let flows = FLOWS_MAX as u16 + 500;
    for port in 0..flows {
        net.send(0, &tcp(1, 0, port));
    }
    net.send(0, &tcp(1, 0, 1));
    let drops = seen(&mut reader);
    assert_eq!(drops.len(), FLOWS_MAX + 1);
    let frames = |wanted: fn(&Group) -> bool| {
        let wanted = drops.iter().filter(|(place, _)| wanted(&place.group));
        wanted.map(|(_, counts)| counts.frames).sum::<u64>()
    };
    assert_eq!(frames(|group| matches!(group, Group::Others)), 500);
    assert_eq!(frames(|group| matches!(group, Group::Flow(_))), FLOWS_MAX as u64 + 1);
    assert!(drops.iter().all(|(place, _)| place.dropped.reason == DropReason::Isolated));

    // A ring for five records: 1 + 5 + 7 words for each frame of 54 bytes.
    let (mut small, id) = begin(&mut net, None, 65).unwrap();
    let mut made = 0;
    for _ in 0..100 {
        net.stations[0].send(&tcp(1, 0, 1));
        let before = allocations();
        net.switch.turn(net.now, 32);
        made += allocations() - before;
    }
    assert_eq!((made, small.read(u64::MAX)), (0, 5));
    let (drops, lost) = small.take();
    assert_eq!((drops[0].1.frames, lost), (5, 95));
    assert_eq!(small.take(), (Vec::new(), 0));
    // Missing frames are told with the counts in which they are missing.
    for _ in 0..100 {
        net.send(0, &tcp(1, 0, 1));
    }
    assert_eq!(small.take(), (Vec::new(), 0));
    assert_eq!((small.read(u64::MAX), small.take().1), (5, 95));
    drop(net.switch.remove_trace(id).unwrap());
    assert!(small.is_closed() && net.switch.remove_trace(id).is_none());
}

#[test]
fn a_switch_has_so_many_traces() {
    let mut net = Net::new(&[Vlans::Access(1)]);
    let readers: Vec<_> = (0..TRACES_MAX).map(|_| trace(&mut net, None)).collect();
    assert_eq!(begin(&mut net, None, 64).err(), Some(SwitchError::TooManyTraces));
    assert!(readers.iter().all(|reader| !reader.is_closed()));
    drop(net.switch.remove_port(net.ports[0]).unwrap());
    let gone = Some(net.ports[0]);
    assert_eq!(begin(&mut net, gone, 64).err(), Some(SwitchError::NoSuchPort));
}
