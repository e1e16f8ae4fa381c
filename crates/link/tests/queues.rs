//! Links with several queues, each of which gets the frames that name it.

use sidecore_link::{
    Link, LinkAddress, LinkDescription, LinkError, LinkOptions, Medium, QUEUE_AT, open,
};
use sidecore_link_contract as contract;
use sidecore_skip::skip;
use sidecore_units::Nanos;

mod veth;
use veth::{LEFT, RIGHT, Veth};

const ETHERTYPE: u16 = 0x88b5;

fn description(medium: Medium, queues: usize) -> LinkDescription {
    let options = LinkOptions { receive_frames: 64, transmit_frames: 32, ..LinkOptions::new(82) };
    LinkDescription { medium, queues, options }
}

fn packet(interface: &str) -> Medium {
    Medium::Packet {
        interface: interface.to_owned(),
        ethertype: ETHERTYPE,
        bypass_qdisc: true,
        offload: true,
    }
}

fn xdp(interface: &str) -> Medium {
    Medium::Xdp { interface: interface.to_owned(), ethertype: ETHERTYPE, mode: None }
}

fn udp(listen: &str) -> Medium {
    Medium::Udp { listen: listen.parse().unwrap(), coalesce: true }
}

fn open_in(
    veth: &Veth,
    end: &str,
    medium: Medium,
    queues: usize,
) -> Result<Vec<Box<dyn Link>>, LinkError> {
    veth.within(end, || open(&description(medium, queues)))
}

fn send(link: &mut dyn Link, to: LinkAddress, frames: &[Vec<u8>]) {
    let mut buffers = Vec::new();
    link.buffers(to, frames.len(), &mut buffers);
    assert_eq!(buffers.len(), frames.len());
    for (buffer, bytes) in buffers.iter_mut().zip(frames) {
        buffer.pieces().write(link.memory(), 0, bytes);
        buffer.address(to, bytes.len());
    }
    link.send(Nanos::ZERO, &mut buffers);
}

fn receive(link: &mut dyn Link) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    link.receive(Nanos::ZERO, 64, &mut frames);
    let bytes = frames
        .iter()
        .map(|frame| {
            let mut bytes = vec![0; frame.len_bytes()];
            frame.pieces().read(link.memory(), 0, &mut bytes);
            bytes
        })
        .collect();
    link.give_back(&mut frames);
    bytes
}

/// A frame that names a queue.
fn frame(seed: usize, queue: u8, len_bytes: usize) -> Vec<u8> {
    let mut bytes = contract::pattern(seed, len_bytes);
    bytes[QUEUE_AT] = queue;
    bytes
}

/// Frames of one sender, in batches of one size, arrive at the queues that they name, in order.
fn check_steering(from: &mut dyn Link, to: &mut [Box<dyn Link>]) {
    let address = to[0].properties().address;
    let count = to.len();
    let mut seed = 0;
    let mut expected = vec![Vec::new(); count];
    for queue in [0, 1, 2, 3, 4, 5, 127, 128, 254, 255_u8] {
        let batch: Vec<_> = (0..8)
            .map(|index| {
                seed += 1;
                frame(seed, if index % 3 == 2 { 0 } else { queue }, 300 + 4000 * (index % 2))
            })
            .collect();
        for frame in &batch {
            expected[usize::from(frame[QUEUE_AT]) % count].push(frame.clone());
        }
        send(from, address, &batch);
        for (link, expected) in to.iter_mut().zip(&mut expected) {
            let received = receive(&mut **link);
            assert!(received == *expected, "queue {queue}: {} frames", received.len());
            expected.clear();
        }
    }
    assert!(to.iter().all(|link| link.stats().dropped_full.get() == 0));
}

#[test]
fn packet_queues_get_the_frames_that_name_them() {
    let Some(veth) = Veth::new(9_000) else { return };
    let mut left = open_in(&veth, LEFT, packet(LEFT), 1).unwrap();
    for count in [1, 2, 3, 5] {
        let mut right = open_in(&veth, RIGHT, packet(RIGHT), count).unwrap();
        assert_eq!(right.len(), count);
        check_steering(&mut *left[0], &mut right);
        // A frame that is too short to name a queue is no frame of a link with several.
        send(&mut *left[0], right[0].properties().address, &[vec![0; QUEUE_AT]]);
        let received: usize = right.iter_mut().map(|link| receive(&mut **link).len()).sum();
        assert_eq!(received, usize::from(count == 1));
    }
}

