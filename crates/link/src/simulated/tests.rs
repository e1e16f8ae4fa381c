use super::*;

const A: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
const B: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 2]);

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 64, transmit_frames: 64, ..LinkOptions::new(82) }
}

fn send(link: &mut SimulatedLink, now: Nanos, to: EthernetAddress, bytes: &[u8]) {
    let mut buffers = Vec::new();
    link.buffers(LinkAddress::Ethernet(to), 1, &mut buffers);
    buffers[0].pieces().write(link.memory(), 0, bytes);
    buffers[0].address(LinkAddress::Ethernet(to), bytes.len());
    link.send(now, &mut buffers);
}

/// The bytes of all frames that have arrived.
fn receive(link: &mut SimulatedLink, now: Nanos) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    link.receive(now, 1000, &mut frames);
    let bytes = |frame: &Frame| {
        let mut bytes = vec![0; frame.len_bytes()];
        assert_eq!(frame.pieces().read(link.memory(), 0, &mut bytes), bytes.len());
        bytes
    };
    let all = frames.iter().map(bytes).collect();
    link.give_back(&mut frames);
    all
}

/// A thousand numbered frames from A to B, one a microsecond, and what B gets of them.
fn thousand(seed: u64, faults: Faults) -> (Vec<Vec<u8>>, NetworkCounts) {
    let network = Network::new(seed, faults);
    let (mut a, mut b) =
        (network.link(A, &options()).unwrap(), network.link(B, &options()).unwrap());
    let mut got = Vec::new();
    for number in 0..1000_u64 {
        let now = Nanos::from_micros(number);
        let bytes: Vec<u8> = number.to_le_bytes().into_iter().cycle().take(200).collect();
        send(&mut a, now, B, &bytes);
        got.extend(receive(&mut b, now));
    }
    while let Some(at) = b.deadline() {
        got.extend(receive(&mut b, at));
    }
    (got, network.counts())
}

fn number(frame: &[u8]) -> u64 {
    u64::from_le_bytes(frame[..8].try_into().unwrap())
}

#[test]
fn a_perfect_wire_delivers_all_in_order_when_it_is_time() {
    let (got, counts) = thousand(1, Faults { jitter: Nanos::from_micros(30), ..Faults::default() });
    assert!(got.iter().map(|frame| number(frame)).eq(0..1000));
    assert_eq!(
        counts,
        NetworkCounts { carried: 1000, delivered: 1000, ..NetworkCounts::default() }
    );
    let network = Network::new(1, Faults { delay: Nanos(500), ..Faults::default() });
    let (mut a, mut b) =
        (network.link(A, &options()).unwrap(), network.link(B, &options()).unwrap());
    send(&mut a, Nanos(100), B, &[1; 100]);
    assert!(receive(&mut b, Nanos(599)).is_empty());
    assert_eq!(b.deadline(), Some(Nanos(600)));
    assert_eq!(receive(&mut b, Nanos(600)), [[1; 100]]);
    assert_eq!(b.deadline(), None);
}

#[test]
fn each_fault_happens_about_as_often_as_it_is_to_and_is_counted() {
    const TENTH: u32 = 100_000;
    let about_a_tenth = |count: u64| (60..160).contains(&count);
    let (got, counts) = thousand(2, Faults { lost: TENTH, ..Faults::default() });
    assert!(about_a_tenth(counts.lost) && got.len() as u64 == 1000 - counts.lost, "{counts:?}");
    let (got, counts) = thousand(3, Faults { doubled: TENTH, ..Faults::default() });
    assert!(
        about_a_tenth(counts.doubled) && got.len() as u64 == 1000 + counts.doubled,
        "{counts:?}"
    );
    let (got, counts) = thousand(4, Faults { overtaken: TENTH, ..Faults::default() });
    let disorder = got.windows(2).filter(|pair| number(&pair[0]) > number(&pair[1])).count();
    assert!(
        about_a_tenth(counts.overtaken) && disorder > 30 && got.len() == 1000,
        "{counts:?} {disorder}"
    );
    let (got, counts) = thousand(5, Faults { damaged: TENTH, ..Faults::default() });
    let wrong_bits = |frame: &Vec<u8>| -> u32 {
        let number = frame[..8].iter().zip(&frame[8..]).chain(frame[8..].iter().zip(&frame[16..]));
        number.map(|(one, other)| (one ^ other).count_ones()).sum()
    };
    assert_eq!(got.iter().filter(|frame| wrong_bits(frame) > 0).count() as u64, counts.damaged);
    assert!(about_a_tenth(counts.damaged), "{counts:?}");
    let (got, counts) = thousand(6, Faults { cut_short: TENTH, ..Faults::default() });
    assert_eq!(got.iter().filter(|frame| frame.len() < 200).count() as u64, counts.cut_short);
    assert!(
        about_a_tenth(counts.cut_short) && got.iter().all(|frame| !frame.is_empty()),
        "{counts:?}"
    );
}

