//! The version, and the kinds of messages that are answered.

use std::sync::atomic::Ordering;

use sidecore_nvme::Region;
use sidecore_vfio_user::{
    Body, Command, DmaMap, DmaUnmap, Flags, HEADER_BYTES, Header, IrqInfo, IrqSet, Message,
    ProtocolError, Version, vfio,
};

use crate::common::*;
use crate::fixture::*;

#[test]
fn the_version_comes_first_and_once() {
    let mut fixture = Fixture::fresh();
    let command = Command::DeviceGetInfo;
    let error = fixture.handle((command, device_info()), Vec::new()).unwrap_err();
    assert_eq!(error, ProtocolError::NotNegotiated { command });
    fixture.negotiate();
    assert_eq!(fixture.fails((Command::Version, version()), Vec::new()), EINVAL);
    fixture.session.end();
    assert_eq!(fixture.function.events(), [Event::Reset, Event::Memory(0, 0)]);
}

#[test]
fn the_smaller_minor_version_counts_and_our_limits_fit_into_qemus_buffer() {
    for (theirs, ours) in [(0, 0), (1, 1), (2, 1), (u16::MAX, 1)] {
        let mut fixture = Fixture::fresh();
        let Body::Version(Version { data, .. }) = version() else { unreachable!() };
        let version = Body::Version(Version { major: 0, minor: theirs, data: data.clone() });
        let Body::Version(reply) = fixture.succeeds((Command::Version, version), Vec::new()) else {
            panic!()
        };
        assert_eq!((reply.major, reply.minor), (0, ours));
        assert!(reply.data.len() < data.len());
        let text = std::str::from_utf8(&reply.data).unwrap();
        let limits =
            r#""max_msg_fds":16,"max_data_xfer_size":65536,"max_dma_maps":509,"pgsizes":4096"#;
        assert_eq!(text, format!("{{\"capabilities\":{{{limits}}}}}\0"));
    }
}

#[test]
fn a_malformed_version_is_refused_and_an_unsupported_one_ends_the_connection() {
    let mut fixture = Fixture::fresh();
    let of = |major, data: &[u8]| {
        (Command::Version, Body::Version(Version { major, minor: 0, data: data.into() }))
    };
    assert_eq!(fixture.fails(of(0, b"{}"), Vec::new()), EINVAL);
    assert_eq!(fixture.fails(of(0, b"{}\0"), vec![event()]), EINVAL);
    assert_eq!(fixture.fails((Command::Version, Body::Malformed(3)), Vec::new()), EINVAL);
    let error = fixture.handle(of(1, b"{}\0"), Vec::new()).unwrap_err();
    assert_eq!(error, ProtocolError::Version { major: 1, minor: 0 });
    fixture.session.end();
    assert_eq!(fixture.function.events(), [], "a refused client changed nothing");

    let mut fixture = Fixture::fresh();
    fixture.succeeds(of(0, b""), Vec::new());
}

#[test]
fn a_reply_is_no_command() {
    let mut fixture = Fixture::new();
    let command = Command::DmaRead;
    let error =
        fixture.session.handle(Message::reply(1, command, Body::Empty, Vec::new())).unwrap_err();
    assert_eq!(error, ProtocolError::UnexpectedReply { command });
}

#[test]
fn commands_that_are_not_offered_are_refused_as_such() {
    let mut fixture = Fixture::new();
    for command in [
        Command::DeviceGetRegionIoFds,
        Command::DmaRead,
        Command::DmaWrite,
        Command::DirtyPages,
        Command::RegionWriteMulti,
        Command::DeviceFeature,
        Command::MigDataRead,
        Command::MigDataWrite,
        Command::Unknown(0),
        Command::Unknown(0xffff),
    ] {
        assert_eq!(
            fixture.fails((command, Body::Other(vec![0; 40])), Vec::new()),
            ENOTSUP,
            "{command}"
        );
    }
}

#[test]
fn a_client_that_wants_no_reply_gets_none() {
    let mut fixture = Fixture::new();
    let mut post = |(command, body)| {
        let message = Message::command(1, command, body, Vec::new()).without_reply();
        assert!(matches!(fixture.session.handle(message), Ok(None)), "{command}");
    };
    post(write(0, 0x14, &[1, 0, 0, 0]));
    post(write(0, BAR_BYTES, &[1]));
    post((Command::DeviceFeature, Body::Other(Vec::new())));
    post(reset());
    assert_eq!(
        fixture.function.events(),
        [Event::Write(Region::Bar(0), 0x14, vec![1, 0, 0, 0]), Event::Reset]
    );
}

#[test]
fn descriptors_that_do_not_belong_to_a_command_are_refused() {
    let mut fixture = Fixture::new();
    for ask in [read(0, 0, 4), reset(), (Command::DeviceGetInfo, device_info())] {
        assert_eq!(fixture.fails(ask, vec![event()]), EINVAL);
    }
    for ask in [dma_map(map(0, PAGE)), dma_unmap(unmap(0, PAGE))] {
        assert_eq!(fixture.fails(ask, vec![memfd(PAGE), memfd(PAGE)]), EINVAL);
    }
    assert!(fixture.function.events().is_empty());
}

