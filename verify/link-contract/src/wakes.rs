//! The part of the contract that is about sleep.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_reactor::Arm;

use super::{End, Open, PATIENCE, Pair, is_padded, pattern};

/// Whether the link's descriptor becomes readable within so many seconds.
fn is_woken(end: &End, seconds: u64) -> bool {
    let fd = end.link.wake_fd();
    let timeout = Timespec { tv_sec: seconds.try_into().unwrap(), tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd.as_fd(), PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

impl End {
    /// Sleeps as a sidecore does, until something wakes it or the link's deadline has come.
    fn sleep(&mut self) {
        match self.link.arm() {
            Arm::WorkPending => {}
            Arm::CannotSleep => panic!("a link can sleep"),
            Arm::Armed => {
                if self.link.deadline().is_some() {
                    self.skip();
                } else {
                    assert!(
                        is_woken(self, PATIENCE.as_secs()),
                        "nothing wakes a sidecore that waits for this link"
                    );
                    self.link.on_wake();
                }
                self.link.disarm();
            }
        }
    }

    /// Receives one frame, asleep in between.
    fn receive_asleep(&mut self) -> Vec<u8> {
        let start = Instant::now();
        loop {
            let mut frames = self.receive(1);
            if let Some(frame) = frames.first() {
                let bytes = self.bytes(frame);
                self.link.give_back(&mut frames);
                return bytes;
            }
            assert!(start.elapsed() < PATIENCE, "a frame never came");
            self.sleep();
        }
    }
}

/// A frame wakes an armed link, again and again, and no frame does not.
pub(super) fn wakes_for_a_frame(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    for round in 0..20 {
        assert_eq!(right.link.arm(), Arm::Armed, "round {round}");
        assert!(!is_woken(&right, 0), "nothing has come in round {round}");
        left.send_one(&pattern(round, 200));
        assert!(
            right.link.deadline().is_some() || is_woken(&right, PATIENCE.as_secs()),
            "a frame wakes the link"
        );
        right.link.on_wake();
        right.link.disarm();
        assert!(is_padded(&right.take(1)[0], &pattern(round, 200)));
    }
}

/// A frame that has come before the link was armed is found by the look after it.
pub(super) fn looks_once_more_when_it_is_armed(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    for round in 0..20 {
        left.send_one(&pattern(round, 200));
        // Media take their time; a simulated one says how long.
        let start = Instant::now();
        while right.link.arm() != Arm::WorkPending {
            assert!(start.elapsed() < PATIENCE, "the look after arming finds nothing");
            right.link.on_wake();
            right.link.disarm();
            right.turn();
        }
        assert!(is_padded(&right.take(1)[0], &pattern(round, 200)));
    }
}

/// A frame that is lent, or was, does not wake.
pub(super) fn sleeps_while_frames_are_lent(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let mut kept = Vec::new();
    for round in 0..right.link.properties().receive_frames.min(3) {
        left.send_one(&pattern(round, 200));
        kept.append(&mut right.receive_all(1));
        for _ in 0..2 {
            assert_eq!(right.link.arm(), Arm::Armed);
            assert!(!is_woken(&right, 0), "a frame that is lent wakes the sidecore");
            right.link.disarm();
        }
    }
    right.link.give_back(&mut kept);
    assert_eq!(right.link.arm(), Arm::Armed);
    assert!(!is_woken(&right, 0), "a frame that was given back wakes the sidecore");
    right.link.disarm();
}

/// Frames that come at any time, from another thread, are all received by a side that sleeps
/// whenever it has nothing to do.
pub(super) fn loses_no_wake_up_to_a_race(open: Open<'_>) {
    const ROUNDS: usize = 2000;
    let Pair { mut left, mut right } = open();
    let received = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&received);
    // The sender polls, and sends when the receiver may be anywhere between its poll and its sleep.
    let sender = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            let start = Instant::now();
            while seen.load(Ordering::Acquire) < round {
                assert!(start.elapsed() < 2 * PATIENCE, "frame {round} was not received");
                std::hint::spin_loop();
            }
            (0..round % 256).for_each(|_| std::hint::spin_loop());
            left.send_one(&pattern(round, 100));
            left.turn();
        }
        left
    });
    for round in 0..ROUNDS {
        assert!(is_padded(&right.receive_asleep(), &pattern(round, 100)), "round {round}");
        received.store(round + 1, Ordering::Release);
    }
    let left = sender.join().unwrap();
    assert_eq!(left.counts().dropped() + right.counts().dropped(), 0);
}

/// A side without buffers can sleep until it has some.
pub(super) fn wakes_for_room(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let total = 3 * left.link.properties().transmit_frames;
    let (done, over) = mpsc::channel();
    let receiver = std::thread::spawn(move || {
        let mut received = 0;
        // Until the sender has sent all; what was dropped for want of room is counted.
        loop {
            let mut frames = right.receive(8);
            received += frames.len();
            right.link.give_back(&mut frames);
            right.skip();
            if let Ok(sent) = over.try_recv() {
                return (right, received, sent);
            }
        }
    });
    for index in 0..total {
        let start = Instant::now();
        while left.send(&[pattern(index, 1000)]) == 0 {
            assert!(start.elapsed() < PATIENCE, "there is no room for frame {index}");
            left.sleep();
        }
        left.turn();
    }
    done.send(total).unwrap();
    let (right, received, sent) = receiver.join().unwrap();
    assert!(received <= sent, "{received} of {sent}");
    drop(right);
}
