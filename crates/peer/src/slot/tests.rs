//! A socket under a clock that the tests advance, with a pool whose jobs the tests run.

use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use sidecore_socket::{Access, SocketFile};

use super::*;
use crate::connection::Received;
use crate::service::Service;
use crate::testing::{Command, Device, Letters};

const SOON: Duration = Duration::from_secs(10);

/// A slot and the event loop around it.
struct Bench {
    directory: tempfile::TempDir,
    epoll: OwnedFd,
    pool: Arc<Pool>,
    now: Instant,
    device: Arc<Device>,
    slot: Box<Slot<Arc<Device>>>,
    events: Arc<Mutex<Vec<Event>>>,
    known: Arc<Known>,
}

impl Bench {
    fn new(snapshot: Option<Snapshot>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (_file, listener) =
            SocketFile::listen(&directory.path().join("socket"), Access::default(), 8).unwrap();
        let (events, device) = (Arc::<Mutex<Vec<Event>>>::default(), Arc::<Device>::default());
        let inbox = Arc::clone(&events);
        let send_event: SendEvent = Arc::new(move |event| inbox.lock().unwrap().push(event));
        let known = Arc::<Known>::default();
        let mut slot =
            Box::new(Slot::new(1, listener, Arc::clone(&device), Arc::clone(&known), send_event));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let now = Instant::now();
        if let Some(snapshot) = snapshot {
            slot.resume(snapshot, now);
        }
        let mut bench =
            Self { directory, epoll, pool: Pool::new(0), now, device, slot, events, known };
        bench.handle(Event::Added);
        bench
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn handle(&mut self, event: Event) {
        self.slot.handle(event, &Context { epoll: &self.epoll, pool: &self.pool, now: self.now });
    }

    /// Handles the first of the pool's events. False if there is none.
    fn handle_next(&mut self) -> bool {
        let event = Some(()).filter(|()| !self.events.lock().unwrap().is_empty());
        event
            .map(|()| self.events.lock().unwrap().remove(0))
            .map(|event| self.handle(event))
            .is_some()
    }

    /// Runs the pool's jobs and handles their events, until no job is left.
    fn settle(&mut self) {
        while self.pool.run_next() || self.handle_next() {}
    }

    fn connect(&mut self) -> UnixStream {
        let client = UnixStream::connect(self.path()).unwrap();
        client.set_nonblocking(true).unwrap();
        self.handle(Event::Acceptable);
        client
    }

    fn is_listening(&self) -> bool {
        matches!(self.slot.state, State::Listening)
    }
}

fn send(client: &mut UnixStream, letter: char) {
    client.write_all(&[letter as u8, 0, 0, 0]).unwrap();
}

/// Returns the replies to a client: letters, and a dot at the end of the connection.
fn replies(client: &mut UnixStream) -> String {
    let mut letters = String::new();
    loop {
        let mut header = [0; 4];
        match client.read(&mut header) {
            Ok(4) => letters.push(header[0].into()),
            Ok(_) => return letters + ".",
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return letters,
            Err(_) => return letters + ".",
        }
    }
}

#[test]
fn the_pool_runs_a_command_that_may_wait_and_the_next_command_waits_for_it() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    for letter in ['a', 'B', 'c'] {
        send(&mut client, letter);
    }
    bench.handle(Event::Ready);
    assert_eq!(replies(&mut client), "a");
    (0..3).for_each(|_| bench.handle(Event::Ready));
    assert_eq!((replies(&mut client).as_str(), bench.device.take_asked().as_str()), ("", "a"));
    assert!(bench.pool.run_next() && !bench.pool.run_next());
    assert_eq!(replies(&mut client), "", "the worker sends the replies");
    assert!(bench.handle_next() && !bench.handle_next());
    bench.handle(Event::Ready);
    assert_eq!((replies(&mut client).as_str(), bench.device.take_asked().as_str()), ("Bc", "Bc"));
}

