//! The service over real sockets.

mod common;

use std::io::{ErrorKind, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::*;
use sidecore_memory::GuestAddress;
use sidecore_nvme::Region;
use sidecore_vfio_user::{
    Access, Body, Command, HEADER_BYTES, MAX_TRANSFER_BYTES, Message, PciEndpoint, ServerError,
    Service, Socket, vfio,
};

struct Fixture {
    directory: tempfile::TempDir,
    service: Service,
}

impl Fixture {
    fn new() -> Self {
        let service = Service::start(NonZeroUsize::MIN).unwrap();
        Self { directory: tempfile::tempdir().unwrap(), service }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn serve(&self, name: &str) -> (Arc<Function>, Socket) {
        let function = Function::with_area(name, Some((AREA.0, AREA.0)));
        let socket = self
            .service
            .serve(&self.path(name), Access::default(), PciEndpoint(function.clone()), None)
            .unwrap();
        (function, socket)
    }
}

fn dma_map(address: u64, len_bytes: u64) -> (Command, Body) {
    (Command::DmaMap, Body::DmaMap(map(address, len_bytes)))
}

fn dma_unmap(address: u64, len_bytes: u64) -> (Command, Body) {
    (Command::DmaUnmap, Body::DmaUnmap(unmap(address, len_bytes)))
}

fn reset() -> (Command, Body) {
    (Command::DeviceReset, Body::Empty)
}

/// The messages of QEMU before the guest runs.
fn start_as_qemu(client: &mut Client) {
    // All memory at once; QEMU waits for the last reply only.
    let ram = client.post(dma_map(0, 64 * PAGE), vec![memfd(64 * PAGE)]);
    let high = client.post(dma_map(1 << 32, 64 * PAGE), vec![memfd(64 * PAGE)]);
    let rom = client.post(dma_map(0xfffc_0000, 64 * PAGE), Vec::new());
    assert_eq!([client.answer().id, client.answer().id, client.answer().id], [ram, high, rom]);
    assert!(matches!(
        client.ask((Command::DeviceGetInfo, device_info()), vec![]).body,
        Body::DeviceInfo(_)
    ));
    for index in [0, 1, 2, 3, 4, 5, 7] {
        let mut argsz = 32;
        loop {
            let reply =
                client.ask((Command::DeviceGetRegionInfo, region_info(index, argsz)), vec![]);
            let Body::RegionInfo(info) = reply.body else { panic!("{reply:?}") };
            if info.argsz <= argsz {
                assert_eq!(reply.fds.len(), usize::from(index == 0));
                break;
            }
            argsz = info.argsz;
        }
    }
    assert!(matches!(
        client.ask((Command::DeviceGetIrqInfo, irq_info(3)), vec![]).body,
        Body::IrqInfo(_)
    ));
    assert!(matches!(client.ask(read(7, 0, 4096), vec![]).body, Body::RegionAccess(_)));
    let eventfd = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
    for (index, count) in [(vfio::PCI_ERR_IRQ_INDEX, 1), (vfio::PCI_MSIX_IRQ_INDEX, 16)] {
        let set = (Command::DeviceSetIrqs, Body::IrqSet(irqs(eventfd, index, 0, count)));
        assert_eq!(client.ask(set, (0..count).map(|_| event()).collect()).errno, 0);
    }
}

#[test]
fn a_vmm_connects_disconnects_and_connects_again() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    for _ in 0..3 {
        assert!(!socket.is_connected());
        let mut client = Client::start(socket.path());
        assert!(socket.is_connected());
        start_as_qemu(&mut client);
        assert_eq!((function.memory().region_count(), function.assigned().len()), (2, 16));
        assert_eq!(client.ask(write(0, 0x14, &[1, 0, 0, 0]), vec![]).errno, 0);
        function.take_events();
        drop(client);
        wait_until(|| !socket.is_connected());
        assert!(function.assigned().is_empty());
        let events = function.take_events();
        assert_eq!(events[events.len() - 2..], [Event::Reset, Event::Memory(0, 0)]);
    }
}

#[test]
fn a_second_vmm_waits_for_the_first_to_go() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    let first = Client::start(socket.path());
    let mut second = Client::connect(socket.path());
    second.post((Command::Version, version()), vec![]);
    assert!(second.is_quiet());
    function.hold(true);
    drop(first);
    for _ in 0..2 {
        wait_until(|| function.is_held());
        assert!(second.is_quiet(), "the function is not free yet");
        function.release();
    }
    assert_eq!(second.answer().errno, 0);
    function.hold(false);
}

