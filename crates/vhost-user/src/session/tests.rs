use std::io;
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::prelude::*;
use sidecore_memory::reaper::wait_until_reaped;
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_ring::{RingFormat, RingState};

use super::*;
use crate::message::{Log, MessageError};
use crate::testing::*;

mod configuration;
mod log;
mod random;

const SPLIT: u64 = VERSION_1 | EVENT_IDX;
const PACKED: u64 = VERSION_1 | RING_PACKED;

/// A front end and its session.
struct Fixture {
    device: Arc<Recorder>,
    session: Session,
}

impl Fixture {
    fn new() -> Self {
        let device = Recorder::new();
        Self { session: Session::new(device.clone()), device }
    }

    /// Makes a negotiated session with a megabyte of memory, and no rings yet.
    fn ready(driver_features: u64) -> Self {
        let mut fixture = Self::new();
        fixture.all(negotiation(driver_features));
        fixture.ok(add_region(region(0, MEGABYTE), "ready"));
        fixture
    }

    /// Makes a negotiated session with memory, and with some rings running.
    fn running(driver_features: u64, indexes: &[u32]) -> Self {
        let mut fixture = Self::ready(driver_features);
        for index in indexes {
            fixture.all(ring_setup(*index, 128, 0));
        }
        assert_eq!(fixture.device.running().len(), indexes.len());
        fixture.device.events();
        fixture
    }

    fn send(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        self.session.handle(message)
    }

    /// Sends a request with a reply of its own, and returns the reply.
    fn ask(&mut self, message: Message) -> Body {
        let request = message.request;
        let reply = self.send(message).unwrap().unwrap();
        assert_eq!(
            (reply.request, reply.flags.reply, reply.flags.need_reply),
            (request, true, false)
        );
        assert!(
            reply.fds.is_empty(),
            "no descriptor of this process is sent to a client, which could keep it"
        );
        reply.body
    }

    /// Sends a request that wants an acknowledgement. Returns whether the request succeeded.
    fn ack(&mut self, message: Message) -> bool {
        match self.ask(message.needing_reply()) {
            Body::U64(code) => code == 0,
            body => panic!("{body:?} acknowledges nothing"),
        }
    }

    fn ok(&mut self, message: Message) {
        let text = format!("{message:?}");
        assert!(self.ack(message), "{text}");
    }

    fn all(&mut self, messages: Vec<Message>) {
        for message in messages {
            let text = format!("{message:?}");
            if let Some(Message { body: Body::U64(code), flags, .. }) =
                self.send(message).expect(&text)
            {
                assert!(code == 0 || flags.reply, "{text}");
            }
        }
    }

    fn base(&mut self, index: u32) -> u32 {
        match self.ask(vring(Request::GetVringBase, index, 0)) {
            Body::VringState(state) if state.index == index => state.num,
            body => panic!("{body:?} is no base"),
        }
    }

    fn status(&mut self) -> u64 {
        match self.ask(plain(Request::GetStatus)) {
            Body::U64(status) => status,
            body => panic!("{body:?} is no status"),
        }
    }
}

fn at(next: u16) -> RingState {
    RingState { next_avail: next, next_used: next }
}

fn started(index: u16, state: RingState) -> Event {
    Event::Start { index, state, format: RingFormat::Split, kick: true, call: true }
}

#[test]
fn negotiation_offers_the_device_and_exactly_eight_protocol_features() {
    let mut fixture = Fixture::new();
    let features = DEVICE_FEATURES | 1 << 30 | 1 << 26;
    assert_eq!(fixture.ask(plain(Request::GetFeatures)), Body::U64(features));
    let protocol = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15 | 1 << 16;
    assert_eq!(fixture.ask(plain(Request::GetProtocolFeatures)), Body::U64(protocol));
    assert_eq!(fixture.ask(plain(Request::GetQueueNum)), Body::U64(QUEUES.into()));
    fixture.ok(number(Request::SetProtocolFeatures, protocol));
    assert_eq!(fixture.ask(plain(Request::GetMaxMemSlots)), Body::U64(509));
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut fixture = Fixture::new();
    for (request, bits) in [(Request::SetFeatures, 1 << 27), (Request::SetProtocolFeatures, 1 << 2)]
    {
        assert!(matches!(
            fixture.send(number(request, bits)),
            Err(ProtocolError::FeaturesNotOffered { bits: refused, .. }) if refused == bits
        ));
    }
}

