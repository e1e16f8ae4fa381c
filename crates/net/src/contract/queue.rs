//! The contract that every queue of a port keeps, as tests that each of them runs.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_memory::Segments;
use sidecore_reactor::Arm;
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_units::Nanos;

use crate::{Frames, Loan, NoBuffers, PortQueue, QueueState};

/// The longest that a queue may take for anything.
const PATIENCE: Duration = Duration::from_secs(20);
/// Frames that a station has to be able to send, and to take, before the switch has looked.
const FRAMES: usize = 4;
/// Type of the frames.
const TYPE: [u8; 2] = [0x88, 0xb5];

/// The station behind a queue under test. Frames of other types than 0x88b5 are none of the
/// test's.
pub trait QueueDriver {
    /// Sends a frame, and kicks the queue if it asks for that.
    fn send(&mut self, frame: &[u8]);

    /// Offers room for so many frames of up to 1514 bytes, if the station has to.
    fn offer(&mut self, frames: usize);

    /// The frames that have come since the last call, without virtio headers.
    fn received(&mut self) -> Vec<Vec<u8>>;
}

/// A queue that is up, and its station.
pub struct QueueRig<'a> {
    /// The queue.
    pub queue: Box<dyn PortQueue>,
    /// Its station.
    pub driver: Box<dyn QueueDriver + 'a>,
}

/// Makes a rig anew, for each test.
pub type OpenQueue<'a> = &'a dyn Fn() -> QueueRig<'a>;

/// Runs all tests of the contract.
///
/// # Panics
/// The queue breaks the contract.
pub fn check_queue(open: OpenQueue<'_>) {
    frames_are_lent_in_their_order(open);
    a_frame_stays_as_it_is_until_it_is_given_back(open);
    a_loan_is_filled_and_arrives(open);
    a_loan_that_is_cancelled_leaves_no_trace(open);
    several_frames_have_a_buffer_each(open);
    a_sleeping_queue_is_woken(open);
}

/// A rig with a clock and the frames that its queue has lent.
struct Test<'a> {
    rig: QueueRig<'a>,
    frames: Frames,
    start: Instant,
    header_bytes: usize,
}

/// A frame of this size whose bytes depend on its number.
fn frame(number: usize, len_bytes: usize) -> Vec<u8> {
    let head = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, TYPE[0], TYPE[1]];
    let rest = (head.len()..len_bytes).map(|at| (at * 13 + at / 256 + number * 31) as u8);
    head.into_iter().chain(rest).collect()
}

fn bytes(segments: &Segments, skip: usize) -> Vec<u8> {
    let mut all = vec![0; usize::try_from(segments.len_bytes()).unwrap()];
    segments.copy_to_slice(0, &mut all);
    all.split_off(skip)
}

impl<'a> Test<'a> {
    fn new(open: OpenQueue<'a>) -> Self {
        let rig = open();
        assert_eq!(rig.queue.state(), QueueState::Up, "a rig's queue is up");
        let properties = rig.queue.properties();
        assert!(
            properties.frame_bytes >= 1518,
            "frames of 1500 bytes and a tag fit: {properties:?}"
        );
        let frames = Frames::with_capacity(properties.frame_segments);
        let mut test =
            Self { rig, frames, start: Instant::now(), header_bytes: properties.header_bytes };
        test.rig.queue.disarm();
        test
    }

    fn now(&self) -> Nanos {
        Nanos(1 + u64::try_from(self.start.elapsed().as_nanos()).unwrap())
    }

    /// Receives until `count` frames are lent.
    fn take(&mut self, count: usize) {
        let start = Instant::now();
        while self.frames.len() < count {
            let (now, before) = (self.now(), self.frames.len());
            self.frames.make_room(count - before);
            self.rig.queue.receive(now, &mut self.frames);
            assert!(self.frames.len() <= count, "more frames than there was room for");
            self.rig.queue.end_turn(now, self.frames.len() > before);
            let lent = self.frames.len();
            assert!(start.elapsed() < PATIENCE, "{lent} of {count} frames are lent");
        }
    }

    /// The frame at `index` of those that are lent.
    fn lent(&self, index: usize) -> Vec<u8> {
        let slot = self.frames.get(index).expect("a frame");
        assert_eq!(slot.fault, None, "a good frame is not dropped");
        bytes(&slot.segments, self.header_bytes)
    }

    fn give_back(&mut self, count: usize) {
        for index in 0..count {
            self.frames.get_mut(index).expect("a frame").is_done = true;
        }
        assert_eq!(self.frames.take_done(), count);
        self.rig.queue.give_back(count);
        self.rig.queue.publish();
        let now = self.now();
        self.rig.queue.end_turn(now, true);
    }

    /// Borrows buffers for a frame and fills them.
    fn fill(&mut self, frame: &[u8], loan: &mut Loan) {
        let all = self.header_bytes + frame.len();
        loan.segments.clear();
        self.rig.queue.lend(all, loan).unwrap_or_else(|error| panic!("no buffers: {error:?}"));
        assert_eq!(loan.segments.len_bytes(), all as u64, "as many bytes as were asked for");
        assert!(loan.segments.pieces().len() <= self.rig.queue.properties().buffer_segments);
        let header = PacketHeader { num_buffers: loan.buffers, ..PacketHeader::default() }.encode();
        loan.segments.copy_from_slice(0, &header[..self.header_bytes]);
        loan.segments.copy_from_slice(self.header_bytes as u64, frame);
    }

    fn loan(&self) -> Loan {
        Loan::with_capacity(self.rig.queue.properties().buffer_segments)
    }

    fn publish(&mut self) {
        self.rig.queue.publish();
        let now = self.now();
        self.rig.queue.end_turn(now, true);
        self.rig.queue.end_turn(now, false);
    }