#[test]
fn messages_are_served_in_their_order_while_others_wait() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    let mut client = Client::start(socket.path());
    function.hold(true);
    let mut posted = vec![client.post(dma_map(0, PAGE), vec![memfd(PAGE)])];
    posted.push(client.post(dma_map(PAGE, PAGE), vec![memfd(PAGE)]));
    posted.push(client.post(dma_unmap(0, PAGE), vec![]));
    posted.push(client.post(write(0, 0, &[1]), vec![]));
    let last = posted.pop().unwrap();
    for id in posted {
        wait_until(|| function.is_held());
        assert!(client.is_quiet());
        function.release();
        assert_eq!(client.answer().id, id);
    }
    assert_eq!(client.answer().id, last);
    let expected = [
        Event::Memory(1, PAGE),
        Event::Memory(2, 2 * PAGE),
        Event::Memory(1, PAGE),
        Event::Write(Region::Bar(0), 0, vec![1]),
    ];
    assert_eq!(function.events(), expected);
    function.hold(false);
}

#[test]
fn a_client_that_waits_or_does_not_read_or_sends_half_a_message_delays_only_itself() {
    let fixture = Fixture::new();
    let (slow_function, slow_socket) = fixture.serve("slow");
    let (_unread_function, unread_socket) = fixture.serve("unread");
    let (_half_function, half_socket) = fixture.serve("half");
    let (_good_function, good_socket) = fixture.serve("good");

    let mut slow = Client::start(slow_socket.path());
    slow_function.hold(true);
    slow.post(reset(), vec![]);
    wait_until(|| slow_function.is_held());

    // This client asks for more than the socket's buffer holds, and reads no reply.
    let mut not_reading = UnixStream::connect(unread_socket.path()).unwrap();
    let mut bytes = Vec::new();
    Message::command(0, Command::Version, version(), vec![]).write(&mut bytes);
    let (command, body) = read(0, 0, MAX_TRANSFER_BYTES as u32);
    for id in 1..100 {
        Message::command(id, command, body.clone(), vec![]).write(&mut bytes);
    }
    not_reading.set_nonblocking(true).unwrap();
    assert!(not_reading.write(&bytes).unwrap() > 0);

    let mut half = UnixStream::connect(half_socket.path()).unwrap();
    half.write_all(&bytes[..HEADER_BYTES + 3]).unwrap();

    let mut good = Client::start(good_socket.path());
    for _ in 0..200 {
        assert_eq!(good.ask(read(0, 0, 8), vec![]).errno, 0);
    }
    assert!(slow.is_quiet());
    slow_function.release();
    assert_eq!(slow.answer().command, Command::DeviceReset);
    slow_function.hold(false);
    // Each of the sockets can be removed in its state.
    drop((half_socket, unread_socket, slow_socket));
    assert!(slow.is_hung_up());
    assert_eq!(good.ask(read(0, 0, 8), vec![]).errno, 0);
}

#[test]
fn a_peer_that_reads_late_gets_everything() {
    let fixture = Fixture::new();
    let (_function, socket) = fixture.serve("function");
    let mut client = Client::start(socket.path());
    let posted: Vec<u16> = (0..50).map(|_| client.post(read(0, 0, 0x1_0000), vec![])).collect();
    for id in posted {
        let reply = client.answer();
        let Body::RegionAccess(access) = reply.body else { panic!() };
        assert_eq!((reply.id, access.data.as_slice().len()), (id, 0x1_0000));
    }
}