#[test]
fn an_acknowledgement_is_sent_when_asked_for_and_negotiated() {
    let mut fixture = Fixture::new();
    assert!(
        fixture.send(plain(Request::SetOwner).needing_reply()).unwrap().is_none(),
        "not negotiated"
    );
    fixture.all(negotiation(SPLIT));
    assert!(fixture.send(plain(Request::SetOwner)).unwrap().is_none(), "not asked for");
    assert!(fixture.ack(plain(Request::SetOwner)));
    assert!(!fixture.ack(number(Request::SetFeatures, 1 << 63)));
    // A request with a reply of its own gets no acknowledgement.
    assert_eq!(
        fixture.ask(plain(Request::GetFeatures).needing_reply()),
        Body::U64(DEVICE_FEATURES | PROTOCOL_FEATURES | 1 << 26)
    );
}

#[test]
fn a_ring_runs_once_it_has_all_its_settings() {
    let mut fixture = Fixture::ready(SPLIT);
    for message in ring_setup(1, 128, 7) {
        assert!(fixture.device.events().is_empty());
        fixture.ok(message);
    }
    assert_eq!(fixture.device.events(), [started(1, at(7))]);
    assert_eq!(fixture.device.features_of(1), SPLIT, "without vhost-user's own bit");
    assert_eq!(fixture.device.running(), [1], "SeaBIOS starts one queue only");
}

#[test]
fn the_order_in_which_a_ring_is_described_does_not_matter() {
    for rotation in 0..6 {
        let mut fixture = Fixture::new();
        fixture.all(negotiation(SPLIT));
        let mut messages = ring_setup(0, 128, 0);
        // Only the base has to come before the ring starts.
        messages.retain(|message| message.request != Request::SetVringBase);
        messages.push(add_region(region(0, MEGABYTE), "order"));
        messages.rotate_left(rotation);
        for message in messages {
            // A complete ring without its memory is refused; once the memory comes, the ring runs.
            fixture.send(message).unwrap();
        }
        assert_eq!(fixture.device.running(), [0], "rotated by {rotation}");
    }
}

#[test]
fn without_protocol_features_rings_are_enabled_from_the_start() {
    let mut fixture = Fixture::new();
    fixture.all(vec![plain(Request::SetOwner), number(Request::SetFeatures, SPLIT)]);
    fixture.all(vec![memory_table(&[region(0, MEGABYTE)], "legacy")]);
    fixture.all(ring_setup(0, 128, 0).into_iter().take(4).collect());
    assert_eq!(fixture.device.running(), [0]);
}

#[test]
fn a_ring_without_a_kick_descriptor_is_polled() {
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ok(vring(Request::SetVringNum, 0, 64));
    fixture.ok(addresses(0, 0));
    fixture.ok(vring(Request::SetVringEnable, 0, 1));
    fixture.ok(no_eventfd(Request::SetVringCall, 0));
    assert!(fixture.device.running().is_empty());
    fixture.ok(no_eventfd(Request::SetVringKick, 0));
    let format = RingFormat::Split;
    let expected = Event::Start { index: 0, state: at(0), format, kick: false, call: false };
    assert_eq!(fixture.device.events(), [expected]);
}

#[test]
fn rings_that_were_never_described_are_left_alone() {
    let mut fixture = Fixture::running(SPLIT, &[2]);
    for index in 0..4 {
        fixture.ok(vring(Request::SetVringEnable, index, 1));
    }
    assert_eq!(fixture.device.running(), [2]);
    assert_eq!(fixture.base(0), 0);
    assert!(fixture.device.events().is_empty());
}

#[test]
fn a_stopped_ring_returns_its_base_and_runs_again_after_another_kick() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.device.serve(0, 5);
    assert_eq!(fixture.base(0), 5);
    assert_eq!(fixture.base(0), 5, "and again");
    assert_eq!(fixture.device.events(), [Event::Stop { index: 0 }]);
    fixture.ok(vring(Request::SetVringEnable, 0, 1));
    assert!(fixture.device.events().is_empty());
    fixture.ok(eventfd(Request::SetVringKick, 0));
    assert_eq!(
        fixture.device.events(),
        [started(0, at(5))],
        "from its position, with the same call"
    );
}

