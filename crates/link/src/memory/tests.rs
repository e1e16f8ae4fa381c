//! The worst that a hostile peer can do to a link: close it.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_memory::UserAddress;

use super::*;

const HEADER_BYTES: usize = 82;

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 8, transmit_frames: 4, ..LinkOptions::new(HEADER_BYTES) }
}

fn pair() -> (MemoryLink, MemoryLink) {
    let (one, other) = UnixStream::pair().unwrap();
    let host = MemoryLink::offer(one.into(), &options(), EventFd::peer_signal).unwrap();
    let client = MemoryLink::join(other.into(), HEADER_BYTES, EventFd::peer_signal).unwrap();
    (host, client)
}

fn send(link: &mut MemoryLink, bytes: &[u8]) {
    let mut buffers = Vec::new();
    link.buffers(LinkAddress::Peer(0), 1, &mut buffers);
    buffers[0].pieces().write(link.memory(), 0, bytes);
    buffers[0].address(LinkAddress::Peer(0), bytes.len());
    link.send(Nanos::ZERO, &mut buffers);
}

fn receive_one(link: &mut MemoryLink) -> Option<Vec<u8>> {
    let mut frames = Vec::new();
    link.receive(Nanos::ZERO, 1, &mut frames);
    let bytes = frames.first().map(|frame| {
        let mut bytes = vec![0; frame.len_bytes()];
        frame.pieces().read(link.memory(), 0, &mut bytes);
        bytes
    });
    link.give_back(&mut frames);
    bytes
}

/// The word of a ring that the client can write to: the one on the way to the host.
fn write_entry(client: &MemoryLink, position: usize, bits: u64) {
    let layout = Layout::new(&options(), 4, 8).unwrap();
    let ring = words(client, &layout.to_host, false);
    ring.words()[position].store(bits, Ordering::Release);
}

fn words(link: &MemoryLink, direction: &Direction, returned: bool) -> Words<AtomicU64> {
    let at = direction.ring_at(returned);
    Words::new(link.memory(), UserAddress(at as u64), direction.slots, 8).unwrap()
}

#[test]
fn both_sides_know_the_same_link() {
    let (mut host, mut client) = pair();
    assert_eq!((host.properties().receive_frames, host.properties().transmit_frames), (8, 4));
    assert_eq!((client.properties().receive_frames, client.properties().transmit_frames), (4, 8));
    send(&mut client, b"question");
    assert_eq!(receive_one(&mut host).unwrap(), b"question");
    send(&mut host, b"answer");
    assert_eq!(receive_one(&mut client).unwrap(), b"answer");
}

#[test]
fn entries_that_break_a_rule_close_the_link_and_lend_nothing() {
    let round = 1_u64 << 48;
    let frame_bytes = options().frame_bytes as u64;
    for (bits, what) in [
        (round, "no bytes"),
        (round | (frame_bytes + 1), "too many bytes"),
        (round | u64::from(u32::MAX), "far too many bytes"),
        (round | (8 << 32) | 64, "a slot that is not there"),
        (round | (0xffff << 32) | 64, "a slot far outside"),
    ] {
        let (mut host, client) = pair();
        write_entry(&client, 0, bits);
        assert_eq!(receive_one(&mut host), None, "{what}");
        assert_eq!(host.state(), LinkState::Closed(BROKEN), "{what}");
        assert_eq!(host.stats().dropped_malformed.get(), 1);
        // It stays closed, and does nothing more.
        let mut buffers = Vec::new();
        host.buffers(LinkAddress::Peer(0), 4, &mut buffers);
        assert!(buffers.is_empty());
        assert_eq!(host.arm(), Arm::Armed);
    }
}

