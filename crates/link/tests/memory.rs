//! Links through shared memory with listener and clients: who is let in, and what ends what.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_link::{
    Frame, Link, LinkAddress, LinkDescription, LinkOptions, LinkState, Medium, MemoryEnd, open,
};
use sidecore_link_contract as contract;
use sidecore_memory::RegionHint;
use sidecore_reactor::Arm;
use sidecore_units::Nanos;

/// The longest that anything may take on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 16, transmit_frames: 16, ..LinkOptions::new(82) }
}

fn open_end(
    path: &Path,
    end: MemoryEnd,
    queues: usize,
    options: LinkOptions,
) -> Vec<Box<dyn Link>> {
    let medium = Medium::Memory { path: path.to_owned(), end };
    open(&LinkDescription { medium, queues, options }).unwrap()
}

fn listen(clients: usize) -> MemoryEnd {
    MemoryEnd::Listen { users: Vec::new(), clients }
}

fn connect(path: &Path) -> Box<dyn Link> {
    open_end(path, MemoryEnd::Connect, 1, options()).remove(0)
}

fn path() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("wire.sock");
    (directory, path)
}

/// Polls the links until it is so.
fn until(
    links: &mut [&mut dyn Link],
    what: &str,
    mut is_so: impl FnMut(&mut [&mut dyn Link]) -> bool,
) {
    let start = Instant::now();
    while !is_so(links) {
        assert!(start.elapsed() < PATIENCE, "{what}");
        for link in links.iter_mut() {
            link.receive(Nanos::ZERO, 0, &mut Vec::new());
        }
        std::thread::yield_now();
    }
}

fn until_up(link: &mut dyn Link) {
    until(&mut [link], "the link does not come up", |links| links[0].state() == LinkState::Up);
}

fn send(link: &mut dyn Link, to: LinkAddress, bytes: &[u8]) {
    let (start, mut buffers) = (Instant::now(), Vec::new());
    while buffers.is_empty() {
        link.buffers(to, 1, &mut buffers);
        link.receive(Nanos::ZERO, 0, &mut Vec::new());
        assert!(start.elapsed() < PATIENCE, "no buffer for {to}");
    }
    buffers[0].pieces().write(link.memory(), 0, bytes);
    buffers[0].address(to, bytes.len());
    link.send(Nanos::ZERO, &mut buffers);
}

fn receive(link: &mut dyn Link) -> Vec<(LinkAddress, Vec<u8>)> {
    let mut frames = Vec::new();
    let start = Instant::now();
    while frames.is_empty() {
        link.receive(Nanos::ZERO, 64, &mut frames);
        assert!(start.elapsed() < PATIENCE, "no frame comes");
        std::thread::yield_now();
    }
    let received = frames.iter().map(|frame| (frame.from, bytes(link, frame))).collect();
    link.give_back(&mut frames);
    received
}

fn bytes(link: &dyn Link, frame: &Frame) -> Vec<u8> {
    let mut bytes = vec![0; frame.len_bytes()];
    assert_eq!(frame.pieces().read(link.memory(), 0, &mut bytes), bytes.len());
    bytes
}

/// A question and its answer.
fn exchange(host: &mut dyn Link, client: &mut dyn Link, seed: usize) -> LinkAddress {
    let question = contract::pattern(seed, 1000);
    send(client, LinkAddress::Peer(0), &question);
    let received = receive(host);
    assert!(received.len() == 1 && received[0].1 == question);
    let answer = contract::pattern(seed + 1, 8_100);
    send(host, received[0].0, &answer);
    assert!(receive(client) == [(LinkAddress::Peer(0), answer)]);
    received[0].0
}

#[test]
fn links_with_a_listener_keep_the_contract() {
    contract::check(&|| {
        let (_directory, path) = path();
        let (mut host, mut client) =
            (open_end(&path, listen(1), 1, options()).remove(0), connect(&path));
        until_up(&mut *client);
        until(&mut [&mut *host], "it joins", |links| links[0].memory().region_count() == 1);
        // Both were told, and have no other reason to wake.
        host.on_wake();
        client.on_wake();
        let mut pair = contract::Pair::of(host, client);
        // The first client of a listener.
        pair.left.peer = LinkAddress::Peer(1 << 8);
        pair
    });
}

