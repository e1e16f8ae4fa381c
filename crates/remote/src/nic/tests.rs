use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_net::contract::{QueueDriver, QueueRig, check_queue};

use super::*;

/// The other end of a queue under test: takes and gives packets as a session does.
struct Driver {
    end: NicEnd,
    buffers: NicBuffers,
    name: u64,
    /// Empty buffers for packets to the switch.
    free: VecDeque<u16>,
    received: Vec<Vec<u8>>,
}

impl Driver {
    fn take(&mut self) {
        while let Some(message) = self.end.inbox.receive() {
            match message {
                ToWire::Empty(buffer) => self.free.push_back(buffer),
                ToWire::Send(Packet { buffer, len_bytes }) => {
                    let mut bytes = vec![0; len_bytes as usize];
                    let list = self.buffers.segments(self.name + u64::from(buffer)).unwrap();
                    list.copy_to_slice(0, &mut bytes);
                    self.received.push(bytes.split_off(PacketHeader::BYTES));
                    assert!(self.end.sender.send(ToSwitch::Empty(buffer)).is_ok());
                }
            }
        }
        self.end.sender.wake();
    }
}

struct Shared(Rc<RefCell<Driver>>);

impl QueueDriver for Shared {
    fn send(&mut self, frame: &[u8]) {
        let mut driver = self.0.borrow_mut();
        driver.take();
        let buffer = driver.free.pop_front().expect("a buffer is free");
        let packet = [PacketHeader::default().encode().as_slice(), frame].concat();
        let list = driver.buffers.segments(driver.name + u64::from(buffer)).unwrap();
        list.copy_from_slice(0, &packet);
        let packet = Packet { buffer, len_bytes: packet.len() as u32 };
        assert!(driver.end.sender.send(ToSwitch::Arrived(packet)).is_ok());
        driver.end.sender.wake();
    }

    fn offer(&mut self, _frames: usize) {
        self.0.borrow_mut().take();
    }

    fn received(&mut self) -> Vec<Vec<u8>> {
        let mut driver = self.0.borrow_mut();
        driver.take();
        std::mem::take(&mut driver.received)
    }
}

#[test]
fn a_remote_nic_keeps_the_contract_of_queues() {
    check_queue(&|| {
        let (nic, end) = remote_nic(1500).unwrap();
        end.set_state(NicState::Up, None);
        let mut buffers = NicBuffers::default();
        let name = buffers.add(&end.memory).unwrap();
        let free = (BUFFERS..2 * BUFFERS).collect();
        let driver = Driver { end, buffers, name, free, received: Vec::new() };
        let driver = Box::new(Shared(Rc::new(RefCell::new(driver))));
        QueueRig { queue: Box::new(nic), driver }
    });
}

#[test]
fn a_queue_without_empty_buffers_waits_for_them() {
    let (mut nic, mut end) = remote_nic(1500).unwrap();
    let mut loan = Loan::with_capacity(1);
    for _ in 0..BUFFERS {
        loan.segments.clear();
        nic.lend(100, &mut loan).unwrap();
        nic.commit();
    }
    loan.segments.clear();
    assert_eq!(nic.lend(100, &mut loan), Err(NoBuffers::Later));
    assert!(end.sender.send(ToSwitch::Empty(5)).is_ok());
    assert_eq!(nic.lend(100, &mut loan), Ok(()));
    nic.cancel();
    loan.segments.clear();
    let longest = MAX_PACKET_BYTES as usize;
    assert_eq!(nic.lend(longest, &mut loan), Ok(()));
    nic.cancel();
    let never = NoBuffers::Never(DropReason::SmallBuffers);
    assert_eq!(nic.lend(longest + 1, &mut loan), Err(never));
    assert_eq!(std::iter::from_fn(|| end.inbox.receive()).count(), usize::from(BUFFERS));
}

#[test]
fn each_end_learns_of_the_end_of_the_other() {
    let (nic, end) = remote_nic(1500).unwrap();
    let monitor = nic.monitor();
    assert_eq!((monitor.state(), monitor.address()), (NicState::Away, None));
    let entry = NicEntry { mac: [2, 1, 2, 3, 4, 5], mtu: 9000, ..NicEntry::default() };
    end.set_state(NicState::Down, Some(&entry));
    assert_eq!(monitor.address(), Some(([2, 1, 2, 3, 4, 5], 9000)));
    assert!(matches!(nic.state(), QueueState::Down(_)));
    drop(end);
    assert_eq!(monitor.state(), NicState::Ended);
    let (nic, mut end) = remote_nic(1500).unwrap();
    drop(nic);
    assert!(end.inbox.receive().is_none() && end.is_over());
}

#[test]
fn another_state_wakes_a_switch_that_sleeps() {
    let (mut nic, end) = remote_nic(1500).unwrap();
    let is_signalled = |nic: &RemoteNic| {
        let fd = nic.inbox.wake_fd();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
    };
    assert_eq!(nic.arm(), Arm::Armed);
    end.set_state(NicState::Away, None);
    assert!(!is_signalled(&nic), "nothing has changed");
    end.set_state(NicState::Up, None);
    assert!(is_signalled(&nic));
    nic.on_wake();
    assert!(!is_signalled(&nic));
    assert_eq!(nic.arm(), Arm::WorkPending, "the switch has not seen it");
    assert_eq!((nic.state(), nic.arm()), (QueueState::Up, Arm::Armed));
}

#[test]
fn buffers_have_names_that_no_request_has() {
    let (nic, end) = remote_nic(1500).unwrap();
    let mut buffers = NicBuffers::default();
    let first = buffers.add(&end.memory).unwrap();
    let second = buffers.add(&end.memory).unwrap();
    assert!(NicBuffers::is_name(first) && first != second);
    assert!(!NicBuffers::is_name(u64::from(u32::MAX)), "a place of an IOhost");
    let of = |name: u64| buffers.segments(name).map(Segments::len_bytes);
    for name in [first, first + 127, second, second + 127] {
        assert_eq!(of(name), Some(MAX_PACKET_BYTES.into()));
    }
    for name in [first + 128, second + 128, u64::MAX, first + (2 << 16)] {
        assert_eq!(of(name), None);
    }
    buffers.remove(first);
    assert!(buffers.segments(first).is_none());
    assert_eq!(buffers.add(&end.memory).unwrap(), first);
    drop(nic);
}
