//! The contract that every link keeps, as tests that each of them runs:
//!
//! ```
//! use sidecore_link::{EthernetAddress, Faults, LinkOptions, Network};
//! use sidecore_link_contract as contract;
//!
//! let open = || {
//!     let network = Network::new(1, Faults::default());
//!     let options = LinkOptions { receive_frames: 64, ..LinkOptions::new(82) };
//!     let link = |last| network.link(EthernetAddress([2, 0, 0, 0, 0, last]), &options).unwrap();
//!     contract::Pair::new(link(1), link(2))
//! };
//! contract::check(&open);
//! ```
//!
//! Each test opens a pair of connected links anew and says in its panic what was broken.
//!
//! Time is the test's: it runs with the real clock and jumps to a link's deadline.

#![forbid(unsafe_code)]

mod wakes;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

use sidecore_link::{Buffer, Frame, Link, LinkAddress, LinkCounts, LinkState};

/// How to get two links that are connected with each other, and with no third one.
pub type Open<'a> = &'a dyn Fn() -> Pair;

/// The longest that a link may take for anything.
const PATIENCE: Duration = Duration::from_secs(10);

/// Two links that are connected with each other.
pub struct Pair {
    /// One end.
    pub left: End,
    /// The other end.
    pub right: End,
}

/// One end of the pair, and a clock.
pub struct End {
    /// The link.
    pub link: Box<dyn Link>,
    /// Its peer's address.
    pub peer: LinkAddress,
    started_at: Instant,
    skipped: Nanos,
    buffers: Vec<Buffer>,
    frames: Vec<Frame>,
}

impl Pair {
    /// The pair of these links, whose addresses are for the caller to set.
    #[must_use]
    pub fn of(left: Box<dyn Link>, right: Box<dyn Link>) -> Self {
        let addresses = (left.properties().address, right.properties().address);
        Self { left: End::new(left, addresses.1), right: End::new(right, addresses.0) }
    }

    /// The pair of these links.
    pub fn new(left: impl Link + 'static, right: impl Link + 'static) -> Self {
        Self::of(Box::new(left), Box::new(right))
    }
}

impl End {
    fn new(link: Box<dyn Link>, peer: LinkAddress) -> Self {
        let vectors = (Vec::with_capacity(256), Vec::with_capacity(256));
        let (buffers, frames) = vectors;
        Self { link, peer, started_at: Instant::now(), skipped: Nanos::ZERO, buffers, frames }
    }

    /// The time, of which [`End::skip`] may have skipped some.
    pub fn now(&self) -> Nanos {
        Nanos::from(self.started_at.elapsed()).after(self.skipped)
    }

    /// Goes on to the link's deadline.
    pub fn skip(&mut self) {
        if let Some(deadline) = self.link.deadline() {
            self.skipped = self.skipped.after(deadline.since(self.now()));
        }
    }

    /// Sends frames of these bytes, as far as there are buffers; returns how many it sent.
    ///
    /// # Panics
    /// A frame does not fit.
    pub fn send(&mut self, frames: &[Vec<u8>]) -> usize {
        self.link.buffers(self.peer, frames.len(), &mut self.buffers);
        let count = self.buffers.len();
        for (buffer, bytes) in self.buffers.iter_mut().zip(frames) {
            assert_eq!(
                buffer.pieces().write(self.link.memory(), 0, bytes),
                bytes.len(),
                "a buffer is too short"
            );
            buffer.address(self.peer, bytes.len());
        }
        let now = self.now();
        self.link.send(now, &mut self.buffers);
        assert!(self.buffers.is_empty(), "send takes all buffers");
        count
    }

    /// Sends one frame, as soon as there is a buffer.
    ///
    /// # Panics
    /// There is none in ten seconds.
    pub fn send_one(&mut self, bytes: &[u8]) {
        let start = Instant::now();
        while self.send(&[bytes.to_vec()]) == 0 {
            assert!(start.elapsed() < PATIENCE, "no buffer becomes free");
            self.turn();
        }
    }

