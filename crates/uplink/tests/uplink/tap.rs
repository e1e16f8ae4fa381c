//! TAP interfaces.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_kit::wait;
use sidecore_linux::{Place, Tap};
use sidecore_memory::SharedPages;
use sidecore_net::contract::{QueueDriver as _, QueueRig, check_queue};
use sidecore_net::{
    Guard, PortConfig, PortQueue as _, PortStats, QueueState, Switch, SwitchOptions, SwitchUnit,
};
use sidecore_reactor::{IdleMode, Pollable as _};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_uplink::{TapOptions, TapQueue};

use crate::lan::{self, GUEST_MAC, HOST_MAC, Host, SOON, Way, ip, set_up};

const TAP: &str = "tap0";

/// Runs a test if this machine has TAP.
fn with_tap(test: impl FnOnce() + Send) {
    match File::open("/dev/net/tun") {
        Ok(_) => test(),
        Err(error) => sidecore_skip::skip(format_args!("/dev/net/tun: {error}")),
    }
}

/// Runs a test in a network namespace of its own, if this machine allows that and has TAP.
fn inside(test: impl FnOnce() + Send) {
    with_tap(|| lan::inside(test));
}

fn options() -> TapOptions {
    TapOptions { interface: TAP.to_owned(), mtu: Some(1500), offloads: true }
}

/// Opens an interface that this process may have just closed: until a child of another test runs
/// its program, it has the descriptors of this process, and the interface is still busy.
fn open_when_free(options: &TapOptions, stats: &Arc<PortStats>) -> TapQueue {
    wait::succeed(SOON, || TapQueue::open(options, Arc::clone(stats)))
}

/// An interface that is up.
fn open() -> Way {
    let stats = Arc::<PortStats>::default();
    let tap = open_when_free(&options(), &stats);
    ip(&format!("link set {TAP} address {HOST_MAC}"));
    set_up(TAP);
    let queue = Box::new(tap);
    Way { queue, stats, interface: TAP, of_host: TAP, cuts_datagrams: true }
}

#[test]
fn a_tap_keeps_the_contract_of_queues() {
    inside(|| {
        check_queue(&|| QueueRig { queue: open().queue, driver: Box::new(Host::new(TAP)) });
    });
}

#[test]
fn the_host_completes_checksums_and_cuts() {
    with_tap(|| lan::the_host_completes_checksums_and_cuts(open));
}

#[test]
fn large_messages_of_the_host_are_cut_for_those_that_need_it() {
    with_tap(|| lan::large_messages_of_the_host_are_cut_for_those_that_need_it(open));
}

#[test]
fn the_port_follows_the_interface_down_and_up_and_to_its_end() {
    with_tap(|| lan::the_port_follows_the_interface_down_and_up_and_to_its_end(open));
}

#[test]
fn frames_above_the_mtu_are_dropped_and_nothing_allocates() {
    with_tap(|| lan::frames_above_the_mtu_are_dropped_and_nothing_allocates(open));
}

#[test]
fn an_interface_stays_with_its_addresses_and_has_one_process() {
    inside(|| {
        let queue = TapQueue::open(&options(), Arc::default()).unwrap();
        let again = TapQueue::open(&options(), Arc::default()).unwrap_err();
        assert_eq!(again.kind(), std::io::ErrorKind::ResourceBusy);
        assert!(matches!(queue.state(), QueueState::Down(_)), "the interface is down at first");
        set_up(TAP);
        assert_eq!(queue.state(), QueueState::Up);
        assert_eq!(queue.mtu(), 1500);
        drop(queue);
        assert!(ip(&format!("link show {TAP}")).contains("NO-CARRIER"));
        let jumbo = TapOptions { mtu: Some(9000), ..options() };
        let queue = open_when_free(&jumbo, &Arc::default());
        let shown = ip(&format!("link show {TAP}"));
        assert!(shown.contains("LOWER_UP") && shown.contains("mtu 9000"), "{shown}");
        drop(queue);
        let as_it_is = TapOptions { mtu: None, ..options() };
        assert_eq!(open_when_free(&as_it_is, &Arc::default()).mtu(), 9000);

        for name in ["lo", "a-name-that-is-too-long", ""] {
            let other = TapOptions { interface: name.to_owned(), ..options() };
            // Without a name the kernel would choose one.
            assert!(TapQueue::open(&other, Arc::default()).is_err(), "{name:?}");
        }
    });
}

