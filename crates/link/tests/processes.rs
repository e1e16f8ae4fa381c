//! A memory link between two processes.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sidecore_link::{Link, LinkAddress, LinkOptions, LinkState, MemoryLink, contract};
use sidecore_units::Nanos;

const HEADER_BYTES: usize = 82;
const CHILD: &str = "SIDECORE_LINK_CHILD";
const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 32, transmit_frames: 32, ..LinkOptions::new(HEADER_BYTES) }
}

/// The client: sends each frame back, until the link is closed. Does nothing in the parent's run.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut link = MemoryLink::join(socket, HEADER_BYTES, sidecore_linux::peer_event).unwrap();
    let (mut frames, mut buffers) = (Vec::new(), Vec::new());
    let start = Instant::now();
    let mut bytes = vec![0; link.properties().frame_bytes];
    while link.state() == LinkState::Up {
        assert!(start.elapsed() < PATIENCE);
        link.buffers(LinkAddress::Peer(0), 4 - buffers.len(), &mut buffers);
        link.receive(Nanos::from(start.elapsed()), buffers.len(), &mut frames);
        let mut answers: Vec<_> = buffers.drain(..frames.len()).collect();
        for (frame, answer) in frames.iter().zip(&mut answers) {
            let len = frame.pieces().read(link.memory(), 0, &mut bytes);
            answer.pieces().write(link.memory(), 0, &bytes[..len]);
            answer.address(LinkAddress::Peer(0), len);
        }
        link.give_back(&mut frames);
        link.send(Nanos::from(start.elapsed()), &mut answers);
        std::thread::yield_now();
    }
    link.cancel(&mut buffers);
}

fn start_child(socket: UnixStream) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--test-threads", "1"])
        .env(CHILD, "1")
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn frames_travel_between_processes_until_one_of_them_is_killed() {
    let (one, other) = UnixStream::pair().unwrap();
    let mut link = MemoryLink::offer(one.into(), &options(), sidecore_linux::peer_event).unwrap();
    let mut child = start_child(other);
    let start = Instant::now();
    let (mut frames, mut buffers) = (Vec::new(), Vec::new());
    let (mut sent, mut received) = (0_usize, 0_usize);
    while received < 5000 {
        link.buffers(LinkAddress::Peer(0), 8 - (sent - received).min(8), &mut buffers);
        for buffer in &mut buffers {
            let bytes = contract::pattern(sent, 1 + sent % 8_100);
            buffer.pieces().write(link.memory(), 0, &bytes);
            buffer.address(LinkAddress::Peer(0), bytes.len());
            sent += 1;
        }
        link.send(Nanos::from(start.elapsed()), &mut buffers);
        link.receive(Nanos::from(start.elapsed()), 8, &mut frames);
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
    child.kill().unwrap();
    child.wait().unwrap();
    while link.state() == LinkState::Up {
        link.receive(Nanos::from(start.elapsed()), 8, &mut frames);
        link.give_back(&mut frames);
        assert!(start.elapsed() < PATIENCE, "the death of the peer is not noticed");
    }
    assert!(matches!(link.state(), LinkState::Closed(_)));
    // A closed link has no buffers.
    link.buffers(LinkAddress::Peer(0), 1, &mut buffers);
    assert!(buffers.is_empty());
}
