//! AF_XDP links on two interfaces that a cable connects, in each mode that their driver grants.
//! `SIDECORE_LINK_INTERFACES=eth1,eth2` names them. For network cards, and for guests whose cards
//! have zero copy, which virtual wires of the host's kernel have not: docs/links.md.

use std::io::Write as _;
use std::time::{Duration, Instant};

use sidecore_link::{Link as _, LinkError, LinkOptions, XdpLink, XdpOptions};
use sidecore_link_contract as contract;
use sidecore_linux::XdpMode;
use sidecore_skip::skip;

const VARIABLE: &str = "SIDECORE_LINK_INTERFACES";

fn open(interface: &str, mode: XdpMode) -> Result<XdpLink, LinkError> {
    let link = LinkOptions {
        frame_bytes: 1_500,
        receive_frames: 64,
        transmit_frames: 32,
        ..LinkOptions::new(82)
    };
    let interface = interface.to_owned();
    XdpLink::open(&XdpOptions { interface, ethertype: 0x88b5, link, mode: Some(mode) })
}

fn wait_for_carrier(interface: &str) {
    let path = format!("/sys/class/net/{interface}/carrier");
    let end = Instant::now() + Duration::from_secs(20);
    while std::fs::read_to_string(&path).is_ok_and(|carrier| carrier.trim() != "1") {
        assert!(Instant::now() < end, "{interface} has no carrier");
        std::thread::yield_now();
    }
}

#[test]
fn links_on_named_interfaces_keep_the_contract_in_each_granted_mode() {
    let names = std::env::var(VARIABLE).unwrap_or_default();
    let Some((left, right)) = names.split_once(',') else {
        return skip(format_args!("{VARIABLE} names no two interfaces"));
    };
    // Not by a macro: the harness would keep it to itself.
    let mut log = std::io::stderr();
    let mut granted = 0;
    for mode in [XdpMode::ZeroCopy, XdpMode::Driver, XdpMode::Generic] {
        match open(left, mode) {
            Ok(link) => {
                let _ = writeln!(log, "{left}: granted {}", link.properties().mode);
            }
            Err(error) => {
                let _ = writeln!(log, "{left}: {mode:?} refused: {error}");
                continue;
            }
        }
        let open = || {
            let pair = [left, right].map(|name| open(name, mode).unwrap());
            // A card that gets a program begins anew.
            [left, right].into_iter().for_each(wait_for_carrier);
            let [left, right] = pair;
            contract::Pair::new(left, right)
        };
        match mode {
            XdpMode::ZeroCopy => contract::check_without_counts(&open),
            _ => contract::check(&open),
        }
        let _ = writeln!(log, "{left}, {right}: the contract holds with {mode:?}");
        granted += 1;
    }
    assert!(granted > 0, "the interfaces have no AF_XDP");
}