#[test]
fn a_packed_ring_starts_and_stops_with_both_wrap_counters() {
    let mut fixture = Fixture::ready(PACKED);
    fixture.all(ring_setup(0, 128, 0x8003_8005));
    let state = RingState { next_avail: 0x8005, next_used: 0x8003 };
    let format = RingFormat::Packed;
    assert_eq!(
        fixture.device.events(),
        [Event::Start { index: 0, state, format, kick: true, call: true }]
    );
    fixture.device.serve(0, 2);
    assert_eq!(fixture.base(0), 0x8005_8007);
    assert_eq!(fixture.base(1), 0x8000_8000, "a fresh one");
}

#[test]
fn a_position_does_not_outlive_its_ring_format() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.device.serve(0, 5);
    fixture.base(0);
    fixture.ok(number(Request::SetFeatures, PACKED | PROTOCOL_FEATURES));
    fixture.ok(eventfd(Request::SetVringKick, 0));
    let state = RingState::fresh(RingFormat::Packed);
    assert!(matches!(
        fixture.device.events()[..], [_, Event::Start { state: from, .. }] if from == state
    ));
}

#[test]
fn disabling_stops_a_ring_and_enabling_resumes_it() {
    let mut fixture = Fixture::running(SPLIT, &[0, 1]);
    fixture.device.serve(1, 9);
    fixture.ok(vring(Request::SetVringEnable, 1, 0));
    fixture.ok(vring(Request::SetVringEnable, 1, 0));
    fixture.ok(vring(Request::SetVringEnable, 1, 1));
    fixture.ok(vring(Request::SetVringEnable, 1, 1));
    assert_eq!(fixture.device.events(), [Event::Stop { index: 1 }, started(1, at(9))]);
    assert!(!fixture.ack(vring(Request::SetVringEnable, 1, 2)));
}

#[test]
fn a_call_is_replaced_without_stopping_the_ring() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.ok(eventfd(Request::SetVringCall, 0));
    fixture.ok(no_eventfd(Request::SetVringCall, 0));
    fixture.ok(eventfd(Request::SetVringCall, 1));
    let calls = [Event::SetCall { index: 0, call: true }, Event::SetCall { index: 0, call: false }];
    assert_eq!(fixture.device.events(), calls);
}

#[test]
fn a_kick_or_an_error_eventfd_is_replaced_around_a_stop() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.device.serve(0, 3);
    fixture.ok(eventfd(Request::SetVringKick, 0));
    fixture.device.serve(0, 1);
    fixture.ok(eventfd(Request::SetVringErr, 0));
    let stop = || Event::Stop { index: 0 };
    assert_eq!(fixture.device.events(), [stop(), started(0, at(3)), stop(), started(0, at(4))]);
}

#[test]
fn a_ring_that_was_in_use_before_is_not_served_on_a_device_that_misses_answered_writes() {
    for (driver_features, fresh) in [(SPLIT, 0), (PACKED, 0x8000_8000)] {
        let mut fixture = Fixture::ready(driver_features);
        fixture.device.set_loss(Some("the log is gone"));
        // A ring at its first position is served, also after a stop and another start.
        fixture.all(ring_setup(0, 128, fresh));
        fixture.device.serve(0, 3);
        let Body::VringState(stopped) = fixture.ask(vring(Request::GetVringBase, 0, 0)) else {
            panic!("no base")
        };
        fixture.all(ring_setup(0, 128, stopped.num));
        fixture.ok(number(Request::SetStatus, 0));
        fixture.ok(number(Request::SetFeatures, driver_features | PROTOCOL_FEATURES));
        fixture.all(ring_setup(0, 128, stopped.num));
        assert_eq!(fixture.device.running(), [0]);
        // The connection ends, although an acknowledgement was asked for.
        let refused = ring_setup(1, 128, fresh + 5)
            .into_iter()
            .find_map(|message| fixture.send(message).err());
        let refused = refused.expect("the ring is served");
        assert!(refused.to_string().contains("the log is gone"), "{refused}");
        assert_eq!(fixture.device.running(), [0]);
        // A device without a loss serves the ring.
        let mut next = Fixture::ready(driver_features);
        next.device.set_loss(None);
        next.all(ring_setup(1, 128, fresh + 5));
        assert_eq!(next.device.running(), [1]);
    }
}

