use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use sidecore_memory::GuestAddress;
use sidecore_peer::{Access, ServerError, Service, Snapshot, Socket};
use sidecore_ring::{RingFormat, RingState};
use sidecore_spec_virtio::vhost_user::LOG_ALL;

use super::*;
use crate::message::{Body, ConfigSpace, Log, VringState};
use crate::testing::*;

struct Fixture {
    directory: tempfile::TempDir,
    device: Arc<Recorder>,
    service: Service,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Recorder::new())
    }

    fn with(device: Arc<Recorder>) -> Self {
        let service = Service::start(NonZeroUsize::MIN).unwrap();
        Self { directory: tempfile::tempdir().unwrap(), device, service }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("disk.sock")
    }

    fn start(&self) -> Socket {
        self.service
            .serve(&self.path(), Access::default(), VirtioEndpoint(self.device.clone()), None)
            .unwrap()
    }
}

fn connect_to(server: &Socket) -> Front {
    Front::new(UnixStream::connect(server.path()).unwrap())
}

fn ask(front: &mut Front, message: Message) -> Body {
    let request = message.request;
    front.send(message).unwrap();
    let reply = front.receive().unwrap().expect("a reply");
    assert_eq!(reply.request, request);
    assert!(reply.flags.reply);
    reply.body
}

/// Waits for the other end to disconnect. It resets the connection if it has not read everything
/// that was sent.
fn hung_up(front: &Front) -> bool {
    front.stream().set_read_timeout(Some(SOON)).unwrap();
    match front.stream().read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < SOON, "the condition never held");
        thread::sleep(Duration::from_millis(1));
    }
}

/// All messages of QEMU that start queue 0.
fn start_queue(front: &mut Front) {
    let mut messages = negotiation(VERSION_1);
    messages.push(add_region(region(0, MEGABYTE), "server"));
    messages.extend(ring_setup(0, 128, 0));
    for message in messages {
        if message.request.has_reply() || message.flags.need_reply {
            ask(front, message);
        } else {
            front.send(message).unwrap();
        }
    }
}

#[test]
fn a_vmm_is_served_and_its_disconnect_stops_the_queues() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    assert_eq!(
        ask(&mut front, plain(Request::GetFeatures)),
        Body::U64(DEVICE_FEATURES | PROTOCOL_FEATURES | LOG_ALL)
    );
    start_queue(&mut front);
    assert!(server.is_serving());
    assert_eq!(fixture.device.running(), [0]);
    drop(front);
    wait_until(|| !server.is_serving());
    assert!(fixture.device.running().is_empty());
    assert_eq!(fixture.device.events().last(), Some(&Event::Reset));
    // The VMM may connect again.
    let mut front = connect_to(&server);
    start_queue(&mut front);
    assert_eq!(fixture.device.running(), [0]);
}

#[test]
fn a_second_vmm_waits_for_the_first_to_go() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut first = connect_to(&server);
    ask(&mut first, plain(Request::GetFeatures));
    let mut second = connect_to(&server);
    second.send(plain(Request::GetFeatures)).unwrap();
    second.set_patience(Duration::from_millis(50));
    assert!(second.receive().is_err(), "no reply yet");
    second.set_patience(SOON);
    drop(first);
    assert_eq!(second.receive().unwrap().unwrap().request, Request::GetFeatures);
}

#[test]
fn bytes_that_are_no_message_end_only_their_connection() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let oversized = [1_u32, 1, 1 << 20].map(u32::to_ne_bytes).concat();
    let version_2 = [1_u32, 2, 0].map(u32::to_ne_bytes).concat();
    let unknown = [99_u32, 1, 0].map(u32::to_ne_bytes).concat();
    let missing_fd = number(Request::SetVringKick, 0).to_bytes();
    let reply = Message::reply(Request::GetFeatures, Body::U64(0)).to_bytes();
    for bytes in [oversized, version_2, unknown, missing_fd, reply, vec![0xff; 100]] {
        let mut front = connect_to(&server);
        start_queue(&mut front);
        front.stream().write_all(&bytes).unwrap();
        assert!(hung_up(&front), "{bytes:?}");
        assert!(fixture.device.running().is_empty());
    }
    let mut front = connect_to(&server);
    ask(&mut front, plain(Request::GetFeatures));
}

#[test]
fn shutdown_ends_an_idle_server() {
    let fixture = Fixture::new();
    let server = fixture.start();
    assert!(fixture.path().exists());
    drop(server);
    assert!(!fixture.path().exists());
}