#[test]
fn bytes_that_are_no_message_end_only_their_connection() {
    let fixture = Fixture::new();
    let (_function, socket) = fixture.serve("function");
    let mut hello = Vec::new();
    Message::command(0, Command::Version, version(), vec![]).write(&mut hello);
    let header = |command: u16, size: u32, flags: u32| {
        let mut bytes = vec![0, 0];
        bytes.extend_from_slice(&command.to_ne_bytes());
        bytes.extend_from_slice(&size.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes
    };
    for bad in [
        header(10, u32::MAX, 0),
        header(10, 0, 0),
        header(10, 15, 0),
        header(13, 1 << 20, 0),
        header(13, 16, 2),
        header(13, 16, 1),
        vec![0xff; 64],
    ] {
        for greeting in [&[], hello.as_slice()] {
            let mut client = Client::connect(socket.path());
            let mut stream = UnixStream::from(
                std::os::fd::AsFd::as_fd(&client.connection).try_clone_to_owned().unwrap(),
            );
            stream.write_all(&[greeting, &bad].concat()).unwrap();
            drop(stream);
            assert!(client.is_hung_up(), "{bad:?}");
        }
    }
    let mut client = Client::connect(socket.path());
    client.post(reset(), vec![]);
    assert!(client.is_hung_up(), "before VERSION");
    let mut client = Client::start(socket.path());
    assert_eq!(client.ask(reset(), vec![]).errno, 0);
}

#[test]
fn a_message_cut_short_at_any_byte_leaves_the_function_to_the_next() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    let mut bytes = Vec::new();
    Message::command(0, Command::Version, version(), vec![]).write(&mut bytes);
    let greeting = bytes.len();
    let (command, body) = write(0, 0, &[9; 8]);
    Message::command(1, command, body, vec![]).write(&mut bytes);
    for len in (0..bytes.len()).step_by(3).chain(greeting..bytes.len()) {
        let mut stream = UnixStream::connect(socket.path()).unwrap();
        stream.write_all(&bytes[..len]).unwrap();
    }
    let mut client = Client::start(socket.path());
    assert_eq!(client.ask(reset(), vec![]).errno, 0);
    assert!(!function.events().iter().any(|event| matches!(event, Event::Write(..))));
}

#[test]
fn repeated_and_wrong_messages_are_refused_and_the_connection_goes_on() {
    let fixture = Fixture::new();
    let (_function, socket) = fixture.serve("function");
    let mut client = Client::start(socket.path());
    assert_eq!(client.ask((Command::Version, version()), vec![]).errno, 22);
    assert_eq!(client.ask(dma_unmap(0, PAGE), vec![]).errno, 2);
    assert_eq!(client.ask(dma_map(0, PAGE), vec![memfd(PAGE)]).errno, 0);
    assert_eq!(client.ask(dma_map(0, PAGE), vec![memfd(PAGE)]).errno, 17);
    assert_eq!(client.ask(dma_map(PAGE, PAGE), vec![memfd(PAGE), memfd(PAGE)]).errno, 22);
    assert_eq!(client.ask(read(0, 0, 8), vec![event()]).errno, 22);
    assert_eq!(client.ask((Command::DeviceGetInfo, Body::Other(vec![0; 15])), vec![]).errno, 22);
    assert_eq!(client.ask((Command::Unknown(99), Body::Other(vec![0; 1000])), vec![]).errno, 95);
    assert_eq!(client.ask(read(0, 0, 8), vec![]).errno, 0);
}

#[test]
fn a_disconnect_waits_for_the_call_in_progress() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    let mut client = Client::start(socket.path());
    function.hold(true);
    client.post(dma_map(0, PAGE), vec![memfd(PAGE)]);
    wait_until(|| function.is_held());
    drop(client);
    assert_eq!(function.take_events(), [Event::Memory(1, PAGE)]);
    for step in [Event::Reset, Event::Memory(0, 0)] {
        function.release();
        wait_until(|| function.is_held());
        assert_eq!(function.take_events(), [step]);
        assert!(socket.is_connected());
    }
    function.release();
    wait_until(|| !socket.is_connected());
    assert!(function.memory().read_array::<1>(GuestAddress(0), &mut Default::default()).is_err());
    function.hold(false);
    Client::start(socket.path());
}

#[test]
fn a_socket_can_be_dropped_in_any_state() {
    let fixture = Fixture::new();
    // No client has ever connected.
    let (function, socket) = fixture.serve("idle");
    drop(socket);
    assert!(function.events().is_empty());
    assert!(!fixture.path("idle").exists());

    // One client is connected, and another one waits.
    let (function, socket) = fixture.serve("connected");
    let mut client = Client::start(socket.path());
    let mut waiting = Client::connect(socket.path());
    drop(socket);
    assert!(client.is_hung_up() && waiting.is_hung_up());
    assert_eq!(function.events(), [Event::Reset, Event::Memory(0, 0)]);

    // A call is in progress: the drop waits for it.
    for gone in [false, true] {
        let (function, socket) = fixture.serve("outstanding");
        let mut client = Client::start(socket.path());
        function.hold(true);
        client.post(reset(), vec![]);
        wait_until(|| function.is_held());
        let client = (!gone).then_some(client);
        let (dropped, wait) = channel();
        let dropping = thread::spawn(move || {
            drop(socket);
            dropped.send(()).unwrap();
        });
        for _ in 0..3 {
            wait_until(|| function.is_held());
            assert!(wait.recv_timeout(Duration::from_millis(20)).is_err());
            function.release();
        }
        wait.recv_timeout(SOON).unwrap();
        dropping.join().unwrap();
        assert!(client.is_none_or(|mut client| client.is_hung_up()));
    }
}