    /// A poll that receives nothing.
    fn turn(&mut self) {
        self.skip();
        let now = self.now();
        self.link.receive(now, 0, &mut self.frames);
        assert!(self.frames.is_empty(), "no frame was asked for");
    }

    /// Receives up to `limit` frames.
    ///
    /// # Panics
    /// The link lends more.
    pub fn receive(&mut self, limit: usize) -> Vec<Frame> {
        let mut frames = Vec::new();
        let now = self.now();
        self.link.receive(now, limit, &mut frames);
        assert!(frames.len() <= limit, "{} frames instead of {limit}", frames.len());
        for frame in &frames {
            assert_eq!(frame.from, self.peer, "the sender");
        }
        frames
    }

    /// Receives frames until there are `count`.
    ///
    /// # Panics
    /// They do not come within ten seconds.
    pub fn receive_all(&mut self, count: usize) -> Vec<Frame> {
        let start = Instant::now();
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.append(&mut self.receive(count - frames.len()));
            assert!(start.elapsed() < PATIENCE, "{} of {count} frames came", frames.len());
            self.skip();
        }
        frames
    }

    /// The bytes of a frame.
    ///
    /// # Panics
    /// They are not all in the link's memory.
    #[must_use]
    pub fn bytes(&self, frame: &Frame) -> Vec<u8> {
        let mut bytes = vec![0; frame.len_bytes()];
        assert_eq!(frame.pieces().read(self.link.memory(), 0, &mut bytes), bytes.len());
        bytes
    }

    /// Receives `count` frames, gives them back, and returns their bytes.
    #[must_use]
    pub fn take(&mut self, count: usize) -> Vec<Vec<u8>> {
        let mut frames = self.receive_all(count);
        let bytes = frames.iter().map(|frame| self.bytes(frame)).collect();
        self.link.give_back(&mut frames);
        assert!(frames.is_empty(), "give_back takes all frames");
        bytes
    }

    /// The counters.
    #[must_use]
    pub fn counts(&self) -> LinkCounts {
        self.link.stats().counts()
    }

    fn frame_bytes(&self) -> usize {
        self.link.properties().frame_bytes
    }
}

/// Bytes that depend on `seed` and look like no others.
#[must_use]
pub fn pattern(seed: usize, len_bytes: usize) -> Vec<u8> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len_bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Whether a frame is what was sent, perhaps with zeros behind it.
fn is_padded(received: &[u8], sent: &[u8]) -> bool {
    received.len() >= sent.len()
        && received[..sent.len()] == *sent
        && received.len() <= sent.len().max(64)
        && received[sent.len()..].iter().all(|byte| *byte == 0)
}

/// Runs every test but that of counts: a network card that has no room for a frame drops it where
/// no link sees it.
///
/// # Panics
/// The link breaks the contract.
pub fn check_without_counts(open: Open<'_>) {
    properties_are_sound(open);
    carries_frames_of_every_size(open);
    carries_batches_in_order(open);
    carries_long_batches_in_order(open);
    aligns_payloads(open);
    lends_no_more_buffers_than_it_has(open);
    sends_in_the_order_of_sending(open);
    keeps_what_is_lent(open);
    shows_nothing_of_former_frames(open);
    drops_what_it_cannot_send(open);
    leaks_nothing(open);
    wakes::wakes_for_a_frame(open);
    wakes::looks_once_more_when_it_is_armed(open);
    wakes::sleeps_while_frames_are_lent(open);
    wakes::loses_no_wake_up_to_a_race(open);
    wakes::wakes_for_room(open);
}

/// Runs every test.
///
/// # Panics
/// The link breaks the contract.
pub fn check(open: Open<'_>) {
    check_without_counts(open);
    counts_what_it_drops(open);
}

