//! The configuration space, and notifications of its changes.

use std::io::Read;

use super::*;

#[test]
fn the_configuration_is_read_with_zeros_after_its_end() {
    let mut fixture = Fixture::ready(SPLIT);
    let mut read = |offset_bytes, len| match fixture.ask(config(
        Request::GetConfig,
        offset_bytes,
        0,
        vec![7; len],
    )) {
        Body::Config(reply) => {
            assert_eq!((reply.offset_bytes, reply.flags), (offset_bytes, 0));
            Some(reply.data)
        }
        Body::Empty => None,
        body => panic!("{body:?}"),
    };
    let padded = |zeros| Some([&CONFIG[..], &vec![0; zeros]].concat());
    assert_eq!(read(0, 60), padded(0));
    assert_eq!(read(0, 96), padded(36));
    assert_eq!(read(0, 256), padded(196));
    assert_eq!(read(0x100, 60), padded(0), "counted from the start of virtio-mmio's registers");
    assert_eq!(read(58, 4), Some(vec![0xC5, 0xC5, 0, 0]));
    assert_eq!(read(60, 4), None);
    assert_eq!(read(u32::MAX, 4), None);
    assert_eq!(read(0, 0), None);
}

#[test]
fn the_configuration_is_written_where_the_device_lets_it() {
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ok(config(Request::SetConfig, 32, 0, vec![1]));
    fixture.ok(config(Request::SetConfig, 0x120, 1, vec![0]));
    assert!(!fixture.ack(config(Request::SetConfig, 0, 0, vec![1])));
    assert!(!fixture.ack(config(Request::SetConfig, 32, 2, vec![1])));
    assert!(
        fixture.send(config(Request::SetConfig, 0, 0, vec![1])).unwrap().is_none(),
        "the guest may have caused it"
    );
    assert_eq!(fixture.device.written(), [(32, vec![1]), (32, vec![0])]);
}

/// The messages that the front end has received, in full.
fn notifications(mut front: &UnixStream) -> Vec<[u32; 3]> {
    let mut bytes = Vec::new();
    assert_eq!(front.read_to_end(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let messages = bytes.chunks_exact(12).map(|message| {
        let word = |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
        [word(0), word(4), word(8)]
    });
    messages.collect()
}

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no payload.
const CONFIG_CHANGED: [u32; 3] = [2, 1, 0];

#[test]
fn a_running_front_end_is_notified_once_of_each_change_of_the_configuration() {
    let read = || config(Request::GetConfig, 0, 0, vec![0; 60]);
    let mut fixture = Fixture::ready(SPLIT);
    fixture.ask(read());
    let (message, front) = backend_channel();
    fixture.ok(message);
    fixture.device.change_config();
    assert!(
        !fixture.session.owes_config_change(),
        "a front end ignores the message before its rings run"
    );
    fixture.all(ring_setup(0, 128, 0));
    assert!(fixture.session.owes_config_change());
    fixture.session.send_config_change();
    assert!(!fixture.session.owes_config_change());
    assert_eq!(notifications(&front), [CONFIG_CHANGED]);
    fixture.ask(read());
    assert!(!fixture.session.owes_config_change(), "the front end has read the change");
    fixture.device.change_config();
    fixture.ask(read());
    assert!(!fixture.session.owes_config_change(), "the front end has read the change by itself");
}

#[test]
fn a_front_end_that_reconnects_without_reading_the_configuration_is_notified() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    let (message, front) = backend_channel();
    fixture.ok(message);
    assert!(fixture.session.owes_config_change());
    fixture.session.send_config_change();
    assert_eq!(notifications(&front), [CONFIG_CHANGED]);
    assert!(!fixture.session.owes_config_change());
}

#[test]
fn a_front_end_that_does_not_read_its_channel_blocks_no_request() {
    let mut fixture = Fixture::running(SPLIT, &[0]);
    let (message, front) = backend_channel();
    fixture.ok(message);
    let mut count = 0;
    loop {
        fixture.device.change_config();
        fixture.session.send_config_change();
        if fixture.session.owes_config_change() {
            break;
        }
        count += 1;
    }
    assert_eq!(notifications(&front), vec![CONFIG_CHANGED; count]);
    fixture.session.send_config_change();
    assert_eq!(notifications(&front), [CONFIG_CHANGED], "the socket has space again");
    // After the front end has closed its end, no message is sent.
    drop(front);
    fixture.device.change_config();
    fixture.session.send_config_change();
    assert!(!fixture.session.owes_config_change());
}

#[test]
fn a_channel_for_requests_is_a_connected_unix_stream() {
    let mut fixture = Fixture::ready(SPLIT);
    let (datagram, _peer) = std::os::unix::net::UnixDatagram::pair().unwrap();
    for fd in [event(), memfd("channel", 4096), datagram.into()] {
        assert!(!fixture.ack(Message::request(Request::SetBackendReqFd, Body::Empty, vec![fd])));
    }
    let (message, _front) = backend_channel();
    assert!(fixture.ack(message));
}
