//! The log of written pages: settings, replacement while rings run, and logs that are refused.

use sidecore_spec_virtio::vhost_user::{LOG_ALL, RING_LOG};

use super::*;

const PAGES: u64 = MEGABYTE / 4096;
const LOG_BYTES: u64 = PAGES / 8;

fn log_message(file: &OwnedFd, len_bytes: u64, file_offset_bytes: u64) -> Message {
    let log = Body::Log(Log { len_bytes, file_offset_bytes });
    Message::request(Request::SetLogBase, log, vec![file.try_clone().unwrap()])
}

fn features(bits: u64) -> Message {
    number(Request::SetFeatures, bits | PROTOCOL_FEATURES)
}

fn marked(file: &OwnedFd) -> Vec<u64> {
    let mut bytes = [0; LOG_BYTES as usize];
    rustix::io::pread(file, &mut bytes, 0).unwrap();
    (0..PAGES).filter(|page| bytes[*page as usize / 8] >> (page % 8) & 1 == 1).collect()
}

fn switched(index: u16, log: bool) -> Event {
    Event::SetLog { index, log }
}

#[test]
fn a_log_begins_is_replaced_and_ends_while_rings_run() {
    let mut fixture = Fixture::running(SPLIT, &[0, 2]);
    let [first, second] = ["first", "second"].map(|name| memfd(name, LOG_BYTES));
    // As QEMU does it: the log, the features, and the addresses of each ring.
    assert_eq!(fixture.ask(log_message(&first, LOG_BYTES, 0)), Body::U64(0));
    assert!(!fixture.device.mark(0, 1), "not before VHOST_F_LOG_ALL");
    fixture.device.events();
    fixture.ok(features(SPLIT | LOG_ALL));
    assert_eq!(fixture.device.events(), [switched(0, true), switched(2, true)]);
    let Body::VringAddress(plain) = addresses(0, 0).body else { unreachable!() };
    let with_log = VringAddress { flags: RING_LOG, log: 0x800, ..plain };
    fixture.ok(Message::request(Request::SetVringAddr, Body::VringAddress(with_log), Vec::new()));
    assert!(fixture.device.mark(0, 1) && fixture.device.mark(2, PAGES - 1));
    assert_eq!(marked(&first), [1, PAGES - 1]);
    fixture.ask(log_message(&second, LOG_BYTES, 0));
    fixture.device.mark(0, 3);
    assert_eq!((marked(&first).len(), marked(&second)), (2, vec![3]), "only in the new one");
    fixture.ok(features(SPLIT));
    assert!(!fixture.device.mark(0, 4));
    assert_eq!(fixture.device.running(), [0, 2], "no ring was stopped");
    // The log is forgotten: the front end unmaps it.
    assert!(matches!(fixture.send(features(SPLIT | LOG_ALL)), Err(ProtocolError::NoLog)));
}

#[test]
fn a_ring_that_is_to_be_logged_waits_for_the_log() {
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ok(features(SPLIT | LOG_ALL));
    fixture.all(ring_setup(0, 128, 0));
    assert_eq!(fixture.device.running(), [0_u16; 0]);
    let file = memfd("log", LOG_BYTES);
    fixture.ask(log_message(&file, LOG_BYTES, 0));
    assert_eq!(fixture.device.features_of(0), SPLIT, "without vhost-user's own bits");
    assert!(fixture.device.mark(0, 7));
    assert_eq!(marked(&file), [7]);
    // A reset ends the log, as it ends the features.
    fixture.ok(plain(Request::ResetDevice));
    fixture.ok(features(SPLIT | LOG_ALL));
    fixture.all(ring_setup(0, 128, 0));
    assert_eq!(fixture.device.running(), [0_u16; 0]);
}

#[test]
fn other_features_do_not_change_with_the_log() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    fixture.ask(log_message(&memfd("log", LOG_BYTES), LOG_BYTES, 0));
    for bits in [VERSION_1 | LOG_ALL, SPLIT | LOG_ALL | INDIRECT_DESC] {
        let refused = fixture.send(features(bits));
        assert!(matches!(refused, Err(ProtocolError::FeaturesWhileRunning)), "{bits:#x}");
    }
    assert!(!fixture.device.mark(0, 1));
}

#[test]
fn logs_that_do_not_fit_are_refused_by_name() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    let file = memfd("log", LOG_BYTES);
    let error = fixture.send(log_message(&file, LOG_BYTES - 1, 0)).unwrap_err();
    assert!(matches!(
        error,
        ProtocolError::LogTooSmall { request: Request::SetLogBase, log_pages: 248, .. }
    ));
    assert!(error.to_string().contains("send a larger log"), "{error}");
    for (len_bytes, offset_bytes) in [(LOG_BYTES, 1), (LOG_BYTES + 1, 0), (0, 0), (8, u64::MAX)] {
        let refused = fixture.send(log_message(&file, len_bytes, offset_bytes));
        assert!(matches!(refused, Err(ProtocolError::Memory { .. })), "{refused:?}");
    }
    // More memory needs a larger log before.
    fixture.ask(log_message(&file, LOG_BYTES, 0));
    fixture.ok(features(SPLIT | LOG_ALL));
    assert!(!fixture.ack(add_region(region(MEGABYTE, MEGABYTE), "more")));
    let larger = memfd("larger", 2 * LOG_BYTES);
    fixture.ask(log_message(&larger, 2 * LOG_BYTES, 0));
    fixture.ok(add_region(region(MEGABYTE, MEGABYTE), "more"));
    assert!(fixture.device.mark(0, 1), "the log stays over a change of memory");
    assert!(!fixture.ack(memory_table(&[region(4 * MEGABYTE, 4096)], "far")));
    assert_eq!(fixture.device.running(), [0]);
}

#[test]
fn a_log_needs_its_protocol_feature_and_its_file() {
    let mut fixture = Fixture::new();
    let file = memfd("log", LOG_BYTES);
    let refused = fixture.send(log_message(&file, LOG_BYTES, 0));
    assert!(matches!(refused, Err(ProtocolError::NotNegotiated { .. })));
    let mut fixture = Fixture::ready(SPLIT);
    let log = Body::Log(Log { len_bytes: LOG_BYTES, file_offset_bytes: 0 });
    let refused = fixture.send(Message::request(Request::SetLogBase, log, Vec::new()));
    assert!(matches!(refused, Err(ProtocolError::Message(MessageError::FdCount { count: 0, .. }))));
    // The notification, which QEMU does not ask for.
    fixture.ok(Message::request(Request::SetLogFd, Body::Empty, vec![event()]));
    let refused = fixture.send(Message::request(Request::SetLogFd, Body::Empty, Vec::new()));
    assert!(matches!(refused, Err(ProtocolError::Message(MessageError::FdCount { .. }))));
}
