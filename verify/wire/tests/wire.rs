//! Wires between stations in network namespaces: what they count is what the stations see.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdout, Stdio};
use std::time::Duration;

use sidecore_kit::namespace::{End, Namespace};
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_link::{Frame, Link, LinkOptions, LinkQueue, PacketLink, PacketOptions, QUEUE_AT};
use sidecore_linux::Clock;
use sidecore_skip::skip;
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

const A: &str = "02:00:00:00:00:0a";
const B: &str = "02:00:00:00:00:0b";
const MTU: usize = 9000;
/// Of the wire's ends, to which packets of several frames come in one piece.
const WIRE_MTU: usize = 65_535;
const PATIENCE: Duration = Duration::from_secs(60);
/// Fewer than the rings hold: so none is lost but by chance.
const FRAMES: u16 = 600;

/// Two stations, with the wire between them.
struct Bench {
    wire: Process,
    said: BufReader<ChildStdout>,
    stations: [PacketLink; 2],
    _namespaces: [Namespace; 3],
}

fn open(station: &Namespace, offload: bool) -> PacketLink {
    let options = PacketOptions {
        interface: "eth0".to_owned(),
        ethertype: 0x88b5,
        queue: LinkQueue::ONLY,
        link: LinkOptions { frame_bytes: MTU, receive_frames: 2048, ..LinkOptions::new(0) },
        bypass_qdisc: true,
        offload,
    };
    station.within(|| PacketLink::open(&options).unwrap()).unwrap()
}

impl Bench {
    /// `None`, and a word about it, if this machine has no namespaces.
    fn new(options: &[&str]) -> Option<Self> {
        Self::of_stations(false, options)
    }

    /// Stations that send packets of several frames, or single frames.
    fn of_stations(offload: bool, options: &[&str]) -> Option<Self> {
        let namespaces = [(); 3].map(|()| Namespace::new());
        let [Ok(a), Ok(middle), Ok(b)] = namespaces else {
            skip("no network namespace can be made (CAP_SYS_ADMIN)");
            return None;
        };
        let end = |interface, address| End { interface, address };
        if let Err(error) = a.connect(&end("eth0", A), &middle, &end("left", B), MTU) {
            skip(error);
            return None;
        }
        b.connect(&end("eth0", B), &middle, &end("right", A), MTU).unwrap();
        for end in ["left", "right"] {
            middle.ip(&format!("link set dev {end} mtu {WIRE_MTU}")).unwrap();
        }
        let mut command = middle.command(env!("CARGO_BIN_EXE_sidecore-wire").as_ref());
        command.args(["--between", "left:right"]).args(options);
        let mut wire =
            Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped())).unwrap();
        let mut said = BufReader::new(wire.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: 1 wires, seed "), "{line}");
        let stations = [open(&a, offload), open(&b, offload)];
        Some(Self { wire, said, stations, _namespaces: [a, middle, b] })
    }

    fn order(&mut self, order: &str) {
        writeln!(self.wire.stdin.as_mut().unwrap(), "{order}").unwrap();
    }

    fn counts(&mut self) -> BTreeMap<String, u64> {
        self.order("counts");
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Sends a frame with this number from a station to the other one.
    fn send(&mut self, from: usize, number: u16) {
        let to = self.stations[1 - from].properties().address;
        let station = &mut self.stations[from];
        let mut buffers = Vec::new();
        wait::until("there is a buffer", PATIENCE, || {
            station.buffers(to, 1, &mut buffers);
            !buffers.is_empty()
        });
        let bytes = content(number);
        buffers[0].pieces().write(station.memory(), 0, &bytes);
        buffers[0].address(to, bytes.len());
        station.send(Nanos::ZERO, &mut buffers);
    }

    /// Sends frames one way, and returns those that come out, and the counts.
    fn exchange(&mut self, from: usize) -> (Vec<Vec<u8>>, BTreeMap<String, u64>) {
        let before = self.counts();
        (0..FRAMES).for_each(|number| self.send(from, number));
        let counts = wait::attempts(PATIENCE, || {
            let counts = self.counts();
            let due = counts["carried"] + counts["doubled"] - counts["lost"] - counts["parted"];
            let is_done = counts["carried"] == before["carried"] + u64::from(FRAMES)
                && counts["delivered"] == due;
            if is_done { Ok(counts) } else { Err(counts) }
        });
        let counts = counts.unwrap_or_else(|counts| panic!("frames are missing: {counts:?}"));
        (self.receive(1 - from, counts["delivered"] - before["delivered"]), counts)
    }

    /// Waits for this many frames at a station. A frame is counted before it leaves the wire.
    fn receive(&mut self, at: usize, count: u64) -> Vec<Vec<u8>> {
        let sender = self.stations[1 - at].properties().address;
        let station = &mut self.stations[at];
        let mut frames: Vec<Frame> = Vec::new();
        wait::until("the frames are at the station", PATIENCE, || {
            station.receive(Nanos::ZERO, usize::MAX, &mut frames);
            frames.len() as u64 >= count
        });
        let read = |frame: &Frame| {
            assert_eq!(frame.from, sender, "the frame has another sender");
            let mut bytes = vec![0; frame.len_bytes()];
            frame.pieces().read(station.memory(), 0, &mut bytes);
            bytes
        };
        let contents = frames.iter().map(read).collect();
        station.give_back(&mut frames);
        contents
    }
}