#[test]
fn shutdown_ends_a_connection_stalled_in_mid_message() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    front.stream().write_all(&number(Request::SetFeatures, 0).to_bytes()[..14]).unwrap();
    drop(server);
    assert!(hung_up(&front));
    assert!(fixture.device.running().is_empty());
    assert_eq!(fixture.device.events().last(), Some(&Event::Reset));
}

#[test]
fn shutdown_ends_a_connection_whose_peer_reads_no_replies() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let front = connect_to(&server);
    let stream = front.stream();
    let flood = thread::spawn(move || {
        let request = plain(Request::GetFeatures).to_bytes();
        while (&stream).write_all(&request).is_ok() {}
    });
    // Until both directions are full.
    thread::sleep(Duration::from_millis(100));
    drop(server);
    flood.join().unwrap();
}

#[test]
fn shutdown_disconnects_a_waiting_client() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut first = connect_to(&server);
    ask(&mut first, plain(Request::GetFeatures));
    let second = connect_to(&server);
    drop(server);
    assert!(hung_up(&first));
    assert!(hung_up(&second));
}

#[test]
fn a_socket_that_is_served_is_not_served_again() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let endpoint = VirtioEndpoint(Recorder::new());
    let second = fixture.service.serve(&fixture.path(), Access::default(), endpoint, None);
    assert!(matches!(second, Err(ServerError::Ours { .. })));
    ask(&mut connect_to(&server), plain(Request::GetFeatures));
}

/// A socket whose last close waits, and the other end, whose drop ends the wait.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (end, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(6 * SOON)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket.into(), end)
}

/// Sends a descriptor with a slow close, with a request that takes a descriptor. This end closes
/// its own before the request is complete.
fn send_lingering(front: &Front) -> TcpStream {
    let (socket, end) = lingering();
    let bytes = number(Request::SetVringKick, 0).to_bytes();
    sidecore_socket::send(front, &bytes[..14], &[socket], 1, sidecore_socket::Blocking::Wait)
        .unwrap();
    front.stream().write_all(&bytes[14..]).unwrap();
    end
}

/// Shuts the server down, and checks that the shutdown ends soon.
fn shut_down_soon(server: Socket) {
    let (done, wait) = channel();
    thread::spawn(move || {
        drop(server);
        let _ = done.send(());
    });
    wait.recv_timeout(SOON).expect("the shutdown waits for the client");
}

#[test]
fn shutdown_does_not_wait_for_the_close_of_a_clients_descriptors() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    let end = send_lingering(&front);
    // The queues are stopped and the client is disconnected, although descriptors are still to be
    // closed.
    assert!(hung_up(&front));
    wait_until(|| fixture.device.running().is_empty() && !server.is_serving());
    shut_down_soon(server);
    // Meanwhile the device and its socket can be served again.
    let again = fixture.start();
    start_queue(&mut connect_to(&again));
    let waiting = connect_to(&again);
    let other_end = send_lingering(&waiting);
    shut_down_soon(again);
    drop((end, other_end));
}

#[test]
fn the_next_client_is_served_when_all_descriptors_of_the_last_one_are_closed() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let front = connect_to(&server);
    let end = send_lingering(&front);
    assert!(hung_up(&front));
    let mut next = connect_to(&server);
    next.send(plain(Request::GetFeatures)).unwrap();
    drop(end);
    assert_eq!(next.receive().unwrap().unwrap().request, Request::GetFeatures);
}

#[test]
fn a_connected_vmm_is_notified_of_a_change_of_the_configuration() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    let (mut notified, channel) = UnixStream::pair().unwrap();
    notified.set_read_timeout(Some(SOON)).unwrap();
    front
        .send(Message::request(Request::SetBackendReqFd, Body::Empty, vec![channel.into()]))
        .unwrap();
    let mut message = [0; 12];
    // The client has not read the configuration. Once it has, only a change causes a notification.
    notified.read_exact(&mut message).unwrap();
    let config = ConfigSpace { offset_bytes: 0, flags: 0, data: vec![0; 60] };
    ask(&mut front, Message::request(Request::GetConfig, Body::Config(config), Vec::new()));
    fixture.device.change_config();
    server.notify();
    notified.read_exact(&mut message).unwrap();
    assert_eq!(message[..4], 2_u32.to_ne_bytes(), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    server.notify();
    drop(server);
    assert_eq!(notified.read(&mut message).unwrap(), 0, "nothing has changed since");
}

