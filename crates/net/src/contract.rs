//! The contract of queues, as tests that each of them runs ([`check_queue`]), and a station for
//! tests: a port's queue whose driver is the test.

// A test's way to fail is to panic; this module is in no release build.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

mod queue;

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_reactor::{Arm, EventFd};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_units::Nanos;

use crate::{DropReason, Frames, Loan, NoBuffers, Offloads, PortQueue, Properties, QueueState};

pub use queue::{OpenQueue, QueueDriver, QueueRig, check_queue};

/// Bytes of frames that the driver can have in memory at a time.
const SEND_BYTES: u64 = 16 << 20;
/// Bytes of receive buffers.
const RECEIVE_BYTES: u64 = 48 << 20;
/// Frames and buffers that need no allocation.
const CAPACITY: usize = 4096;

/// Properties of a NIC with an MTU of 1500 bytes that knows all offloads.
pub const NIC: Properties = Properties {
    header_bytes: PacketHeader::BYTES,
    frame_bytes: 1518,
    sends: Offloads::ALL,
    takes: Offloads::ALL,
    frame_segments: 32,
    buffer_segments: 128,
};

/// Properties of a wire without virtio headers and offloads.
pub const WIRE: Properties =
    Properties { header_bytes: 0, sends: Offloads::NONE, takes: Offloads::NONE, ..NIC };

/// A frame that the station received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its virtio header; zeros on a wire without.
    pub header: PacketHeader,
    /// The frame.
    pub frame: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    start: u64,
    len_bytes: u64,
    /// The frame is in pieces of this size.
    piece_bytes: u64,
    fault: Option<DropReason>,
}

struct State {
    pages: SharedPages,
    properties: Properties,
    state: QueueState,
    merges: bool,
    /// Lends several buffers at a time.
    lends_each: bool,
    /// Frames to be lent.
    sent: VecDeque<Sent>,
    next_send: u64,
    lent: usize,
    completed: usize,
    /// Free receive buffers.
    buffers: VecDeque<(u64, u64)>,
    next_buffer: u64,
    /// The loan that is out: its buffers, and the bytes in each.
    loan: Vec<(u64, u64, u64)>,
    is_lent: bool,
    /// The loan is a buffer for each of several frames.
    is_each: bool,
    /// Frames that had a buffer each of such loans.
    each: usize,
    /// Buffers with frames: how many one frame has, and each.
    used: VecDeque<(usize, u64, u64)>,
    /// Those that were published.
    shown: usize,
    is_shown_complete: bool,
    kick: EventFd,
}

/// The driver's side of the station.
#[derive(Clone)]
pub struct Station(Arc<Mutex<State>>);

/// The switch's side of the station.
pub struct StationQueue(Arc<Mutex<State>>);