#[test]
fn a_ring_whose_position_came_round_to_the_first_was_in_use_before() {
    // The last write of the device that is gone: a split ring's last used element, a packed ring's
    // last descriptor.
    let split = (SPLIT, 0, 2048 + 4 + 127 * 8, [0; 4]);
    let packed = (PACKED, 0x8000_8000, 127 * 16 + 8, [3, 0, 0, 0]);
    for (driver_features, fresh, offset_bytes, id_and_flags) in [split, packed] {
        let mut fixture = Fixture::ready(driver_features);
        fixture.device.set_loss(Some("the log is gone"));
        let written = [1_u32.to_le_bytes(), id_and_flags].concat();
        let at = GuestAddress(4096 + offset_bytes + if driver_features == SPLIT { 4 } else { 0 });
        fixture.session.memory.write_slice(at, &written, &mut RegionHint::default()).unwrap();
        fixture.all(ring_setup(0, 128, fresh));
        let refused =
            ring_setup(1, 128, fresh).into_iter().find_map(|message| fixture.send(message).err());
        assert!(refused.expect("the ring is served").to_string().contains("the log is gone"));
        assert_eq!(fixture.device.running(), [0]);
    }
}

#[test]
fn a_running_ring_accepts_only_the_same_settings() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.ok(vring(Request::SetVringNum, 0, 128));
    fixture.ok(addresses(0, 0));
    assert!(!fixture.ack(vring(Request::SetVringNum, 0, 64)));
    assert!(!fixture.ack(addresses(0, 8192)));
    assert!(!fixture.ack(vring(Request::SetVringBase, 0, 0)));
    fixture.ok(number(Request::SetFeatures, SPLIT | PROTOCOL_FEATURES));
    assert!(!fixture.ack(number(Request::SetFeatures, PACKED | PROTOCOL_FEATURES)));
    assert!(fixture.device.events().is_empty());
    // Without an acknowledgement the error closes the connection.
    assert!(matches!(
        fixture.send(vring(Request::SetVringNum, 0, 64)),
        Err(ProtocolError::RingRuns { .. })
    ));
}

#[test]
fn impossible_sizes_addresses_and_rings_are_refused() {
    let mut fixture = Fixture::ready(SPLIT);
    for size in [0, 32769, 65536, u32::MAX] {
        assert!(!fixture.ack(vring(Request::SetVringNum, 0, size)), "{size}");
    }
    fixture.ok(vring(Request::SetVringNum, 0, 32768));
    for index in [4, 256, u32::MAX] {
        assert!(!fixture.ack(vring(Request::SetVringNum, index, 64)));
        assert!(!fixture.ack(addresses(index, 0)));
    }
    assert!(!fixture.ack(eventfd(Request::SetVringKick, 4)));
    let mut logging = addresses(0, 0);
    let Body::VringAddress(address) = &mut logging.body else { unreachable!() };
    address.flags = 2;
    assert!(!fixture.ack(logging));
    assert!(matches!(
        fixture.send(vring(Request::GetVringBase, 4, 0).needing_reply()),
        Err(ProtocolError::NoSuchRing { index: 4, queue_count: 4 })
    ));
}

/// A made-up base is refused at its request, and not taken for another base.
#[test]
fn a_position_that_no_ring_has_is_refused() {
    for base in [0x1_0000, 0x8000_0000, u32::MAX] {
        let mut split = Fixture::ready(SPLIT);
        assert!(!split.ack(vring(Request::SetVringBase, 0, base)), "{base:#x}");
        // In every order of the requests.
        let mut messages = negotiation(SPLIT);
        let (features, mut early) = (messages.pop().unwrap(), Fixture::new());
        early.all(messages);
        early.ok(vring(Request::SetVringBase, 0, base));
        assert!(!early.ack(features), "{base:#x}");
    }
    let mut packed = Fixture::ready(PACKED);
    assert!(packed.ack(vring(Request::SetVringBase, 0, 0x807f_007f)));
    // The base for the other format is forgotten.
    packed.ok(number(Request::SetFeatures, SPLIT));
    assert_eq!(packed.base(0), 0);
}