#[test]
fn a_slot_that_is_lent_does_not_come_again() {
    let (mut host, mut client) = pair();
    send(&mut client, &[7; 100]);
    let mut frames = Vec::new();
    host.receive(Nanos::ZERO, 9, &mut frames);
    let slot = u64::from(client.outgoing.away.iter().position(|away| *away).unwrap() as u32);
    write_entry(&client, 1, (1 << 48) | (slot << 32) | 64);
    host.receive(Nanos::ZERO, 9, &mut frames);
    assert_eq!((frames.len(), host.state()), (1, LinkState::Closed(BROKEN)));
    host.give_back(&mut frames);
}

#[test]
fn slots_that_were_never_sent_do_not_come_back() {
    for slot in [0_u64, 3, 4, 0xffff] {
        let (mut host, client) = pair();
        let layout = Layout::new(&options(), 4, 8).unwrap();
        words(&client, &layout.to_client, true).words()[0]
            .store((1 << 48) | (slot << 32), Ordering::Release);
        let mut buffers = Vec::new();
        host.buffers(LinkAddress::Peer(0), 5, &mut buffers);
        assert!(buffers.is_empty(), "slot {slot}");
        assert_eq!(host.state(), LinkState::Closed(BROKEN), "slot {slot}");
    }
}

#[test]
fn any_bytes_in_the_shared_memory_end_in_a_closed_link_or_in_frames() {
    let mut state = 1_u64;
    for _ in 0..2000 {
        let (mut host, client) = pair();
        let layout = Layout::new(&options(), 4, 8).unwrap();
        for (direction, returned) in [(&layout.to_host, false), (&layout.to_client, true)] {
            for word in words(&client, direction, returned).words() {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                // Mostly of the right round, and with a slot and a size near the limits.
                let bits = (1 << 48) | (((state >> 33) % 10) << 32) | ((state >> 40) % 9000);
                word.store(if state >> 61 == 0 { state } else { bits }, Ordering::Release);
            }
        }
        let (mut frames, mut buffers) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            host.receive(Nanos::ZERO, 3, &mut frames);
            host.buffers(LinkAddress::Peer(0), 3, &mut buffers);
            let mut bytes = [0; 64];
            frames
                .iter()
                .for_each(|frame| assert!(frame.pieces().read(host.memory(), 0, &mut bytes) > 0));
            assert!(frames.len() <= 8 && buffers.len() <= 4);
            host.cancel(&mut buffers);
        }
        host.give_back(&mut frames);
    }
}

/// Both sides act at the same moment, again and again: the one publishes a frame and then looks
/// whether its peer sleeps, the other one goes to sleep and then looks for a frame. One of the two
/// looks is late enough.
#[test]
fn a_frame_is_seen_or_wakes_however_the_two_sides_interleave() {
    const ROUNDS: u64 = 30_000;
    let (mut host, mut client) = pair();
    let turn = Arc::new(AtomicU64::new(0));
    let meet = |turn: &AtomicU64, count: u64| {
        turn.fetch_add(1, Ordering::SeqCst);
        let mut spins = 0;
        while turn.load(Ordering::SeqCst) < count {
            spins += 1;
            // The other thread may have no core.
            if spins % 1_000 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    // Every distance between the two is tried.
    let delay = |count: u64| {
        for step in 0..count {
            let _ = std::hint::black_box(step);
        }
    };
    let theirs = Arc::clone(&turn);
    let sender = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            let mut buffers = Vec::with_capacity(1);
            client.buffers(LinkAddress::Peer(0), 1, &mut buffers);
            buffers[0].address(LinkAddress::Peer(0), 64);
            meet(&theirs, 4 * round + 2);
            delay(round % 64);
            client.send(Nanos::ZERO, &mut buffers);
            meet(&theirs, 4 * round + 4);
        }
        client
    });
    for round in 0..ROUNDS {
        meet(&turn, 4 * round + 2);
        delay(round / 64 % 64);
        let armed = host.arm();
        // After this the sender has looked.
        meet(&turn, 4 * round + 4);
        let woken = host.doorbell.event.drain() > 0;
        assert!(
            armed == Arm::WorkPending || woken,
            "round {round}: the frame was not seen, and woke nothing"
        );
        host.disarm();
        assert_eq!(receive_one(&mut host).map(|bytes| bytes.len()), Some(64));
    }
    drop(sender.join().unwrap());
}