/// SPDK's driver sends the file again.
#[test]
fn an_unmap_may_come_with_a_descriptor() {
    let mut fixture = Fixture::new();
    for fd in [memfd(PAGE), event()] {
        fixture.map(0, PAGE);
        fixture.succeeds(dma_unmap(unmap(0, PAGE)), vec![fd]);
        assert_eq!(fixture.function.memory().region_count(), 0);
    }
    assert_eq!(fixture.fails(dma_unmap(unmap(0, PAGE)), vec![memfd(PAGE)]), ENOENT);
}

/// The payload of each command as clients send it that reuse the reply's buffer: the structure,
/// with an `argsz` of all bytes that follow the header, and then arbitrary bytes.
#[test]
fn payloads_may_be_longer_than_their_structures() {
    let signal = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
    let signal_some = vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER;
    for padding in [1_usize, 8, 4000, 4064 - 32, 64 << 10] {
        let argsz = |bytes: usize| (bytes + padding).min(64 << 10) as u32;
        let mut fixture = Fixture::new();
        let Body::DeviceInfo(mut device) = device_info() else { unreachable!() };
        device.argsz = argsz(16);
        let irq = IrqInfo { argsz: argsz(16), flags: 0, index: MSIX, count: 0 };
        let region = region_info(0, argsz(32));
        let map = DmaMap { argsz: argsz(32), ..map(0, PAGE) };
        let unmap = DmaUnmap { argsz: argsz(24), ..unmap(0, PAGE) };
        let sets = [irqs(EVENTFD, MSIX, 1, 1), irqs(signal, MSIX, 1, 1)];
        let some = IrqSet { data: vec![0, 1], ..irqs(signal_some, MSIX, 0, 2) };
        let mut asks = vec![
            ((Command::DeviceGetInfo, Body::DeviceInfo(device)), vec![]),
            ((Command::DeviceGetRegionInfo, region), vec![]),
            ((Command::DeviceGetIrqInfo, Body::IrqInfo(irq)), vec![]),
            (dma_map(map), vec![memfd(PAGE)]),
            (dma_unmap(unmap), vec![]),
            (read(0, 0, 4), vec![]),
            (reset(), vec![]),
        ];
        let fds = [vec![event()], vec![], vec![]];
        let sets =
            sets.into_iter().chain([some]).map(|set| set_irqs(IrqSet { argsz: argsz(20), ..set }));
        asks.extend(sets.zip(fds));
        for ((command, body), fds) in asks {
            let (payload_bytes, message) = padded(command, body, padding, fds);
            // No message is larger than the largest region access.
            if payload_bytes > (64 << 10) + 16 {
                continue;
            }
            match fixture.session.handle(message).unwrap() {
                Some(reply) => assert_eq!(reply.errno, 0, "{command} with {padding} more bytes"),
                other @ None => panic!("{other:?}"),
            }
        }
        let signalled = fixture
            .function
            .events()
            .into_iter()
            .filter(|event| *event == Event::Signal(1))
            .count();
        assert_eq!(signalled, if padding < 64 << 10 { 2 } else { 0 }, "vector 1 and no other");
        assert!(!fixture.function.events().contains(&Event::Signal(0)));
    }
}

/// A received command with `padding` more bytes, which are not zero, behind its payload; and the
/// payload's size.
fn padded(
    command: Command,
    body: Body,
    padding: usize,
    fds: Vec<std::os::fd::OwnedFd>,
) -> (usize, Message) {
    let mut bytes = Vec::new();
    Message::command(42, command, body, Vec::new()).write(&mut bytes);
    let mut payload = bytes.split_off(HEADER_BYTES);
    payload.resize(payload.len() + padding, 0xA5);
    let flags = Flags::default();
    let header = Header { id: 42, command, payload_bytes: payload.len(), flags, errno: 0 };
    (payload.len(), Message::parse(header, &payload, fds))
}

/// Each session that gets a message is a new client of the function, and a client is refused if the
/// function has no memory for it.
#[test]
fn a_function_knows_of_each_client() {
    let function = Function::new();
    let connections = || function.connections.load(Ordering::SeqCst);
    for client in 1..4 {
        let mut fixture = Fixture::with(function.clone());
        assert_eq!(connections(), client - 1, "no message was sent yet");
        function.refuses.store(true, Ordering::SeqCst);
        assert_eq!(fixture.fails((Command::Version, version()), Vec::new()), 12);
        assert!(matches!(
            fixture.handle(read(0, 0, 4), Vec::new()),
            Err(ProtocolError::NotNegotiated { .. })
        ));
        function.refuses.store(false, Ordering::SeqCst);
        fixture.negotiate();
        fixture.succeeds(reset(), Vec::new());
        assert_eq!(connections(), client);
        fixture.session.end();
    }
}