#[test]
fn clients_are_divided_among_queues_and_know_nothing_of_each_other() {
    let (_directory, path) = path();
    let mut hosts = open_end(&path, listen(8), 2, options());
    let mut clients: Vec<_> = (0..6).map(|_| connect(&path)).collect();
    clients.iter_mut().for_each(|client| until_up(&mut **client));
    for (index, client) in clients.iter_mut().enumerate() {
        send(&mut **client, LinkAddress::Peer(0), &contract::pattern(index, 500));
    }
    for host in &mut hosts {
        let mut asked = Vec::new();
        while asked.len() < 3 {
            asked.append(&mut receive(&mut **host));
        }
        assert_eq!(asked.len(), 3, "half of the clients");
        for (from, bytes) in asked {
            send(&mut **host, from, &bytes);
        }
    }
    for (index, client) in clients.iter_mut().enumerate() {
        assert!(receive(&mut **client) == [(LinkAddress::Peer(0), contract::pattern(index, 500))]);
        assert_eq!(client.memory().region_count(), 1, "a client has its own memory alone");
    }
    assert!(hosts.iter().all(|host| host.memory().region_count() == 3));
}

#[test]
fn a_client_that_ends_or_misbehaves_ends_its_own_link_only() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(4), 1, options()).remove(0);
    let (mut good, mut bad) = (connect(&path), connect(&path));
    until_up(&mut *good);
    until_up(&mut *bad);
    let address = exchange(&mut *host, &mut *good, 1);
    let bads = exchange(&mut *host, &mut *bad, 2);
    assert_ne!(address, bads);
    // A frame and a buffer of the client are in use when it breaks a rule.
    send(&mut *bad, LinkAddress::Peer(0), &[9; 100]);
    let mut held = Vec::new();
    until(&mut [&mut *host], "a frame", |links| {
        links[0].receive(Nanos::ZERO, 1, &mut held);
        !held.is_empty()
    });
    let mut buffers = Vec::new();
    host.buffers(bads, 1, &mut buffers);
    // Entries of the first round, in all rings, with a slot that there is not.
    let entry = ((1_u64 << 48) | (1 << 47) | 64).to_ne_bytes();
    for word in 0..bad.memory().len_bytes() / 8 {
        let at = sidecore_memory::GuestAddress(word * 8);
        bad.memory().write_slice(at, &entry, &mut RegionHint::default()).unwrap();
    }
    until(&mut [&mut *host], "the rule is broken", |links| {
        let mut more = Vec::new();
        links[0].receive(Nanos::ZERO, 8, &mut more);
        assert!(more.is_empty());
        links[0].stats().dropped_malformed.get() == 1
    });
    assert_eq!(bytes(&*host, &held[0]).len(), 100, "its memory is there while a frame is lent");
    exchange(&mut *host, &mut *good, 3);
    host.give_back(&mut held);
    host.cancel(&mut buffers);
    host.buffers(bads, 1, &mut buffers);
    assert!(buffers.is_empty(), "there is no such client");
    let anew = comes_back(&mut *host, &mut *bad);
    assert_ne!(anew, bads, "it has another number");
    assert_eq!(exchange(&mut *host, &mut *good, 4), address);
    // The end of a client.
    drop(bad);
    until(&mut [&mut *host], "the place is free", |links| links[0].memory().region_count() == 1);
    assert_eq!(exchange(&mut *host, &mut *good, 5), address);
}

/// Polls both until a frame of the client arrives, through whichever channel is its newest.
fn comes_back(host: &mut dyn Link, client: &mut dyn Link) -> LinkAddress {
    let (start, mut frames, mut buffers) = (Instant::now(), Vec::new(), Vec::new());
    loop {
        assert!(start.elapsed() < PATIENCE, "it does not connect again");
        client.receive(Nanos::ZERO, 8, &mut frames);
        client.give_back(&mut frames);
        client.buffers(LinkAddress::Peer(0), 1, &mut buffers);
        buffers.iter_mut().for_each(|buffer| buffer.address(LinkAddress::Peer(0), 100));
        client.send(Nanos::ZERO, &mut buffers);
        // All that it has sent so far, a few in each call: the next frame is another client's.
        let mut from = None;
        loop {
            host.receive(Nanos::ZERO, usize::MAX, &mut frames);
            let Some(frame) = frames.first() else { break };
            from = Some(frame.from);
            host.give_back(&mut frames);
        }
        if let Some(from) = from {
            return from;
        }
        std::thread::yield_now();
    }
}

#[test]
fn no_more_clients_than_permitted_and_the_next_one_gets_the_place() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(1), 1, options()).remove(0);
    let mut first = connect(&path);
    until_up(&mut *first);
    let mut second = connect(&path);
    until(&mut [&mut *second], "it is told why", |links| {
        links[0].state() == LinkState::Down("the IOhost's link has as many clients as it permits")
    });
    drop(first);
    until(&mut [&mut *host, &mut *second], "its turn", |links| links[1].state() == LinkState::Up);
    exchange(&mut *host, &mut *second, 1);
}