#[test]
fn the_end_of_a_peer_is_noticed_asleep_and_awake() {
    let (mut host, client) = pair();
    assert_eq!(host.arm(), Arm::Armed);
    assert!(!is_readable(host.wake_fd()));
    drop(client);
    wait_readable(host.wake_fd());
    host.on_wake();
    assert_eq!(host.state(), LinkState::Closed(GONE));
    assert!(!is_readable(host.wake_fd()), "it would wake the sidecore for ever");

    let (mut host, client) = pair();
    drop(client);
    // The socket is closed on a thread of its own.
    let start = Instant::now();
    let mut now = Nanos::ZERO;
    while host.state() == LinkState::Up {
        assert!(start.elapsed() < Duration::from_secs(10));
        now = now.after(Nanos::from_millis(1));
        assert!(receive_at(&mut host, now));
    }
    assert_eq!(host.state(), LinkState::Closed(GONE));
}

fn receive_at(link: &mut MemoryLink, now: Nanos) -> bool {
    let mut frames = Vec::new();
    link.receive(now, 1, &mut frames);
    frames.is_empty()
}

fn wait_readable(fd: BorrowedFd<'_>) {
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)), Ok(1));
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        > 0
}

#[test]
fn bytes_on_the_socket_close_the_link() {
    use std::io::Write as _;
    let (mut one, other) = UnixStream::pair().unwrap();
    let mut host = MemoryLink::offer(other.into(), &options(), EventFd::peer_signal).unwrap();
    one.write_all(b"x").unwrap();
    assert!(is_readable(host.wake_fd()));
    host.on_wake();
    assert_eq!(host.state(), LinkState::Closed(BROKEN));
    assert!(!is_readable(host.wake_fd()));
}

#[test]
fn a_client_refuses_offers_that_break_a_rule() {
    let events = || EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
    let layout = Layout::new(&options(), 4, 8).unwrap();
    let good = || {
        let pages = SharedPages::new("test", layout.len_bytes).unwrap();
        pages.file().try_clone_to_owned().unwrap()
    };
    let small = || SharedPages::new("test", 4096).unwrap().file().try_clone_to_owned().unwrap();
    let unsealed = || {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, layout.len_bytes as u64).unwrap();
        file
    };
    let offer = Offer::of(&options()).encode();
    let join = |bytes: &[u8], fds: Vec<OwnedFd>| {
        let (one, other) = UnixStream::pair().unwrap();
        send_raw(&one, bytes, &fds);
        drop((one, fds));
        MemoryLink::join(other.into(), HEADER_BYTES, EventFd::peer_signal).map(drop)
    };
    for (bytes, fds, why) in [
        (&offer[..], vec![small(), events(), events()], "another size"),
        (&offer[..], vec![unsealed(), events(), events()], "could change it"),
        (&offer[..], vec![events(), events(), events()], "could change it"),
        (&offer[..], vec![good(), good(), events()], "no eventfd"),
        (&offer[..], vec![good(), events(), good()], "no eventfd"),
        (&offer[..], vec![good(), events()], "three descriptors"),
        (&offer[..], vec![good(), events(), events(), events()], "more than 3"),
        (&offer[..31], vec![good(), events(), events()], "cut short"),
        (&[0; 32], vec![good(), events(), events()], "another protocol"),
        (&[], vec![], "closed"),
    ] {
        let error = join(bytes, fds).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    join(&offer, vec![good(), events(), events()]).unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let error = MemoryLink::join(other.into(), HEADER_BYTES, EventFd::peer_signal).unwrap_err();
    assert!(matches!(error, LinkError::Kernel { .. }), "nothing has been offered: {error}");
    drop(one);
}

fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) {
    if !bytes.is_empty() {
        assert_eq!(
            sidecore_socket::send(socket, bytes, fds, 16, Blocking::Never).unwrap(),
            bytes.len()
        );
    }
}