impl Station {
    /// A station and its queue. It merges receive buffers if `merges`.
    #[must_use]
    pub fn new(properties: Properties, merges: bool) -> (Self, StationQueue) {
        let len_bytes = usize::try_from(SEND_BYTES + RECEIVE_BYTES).unwrap();
        let state = State {
            pages: SharedPages::new("station", len_bytes).unwrap(),
            properties,
            state: QueueState::Up,
            merges,
            lends_each: true,
            sent: VecDeque::with_capacity(CAPACITY),
            next_send: 0,
            lent: 0,
            completed: 0,
            buffers: VecDeque::with_capacity(CAPACITY),
            next_buffer: SEND_BYTES,
            loan: Vec::with_capacity(128),
            is_lent: false,
            is_each: false,
            each: 0,
            used: VecDeque::with_capacity(CAPACITY),
            shown: 0,
            is_shown_complete: true,
            kick: EventFd::new().unwrap(),
        };
        let state = Arc::new(Mutex::new(state));
        (Self(Arc::clone(&state)), StationQueue(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Sends a frame with this virtio header, as pieces of `piece_bytes`. Returns where it is in
    /// the station's memory, the virtio header first.
    pub fn send_with(&self, header: PacketHeader, frame: &[u8], piece_bytes: usize) -> u64 {
        let mut state = self.state();
        let header_bytes = state.properties.header_bytes;
        let bytes = [&header.encode()[..header_bytes], frame].concat();
        if state.next_send + bytes.len() as u64 > SEND_BYTES {
            state.next_send = 0;
        }
        let start = state.next_send;
        // Frames begin at any address.
        state.next_send += bytes.len() as u64 + 3;
        let memory = state.pages.memory();
        memory.write_slice(GuestAddress(start), &bytes, &mut RegionHint::default()).unwrap();
        let (len_bytes, piece_bytes) = (bytes.len() as u64, piece_bytes as u64);
        state.sent.push_back(Sent { start, len_bytes, piece_bytes, fault: None });
        state.kick.signal();
        start
    }

    /// Sends a whole frame without offloads.
    pub fn send(&self, frame: &[u8]) -> u64 {
        self.send_with(PacketHeader::default(), frame, 1 << 20)
    }

    /// Sends something that the queue itself drops for this reason.
    pub fn send_fault(&self, fault: DropReason) {
        let sent = Sent { start: 0, len_bytes: 64, piece_bytes: 64, fault: Some(fault) };
        self.state().sent.push_back(sent);
    }

    /// Sends again the bytes at `start`, where a frame of this size is.
    pub fn resend(&self, start: u64, frame_bytes: usize) {
        let mut state = self.state();
        let len_bytes = (state.properties.header_bytes + frame_bytes) as u64;
        state.sent.push_back(Sent { start, len_bytes, piece_bytes: 1 << 20, fault: None });
    }

    /// Writes to the station's memory.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let memory = self.state().pages.memory().clone();
        memory.write_slice(GuestAddress(at), bytes, &mut RegionHint::default()).unwrap();
    }

    /// A copy of the handle of its memory.
    #[must_use]
    pub fn memory(&self) -> sidecore_memory::GuestMemory {
        self.state().pages.memory().clone()
    }

    /// Offers `count` receive buffers of `len_bytes`.
    pub fn post(&self, count: usize, len_bytes: usize) {
        let mut state = self.state();
        for _ in 0..count {
            if state.next_buffer + len_bytes as u64 > SEND_BYTES + RECEIVE_BYTES {
                state.next_buffer = SEND_BYTES;
            }
            let start = state.next_buffer;
            state.next_buffer += len_bytes as u64;
            state.buffers.push_back((start, len_bytes as u64));
        }
    }

    /// Sets whether the queue lends buffers for several frames at a time.
    pub fn set_lends_each(&self, lends_each: bool) {
        self.state().lends_each = lends_each;
    }

    /// Frames that came in loans of several buffers, one for each.
    #[must_use]
    pub fn received_each(&self) -> usize {
        self.state().each
    }

    /// Forgets its receive buffers.
    pub fn take_buffers(&self) {
        self.state().buffers.clear();
    }

    /// Receive buffers that are free.
    #[must_use]
    pub fn free_buffers(&self) -> usize {
        self.state().buffers.len()
    }

    /// Frames that the switch has given back.
    #[must_use]
    pub fn completed(&self) -> usize {
        self.state().completed
    }

    /// Frames that the switch has not taken yet.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.state().sent.len()
    }

    /// Sets whether the queue carries frames.
    pub fn set_state(&self, queue: QueueState) {
        self.state().state = queue;
    }

    /// The frames that were published since the last call.
    ///
    /// # Panics
    /// A frame is not as its header says.
    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        let mut frames = Vec::new();
        while let Some(frame) = self.receive() {
            frames.push(frame);
        }
        frames
    }

    /// The number of frames that were published and not received: they are dropped here.
    #[allow(clippy::must_use_candidate)] // most callers want them gone
    pub fn discard(&self) -> usize {
        let mut state = self.state();
        let mut frames = 0;
        while state.shown > 0 {
            let (buffers, ..) = state.used[0];
            state.used.drain(..buffers);
            state.shown -= buffers;
            frames += 1;
        }
        frames
    }

    fn receive(&self) -> Option<Received> {
        let mut state = self.state();
        if state.shown == 0 {
            return None;
        }
        let buffers = state.used[0].0;
        let mut bytes = Vec::new();
        for _ in 0..buffers {
            let (_, start, len_bytes) = state.used.pop_front().unwrap();
            let mut part = vec![0; usize::try_from(len_bytes).unwrap()];
            let memory = state.pages.memory();
            memory.read_slice(GuestAddress(start), &mut part, &mut RegionHint::default()).unwrap();
            bytes.extend(part);
            state.shown -= 1;
        }
        let header_bytes = state.properties.header_bytes;
        let mut header = [0; PacketHeader::BYTES];
        header[..header_bytes].copy_from_slice(&bytes[..header_bytes]);
        let header = PacketHeader::decode(&header);
        if header_bytes == PacketHeader::BYTES {
            assert_eq!(usize::from(header.num_buffers), buffers, "num_buffers is wrong");
        }
        Some(Received { header, frame: bytes.split_off(header_bytes) })
    }
}

impl QueueDriver for Station {
    fn send(&mut self, frame: &[u8]) {
        Self::send(self, frame);
    }

    fn offer(&mut self, frames: usize) {
        self.post(frames, 2048);
    }

    fn received(&mut self) -> Vec<Vec<u8>> {
        Self::received(self).into_iter().map(|received| received.frame).collect()
    }
}

impl StationQueue {
    fn with<T>(&self, task: impl FnOnce(&mut State) -> T) -> T {
        task(&mut self.0.lock().unwrap())
    }
}

