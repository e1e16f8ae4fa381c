//! The worst that a hostile peer can do to a link: close it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_memory::{SharedPages, UserAddress, Words};

use super::layout::{Direction, Layout};
use super::*;

const HEADER_BYTES: usize = 82;

/// Of the client.
fn options() -> LinkOptions {
    LinkOptions { receive_frames: 4, transmit_frames: 8, ..LinkOptions::new(HEADER_BYTES) }
}

/// The IOhost and its client.
fn pair() -> (MemoryLink, MemoryLink) {
    MemoryLink::pair(&options(), EventFd::peer_signal).unwrap()
}

fn is_closed(host: &MemoryLink) -> bool {
    host.open.is_empty() && host.stats().dropped_malformed.get() == 1
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
    let layout = Layout::new(&options()).unwrap();
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
        assert!(is_closed(&host), "{what}");
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
    // The slots are used from the first one on.
    write_entry(&client, 1, (1 << 48) | 64);
    host.receive(Nanos::ZERO, 9, &mut frames);
    assert!(frames.len() == 1 && is_closed(&host));
    // The frame is as it was until it is given back, and only then is the channel gone.
    let mut bytes = [0; 100];
    assert_eq!(frames[0].pieces().read(host.memory(), 0, &mut bytes), 100);
    assert!(bytes == [7; 100] && host.channels[0].is_some());
    host.give_back(&mut frames);
    assert!(host.channels[0].is_none());
}

#[test]
fn slots_that_were_never_sent_do_not_come_back() {
    for slot in [0_u64, 3, 4, 0xffff] {
        let (mut host, client) = pair();
        let layout = Layout::new(&options()).unwrap();
        words(&client, &layout.to_client, true).words()[0]
            .store((1 << 48) | (slot << 32), Ordering::Release);
        let mut buffers = Vec::new();
        host.buffers(LinkAddress::Peer(0), 5, &mut buffers);
        assert!(buffers.is_empty(), "slot {slot}");
        assert!(is_closed(&host), "slot {slot}");
    }
}

/// The slot of the next buffer, which goes back unsent.
fn next_slot(link: &mut MemoryLink) -> u16 {
    let mut buffers = Vec::new();
    link.buffers(LinkAddress::Peer(0), 1, &mut buffers);
    let (_, slot) = Channel::split(buffers[0].slot());
    link.cancel(&mut buffers);
    slot
}

#[test]
fn slots_come_back_while_nothing_arrives_or_when_they_are_needed() {
    let (mut host, mut client) = pair();
    let exchange = |host: &mut MemoryLink, client: &mut MemoryLink| {
        send(client, b"question");
        assert_eq!(receive_one(host).as_deref(), Some(&b"question"[..]));
    };
    exchange(&mut host, &mut client);
    assert_eq!(next_slot(&mut client), 1, "the peer has just written where slot 0 is named");
    assert_eq!(receive_one(&mut client), None);
    assert_eq!(next_slot(&mut client), 0);
    // No receive finds nothing now: neither the last slot nor the memory of all is used up.
    let mut last = 0;
    for _ in 0..100 {
        last = last.max(next_slot(&mut client));
        exchange(&mut host, &mut client);
    }
    assert!(last < 7, "slot {last} was lent");
    for _ in 0..8 {
        send(&mut client, b"question");
    }
    (0..8).for_each(|_| assert!(receive_one(&mut host).is_some()));
    assert!(next_slot(&mut client) < 8);
}

#[test]
fn any_bytes_in_the_shared_memory_end_in_a_closed_link_or_in_frames() {
    let mut state = 1_u64;
    for _ in 0..2000 {
        let (mut host, client) = pair();
        let layout = Layout::new(&options()).unwrap();
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

/// Both sides act at the same moment, again and again: the one publishes a frame and then, at the
/// latest in a receive that finds nothing, looks whether its peer sleeps; the other one goes to
/// sleep and then looks for a frame. One of the two looks is late enough.
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
            // The part of a receive that looks, as early as can be.
            client.ring_doorbells();
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
        let woken = is_readable(host.wake_fd());
        host.on_wake();
        assert!(
            armed == Arm::WorkPending || woken,
            "round {round}: the frame was not seen, and woke nothing"
        );
        host.disarm();
        assert_eq!(receive_one(&mut host).map(|bytes| bytes.len()), Some(64));
    }
    drop(sender.join().unwrap());
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        > 0
}

#[test]
fn a_client_whose_iohost_breaks_a_rule_is_down_and_says_why() {
    let (host, mut client) = pair();
    assert_eq!(client.state(), LinkState::Up);
    let layout = Layout::new(&options()).unwrap();
    words(&host, &layout.to_client, false).words()[0].store(1 << 48, Ordering::Release);
    assert_eq!(receive_one(&mut client), None);
    assert_eq!(client.state(), LinkState::Down(BROKEN));
    let mut buffers = Vec::new();
    client.buffers(LinkAddress::Peer(0), 1, &mut buffers);
    assert!(buffers.is_empty());
}

#[test]
fn buffers_of_a_closed_channel_are_refused_and_those_for_another_peer_unsendable() {
    let (mut host, client) = pair();
    let mut buffers = Vec::new();
    host.buffers(LinkAddress::Peer(0), 4, &mut buffers);
    host.buffers(LinkAddress::Peer(256), 4, &mut buffers);
    assert_eq!(buffers.len(), 4, "a peer of an earlier time");
    buffers.iter_mut().for_each(|buffer| buffer.address(LinkAddress::Peer(0), 100));
    buffers[0].address(LinkAddress::Peer(256), 100);
    let mut rest = buffers.split_off(2);
    host.send(Nanos::ZERO, &mut buffers);
    assert_eq!((host.stats().dropped_unsendable.get(), host.stats().sent.get()), (1, 1));
    write_entry(&client, 0, 1 << 48);
    assert_eq!(receive_one(&mut host), None);
    assert!(is_closed(&host));
    buffers.push(rest.remove(0));
    host.send(Nanos::ZERO, &mut buffers);
    assert_eq!((host.stats().dropped_refused.get(), host.stats().sent.get()), (1, 1));
    assert!(host.channels[0].is_some());
    host.cancel(&mut rest);
    assert!(host.channels[0].is_none());
}

#[test]
fn a_client_refuses_offers_that_break_a_rule() {
    let events = || EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
    let layout = Layout::new(&options()).unwrap();
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
    let place = Place { index: 0, number: 0, base: 0 };
    let join = |fds: &[OwnedFd]| Channel::client(&options(), fds, place, EventFd::peer_signal);
    for (fds, why) in [
        (vec![small(), events(), events()], "another size"),
        (vec![unsealed(), events(), events()], "could change it"),
        (vec![events(), events(), events()], "could change it"),
        (vec![good(), good(), events()], "no eventfd"),
        (vec![good(), events(), good()], "no eventfd"),
        (vec![good(), events()], "three descriptors"),
        (vec![], "three descriptors"),
    ] {
        let error = join(&fds).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    join(&[good(), events(), events()]).unwrap();
}