#[test]
fn a_change_of_memory_stops_all_rings_before_it_unmaps_anything() {
    let mut fixture = Fixture::new();
    fixture.all(negotiation(SPLIT));
    fixture.ok(memory_table(&[region(0, MEGABYTE)], "quiesce-old"));
    for index in [0, 1, 3] {
        fixture.all(ring_setup(index, 128, 0));
    }
    fixture.device.serve(1, 11);
    fixture.device.serve(3, 33);
    fixture.device.events();
    fixture.ok(memory_table(&[region(0, MEGABYTE)], "quiesce-new"));
    let stops = [0, 1, 3].map(|index| Event::Stop { index });
    let starts = [(0, 0), (1, 11), (3, 33)].map(|(index, next)| started(index, at(next)));
    assert_eq!(fixture.device.events(), [stops, starts].concat());
    for maps in fixture.device.maps_at_stop() {
        assert!(maps.contains("quiesce-old"), "unmapped under a running ring");
    }
    wait_until_reaped();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("quiesce-old") && maps.contains("quiesce-new"));
}

#[test]
fn a_memory_table_that_cannot_be_mapped_leaves_the_rings_undisturbed() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    let memory = fixture.device.memory_of(0);
    assert!(!fixture.ack(memory_table(&[region(0, MEGABYTE), region(4096, MEGABYTE)], "overlap")));
    let mut short = memory_table(&[region(0, MEGABYTE)], "short");
    short.fds = vec![memfd("short", 4096)];
    assert!(!fixture.ack(short));
    // The program that serves a file's filesystem could make the rings wait.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let mut on_disk = memory_table(&[region(0, 16)], "disk");
    on_disk.fds = vec![std::fs::File::options().read(true).write(true).open(path).unwrap().into()];
    assert!(!fixture.ack(on_disk));
    assert!(!fixture.ack(add_region(region(0, MEGABYTE), "twice")));
    assert!(!fixture.ack(remove_region(region(MEGABYTE, MEGABYTE))));
    assert!(fixture.device.events().is_empty());
    assert!(fixture.device.memory_of(0).is_same(&memory));
}

#[test]
fn a_ring_outside_a_new_memory_table_stays_stopped_and_the_table_is_acknowledged_as_failed() {
    let mut fixture = Fixture::running(SPLIT, &[0, 1]);
    fixture.device.serve(0, 6);
    // The new table has ring 1's page, but not ring 0's.
    assert!(!fixture.ack(memory_table(&[region(4096, MEGABYTE)], "moved")));
    assert_eq!(fixture.device.running(), [1]);
    assert_eq!(fixture.status(), 0x40);
    assert_eq!(fixture.base(0), 6);
    assert_eq!(fixture.status(), 0);
}

#[test]
fn regions_are_added_and_removed_under_running_rings() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    let more = region(MEGABYTE, MEGABYTE);
    fixture.device.serve(0, 1);
    fixture.ok(add_region(more, "hotplug"));
    fixture.device.serve(0, 1);
    assert_eq!(fixture.device.memory_of(0).region_count(), 2);
    // Some front ends send the region's file as well, which is not needed.
    let mut removal = remove_region(more);
    removal.fds.push(memfd("unused", 1));
    fixture.ok(removal);
    assert!(fixture.device.maps_at_stop().last().unwrap().contains("hotplug"));
    wait_until_reaped();
    assert!(!std::fs::read_to_string("/proc/self/maps").unwrap().contains("hotplug"));
    let stop = || Event::Stop { index: 0 };
    assert_eq!(fixture.device.events(), [stop(), started(0, at(1)), stop(), started(0, at(2))]);
}

/// QEMU resizes a region by removing and adding it, and exits on an error.
#[test]
fn a_ring_stays_stopped_until_its_memory_is_added_again() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.device.serve(0, 8);
    fixture.ok(remove_region(region(0, MEGABYTE)));
    assert!(fixture.device.running().is_empty());
    fixture.ok(add_region(region(2 * MEGABYTE, MEGABYTE), "elsewhere"));
    assert!(fixture.device.running().is_empty());
    fixture.ok(add_region(region(0, 2 * MEGABYTE), "resized"));
    assert_eq!(fixture.device.events(), [Event::Stop { index: 0 }, started(0, at(8))]);
}