impl PortQueue for StationQueue {
    fn properties(&self) -> Properties {
        self.with(|state| state.properties)
    }

    fn state(&self) -> QueueState {
        self.with(|state| state.state)
    }

    fn receive(&mut self, _now: Nanos, frames: &mut Frames) {
        self.with(|state| {
            while frames.room() > 0
                && let Some(sent) = state.sent.pop_front()
            {
                let memory = state.pages.memory();
                assert!(frames.append(|segments| {
                    if let Some(fault) = sent.fault {
                        return Err(fault);
                    }
                    segments.bind(memory);
                    let (mut at, end) = (sent.start, sent.start + sent.len_bytes);
                    while at < end {
                        let len_bytes = sent.piece_bytes.min(end - at);
                        segments
                            .push(GuestAddress(at), len_bytes, &mut RegionHint::default())
                            .map_err(|_| DropReason::Fragmented)?;
                        at += len_bytes;
                    }
                    Ok(())
                }));
                state.lent += 1;
            }
        });
    }

    fn give_back(&mut self, count: usize) {
        self.with(|state| {
            assert!(count <= state.lent, "more frames come back than were lent");
            state.lent -= count;
            state.completed += count;
        });
    }

    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers> {
        self.with(|state| {
            assert!(!state.is_lent, "one loan at a time");
            let (mut rest, merges) = (len_bytes as u64, state.merges);
            loan.segments.bind(state.pages.memory());
            state.loan.clear();
            for (start, buffer_bytes) in &state.buffers {
                let here = rest.min(*buffer_bytes);
                if !merges && here < rest {
                    return Err(NoBuffers::Never(DropReason::SmallBuffers));
                }
                loan.segments
                    .push(GuestAddress(*start), here, &mut RegionHint::default())
                    .map_err(|_| NoBuffers::Never(DropReason::SmallBuffers))?;
                state.loan.push((*start, *buffer_bytes, here));
                rest -= here;
                if rest == 0 {
                    break;
                }
            }
            if rest > 0 {
                return Err(NoBuffers::Later);
            }
            loan.buffers = u16::try_from(state.loan.len()).unwrap();
            let count = state.loan.len();
            state.buffers.drain(..count);
            (state.is_lent, state.is_each) = (true, false);
            Ok(())
        })
    }

    fn lend_each(&mut self, sizes_bytes: &[usize], loan: &mut Loan) -> usize {
        self.with(|state| {
            assert!(!state.is_lent, "one loan at a time");
            state.loan.clear();
            if !state.lends_each {
                return 0;
            }
            loan.segments.bind(state.pages.memory());
            for size_bytes in sizes_bytes {
                let Some((start, buffer_bytes)) = state.buffers.front().copied() else { break };
                let is_enough = buffer_bytes >= *size_bytes as u64;
                let (start_at, hint) = (GuestAddress(start), &mut RegionHint::default());
                if !is_enough || !loan.segments.push_piece(start_at, *size_bytes, hint) {
                    break;
                }
                state.buffers.pop_front();
                state.loan.push((start, buffer_bytes, *size_bytes as u64));
            }
            (state.is_lent, state.is_each) = (!state.loan.is_empty(), true);
            state.loan.len()
        })
    }

    fn commit(&mut self) {
        self.with(|state| {
            assert!(std::mem::take(&mut state.is_lent), "there is a loan to commit");
            let buffers = if state.is_each { 1 } else { state.loan.len() };
            state.each += if state.is_each { state.loan.len() } else { 0 };
            for (start, _, len_bytes) in state.loan.drain(..) {
                state.used.push_back((buffers, start, len_bytes));
            }
            state.is_shown_complete = false;
        });
    }

    fn cancel(&mut self) {
        self.with(|state| {
            assert!(std::mem::take(&mut state.is_lent), "there is a loan to cancel");
            while let Some((start, buffer_bytes, _)) = state.loan.pop() {
                state.buffers.push_front((start, buffer_bytes));
            }
        });
    }

    fn publish(&mut self) {
        self.with(|state| {
            state.shown = state.used.len();
            state.is_shown_complete = true;
        });
    }

    fn end_turn(&mut self, _now: Nanos, _busy: bool) {
        self.with(|state| {
            assert!(!state.is_lent, "a loan outlives the turn");
            assert!(state.is_shown_complete, "a turn ends with frames that are not published");
        });
    }

    fn arm(&mut self) -> Arm {
        self.with(|state| if state.sent.is_empty() { Arm::Armed } else { Arm::WorkPending })
    }

    fn disarm(&mut self) {}

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.with(|state| watch(state.kick.as_fd()));
    }

    fn on_wake(&mut self) {
        self.with(|state| {
            state.kick.drain();
        });
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}