/// The properties make sense.
pub fn properties_are_sound(open: Open<'_>) {
    let pair = open();
    for end in [&pair.left, &pair.right] {
        let properties = end.link.properties();
        assert!(properties.frame_bytes >= sidecore_link::FRAME_BYTES_MIN, "{properties:?}");
        assert!(properties.payload_align_bytes.is_power_of_two(), "{properties:?}");
        assert!(
            properties.receive_frames >= 2 && properties.transmit_frames >= 2,
            "{properties:?}"
        );
        assert_eq!(end.link.state(), LinkState::Up);
        assert_eq!(end.counts(), LinkCounts::default(), "nothing has happened yet");
    }
}

/// Frames arrive as they were sent, from one byte to the longest, in both directions.
pub fn carries_frames_of_every_size(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let max = left.frame_bytes();
    for len in [1, 2, 45, 46, 47, 63, 64, 65, 511, 1024, max - 1, max] {
        let bytes = pattern(len, len);
        left.send_one(&bytes);
        let received = right.take(1).remove(0);
        assert!(
            is_padded(&received, &bytes),
            "a frame of {len} bytes arrives with {}",
            received.len()
        );
        right.send_one(&bytes);
        assert!(is_padded(&left.take(1)[0], &bytes), "{len} bytes back");
    }
}

/// Frames arrive in the order in which they were sent, whatever the batches, many times round the
/// rings, with traffic in both directions.
pub fn carries_batches_in_order(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let rounds =
        3 * left.link.properties().transmit_frames.max(left.link.properties().receive_frames);
    let (mut there, mut back) = (Stream::default(), Stream::default());
    for round in 0..rounds {
        there.send(&mut left, 1 + round % 7);
        back.send(&mut right, 1 + round % 3);
        there.receive(&mut right, 1 + round % 5);
        back.receive(&mut left, 2);
    }
    let start = Instant::now();
    while !there.under_way.is_empty() || !back.under_way.is_empty() {
        there.receive(&mut right, 64);
        back.receive(&mut left, 64);
        assert!(start.elapsed() < PATIENCE, "frames never came");
        right.skip();
        left.skip();
    }
    for counts in [left.counts(), right.counts()] {
        assert_eq!(counts.dropped(), 0, "{counts:?}");
    }
    assert_eq!(left.counts().sent, there.count as u64);
    assert_eq!(right.counts().received, there.count as u64);
    assert!(left.counts().sent_batches <= rounds as u64);
}

/// Long frames of one size, as the data of a long request are, arrive in the order in which they
/// were sent, with short ones before, among and behind them. Media may carry such frames together.
pub fn carries_long_batches_in_order(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let properties = left.link.properties().clone();
    let room = properties.transmit_frames.min(right.link.properties().receive_frames);
    let long = properties.frame_bytes.min(4_178);
    let mut count = 0;
    for round in 0..200_usize {
        // A message that ends with a shorter frame; a short frame; frames of several sizes.
        let sizes = [long; 20].into_iter().chain([long - 100, 60, 2_000, 1_100, long, long, 1]);
        let sizes = sizes.map(|len| len.min(long)).skip(round % 20).take(room);
        let frame = |(at, len): (usize, usize)| {
            let mut frame = pattern(at + round, len);
            // Frames for several queues could not be carried together.
            frame.iter_mut().skip(sidecore_link::QUEUE_AT).take(1).for_each(|queue| *queue = 0);
            frame
        };
        let frames: Vec<_> = sizes.enumerate().map(frame).collect();
        let sent = left.send(&frames);
        count += sent;
        let received = right.take(sent);
        for (at, (received, sent)) in received.iter().zip(&frames).enumerate() {
            assert!(is_padded(received, sent), "round {round}: frame {at} is damaged or displaced");
        }
        // The other way, so that both links have a reason to receive.
        right.send_one(&pattern(round, 100));
        assert!(is_padded(&left.take(1)[0], &pattern(round, 100)));
    }
    assert_eq!((left.counts().sent, right.counts().received), (count as u64, count as u64));
    assert_eq!((left.counts().dropped(), right.counts().dropped()), (0, 0));
}