#[test]
fn the_service_can_go_before_its_sockets() {
    let fixture = Fixture::new();
    let (function, socket) = fixture.serve("function");
    let mut client = Client::start(socket.path());
    let Fixture { directory, service } = fixture;
    drop(service);
    assert!(client.is_hung_up());
    assert_eq!(function.events(), [Event::Reset, Event::Memory(0, 0)]);
    assert!(!socket.is_connected());
    drop(socket);
    drop(directory);
}

#[test]
fn one_thread_serves_64_sockets() {
    let fixture = Fixture::new();
    let served: Vec<_> =
        (0..64).map(|number| fixture.serve(&format!("function{number}"))).collect();
    let mut clients: Vec<_> =
        served.iter().map(|(_, socket)| Client::start(socket.path())).collect();
    for round in 0..20_u8 {
        let posted: Vec<u16> = clients
            .iter_mut()
            .map(|client| client.post(write(0, 0x1000, &[round; 4]), vec![]))
            .collect();
        for (client, id) in clients.iter_mut().zip(posted) {
            assert_eq!(client.answer().id, id);
        }
    }
    for client in &mut clients {
        start_as_qemu(client);
    }
    for (function, _) in &served {
        assert_eq!(function.memory().region_count(), 2);
        let writes =
            function.events().into_iter().filter(|event| matches!(event, Event::Write(..))).count();
        assert_eq!(writes, 20);
    }
    // Every second client disconnects; the others do not notice.
    let mut number = 0;
    clients.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    wait_until(|| served.iter().filter(|(_, socket)| socket.is_connected()).count() == 32);
    for client in &mut clients {
        assert_eq!(client.ask(read(0, 0, 8), vec![]).errno, 0);
    }
    drop(served);
    assert!(clients.iter_mut().all(Client::is_hung_up));
}

#[test]
fn sockets_are_spread_over_threads() {
    let service = Service::start(NonZeroUsize::new(3).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let sockets: Vec<_> = (0..6)
        .map(|number| {
            service
                .serve(
                    &directory.path().join(number.to_string()),
                    Access::default(),
                    PciEndpoint(Function::new()),
                    None,
                )
                .unwrap()
        })
        .collect();
    for socket in &sockets {
        assert_eq!(Client::start(socket.path()).ask(reset(), vec![]).errno, 0);
    }
}

#[test]
fn the_socket_file_is_this_users_and_no_others() {
    let fixture = Fixture::new();
    let (_function, socket) = fixture.serve("function");
    let metadata = std::fs::symlink_metadata(socket.path()).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o077, 0);
    let path = fixture.path("function");
    let error = fixture
        .service
        .serve(&path, Access::default(), PciEndpoint(Function::new()), None)
        .unwrap_err();
    assert!(matches!(error, ServerError::Ours { .. }), "{error}");

    // The socket of a dead process is replaced, and only this process's socket is removed.
    let dead = fixture.path("dead");
    drop(UnixListener::bind(&dead).unwrap());
    let socket = fixture
        .service
        .serve(&dead, Access::default(), PciEndpoint(Function::new()), None)
        .unwrap();
    Client::start(&dead);
    std::fs::remove_file(&dead).unwrap();
    let _others = UnixListener::bind(&dead).unwrap();
    drop(socket);
    assert!(dead.exists());

    let file = fixture.path("file");
    std::fs::write(&file, "precious").unwrap();
    let error = fixture
        .service
        .serve(&file, Access::default(), PciEndpoint(Function::new()), None)
        .unwrap_err();
    assert!(matches!(error, ServerError::NotASocket { .. }), "{error}");
    let nowhere = fixture.path("no/where/socket");
    match fixture.service.serve(&nowhere, Access::default(), PciEndpoint(Function::new()), None) {
        Err(ServerError::Directory { error, .. }) => assert_eq!(error.kind(), ErrorKind::NotFound),
        other => panic!("{other:?}"),
    }
}