#[test]
fn a_ring_that_cannot_be_started_needs_a_reset_and_does_not_close_the_connection() {
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ok(number(Request::SetStatus, 0xf));
    let mut setup = ring_setup(0, 128, 0);
    setup[2] = addresses(0, MEGABYTE);
    for message in setup.into_iter().take(5) {
        fixture.ok(message);
    }
    let enable = || vring(Request::SetVringEnable, 0, 1);
    assert!(!fixture.ack(enable()));
    assert!(fixture.send(enable()).unwrap().is_none(), "the guest may have caused the error");
    assert_eq!(fixture.status(), 0x4f);
    fixture.ok(addresses(0, 0));
    assert_eq!(fixture.device.running(), [0]);
    assert_eq!(fixture.status(), 0xf);
}

#[test]
fn the_status_is_kept_and_says_when_the_device_is_broken() {
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ok(number(Request::SetStatus, 0x0b));
    assert_eq!(fixture.status(), 0x0b);
    fixture.device.set_broken();
    assert_eq!(fixture.status(), 0x4b);
    // QEMU adds bits to the status that it has read.
    fixture.ok(number(Request::SetStatus, 0x4f));
    fixture.ok(number(Request::SetStatus, 0));
    assert_eq!(fixture.status(), 0);
    assert!(!fixture.ack(number(Request::SetStatus, 0x100)));
}

#[test]
fn a_reset_keeps_memory_and_call_eventfds_and_drops_the_rings() {
    for reset in [number(Request::SetStatus, 0), plain(Request::ResetDevice)] {
        let mut fixture = Fixture::running(SPLIT, &[0, 2]);
        fixture.device.serve(0, 4);
        fixture.ok(reset);
        let stops = [Event::Stop { index: 0 }, Event::Stop { index: 2 }];
        assert_eq!(fixture.device.events(), [&stops[..], &[Event::Reset]].concat());
        // QEMU continues with the features, the changes of the memory (here none), and of the rings
        // all settings but the call.
        fixture.ok(number(Request::SetFeatures, SPLIT | PROTOCOL_FEATURES));
        fixture.ok(vring(Request::SetVringEnable, 0, 1));
        fixture.ok(eventfd(Request::SetVringKick, 0));
        assert!(fixture.device.running().is_empty(), "size and addresses are reset");
        fixture.all(ring_setup(0, 128, 0).into_iter().take(3).collect());
        assert_eq!(fixture.device.events(), [started(0, at(0))]);
    }
}

/// The order of requests in which QEMU 7.2 pauses a guest.
#[test]
fn a_base_can_be_asked_for_after_a_reset() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.device.serve(0, 4);
    fixture.ok(number(Request::SetStatus, 0));
    fixture.ok(number(Request::SetStatus, 0));
    fixture.ok(vring(Request::SetVringEnable, 0, 0));
    assert_eq!(fixture.base(0), 4);
    // The base of a ring that never ran is kept, too.
    fixture.ok(vring(Request::SetVringBase, 1, 6));
    fixture.ok(number(Request::SetStatus, 0));
    assert_eq!((fixture.base(0), fixture.base(1)), (4, 6));
    // The next driver starts at the first position, unless it sets a base.
    fixture.ok(number(Request::SetFeatures, SPLIT | PROTOCOL_FEATURES));
    let mut setup = ring_setup(0, 128, 0);
    setup.retain(|message| message.request != Request::SetVringBase);
    fixture.device.events();
    fixture.all(setup);
    assert!(matches!(fixture.device.events()[0], Event::Start { state, .. } if state == at(0)));
}

#[test]
fn reset_owner_stops_the_rings_until_another_kick() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.ok(plain(Request::ResetOwner));
    assert_eq!(fixture.device.events(), [Event::Stop { index: 0 }]);
    fixture.ok(eventfd(Request::SetVringKick, 0));
    assert_eq!(fixture.device.running(), [0]);
}

#[test]
fn the_end_stops_the_rings_and_resets_the_device() {
    let fixture = Fixture::running(SPLIT, &[1, 3]);
    fixture.session.end();
    let expected = [Event::Stop { index: 1 }, Event::Stop { index: 3 }, Event::Reset];
    assert_eq!(fixture.device.events(), expected);
}

