//! The links that need no interface keep the contract.

use sidecore_link::{EthernetAddress, Faults, LinkOptions, MemoryLink, Network};
use sidecore_link_contract as contract;
use sidecore_reactor::{EventFd, MakeSignal};
use sidecore_units::Nanos;

const HEADER_BYTES: usize = 82;

fn options(frame_bytes: usize, receive_frames: usize, transmit_frames: usize) -> LinkOptions {
    LinkOptions { frame_bytes, header_bytes: HEADER_BYTES, receive_frames, transmit_frames }
}

/// Jumbo frames and plain ones; rings that hold much, little, and next to nothing.
const SHAPES: [(usize, usize, usize); 4] =
    [(8_100, 64, 32), (1_500, 16, 64), (9_000, 2, 2), (66_000, 8, 4)];

#[test]
fn simulated_links_keep_the_contract() {
    for (frame_bytes, receive, transmit) in SHAPES {
        let faults = [
            Faults::default(),
            Faults { delay: Nanos(0), ..Faults::default() },
            Faults {
                delay: Nanos::from_millis(30),
                jitter: Nanos::from_millis(20),
                ..Faults::default()
            },
        ];
        for (seed, faults) in faults.into_iter().enumerate() {
            contract::check(&|| {
                let network = Network::new(seed as u64, faults);
                let options = options(frame_bytes, receive, transmit);
                let link =
                    |last| network.link(EthernetAddress([2, 0, 0, 0, 0, last]), &options).unwrap();
                contract::Pair::new(link(1), link(2))
            });
        }
    }
}

fn check_memory(frame_bytes: usize, receive: usize, transmit: usize, make_signal: MakeSignal) {
    contract::check(&|| {
        let options = options(frame_bytes, receive, transmit);
        let (host, client) = MemoryLink::pair(&options, make_signal).unwrap();
        // The IOhost is the left one in one run, the client in the other.
        if transmit > receive {
            contract::Pair::new(client, host)
        } else {
            contract::Pair::new(host, client)
        }
    });
}

#[test]
fn memory_links_keep_the_contract() {
    for (frame_bytes, receive, transmit) in SHAPES {
        check_memory(frame_bytes, receive, transmit, EventFd::peer_signal);
    }
}

#[test]
fn memory_links_keep_the_contract_with_signals_that_never_wait() {
    check_memory(8_100, 32, 64, sidecore_linux::peer_event);
}