    /// Waits for so many frames at the station.
    fn arrived(&mut self, count: usize) -> Vec<Vec<u8>> {
        let (start, mut frames) = (Instant::now(), Vec::new());
        while frames.len() < count {
            frames.extend(self.rig.driver.received());
            assert!(start.elapsed() < PATIENCE, "{} of {count} frames arrive", frames.len());
        }
        frames
    }
}

fn frames_are_lent_in_their_order(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    for round in 0..20 {
        let sizes = [60, 61, 1514, 300 + round];
        let sent: Vec<_> =
            (0..FRAMES).map(|at| frame(round * FRAMES + at, sizes[(round + at) % 4])).collect();
        sent.iter().for_each(|frame| test.rig.driver.send(frame));
        // Not all at once: the others keep their place.
        test.take(1 + round % FRAMES);
        test.take(FRAMES);
        for (index, sent) in sent.iter().enumerate() {
            assert_eq!(&test.lent(index), sent, "frame {index} of round {round}");
        }
        test.give_back(1);
        test.give_back(FRAMES - 1);
    }
}

fn a_frame_stays_as_it_is_until_it_is_given_back(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    let old = frame(1, 1000);
    test.rig.driver.send(&old);
    test.take(1);
    for number in 2..=FRAMES {
        test.rig.driver.send(&frame(number, 1514));
        test.take(number);
    }
    assert_eq!(test.lent(0), old, "a frame that is lent has changed");
    test.give_back(1);
    assert_eq!(test.lent(0), frame(2, 1514));
    test.give_back(FRAMES - 1);
}

fn a_loan_is_filled_and_arrives(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    let mut loan = test.loan();
    for round in 0..10 {
        test.rig.driver.offer(FRAMES);
        let sent: Vec<_> =
            (0..FRAMES).map(|at| frame(round + at, [60, 1514, 777, 64][at])).collect();
        for frame in &sent {
            test.fill(frame, &mut loan);
            test.rig.queue.commit();
        }
        test.publish();
        assert_eq!(test.arrived(FRAMES), sent, "round {round}");
    }
}

fn a_loan_that_is_cancelled_leaves_no_trace(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    let mut loan = test.loan();
    test.rig.driver.offer(1);
    for number in 0..10 {
        test.fill(&frame(number, 1514), &mut loan);
        test.rig.queue.cancel();
    }
    test.fill(&frame(99, 100), &mut loan);
    test.rig.queue.commit();
    test.publish();
    assert_eq!(test.arrived(1), [frame(99, 100)]);
    // A station has buffers for what it has offered, or for more: a refusal is one of the two.
    loan.segments.clear();
    match test.rig.queue.lend(1514 + test.header_bytes, &mut loan) {
        Ok(()) => test.rig.queue.cancel(),
        Err(refusal) => assert_eq!(refusal, NoBuffers::Later),
    }
}

/// A queue may lend no buffers in this way, or fewer.
fn several_frames_have_a_buffer_each(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    let mut loan = test.loan();
    for round in 0..20 {
        test.rig.driver.offer(FRAMES);
        let frames: Vec<_> =
            (0..FRAMES).map(|at| frame(round + at, [60, 1514, 777, 64][at])).collect();
        let sizes: Vec<_> = frames.iter().map(|frame| frame.len() + test.header_bytes).collect();
        let mut sent = 0;
        // A loan that is cancelled is made again.
        for is_meant in [false, true] {
            loan.segments.clear();
            let lent = test.rig.queue.lend_each(&sizes, &mut loan);
            let pieces = loan.segments.pieces().iter().map(sidecore_memory::Segment::len_bytes);
            assert_eq!(pieces.take(lent).collect::<Vec<_>>(), sizes[..lent], "round {round}");
            let header = PacketHeader { num_buffers: 1, ..PacketHeader::default() }.encode();
            for (at, frame) in frames.iter().enumerate().take(lent) {
                let head = [&header[..test.header_bytes], frame].concat();
                Segments::with_capacity(1).copy_to_piece(&head, 0, &loan.segments, at);
            }
            match (lent, is_meant) {
                (0, _) => {}
                (_, false) => test.rig.queue.cancel(),
                (_, true) => test.rig.queue.commit(),
            }
            sent = lent;
        }
        for frame in &frames[sent..] {
            test.fill(frame, &mut loan);
            test.rig.queue.commit();
        }
        test.publish();
        assert_eq!(test.arrived(FRAMES), frames, "round {round}: {sent} had a buffer each");
    }
}

fn a_sleeping_queue_is_woken(open: OpenQueue<'_>) {
    let mut test = Test::new(open);
    for number in 0..10 {
        assert_eq!(test.rig.queue.arm(), Arm::Armed, "nothing was sent");
        test.rig.driver.send(&frame(number, 100));
        assert!(test.is_woken(), "nothing wakes a sidecore that waits for this queue");
        test.rig.queue.on_wake();
        test.rig.queue.disarm();
        test.take(1);
        assert_eq!(test.lent(0), frame(number, 100));
        test.give_back(1);

        // A frame that came before the sidecore went to sleep is noticed, too.
        test.rig.driver.send(&frame(number, 200));
        assert_eq!(test.rig.queue.arm(), Arm::WorkPending);
        test.take(1);
        test.give_back(1);
    }
}

impl Test<'_> {
    /// Whether one of the queue's descriptors becomes readable.
    fn is_woken(&self) -> bool {
        let mut is_woken = false;
        let timeout = Timespec { tv_sec: PATIENCE.as_secs().try_into().unwrap(), tv_nsec: 0 };
        // Queues have one descriptor each.
        self.rig.queue.wake_fds(&mut |fd| {
            is_woken |= poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0;
        });
        is_woken
    }
}
