//! A memory link between two processes.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sidecore_link::{
    Frame, Link, LinkAddress, LinkDescription, LinkOptions, LinkState, Medium, MemoryEnd, open,
};
use sidecore_link_contract as contract;
use sidecore_units::Nanos;

const PATH: &str = "SIDECORE_LINK_PATH";
const PATIENCE: Duration = Duration::from_secs(20);

fn open_end(path: &Path, end: MemoryEnd) -> Box<dyn Link> {
    let medium = Medium::Memory { path: path.to_owned(), end };
    let options = LinkOptions { receive_frames: 32, transmit_frames: 32, ..LinkOptions::new(82) };
    open(&LinkDescription { medium, queues: 1, options }).unwrap().remove(0)
}

/// An IOhost's end that sends each frame back, until it is killed. Nothing in the parent's run.
#[test]
fn child() {
    let Some(path) = std::env::var_os(PATH) else { return };
    let mut link = open_end(Path::new(&path), MemoryEnd::Listen { users: Vec::new(), clients: 2 });
    let (mut frames, mut buffers) = (Vec::<Frame>::new(), Vec::new());
    let start = Instant::now();
    let mut bytes = vec![0; link.properties().frame_bytes];
    while start.elapsed() < PATIENCE {
        link.receive(Nanos::ZERO, 4, &mut frames);
        for frame in &frames {
            let len = frame.pieces().read(link.memory(), 0, &mut bytes);
            while buffers.is_empty() {
                link.buffers(frame.from, 1, &mut buffers);
            }
            buffers[0].pieces().write(link.memory(), 0, &bytes[..len]);
            buffers[0].address(frame.from, len);
            link.send(Nanos::ZERO, &mut buffers);
        }
        link.give_back(&mut frames);
        std::thread::yield_now();
    }
}

fn start_child(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--test-threads", "1"])
        .env(PATH, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Receives nothing until the link is up, or down.
fn wait_for(link: &mut dyn Link, up: bool) {
    let (start, mut frames) = (Instant::now(), Vec::new());
    while (link.state() == LinkState::Up) != up {
        link.receive(Nanos::ZERO, 8, &mut frames);
        link.give_back(&mut frames);
        assert!(start.elapsed() < PATIENCE, "{:?}", link.state());
        std::thread::yield_now();
    }
}

/// Sends frames and checks that they come back.
fn exchange(link: &mut dyn Link, count: usize) {
    let peer = LinkAddress::Peer(0);
    let start = Instant::now();
    let (mut frames, mut buffers) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0_usize, 0_usize);
    while received < count {
        link.buffers(peer, 8 - (sent - received).min(8), &mut buffers);
        for buffer in &mut buffers {
            let bytes = contract::pattern(sent, 1 + sent % 8_100);
            buffer.pieces().write(link.memory(), 0, &bytes);
            buffer.address(peer, bytes.len());
            sent += 1;
        }
        link.send(Nanos::ZERO, &mut buffers);
        link.receive(Nanos::ZERO, 8, &mut frames);
        for frame in &frames {
            let mut bytes = vec![0; frame.len_bytes()];
            frame.pieces().read(link.memory(), 0, &mut bytes);
            assert!(bytes == contract::pattern(received, 1 + received % 8_100), "frame {received}");
            received += 1;
        }
        link.give_back(&mut frames);
        assert!(start.elapsed() < PATIENCE, "{received} frames came back of {sent}");
        std::thread::yield_now();
    }
    while received < sent {
        link.receive(Nanos::ZERO, 8, &mut frames);
        received += frames.len();
        link.give_back(&mut frames);
    }
}

#[test]
fn frames_travel_between_processes_whichever_of_them_is_killed_and_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("wire.sock");
    // The client is there first.
    let mut link = open_end(&path, MemoryEnd::Connect);
    assert!(matches!(link.state(), LinkState::Down(_)));
    for _ in 0..3 {
        let mut child = start_child(&path);
        wait_for(&mut *link, true);
        exchange(&mut *link, 2000);
        // Another client comes and goes.
        let mut other = open_end(&path, MemoryEnd::Connect);
        wait_for(&mut *other, true);
        exchange(&mut *other, 10);
        drop(other);
        exchange(&mut *link, 10);
        child.kill().unwrap();
        child.wait().unwrap();
        wait_for(&mut *link, false);
        let mut buffers = Vec::new();
        link.buffers(LinkAddress::Peer(0), 1, &mut buffers);
        assert!(buffers.is_empty(), "a link that is down has no buffers");
    }
}