#[test]
fn clients_that_do_not_fit_or_are_not_permitted_are_told_why() {
    let (_directory, path) = path();
    let _host = open_end(&path, listen(4), 1, options());
    let good = options();
    for (options, why) in [
        (LinkOptions { frame_bytes: 8_101, ..good }, "frame_bytes"),
        (LinkOptions { header_bytes: 83, ..good }, "headers"),
        (LinkOptions { receive_frames: 32, ..good }, "more frames"),
        (LinkOptions { transmit_frames: 32, ..good }, "more frames"),
    ] {
        let mut client = open_end(&path, MemoryEnd::Connect, 1, options).remove(0);
        until(
            &mut [&mut *client],
            why,
            |links| matches!(links[0].state(), LinkState::Down(reason) if reason.contains(why)),
        );
    }
    let nowhere = path.with_file_name("other.sock");
    let mut client = connect(&nowhere);
    until(
        &mut [&mut *client],
        "nothing there",
        |links| matches!(links[0].state(), LinkState::Down(reason) if reason.contains("no socket")),
    );
    // A user other than this one alone is permitted; root passes the file's mode, and no more.
    let users = vec![rustix::process::geteuid().as_raw() + 1];
    let _host = open_end(&nowhere, MemoryEnd::Listen { users, clients: 1 }, 1, options());
    until(&mut [&mut *client], "another user", |links| {
        let state = links[0].state();
        matches!(state, LinkState::Down(reason) if reason.contains("not permit this user"))
    });
}

#[test]
fn connections_that_talk_nonsense_or_nothing_disturb_no_client() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(4), 1, options()).remove(0);
    let mut client = connect(&path);
    until_up(&mut *client);
    let mut silent: Vec<_> = (0..8).map(|_| UnixStream::connect(&path).unwrap()).collect();
    for bytes in [&[0; 32][..], &[1; 3], &[0xff; 4096], b"sclink\0\0"] {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(bytes).unwrap();
        // It is closed, perhaps with a refusal before.
        let mut answer = Vec::new();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let closed = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 16, "{closed:?}");
    }
    // Descriptors that come with a request are no reason to wait, nor to keep them.
    let stream = UnixStream::connect(&path).unwrap();
    let fds: Vec<OwnedFd> = (0..3).map(|_| stream.as_fd().try_clone_to_owned().unwrap()).collect();
    sidecore_socket::send(&stream, &[0; 32], &fds, 3, sidecore_socket::Blocking::Never).unwrap();
    drop(fds);
    exchange(&mut *host, &mut *client, 1);
    // Those that ask for nothing are disconnected too.
    for stream in &mut silent {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    }
    exchange(&mut *host, &mut *client, 3);
    assert_eq!(host.memory().region_count(), 1);
}

fn wait_readable(link: &dyn Link) {
    let patience = Timespec::try_from(PATIENCE).unwrap();
    let fd = link.wake_fd();
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&patience)), Ok(1));
}

#[test]
fn a_client_that_comes_and_goes_wakes_a_sleeping_link() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(2), 1, options()).remove(0);
    for round in 0..3 {
        assert_eq!(host.arm(), Arm::Armed, "round {round}");
        let mut client = connect(&path);
        wait_readable(&*host);
        host.on_wake();
        host.disarm();
        until(&mut [&mut *host], "it joins", |links| links[0].memory().region_count() == 1);
        // Asleep again, it is woken by a frame.
        until_up(&mut *client);
        while host.arm() != Arm::Armed {
            host.receive(Nanos::ZERO, 0, &mut Vec::new());
        }
        host.on_wake();
        send(&mut *client, LinkAddress::Peer(0), &[1; 100]);
        wait_readable(&*host);
        host.on_wake();
        host.disarm();
        assert_eq!(receive(&mut *host).len(), 1);
        while host.arm() != Arm::Armed {
            host.receive(Nanos::ZERO, 0, &mut Vec::new());
        }
        drop(client);
        wait_readable(&*host);
        host.on_wake();
        host.disarm();
        // A message about the place wakes as well.
        until(&mut [&mut *host], "it leaves", |links| links[0].memory().region_count() == 0);
        while host.arm() != Arm::Armed {
            host.receive(Nanos::ZERO, 0, &mut Vec::new());
        }
        host.on_wake();
        host.disarm();
    }
}

#[test]
fn an_iohost_grants_what_it_has_itself() {
    // Both ends have the same section of a configuration.
    for (receive_frames, transmit_frames) in [(32, 8), (8, 32)] {
        let (_directory, path) = path();
        let options = LinkOptions { receive_frames, transmit_frames, ..options() };
        let mut host = open_end(&path, listen(3), 1, options).remove(0);
        let mut clients: Vec<_> =
            (0..3).map(|_| open_end(&path, MemoryEnd::Connect, 1, options).remove(0)).collect();
        clients.iter_mut().for_each(|client| until_up(&mut **client));
        for (seed, client) in clients.iter_mut().enumerate() {
            exchange(&mut *host, &mut **client, seed);
        }
    }
}

