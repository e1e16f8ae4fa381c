//! A host that cannot make a ring signals all the same. A process of its own, because the limit is
//! the whole process's.

use std::os::fd::{AsFd, AsRawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sidecore_linux::peer_event;

#[test]
fn without_a_ring_a_signal_is_a_write() {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let before = getrlimit(Resource::Nofile);
    // One number is left, for the duplicate.
    let next = event.try_clone().unwrap();
    let limit = u64::try_from(next.as_raw_fd()).unwrap() + 1;
    drop(next);
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..before }).unwrap();
    let made = peer_event(event.as_fd());
    setrlimit(Resource::Nofile, before).unwrap();
    let mut signal = made.unwrap();
    assert!(format!("{signal:?}").contains("EventFd"), "{signal:?}");
    signal.signal();
    let mut count = [0; 8];
    rustix::io::read(&event, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
}