/// Numbered frames in one direction.
#[derive(Default)]
struct Stream {
    count: usize,
    under_way: VecDeque<Vec<u8>>,
}

impl Stream {
    fn send(&mut self, from: &mut End, count: usize) {
        // The receiver has room for what is under way, so that nothing need be dropped.
        let room = from.link.properties().receive_frames.saturating_sub(self.under_way.len() + 1);
        let frame = |index: usize| pattern(index, 60 + index % 700);
        let frames: Vec<_> = (self.count..self.count + count.min(room)).map(frame).collect();
        let sent = from.send(&frames);
        self.count += sent;
        self.under_way.extend(frames.into_iter().take(sent));
    }

    fn receive(&mut self, at: &mut End, limit: usize) {
        let mut frames = at.receive(limit);
        for frame in &frames {
            let sent = self.under_way.pop_front().expect("a frame arrives that was not sent");
            assert!(is_padded(&at.bytes(frame), &sent), "a frame is damaged or out of order");
        }
        at.link.give_back(&mut frames);
    }
}

/// The byte behind the header is aligned in memory, in received frames and in buffers.
pub fn aligns_payloads(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let properties = left.link.properties().clone();
    let (header, align) = (properties.header_bytes, properties.payload_align_bytes as u64);
    let first = |pieces: &sidecore_link::Pieces| {
        pieces.part(header, usize::MAX).next().unwrap().address().0
    };
    let mut buffers = Vec::new();
    left.link.buffers(left.peer, 8, &mut buffers);
    assert!(
        buffers.iter().all(|buffer| first(buffer.pieces()) % align == 0),
        "a buffer is not aligned"
    );
    left.link.cancel(&mut buffers);
    for _ in 0..8 {
        left.send_one(&pattern(1, left.frame_bytes()));
        let mut frames = right.receive_all(1);
        assert_eq!(first(frames[0].pieces()) % align, 0, "a received payload is not aligned");
        right.link.give_back(&mut frames);
    }
}

/// Buffers are lent until there are no more, each once; those cancelled are lent again.
pub fn lends_no_more_buffers_than_it_has(open: Open<'_>) {
    let Pair { mut left, .. } = open();
    let all = left.link.properties().transmit_frames;
    let mut buffers = Vec::new();
    for _ in 0..3 {
        left.link.buffers(left.peer, 2 * all, &mut buffers);
        assert_eq!(buffers.len(), all, "buffers lent");
        left.link.buffers(left.peer, 1, &mut buffers);
        assert_eq!(buffers.len(), all, "there is no further one");
        let mut places: Vec<_> =
            buffers.iter().map(|b| b.pieces().part(0, 1).next().unwrap().address()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), all, "two buffers are one");
        left.link.cancel(&mut buffers);
        assert!(buffers.is_empty(), "cancel takes all buffers");
    }
}

/// Buffers may be sent in another order than they were lent; frames arrive in the order of sending.
pub fn sends_in_the_order_of_sending(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let mut kept = Vec::new();
    for round in 0..200_usize {
        let mut buffers = Vec::new();
        left.link.buffers(left.peer, 1 + round % 4, &mut buffers);
        for (index, buffer) in buffers.iter_mut().enumerate() {
            let bytes = pattern(4 * round + index, 100 + round);
            buffer.pieces().write(left.link.memory(), 0, &bytes);
            buffer.address(left.peer, bytes.len());
        }
        // Some are kept for a while, and sent last.
        if round % 3 == 0 {
            kept.extend(buffers.drain(..buffers.len().min(1)).map(|buffer| (round, buffer)));
            left.link.cancel(&mut buffers);
        }
        buffers.reverse();
        let mut sent: Vec<_> =
            (0..buffers.len()).rev().map(|index| pattern(4 * round + index, 100 + round)).collect();
        if round % 7 == 0 && kept.len() > 2 {
            for (round, buffer) in kept.drain(..2).rev() {
                sent.push(pattern(4 * round, 100 + round));
                buffers.push(buffer);
            }
        }
        let now = left.now();
        left.link.send(now, &mut buffers);
        let received = right.take(sent.len());
        for (received, sent) in received.iter().zip(&sent) {
            assert!(
                is_padded(received, sent),
                "round {round}: frames are out of order, or another's"
            );
        }
    }
    let mut rest = kept.into_iter().map(|(_, buffer)| buffer).collect();
    left.link.cancel(&mut rest);
}