#[test]
fn a_seed_is_a_history() {
    let faults = Faults {
        lost: 50_000,
        doubled: 50_000,
        overtaken: 50_000,
        damaged: 50_000,
        ..Faults::default()
    };
    assert_eq!(thousand(7, faults), thousand(7, faults));
    assert_ne!(thousand(7, faults).0, thousand(8, faults).0);
}

#[test]
fn cut_ways_black_holes_and_absent_links_swallow_frames() {
    let network =
        Network::new(1, Faults { delay: Nanos(1), black_hole_bytes: 1500, ..Faults::default() });
    let mut a = network.link(A, &options()).unwrap();
    send(&mut a, Nanos(0), B, &[1; 100]);
    let mut b = network.link(B, &options()).unwrap();
    network.cut(A, B);
    send(&mut a, Nanos(0), B, &[2; 100]);
    send(&mut b, Nanos(0), A, &[3; 100]);
    network.mend();
    send(&mut a, Nanos(0), B, &[4; 1501]);
    send(&mut a, Nanos(0), B, &[5; 1500]);
    assert_eq!(receive(&mut b, Nanos(1)), [[5; 1500]]);
    assert_eq!(receive(&mut a, Nanos(1)), [[3; 100]]);
    let counts = network.counts();
    assert_eq!((counts.strayed, counts.parted, counts.swallowed, counts.delivered), (1, 1, 1, 2));
    // A restart: what was on its way to the old link is gone.
    send(&mut a, Nanos(1), B, &[6; 100]);
    drop(b);
    let mut b = network.link(B, &options()).unwrap();
    send(&mut a, Nanos(2), B, &[7; 20]);
    let mut padded = [0; 46];
    padded[..20].fill(7);
    assert_eq!(receive(&mut b, Nanos(9)), [padded]);
}

#[test]
fn a_link_that_is_replaced_takes_nothing_from_its_successor() {
    let network = Network::new(1, Faults::default());
    let mut a = network.link(A, &options()).unwrap();
    let old = network.link(B, &options()).unwrap();
    let mut new = network.link(B, &options()).unwrap();
    drop(old);
    send(&mut a, Nanos::ZERO, B, &[1; 64]);
    assert_eq!(receive(&mut new, Nanos::MAX), [[1; 64]]);
}

#[test]
fn frames_that_find_no_slot_and_frames_too_long_are_counted() {
    let network = Network::new(1, Faults { delay: Nanos::ZERO, ..Faults::default() });
    let mut a = network.link(A, &options()).unwrap();
    let small = LinkOptions { receive_frames: 2, frame_bytes: 1_500, ..options() };
    let mut b = network.link(B, &small).unwrap();
    for len in [1_501, 100, 200, 300, 400] {
        send(&mut a, Nanos::ZERO, B, &vec![7; len]);
    }
    let mut frames = Vec::new();
    b.receive(Nanos::ZERO, 10, &mut frames);
    assert_eq!(frames.iter().map(Frame::len_bytes).collect::<Vec<_>>(), [100, 200]);
    assert_eq!((b.stats().dropped_truncated.get(), b.stats().dropped_full.get()), (1, 2));
    b.give_back(&mut frames);
    send(&mut a, Nanos::ZERO, B, &[8; 500]);
    assert_eq!(receive(&mut b, Nanos::ZERO), [[8; 500]]);
}

#[test]
fn a_broadcast_reaches_all_others() {
    let network = Network::new(1, Faults::default());
    let c = EthernetAddress([2, 0, 0, 0, 0, 3]);
    let mut links = [A, B, c].map(|address| network.link(address, &options()).unwrap());
    send(&mut links[1], Nanos::ZERO, EthernetAddress::BROADCAST, &[9; 64]);
    let got = links.each_mut().map(|link| receive(link, Nanos::MAX).len());
    assert_eq!(got, [1, 0, 1]);
}