#[test]
fn a_path_that_is_taken_and_a_number_out_of_range_are_refused() {
    let (_directory, path) = path();
    let _host = open_end(&path, listen(1), 1, options());
    let error = |end, options| {
        let medium = Medium::Memory { path: path.clone(), end };
        open(&LinkDescription { medium, queues: 1, options }).map(drop).unwrap_err().to_string()
    };
    assert!(error(listen(1), options()).contains("another socket of this daemon"));
    assert!(error(listen(0), options()).starts_with("clients = 0"));
    assert!(error(listen(201), options()).starts_with("clients = 201"));
    let large = LinkOptions { receive_frames: 1 << 14, ..options() };
    assert!(error(listen(100), large).contains("4 GiB"));
}

/// Takes a batch at this time, and returns the first byte of each frame.
fn batch(host: &mut dyn Link, now: Nanos) -> Vec<u8> {
    let mut frames = Vec::new();
    host.receive(now, 64, &mut frames);
    let firsts = frames.iter().map(|frame| bytes(host, frame)[0]).collect();
    host.give_back(&mut frames);
    firsts
}

#[test]
fn a_client_that_floods_leaves_the_others_their_turn() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(4), 1, options()).remove(0);
    let (mut flood, mut quiet) = (connect(&path), connect(&path));
    until_up(&mut *flood);
    until_up(&mut *quiet);
    exchange(&mut *host, &mut *flood, 1);
    exchange(&mut *host, &mut *quiet, 2);
    let fill = |flood: &mut dyn Link, first: u8, count: u8| {
        (first..first + count).for_each(|number| send(flood, LinkAddress::Peer(0), &[number; 100]));
    };
    fill(&mut *flood, 100, 10);
    let mut seen = batch(&mut *host, Nanos::ZERO);
    assert_eq!(seen, [100], "no more than a share, because the other one has just sent");
    for number in 0..5 {
        send(&mut *quiet, LinkAddress::Peer(0), &[number; 100]);
        assert_eq!(batch(&mut *host, Nanos::ZERO), [number, 101 + number], "the quiet one first");
        seen.push(101 + number);
    }
    // As soon as it has sent all, it is like the others again.
    while seen.len() < 10 {
        seen.append(&mut batch(&mut *host, Nanos::ZERO));
    }
    assert_eq!(seen, (100..110).collect::<Vec<_>>(), "in their order");
    assert!(batch(&mut *host, Nanos::ZERO).is_empty());
    fill(&mut *flood, 200, 1);
    send(&mut *quiet, LinkAddress::Peer(0), &[7; 100]);
    let mut both = batch(&mut *host, Nanos::ZERO);
    both.sort_unstable();
    assert_eq!(both, [7, 200]);
    // The other one has sent nothing for a while.
    fill(&mut *flood, 210, 10);
    assert_eq!(batch(&mut *host, Nanos::from_millis(20)).len(), 10);
    // Both have many frames on their way: longer batches, which cost less for each frame.
    for now in [Nanos::from_millis(40), Nanos::from_millis(41)] {
        fill(&mut *flood, 100, 12);
        fill(&mut *quiet, 0, 12);
        let first = batch(&mut *host, now);
        let of_flood = first.iter().filter(|number| **number >= 100).count();
        let expected = if now == Nanos::from_millis(40) { (24, 12) } else { (16, 8) };
        assert_eq!((first.len(), of_flood), expected);
        while !batch(&mut *host, now).is_empty() {}
    }
}

#[test]
fn a_flood_beside_many_clients_has_fewer_frames_than_they_have() {
    let (_directory, path) = path();
    let mut host = open_end(&path, listen(6), 1, options()).remove(0);
    let mut clients: Vec<_> = (0..6).map(|_| connect(&path)).collect();
    for (seed, client) in clients.iter_mut().enumerate() {
        until_up(&mut **client);
        exchange(&mut *host, &mut **client, seed);
    }
    // This receive counts the clients.
    assert!(batch(&mut *host, Nanos::ZERO).is_empty());
    for client in &mut clients {
        (0..4).for_each(|number| send(&mut **client, LinkAddress::Peer(0), &[number; 100]));
    }
    assert_eq!(batch(&mut *host, Nanos::ZERO).len(), 24, "with four of each, none leaves any");
    let (flood, others) = clients.split_first_mut().unwrap();
    (0..12).for_each(|_| send(&mut **flood, LinkAddress::Peer(0), &[100; 100]));
    for round in 0..3 {
        for other in &mut *others {
            send(&mut **other, LinkAddress::Peer(0), &[round; 100]);
        }
        let seen = batch(&mut *host, Nanos::ZERO);
        let of_flood = seen.iter().filter(|number| **number == 100).count();
        assert_eq!((of_flood, seen.len()), (4, 9), "round {round}");
    }
}