/// A frame stays as it is until it is given back, whatever else arrives; frames come back in any
/// order.
pub fn keeps_what_is_lent(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let keep = (right.link.properties().receive_frames / 4).max(2);
    let mut kept: Vec<(usize, Frame)> = Vec::new();
    for index in 0..4 * keep {
        left.send_one(&pattern(index, 300));
        kept.extend(right.receive_all(1).into_iter().map(|frame| (index, frame)));
        if kept.len() == keep {
            // The youngest and the oldest, so that the rest is out of order.
            let mut some = vec![kept.pop().unwrap().1, kept.remove(0).1];
            right.link.give_back(&mut some);
        }
        for (index, frame) in &kept {
            assert!(right.bytes(frame) == pattern(*index, 300), "frame {index} has changed");
        }
    }
    let mut rest = kept.into_iter().map(|(_, frame)| frame).collect();
    right.link.give_back(&mut rest);
}

/// A short frame in the place of a long one has its own bytes and no others.
pub fn shows_nothing_of_former_frames(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let properties = right.link.properties().clone();
    let slots = properties.receive_frames.max(left.link.properties().transmit_frames);
    for _ in 0..slots {
        left.send_one(&vec![0xee; left.frame_bytes()]);
        assert_eq!(right.take(1)[0].len(), left.frame_bytes());
    }
    for index in 0..slots {
        let bytes = vec![0x11; 1 + index % 100];
        left.send_one(&bytes);
        let received = right.take(1).remove(0);
        assert!(
            is_padded(&received, &bytes),
            "{} bytes of a frame of {}",
            received.len(),
            bytes.len()
        );
    }
}

/// Buffers without a destination, and frames of no or too many bytes, are dropped and counted, and
/// the buffers are there again.
pub fn drops_what_it_cannot_send(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let all = left.link.properties().transmit_frames;
    for _ in 0..all {
        let mut buffers = Vec::new();
        left.link.buffers(left.peer, 3, &mut buffers);
        assert!(!buffers.is_empty());
        let (peer, too_long) = (left.peer, left.frame_bytes() + 1);
        buffers.iter_mut().skip(1).for_each(|buffer| buffer.address(peer, 0));
        buffers.iter_mut().skip(2).for_each(|buffer| buffer.address(peer, too_long));
        let (before, count) = (left.counts().dropped_unsendable, buffers.len() as u64);
        let now = left.now();
        left.link.send(now, &mut buffers);
        assert_eq!(left.counts().dropped_unsendable - before, count, "each is counted");
    }
    left.send_one(b"the only one");
    assert!(is_padded(&right.take(1)[0], b"the only one"));
    assert_eq!(left.counts().sent, 1);
}

/// Frames for which a receiver that does not poll has no room are counted: none is lost in silence.
pub fn counts_what_it_drops(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let total = 2 * right.link.properties().receive_frames + 10;
    let mut sent = 0;
    for index in 0..total {
        sent += left.send(&[pattern(index, 100)]);
        left.turn();
    }
    let start = Instant::now();
    let mut received = 0;
    loop {
        let mut frames = right.receive(64);
        received += frames.len();
        right.link.give_back(&mut frames);
        let dropped = left.counts().dropped() + right.counts().dropped();
        if received as u64 + dropped == sent as u64 {
            break;
        }
        let counts = (left.counts(), right.counts());
        assert!(start.elapsed() < PATIENCE, "{sent} frames sent, {received} received: {counts:?}");
        left.turn();
        right.skip();
    }
    assert!(
        received
            >= right.link.properties().receive_frames.min(left.link.properties().transmit_frames)
    );
    // And all is well again.
    left.send_one(b"after the flood");
    assert!(is_padded(&right.take(1)[0], b"after the flood"));
}