fn config(request: Request, offset_bytes: u32, flags: u32, data: Vec<u8>) -> Message {
    Message::request(request, Body::Config(ConfigSpace { offset_bytes, flags, data }), Vec::new())
}

/// The channel of the back end's requests, and the front end's end of it.
fn backend_channel() -> (Message, UnixStream) {
    let (front, back) = UnixStream::pair().unwrap();
    front.set_nonblocking(true).unwrap();
    (Message::request(Request::SetBackendReqFd, Body::Empty, vec![back.into()]), front)
}

#[test]
fn requests_of_missing_features_are_refused_by_name() {
    let mut fixture = Fixture::new();
    for request in
        [plain(Request::GetStatus), add_region(region(0, 4096), "early"), backend_channel().0]
    {
        assert!(
            fixture
                .send(request)
                .unwrap_err()
                .to_string()
                .ends_with("without its protocol feature")
        );
    }
    let inflight =
        || Message::request(Request::GetInflightFd, Body::Other(vec![0; 24]), Vec::new());
    assert_eq!(
        fixture.send(inflight()).unwrap_err().to_string(),
        "GET_INFLIGHT_FD, which was not offered"
    );
    fixture.all(negotiation(SPLIT));
    assert!(!fixture.ack(inflight()));
    let unknown = || Message::request(Request::Unknown(77), Body::Other(Vec::new()), vec![event()]);
    assert!(!fixture.ack(unknown()));
    assert_eq!(
        fixture.send(unknown()).unwrap_err().to_string(),
        "request 77, which was not offered"
    );
}

#[test]
fn replies_and_contradictory_messages_are_refused() {
    let mut fixture = Fixture::ready(SPLIT);
    let reply = Message::reply(Request::GetFeatures, Body::U64(0));
    assert!(matches!(fixture.send(reply), Err(ProtocolError::UnexpectedReply { .. })));
    assert!(matches!(
        fixture.send(plain(Request::SetFeatures)),
        Err(ProtocolError::UnexpectedBody { .. })
    ));
    let kick = number(Request::SetVringKick, 0);
    assert!(matches!(
        fixture.send(kick),
        Err(ProtocolError::Message(MessageError::FdCount { .. }))
    ));
}

/// Mostly valid messages; a sequence of them is arbitrary.
fn message_of(seed: u64) -> Message {
    let [kind, small, size, flags, ..] = seed.to_le_bytes();
    let index = u32::from(small % 5);
    let base = u64::from(size % 3) * MEGABYTE;
    let area = region(base, MEGABYTE);
    let message = match kind % 26 {
        0 => plain(Request::GetFeatures),
        1 => number(
            Request::SetFeatures,
            [SPLIT, PACKED, 0, u64::MAX][usize::from(size % 4)]
                | u64::from(flags & 1) << 30
                | u64::from(flags & 4) << 24,
        ),
        2 => number(Request::SetProtocolFeatures, OFFERED_PROTOCOL),
        3 => memory_table(&[area], "any"),
        4 => add_region(area, "any"),
        5 => remove_region(area),
        6 => vring(Request::SetVringNum, index, u32::from(size)),
        7 => vring(Request::SetVringBase, index, u32::from(size)),
        8 => vring(Request::GetVringBase, index, 0),
        9 | 10 => addresses(index, base),
        11 | 12 => eventfd(Request::SetVringKick, index.into()),
        13 => no_eventfd(Request::SetVringKick, index.into()),
        14 => eventfd(Request::SetVringCall, index.into()),
        15 => eventfd(Request::SetVringErr, index.into()),
        16..=18 => vring(Request::SetVringEnable, index, u32::from(size % 8 != 0)),
        19 => number(Request::SetStatus, u64::from(size % 16)),
        20 => plain(Request::GetStatus),
        21 => config(Request::GetConfig, size.into(), 0, vec![0; usize::from(flags)]),
        22 => plain(if size % 2 == 0 { Request::ResetDevice } else { Request::ResetOwner }),
        23 | 24 => {
            let log = Log { len_bytes: u64::from(size), file_offset_bytes: flags.into() };
            Message::request(Request::SetLogBase, Body::Log(log), vec![memfd("any", 256)])
        }
        _ => vring(Request::from_code(size.into()), index, size.into()),
    };
    if flags & 2 == 0 { message.needing_reply() } else { message }
}