/// A frame of a size and content that follow from its number.
fn content(number: u16) -> Vec<u8> {
    let len = 60 + usize::from(number) * 37 % 8900;
    let mut bytes: Vec<u8> = (0..len).map(|at| (at as u16).wrapping_mul(number) as u8).collect();
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// How often each frame came, if it came undamaged.
fn times(frames: &[Vec<u8>]) -> BTreeMap<u16, u64> {
    let mut times = BTreeMap::new();
    for frame in frames {
        let number = u16::from_le_bytes([frame[0], frame[1]]);
        if *frame == content(number) {
            *times.entry(number).or_default() += 1;
        }
    }
    times
}

#[test]
fn a_wire_without_faults_carries_every_frame_both_ways_in_order() {
    let Some(mut bench) = Bench::new(&[]) else { return };
    for from in [0, 1] {
        let (frames, counts) = bench.exchange(from);
        let wanted: Vec<Vec<u8>> = (0..FRAMES).map(content).collect();
        assert!(frames == wanted, "{} frames of {FRAMES}: {counts:?}", frames.len());
    }
    let counts = bench.counts();
    let faults = ["lost", "doubled", "overtaken", "damaged", "parted", "crowded_out"];
    assert!(faults.iter().all(|fault| counts[*fault] == 0), "{counts:?}");
}

#[test]
fn each_fault_is_what_the_stations_see() {
    let Some(mut bench) = Bench::new(&["--seed", "7", "--loss", "10", "--doubling", "10"]) else {
        return;
    };
    let (frames, counts) = bench.exchange(0);
    let seen = times(&frames);
    assert!(counts["lost"] > 0 && counts["doubled"] > 0, "{counts:?}");
    assert_eq!(seen.len() as u64, u64::from(FRAMES) - counts["lost"]);
    assert_eq!(seen.values().filter(|times| **times == 2).count() as u64, counts["doubled"]);

    bench.order("chances 0 0 0 20");
    let damaged_before = bench.counts()["damaged"];
    let (frames, counts) = bench.exchange(1);
    let damaged = counts["damaged"] - damaged_before;
    assert!(damaged > 0 && frames.len() == usize::from(FRAMES));
    let wrong_bits = |(number, frame): (u16, &Vec<u8>)| -> u32 {
        let right = content(number);
        assert_eq!(frame.len(), right.len());
        frame.iter().zip(&right).map(|(one, other)| (one ^ other).count_ones()).sum()
    };
    let wrong: Vec<u32> = (0..FRAMES).zip(&frames).map(wrong_bits).collect();
    assert!(wrong.iter().all(|bits| *bits <= 1), "one bit of a frame, not more");
    assert_eq!(u64::from(wrong.iter().sum::<u32>()), damaged);

    bench.order("chances 0 0 20 0");
    let (frames, counts) = bench.exchange(0);
    assert!(counts["overtaken"] > 0 && times(&frames).len() == usize::from(FRAMES));
}

#[test]
fn frames_that_are_overtaken_come_later_than_some_behind_them() {
    let Some(mut bench) = Bench::new(&["--reordering", "50"]) else { return };
    // A frame waits for 160 us at most; some of the many are overtaken in that time.
    let is_in_order = wait::attempts(PATIENCE, || {
        let (frames, _) = bench.exchange(0);
        assert_eq!(times(&frames).len(), usize::from(FRAMES));
        let numbers: Vec<_> = frames.iter().map(|frame| [frame[1], frame[0]]).collect();
        if numbers.is_sorted() { Err(()) } else { Ok(()) }
    });
    assert!(is_in_order.is_ok(), "no frame was overtaken");
}

#[test]
fn segments_of_packets_have_fates_of_their_own() {
    const RUN: u64 = 8;
    const LEN: usize = 8000;
    let Some(mut bench) = Bench::of_stations(true, &["--seed", "7"]) else { return };
    let to = bench.stations[1].properties().address;
    let (mut sent, mut seen) = (0, BTreeMap::<u64, u64>::new());
    // One call of send has the frames travel together, once the other station has answered.
    let mut turn = |bench: &mut Bench, now: Nanos| {
        let [from, other] = &mut bench.stations;
        let mut buffers = Vec::new();
        from.buffers(to, RUN as usize, &mut buffers);
        for buffer in &mut buffers {
            let mut bytes = vec![sent as u8; LEN];
            bytes[..8].copy_from_slice(&u64::to_le_bytes(sent));
            // The receiver's only queue.
            bytes[QUEUE_AT] = 0;
            buffer.pieces().write(from.memory(), 0, &bytes);
            buffer.address(to, LEN);
            sent += 1;
        }
        from.send(now, &mut buffers);
        let mut frames = Vec::new();
        from.receive(now, 64, &mut frames);
        from.give_back(&mut frames);
        other.receive(now, 256, &mut frames);
        for frame in &frames {
            let mut bytes = vec![0; LEN];
            frame.pieces().read(other.memory(), 0, &mut bytes);
            let number = u64::from_le_bytes(*bytes.first_chunk().unwrap());
            let is_whole = |(at, byte): (usize, &u8)| at == QUEUE_AT || *byte == number as u8;
            assert!(bytes.iter().enumerate().skip(8).all(is_whole), "frame {number}");
            *seen.entry(number).or_default() += 1;
        }
        other.give_back(&mut frames);
        sent
    };
    let clock = Clock::new();
    let offloaded = |bench: &Bench| bench.stations[0].stats().counts().offloaded;
    wait::until("packets of several frames", PATIENCE, || {
        turn(&mut bench, clock.now());
        offloaded(&bench) > 0
    });
    bench.order("chances 10 10 10 0");
    let before = offloaded(&bench);
    wait::until("segments that were lost and doubled", PATIENCE, || {
        turn(&mut bench, clock.now());
        let counts = bench.counts();
        offloaded(&bench) - before > 1000 && counts["lost"] > 50 && counts["doubled"] > 50
    });
    let all = turn(&mut bench, clock.now());
    let doubled = seen.values().filter(|times| **times == 2).count();
    let missing = (0..all).filter(|number| !seen.contains_key(number)).count();
    assert!(doubled > 20 && missing > 20, "{doubled} doubled, {missing} missing of {all}");
}

#[test]
fn a_seed_decides_alike_each_time() {
    let run = || {
        let options = ["--seed", "42", "--loss", "20", "--doubling", "20", "--damage", "10"];
        Some(times(&Bench::new(&options)?.exchange(0).0))
    };
    let (Some(first), Some(second)) = (run(), run()) else { return };
    assert!(first == second && first.len() < usize::from(FRAMES));
}

#[test]
fn a_wire_that_is_cut_carries_nothing_until_it_is_mended() {
    let Some(mut bench) = Bench::new(&[]) else { return };
    bench.order("cut");
    let (frames, counts) = bench.exchange(0);
    assert!(frames.is_empty() && counts["parted"] == u64::from(FRAMES), "{counts:?}");
    bench.order("mend");
    assert_eq!(bench.exchange(0).0.len(), usize::from(FRAMES));
    // The end of the orders ends the wire, with the counts.
    drop(bench.wire.stdin.take());
    assert!(bench.wire.wait_for_end(PATIENCE).unwrap().unwrap().success());
}

#[test]
fn wires_that_cannot_be_are_refused_with_the_remedy() {
    let Ok(namespace) = Namespace::new() else { return skip("no network namespace") };
    let end = |interface| End { interface, address: A };
    let pair = namespace.connect(&end("left"), &namespace, &end("right"), MTU);
    if let Err(error) = pair {
        return skip(error);
    }
    let wire = |arguments: &[&str]| {
        let mut command = namespace.command(env!("CARGO_BIN_EXE_sidecore-wire").as_ref());
        let output = command.args(arguments).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (arguments, complaint) in [
        (["--between", "left:right"].as_slice(), "give each end that of the station"),
        (&["--between", "left:none"], "cannot open the end none"),
        (&["--between", "left"], "use LEFT:RIGHT"),
        (&["--between", "left:right", "--loss", "101"], "use 0 to 100"),
        (&["--between", "left:right", "--ethertype", "vrio"], "is no ethertype"),
        (&[], "--between"),
    ] {
        let said = wire(arguments);
        assert!(said.contains(complaint), "{arguments:?}: {said}");
    }
}