#[test]
fn udp_queues_share_a_port_and_get_the_frames_that_name_them() {
    for (listen, queues) in [("127.0.0.1:0", 3), ("[::1]:0", 2), ("127.0.0.1:0", 1)] {
        let mut left = open(&description(udp(listen), 1)).unwrap();
        let mut right = open(&description(udp(listen), queues)).unwrap();
        let addresses: Vec<_> = right.iter().map(|link| link.properties().address).collect();
        assert!(addresses.windows(2).all(|pair| pair[0] == pair[1]), "{addresses:?}");
        check_steering(&mut *left[0], &mut right);
        // Another daemon cannot have the port, although its queues would share it among them.
        let LinkAddress::Udp(taken) = addresses[0] else { panic!("{addresses:?}") };
        for queues in [1, 2] {
            let again = open(&description(udp(&taken.to_string()), queues)).map(drop).unwrap_err();
            assert!(again.to_string().contains("bind a UDP socket"), "{again}");
        }
    }
}

#[test]
fn xdp_queues_are_those_of_the_interface() {
    let Some(veth) = Veth::with_queues(9_000, 3) else { return };
    let (mut left, mut right) =
        match (open_in(&veth, LEFT, xdp(LEFT), 3), open_in(&veth, RIGHT, xdp(RIGHT), 3)) {
            (Ok(left), Ok(right)) => (left, right),
            (Err(error), _) | (_, Err(error)) => return skip(error),
        };
    let address = right[0].properties().address;
    for round in 0..100 {
        for (queue, (from, to)) in left.iter_mut().zip(&mut right).enumerate() {
            // The wire keeps queues apart by itself, whatever the frame names.
            let bytes = frame(round, 7, 100 + 4000 * (round % 2));
            send(&mut **from, address, std::slice::from_ref(&bytes));
            let mut frames = Vec::new();
            while frames.is_empty() {
                frames = receive(&mut **to);
            }
            assert!(frames == [bytes], "round {round}, queue {queue}");
        }
    }
    assert!(right.iter_mut().all(|link| receive(&mut **link).is_empty()));
    drop(right);
    let error = open_in(&veth, RIGHT, xdp(RIGHT), 4).map(drop).unwrap_err().to_string();
    assert!(error.contains("has 3 receive queues, and the link 4"), "{error}");
    assert!(error.contains("ethtool --set-channels right combined 4"), "{error}");
}

#[test]
fn errors_name_the_remedy() {
    let Some(veth) = Veth::new(9_000) else { return };
    for medium in [packet("no-such-one"), xdp("no-such-one")] {
        let error = open_in(&veth, LEFT, medium, 1).map(drop).unwrap_err().to_string();
        assert!(error.contains("`no-such-one`") && error.contains("`ip link`"), "{error}");
    }
    veth.ip(LEFT, &format!("link set {LEFT} mtu 1000"));
    for medium in [packet(LEFT), xdp(LEFT)] {
        let error = open_in(&veth, LEFT, medium, 1).map(drop).unwrap_err().to_string();
        assert!(error.contains("`ip link set dev left mtu 8100`"), "{error}");
    }
    for queues in [0, 256] {
        for medium in [packet(RIGHT), xdp(RIGHT), udp("127.0.0.1:0")] {
            let error = open_in(&veth, RIGHT, medium, queues).map(drop).unwrap_err().to_string();
            assert!(error.starts_with(&format!("queues = {queues}")), "{error}");
        }
    }
}

#[test]
fn a_process_without_capabilities_is_told_which() {
    let Some(veth) = Veth::new(9_000) else { return };
    for (medium, capabilities) in
        [(packet(LEFT), "CAP_NET_RAW"), (xdp(LEFT), "CAP_NET_RAW CAP_NET_ADMIN CAP_BPF")]
    {
        let opened = veth.within(LEFT, || {
            // Of this thread alone, which ends with the closure.
            rustix::thread::set_capabilities(
                None,
                rustix::thread::CapabilitySets {
                    effective: rustix::thread::CapabilitySet::empty(),
                    permitted: rustix::thread::CapabilitySet::empty(),
                    inheritable: rustix::thread::CapabilitySet::empty(),
                },
            )
            .unwrap();
            open(&description(medium, 1)).map(drop)
        });
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(&format!("AmbientCapabilities={capabilities}")), "{error}");
    }
}