/// After all that, every buffer is there again, and every receive buffer is used.
pub fn leaks_nothing(open: Open<'_>) {
    let Pair { mut left, mut right } = open();
    let (slots, all) =
        (right.link.properties().receive_frames, left.link.properties().transmit_frames);
    for index in 0..2 * slots.max(all) {
        left.send_one(&pattern(index, 200));
        let _ = right.take(1);
    }
    let start = Instant::now();
    let mut buffers = Vec::new();
    while buffers.len() < all {
        left.link.buffers(left.peer, all - buffers.len(), &mut buffers);
        assert!(start.elapsed() < PATIENCE, "{} of {all} buffers are there", buffers.len());
        left.turn();
    }
    left.link.cancel(&mut buffers);
    // The receiver can hold as many frames as it says.
    let mut held = Vec::new();
    for index in 0..slots {
        left.send_one(&pattern(index, 200));
        held.append(&mut right.receive_all(1));
    }
    for (index, frame) in held.iter().enumerate() {
        assert!(right.bytes(frame) == pattern(index, 200), "frame {index}");
    }
    assert!(right.receive(64).is_empty(), "a frame that is lent comes again");
    right.link.give_back(&mut held);
}

/// Runs `exchanges` of a frame each way, without an allocation of its own, for a test that counts
/// those of the link.
///
/// # Panics
/// A frame does not come within ten seconds.
pub fn exchange(pair: &mut Pair, exchanges: usize) {
    for _ in 0..exchanges {
        one_way(&mut pair.left, &mut pair.right);
        one_way(&mut pair.right, &mut pair.left);
    }
}

/// Runs `exchanges` of several long frames each way, as [`exchange`] does with one.
///
/// # Panics
/// A frame does not come within ten seconds.
pub fn exchange_batches(pair: &mut Pair, exchanges: usize) {
    for _ in 0..exchanges {
        batch_one_way(&mut pair.left, &mut pair.right);
        batch_one_way(&mut pair.right, &mut pair.left);
    }
}

fn batch_one_way(from: &mut End, to: &mut End) {
    let start = Instant::now();
    let len_bytes = 4000.min(from.link.properties().frame_bytes);
    from.link.buffers(from.peer, 8, &mut from.buffers);
    let peer = from.peer;
    from.buffers.iter_mut().for_each(|buffer| buffer.address(peer, len_bytes));
    let (now, mut left) = (from.now(), from.buffers.len());
    from.link.send(now, &mut from.buffers);
    while left > 0 {
        let now = to.now();
        to.link.receive(now, left, &mut to.frames);
        left -= to.frames.len();
        to.link.give_back(&mut to.frames);
        assert!(start.elapsed() < PATIENCE, "{left} frames never came");
        to.skip();
    }
}

fn one_way(from: &mut End, to: &mut End) {
    let start = Instant::now();
    while from.buffers.is_empty() {
        from.link.buffers(from.peer, 1, &mut from.buffers);
        assert!(start.elapsed() < PATIENCE, "no buffer becomes free");
    }
    from.buffers[0].pieces().write(from.link.memory(), 0, &[1; 100]);
    from.buffers[0].address(from.peer, 4000.min(from.link.properties().frame_bytes));
    let now = from.now();
    from.link.send(now, &mut from.buffers);
    while to.frames.is_empty() {
        let now = to.now();
        to.link.receive(now, 4, &mut to.frames);
        assert!(start.elapsed() < PATIENCE, "a frame never came");
        to.skip();
    }
    to.link.give_back(&mut to.frames);
}