/// Frames from one interface to another, beside a loop of read and write alone: `cargo test
/// --release -p sidecore-uplink --test tap -- --ignored --nocapture` prints the ratio.
#[test]
#[ignore = "a measurement, not a test"]
fn frames_per_second_beside_a_bare_loop() {
    const FRAMES: usize = 256;
    inside(|| {
        let open = |name: &str| {
            let stats = Arc::<PortStats>::default();
            let named = TapOptions { interface: name.to_owned(), ..options() };
            let queue = TapQueue::open(&named, Arc::clone(&stats)).unwrap();
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
            (queue, stats)
        };
        let pages = SharedPages::new("bare", 1 << 20).unwrap();
        let bare = |name: &str| Tap::open(name, pages.memory().clone(), true, None).unwrap();
        let frame = [&GUEST_MAC.0[..], &HOST_MAC.0, &[0x88, 0xb5], &[1; 50]].concat();
        let (mut of_switch, mut of_loop, rounds) = (Duration::ZERO, Duration::ZERO, 2_000);
        let place = Place { start: 0, len_bytes: 4096 };
        for (name, address) in [("tap0", HOST_MAC), ("tap1", GUEST_MAC)] {
            drop(bare(name));
            ip(&format!("link set {name} address {address} up"));
        }
        for round in 0..10 {
            let mut host = Host::new("tap0");
            let (from, to) = (bare("tap0"), bare("tap1"));
            for _ in 0..rounds / 10 {
                (0..FRAMES).for_each(|_| host.send(&frame));
                let start = Instant::now();
                for _ in 0..FRAMES {
                    let len_bytes = from.read(place).unwrap();
                    to.write(Place { len_bytes, ..place }).unwrap();
                }
                of_loop += start.elapsed();
            }
            drop((from, to));
            let (from, _) = open("tap0");
            let (to, counts) = open("tap1");
            let switch = Switch::new(SwitchOptions::new(7));
            let mut unit = SwitchUnit::new("lan", switch, IdleMode::Poll).unwrap();
            let guard = Guard { mac: GUEST_MAC, ipv4: None, ipv6: None, router: false };
            let station = PortConfig { guard: Some(guard), ..PortConfig::station() };
            for (queue, config, stats) in
                [(from, PortConfig::uplink(), Arc::default()), (to, station, Arc::clone(&counts))]
            {
                let port = unit.switch_mut().add_port(Nanos(1), "tap", config, stats).unwrap();
                unit.attach(port, Box::new(queue)).unwrap();
            }
            let (start_of_all, mut goal) = (Instant::now(), 0);
            for _ in 0..rounds / 10 {
                (0..FRAMES).for_each(|_| host.send(&frame));
                goal += FRAMES as u64;
                let start = Instant::now();
                while counts.counts().out_frames < goal {
                    unit.poll(Nanos(2_000_000 + start_of_all.elapsed().as_nanos() as u64), 32);
                }
                of_switch += start.elapsed();
            }
            assert_eq!(counts.counts().out_errors, 0, "round {round}");
        }
        let frames = (rounds * FRAMES) as u32;
        let (of_switch, of_loop) = (of_switch / frames, of_loop / frames);
        let ratio = of_loop.as_secs_f64() / of_switch.as_secs_f64();
        println!("switch {of_switch:?}, loop {of_loop:?} per frame, ratio of rates {ratio:.2}");
    });
}