#[test]
fn changes_of_the_configuration_do_not_hide_a_disconnect() {
    for _ in 0..100 {
        let fixture = Fixture::new();
        let server = fixture.start();
        let mut front = connect_to(&server);
        ask(&mut front, plain(Request::GetFeatures));
        server.notify();
        shut_down_soon(server);
    }
}

/// Resumes the snapshot, with the parts that a service manager would keep, in the service of the
/// next process and on a new device.
fn resume(fixture: &Fixture, snapshot: Snapshot) -> (Fixture, Socket) {
    let Snapshot { state, fds } = snapshot;
    let state = serde_json::from_slice(&serde_json::to_vec(&state).unwrap()).unwrap();
    let next = Fixture::new();
    let endpoint = VirtioEndpoint(next.device.clone());
    let socket = next.service.serve(
        &fixture.path(),
        Access::default(),
        endpoint,
        Some(Snapshot { state, fds }),
    );
    (next, socket.unwrap())
}

#[test]
fn a_client_is_resumed_with_its_rings_positions_and_the_guest_sees_no_reset() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    for message in ring_setup(2, 64, 40) {
        if message.flags.need_reply {
            drop(ask(&mut front, message))
        } else {
            front.send(message).unwrap()
        }
    }
    fixture.device.serve(0, 5);
    fixture.device.serve(2, 3);
    // Half a message, with its descriptor.
    let bytes = eventfd(Request::SetVringCall, 0).to_bytes();
    sidecore_socket::send(&front, &bytes[..14], &[event()], 1, sidecore_socket::Blocking::Never)
        .unwrap();
    let snapshot = server.export().expect("there is a client");
    let events = fixture.device.events();
    assert_eq!(events[events.len() - 2..], [Event::Stop { index: 0 }, Event::Stop { index: 2 }]);

    let (next, server) = resume(&fixture, snapshot);
    assert_eq!(next.device.running(), [0, 2]);
    let start = |index, at| {
        let (state, format) = (RingState { next_avail: at, next_used: at }, RingFormat::Split);
        Event::Start { index, state, format, kick: true, call: true }
    };
    assert_eq!(next.device.events(), [start(0, 5), start(2, 43)]);
    assert!(
        next.device
            .memory_of(0)
            .read_array::<8>(GuestAddress(MEGABYTE - 8), &mut Default::default())
            .is_ok()
    );
    front.stream().write_all(&bytes[14..]).unwrap();
    // The negotiated features hold: a feature that was not offered is still refused, and a reset
    // takes the rings.
    assert_eq!(
        ask(&mut front, vring(Request::GetVringBase, 2, 0)),
        Body::VringState(VringState { index: 2, num: 43 })
    );
    assert_eq!(
        next.device.events(),
        [Event::SetCall { index: 0, call: true }, Event::Stop { index: 2 }]
    );
    assert_eq!(
        ask(&mut front, number(Request::SetFeatures, 1 << 63).needing_reply()),
        Body::U64(1)
    );
    ask(&mut front, plain(Request::ResetDevice).needing_reply());
    assert!(next.device.running().is_empty() && server.is_serving());
}

#[test]
fn a_guest_that_migrates_is_logged_by_the_next_process() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    let file = memfd("log", 4096);
    let log = Body::Log(Log { len_bytes: 4000, file_offset_bytes: 96 });
    let theirs = file.try_clone().unwrap();
    ask(&mut front, Message::request(Request::SetLogBase, log, vec![theirs]));
    let features = fixture.device.features_of(0) | PROTOCOL_FEATURES | LOG_ALL;
    ask(&mut front, number(Request::SetFeatures, features).needing_reply());
    assert!(fixture.device.mark(0, 0));

    let (next, _server) = resume(&fixture, server.export().expect("there is a client"));
    assert!(next.device.mark(0, 9), "the log is in use");
    let mut marks = [0; 98];
    rustix::io::pread(&file, &mut marks, 0).unwrap();
    assert_eq!(marks[96..], [1, 2]);
}

#[test]
fn a_client_of_a_broken_or_another_device_is_not_handed_over() {
    let fixture = Fixture::new();
    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    fixture.device.set_broken();
    assert!(server.export().is_none());
    assert!(hung_up(&front) && fixture.device.running().is_empty());

    let server = fixture.start();
    let mut front = connect_to(&server);
    start_queue(&mut front);
    let mut snapshot = server.export().unwrap();
    snapshot.state.session.insert("offered".to_owned(), 1.into());
    let (next, server) = resume(&fixture, snapshot);
    assert!(hung_up(&front) && next.device.running().is_empty());
    // The next client is served as usual.
    start_queue(&mut connect_to(&server));
}