#[test]
fn a_client_whose_command_takes_too_long_is_disconnected_and_the_command_named() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    send(&mut client, 'W');
    bench.handle(Event::Ready);
    assert_eq!(bench.slot.timer(), Some(bench.now + DEADLINE));
    bench.now += DEADLINE - Duration::from_millis(1);
    bench.handle(Event::Timeout);
    assert_eq!(replies(&mut client), "");
    bench.now += Duration::from_millis(1);
    bench.handle(Event::Timeout);
    assert_eq!(replies(&mut client), ".");
    assert_eq!(bench.known.last.get().unwrap().reason, "W has taken longer than 30s");
    assert_eq!(bench.slot.timer(), None);
    assert!(
        bench.known.is_serving.load(Ordering::SeqCst) && !bench.is_listening(),
        "the call continues"
    );
    // After its end, the session ends, and the next client may connect.
    bench.settle();
    assert_eq!(bench.device.take_asked(), "W.");
    assert!(bench.is_listening() && !bench.known.is_connected.load(Ordering::SeqCst));
    let mut next = bench.connect();
    send(&mut next, 'n');
    bench.handle(Event::Ready);
    assert_eq!(replies(&mut next), "n");
}

#[test]
fn the_device_is_told_of_a_client_that_is_gone_also_during_a_call_and_of_no_other_end() {
    let mut bench = Bench::new(None);
    drop(bench.connect());
    bench.handle(Event::Ready);
    assert_eq!(bench.device.take_asked(), "!");
    bench.settle();
    assert_eq!(bench.device.take_asked(), ".");
    let mut client = bench.connect();
    send(&mut client, 'W');
    bench.handle(Event::Ready);
    drop(client);
    let mut events = Vec::with_capacity(4);
    epoll::wait(&bench.epoll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
    bench.handle(Event::Ready);
    assert_eq!(bench.device.take_asked(), "!");
    let zero = rustix::event::Timespec::default();
    let again = rustix::buffer::spare_capacity(&mut events);
    assert_eq!(epoll::wait(&bench.epoll, again, Some(&zero)).unwrap(), 0, "it is told once");
    bench.settle();
    // The reply or the next read finds the end, and says so again.
    bench.handle(Event::Ready);
    bench.settle();
    let asked = bench.device.take_asked();
    assert!(asked.starts_with('W') && asked.ends_with('.'), "{asked}");
    let mut client = bench.connect();
    send(&mut client, 'x');
    bench.handle(Event::Ready);
    bench.settle();
    assert_eq!((replies(&mut client).as_str(), bench.device.take_asked().as_str()), (".", "x."));
}

#[test]
fn a_panic_costs_the_client_its_connection_and_the_socket_continues() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    send(&mut client, 'P');
    bench.handle(Event::Ready);
    let job = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.pool.run_next()));
    assert!(job.is_err());
    bench.settle();
    assert_eq!(replies(&mut client), ".");
    assert!(bench.known.last.get().is_some() && bench.is_listening());
}

#[test]
fn the_next_client_is_accepted_when_the_session_has_ended_and_the_connection_is_closed() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    send(&mut client, 'x');
    bench.handle(Event::Ready);
    assert_eq!(replies(&mut client), ".");
    assert!(bench.known.is_serving.load(Ordering::SeqCst));
    assert!(bench.pool.run_next() && bench.handle_next());
    assert_eq!(bench.device.take_asked(), "x.");
    assert!(!bench.known.is_serving.load(Ordering::SeqCst));
    assert!(
        bench.known.is_connected.load(Ordering::SeqCst) && !bench.is_listening(),
        "it is not closed yet"
    );
    bench.settle();
    assert!(bench.is_listening() && !bench.known.is_connected.load(Ordering::SeqCst));
    assert_eq!(bench.known.last.get().unwrap().reason, "an x");
}

#[test]
fn the_end_of_a_socket_waits_for_the_session_and_not_for_the_connection() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    send(&mut client, 'W');
    bench.handle(Event::Ready);
    let (over, wait) = channel();
    bench.handle(Event::End(Some(over)));
    assert_eq!(replies(&mut client), ".");
    assert!(!bench.slot.is_over());
    assert!(bench.pool.run_next() && bench.handle_next());
    assert!(!bench.slot.is_over(), "the session has to end first");
    assert!(bench.pool.run_next() && bench.handle_next());
    assert!(bench.slot.is_over() && !bench.known.is_connected.load(Ordering::SeqCst));
    assert!(wait.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Empty));
    bench.slot.retire(&Context { epoll: &bench.epoll, pool: &bench.pool, now: bench.now });
    assert!(
        wait.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Disconnected)
    );
}

#[test]
fn a_client_is_notified_only_after_it_has_been_silent() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    let quiet = Duration::from_millis(200);
    bench.now += quiet / 2;
    send(&mut client, 'a');
    bench.handle(Event::Ready);
    assert_eq!(bench.slot.timer(), None);
    bench.device.has_event.store(true, Ordering::SeqCst);
    bench.handle(Event::Notify);
    assert_eq!(bench.slot.timer(), Some(bench.now + quiet));
    bench.now += quiet / 2;
    bench.handle(Event::Timeout);
    assert_eq!(bench.device.notified.load(Ordering::SeqCst), 0);
    bench.now += quiet / 2;
    bench.handle(Event::Timeout);
    assert_eq!(bench.device.notified.load(Ordering::SeqCst), 1);
    // If the socket has no space, another attempt follows after a while.
    assert_eq!(bench.slot.timer(), Some(bench.now + quiet));
    // No notification during a command.
    send(&mut client, 'W');
    bench.handle(Event::Ready);
    assert_eq!(bench.slot.timer(), Some(bench.now + DEADLINE));
}

#[test]
fn a_client_is_exported_when_its_command_is_answered_and_resumed_in_the_middle_of_a_message() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    send(&mut client, 'W');
    bench.handle(Event::Ready);
    let (successor, exported) = channel();
    bench.handle(Event::Export(successor));
    client.write_all(b"n\0").unwrap();
    assert!(bench.pool.run_next() && exported.try_recv().is_err(), "the reply comes first");
    bench.settle();
    assert_eq!(replies(&mut client), "W");
    let Snapshot { state, fds } = exported.try_recv().unwrap();
    assert!(bench.slot.is_over() && !bench.known.is_connected.load(Ordering::SeqCst));
    let state = serde_json::from_slice(&serde_json::to_vec(&state).unwrap()).unwrap();
    let mut next = Bench::new(Some(Snapshot { state, fds }));
    assert_eq!(next.device.take_asked(), "W>");
    assert!(next.known.is_connected.load(Ordering::SeqCst));
    next.handle(Event::Ready);
    client.write_all(b"\0\0").unwrap();
    next.handle(Event::Ready);
    assert_eq!(replies(&mut client), "n");
}

#[test]
fn a_client_that_cannot_be_resumed_is_disconnected_and_the_next_one_served() {
    let mut bench = Bench::new(None);
    let mut client = bench.connect();
    let (successor, exported) = channel();
    bench.handle(Event::Export(successor));
    bench.settle();
    let mut snapshot = exported.try_recv().unwrap();
    snapshot.state.session.clear();
    let mut next = Bench::new(Some(snapshot));
    assert_eq!(replies(&mut client), ".");
    next.settle();
    assert!(next.is_listening() && !next.known.is_connected.load(Ordering::SeqCst));
}

#[test]
fn a_client_that_cannot_be_exported_is_disconnected_and_its_session_ends() {
    let mut bench = Bench::new(None);
    bench.device.cannot_be_exported.store(true, Ordering::SeqCst);
    let mut client = bench.connect();
    let (successor, exported) = channel();
    bench.handle(Event::Export(successor));
    bench.settle();
    assert!(exported.try_recv().is_err() && bench.slot.is_over());
    assert_eq!((replies(&mut client).as_str(), bench.device.take_asked().as_str()), (".", ">."));
}

#[test]
fn a_listener_that_fails_is_tried_again_after_a_while() {
    let mut bench = Bench::new(None);
    // The listener is in the set already, by a duplicate of its descriptor.
    let other = bench.slot.listener.try_clone().unwrap();
    bench.handle(Event::Acceptable);
    assert!(bench.is_listening() && bench.slot.timer().is_none());
    bench.slot.listener = std::os::unix::net::UnixDatagram::unbound().unwrap().into();
    epoll::add(&bench.epoll, &bench.slot.listener, epoll::EventData::new_u64(2), EventFlags::IN)
        .unwrap();
    bench.handle(Event::Acceptable);
    assert!(!bench.is_listening());
    let due = bench.slot.timer().unwrap();
    assert_eq!(due, bench.now + RETRY);
    epoll::delete(&bench.epoll, &other).unwrap_err();
    bench.slot.listener = other;
    epoll::delete(&bench.epoll, &bench.slot.listener).unwrap_err();
    bench.now = due;
    bench.handle(Event::Timeout);
    assert!(bench.is_listening());
}

/// Many connections that send nothing, or nonsense, or half a message, on one socket: meanwhile
/// another socket of the same worker is served, and afterwards the next good client of the same
/// socket.
#[test]
fn a_storm_on_one_socket_delays_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    let serve = |name: &str| {
        service
            .serve(&directory.path().join(name), Access::default(), Arc::<Device>::default(), None)
            .unwrap()
    };
    let (stormy, calm) = (serve("stormy"), serve("calm"));
    let mut neighbour = Connection::<Letters>::new(UnixStream::connect(calm.path()).unwrap());
    let ask = |client: &mut Connection<Letters>, letter| {
        assert!(client.send(Command(letter, Vec::new())).unwrap());
        loop {
            match client.receive().unwrap() {
                Received::Message(Command(reply, _)) => return assert_eq!(reply, letter),
                Received::Nothing => {
                    let soon = rustix::event::Timespec::try_from(SOON).unwrap();
                    let mut fds =
                        [rustix::event::PollFd::new(client, rustix::event::PollFlags::IN)];
                    assert_eq!(rustix::event::poll(&mut fds, Some(&soon)).unwrap(), 1, "no answer");
                }
                Received::Closed => panic!("closed"),
            }
        }
    };
    let mut kept = Vec::new();
    for round in 0..400 {
        let storm = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        let storm = storm.unwrap();
        rustix::fs::fcntl_setfl(storm.as_fd(), rustix::fs::OFlags::NONBLOCK).unwrap();
        // The backlog may be full: then the connection is refused, at no cost for this socket.
        let address = rustix::net::SocketAddrUnix::new(stormy.path()).unwrap();
        if rustix::net::connect(&storm, &address).is_ok() {
            let mut storm = UnixStream::from(storm);
            let bytes: &[u8] =
                [b"\xff\xff\xff\xff".as_slice(), b"W\0", b"P\0\0\0", b"sx", b""][round % 5];
            let _ = storm.write_all(bytes);
            if round % 7 == 0 {
                kept.push(storm);
            }
        }
        ask(&mut neighbour, 'a');
        if round % 10 == 0 {
            ask(&mut neighbour, 'W');
            kept.clear();
        }
    }
    drop(kept);
    let mut good = Connection::<Letters>::new(UnixStream::connect(stormy.path()).unwrap());
    ask(&mut good, 'W');
    drop((stormy, calm));
}

#[test]
fn a_large_buffer_is_freed_after_its_message() {
    let (one, other) = UnixStream::pair().unwrap();
    let (mut one, mut other) = (Connection::<Letters>::new(one), Connection::<Letters>::new(other));
    let message = Command('a', vec![7; 60_000]);
    assert!(one.send(message.clone()).unwrap());
    let Received::Message(received) = other.receive().unwrap() else { panic!("no message") };
    assert_eq!(received, message);
    assert!(one.kept_bytes() <= 8 << 10 && other.kept_bytes() <= 8 << 10);
}
