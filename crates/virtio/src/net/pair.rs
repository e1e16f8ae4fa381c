//! A receive queue and a transmit queue, as a queue of a switch's port.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::MemoryError;
use sidecore_net::{
    DropReason, FRAMES_MAX, Frames, Loan, NoBuffers, PortQueue, Properties, QueueState,
};
use sidecore_reactor::{Arm, MakeSignal, Signal};
use sidecore_ring::{RingState, Token};
use sidecore_spec_virtio::net::{ETHERNET_HEADER_BYTES, feature, is_receive};
use sidecore_units::Nanos;

use super::half::Half;
use super::{NetDevice, options};
use crate::{QueueResources, StartError};

/// Size of a VLAN tag (IEEE 802.1Q, 9.4).
const VLAN_TAG_BYTES: usize = 4;

/// Most pieces of memory of a frame that a driver sends. Linux uses up to 19 descriptors, and each
/// may lie across two regions.
const FRAME_SEGMENTS: usize = 64;

/// Most receive buffers of one frame: 64 KiB in buffers of 1 KiB.
const BUFFERS_MAX: usize = 64;

/// Most pieces of memory of the receive buffers of a frame.
const BUFFER_SEGMENTS: usize = 128;

/// A receive queue and a transmit queue of a NIC. Each of them may be absent: a VMM starts and
/// stops them one by one.
#[derive(Debug)]
pub struct NetPair {
    device: Arc<NetDevice>,
    number: u16,
    /// The queue of frames to the guest.
    to_guest: Option<Half>,
    /// The queue of frames from the guest.
    from_guest: Option<Half>,
    /// The frames from the guest that are lent, oldest first.
    lent: VecDeque<Token>,
    /// The buffers of the loan that is out, with the bytes that go into each.
    loan: Vec<(Token, u32)>,
}

impl NetPair {
    /// Pair `number` of `device`, with both queues stopped.
    #[must_use]
    pub fn new(device: &Arc<NetDevice>, number: u16) -> Self {
        Self {
            device: Arc::clone(device),
            number,
            to_guest: None,
            from_guest: None,
            lent: VecDeque::with_capacity(FRAMES_MAX),
            loan: Vec::with_capacity(BUFFERS_MAX),
        }
    }

    /// The number of the pair.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Whether both queues are stopped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.to_guest.is_none() && self.from_guest.is_none()
    }

    /// Takes up queue `index` of the device, which is one of this pair, where `state` says.
    /// `signal` makes what interrupts the guest. The pair is not attached to a switch.
    ///
    /// # Errors
    /// The ring's layout or an eventfd is unusable.
    pub fn start(
        &mut self,
        index: u16,
        resources: QueueResources,
        state: RingState,
        signal: MakeSignal,
    ) -> Result<(), StartError> {
        let half = Half::new(&self.device, index, resources, state, signal)?;
        *self.half(index) = Some(half);
        Ok(())
    }

    /// Ends queue `index`: where it stands. The pair is not attached to a switch, which has given
    /// back all that was lent.
    pub fn stop(&mut self, index: u16) -> Option<RingState> {
        if is_receive(index) {
            self.cancel();
        } else {
            self.give_back(self.lent.len());
        }
        self.half(index).take().map(Half::finish)
    }

    /// Enables or disables queue `index`, if it is started.
    pub fn set_enabled(&mut self, index: u16, is_enabled: bool) {
        if let Some(half) = self.half(index) {
            half.is_enabled = is_enabled;
        }
    }

    /// Replaces what interrupts the guest for queue `index`. Returns the old one: to drop it takes
    /// a while.
    pub fn set_call(
        &mut self,
        index: u16,
        call: Option<Box<dyn Signal>>,
    ) -> Option<Box<dyn Signal>> {
        self.half(index).as_mut().and_then(|half| half.set_call(call))
    }

    fn half(&mut self, index: u16) -> &mut Option<Half> {
        if is_receive(index) { &mut self.to_guest } else { &mut self.from_guest }
    }

    fn halves(&mut self) -> impl Iterator<Item = &mut Half> {
        self.to_guest.iter_mut().chain(self.from_guest.iter_mut())
    }

    /// The features that the driver accepted: the same for both queues.
    fn features(&self) -> u64 {
        self.from_guest.as_ref().or(self.to_guest.as_ref()).map_or(0, |half| half.features)
    }
}

impl PortQueue for NetPair {
    fn properties(&self) -> Properties {
        let features = self.features();
        let ethernet = usize::try_from(ETHERNET_HEADER_BYTES).unwrap_or(0);
        Properties {
            header_bytes: options::header_bytes(features),
            frame_bytes: usize::from(self.device.mtu())
                .saturating_add(ethernet)
                .saturating_add(VLAN_TAG_BYTES),
            sends: options::sends(features),
            takes: options::takes(features),
            frame_segments: FRAME_SEGMENTS,
            buffer_segments: BUFFER_SEGMENTS,
        }
    }

    fn state(&self) -> QueueState {
        let is_up = |half: &Half| half.is_enabled && half.is_usable();
        match (&self.to_guest, &self.from_guest) {
            _ if self.device.health().is_broken() => QueueState::Down("the device needs a reset"),
            (Some(to), Some(from)) if is_up(to) && is_up(from) => QueueState::Up,
            (Some(_), Some(_)) => QueueState::Down("a queue is disabled"),
            _ => QueueState::Down("a queue is not started"),
        }
    }

    fn receive(&mut self, _now: Nanos, frames: &mut Frames) {
        let Some(half) = &mut self.from_guest else { return };
        let mut taken = take_simple(half, &mut self.lent, frames);
        while frames.room() > 0 {
            let Some(token) = half.pop() else { break };
            if !half.chain.writable().is_empty() {
                half.ring.abandon(token);
                half.break_with(&"a frame to send has buffers for the device to write");
                break;
            }
            self.lent.push_back(token);
            taken = taken.wrapping_add(1);
            let Half { is_enabled, memory, chain, hint, .. } = half;
            frames.append(|segments| {
                if !*is_enabled {
                    return Err(DropReason::Disabled);
                }
                segments.bind(memory);
                for part in chain.readable() {
                    segments
                        .push(part.address, part.len_bytes.into(), hint)
                        .map_err(|_| DropReason::Fragmented)?;
                }
                Ok(())
            });
        }
        let stats = half.stats();
        stats.polls.add(1);
        if taken == 0 {
            stats.empty_polls.add(1);
        } else {
            stats.batches.add(1);
        }
    }

    fn give_back(&mut self, count: usize) {
        let Some(half) = &mut self.from_guest else { return };
        let count = count.min(self.lent.len());
        if count > 0 {
            half.ring.complete_read(self.lent.drain(..count));
            half.completed();
        }
    }

    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers> {
        let half = match &mut self.to_guest {
            Some(half) if half.is_enabled => half,
            _ => return Err(NoBuffers::Never(DropReason::NotEnabled)),
        };
        let is_mergeable = half.features & feature::MRG_RXBUF != 0;
        let most = if is_mergeable { BUFFERS_MAX } else { 1 };
        loan.segments.bind(&half.memory);
        let mut left = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        let refusal = loop {
            if left == 0 {
                loan.buffers = u16::try_from(self.loan.len()).unwrap_or(u16::MAX);
                return Ok(());
            }
            if self.loan.len() >= most {
                break NoBuffers::Never(DropReason::SmallBuffers);
            }
            let Some(token) = half.pop() else {
                break if half.is_usable() {
                    NoBuffers::Later
                } else {
                    NoBuffers::Never(DropReason::Unusable)
                };
            };
            if !half.chain.readable().is_empty() {
                half.ring.abandon(token);
                half.break_with(&"a receive buffer has parts for the device to read");
                break NoBuffers::Never(DropReason::Unusable);
            }
            match fill(half, left, loan) {
                Ok(filled) => {
                    left = left.saturating_sub(filled);
                    self.loan.push((token, filled));
                }
                Err(MemoryError::TooManySegments { .. }) => {
                    half.ring.put_back(token);
                    break NoBuffers::Never(DropReason::SmallBuffers);
                }
                Err(error) => {
                    half.ring.abandon(token);
                    half.break_with(&error);
                    break NoBuffers::Never(DropReason::Unusable);
                }
            }
        };
        self.cancel();
        Err(refusal)
    }

    fn lend_each(&mut self, sizes_bytes: &[usize], loan: &mut Loan) -> usize {
        let half = match &mut self.to_guest {
            Some(half) if half.is_enabled && half.is_usable() => half,
            _ => return 0,
        };
        let Half { ring, memory, hint, .. } = half;
        loan.segments.bind(memory);
        let (lent, mut sizes) = (&mut self.loan, sizes_bytes.iter());
        let limit = sizes_bytes.len().min(BUFFERS_MAX);
        let taken = ring.pop_each(memory, true, limit, |token, buffer| {
            let Some(&size_bytes) = sizes.next() else { return false };
            if (buffer.len_bytes as usize) < size_bytes
                || !loan.segments.push_piece(buffer.address, size_bytes, hint)
            {
                return false;
            }
            loan.segments.prefetch_last_for_write();
            lent.push((token, u32::try_from(size_bytes).unwrap_or(u32::MAX)));
            true
        });
        match taken {
            Ok(taken) => taken,
            Err(error) => {
                half.break_with(&error);
                0
            }
        }
    }

    fn commit(&mut self) {
        if let Some(half) = &mut self.to_guest {
            half.ring.complete_together(&mut self.loan);
            half.completed();
        }
    }

    fn cancel(&mut self) {
        if let Some(half) = &mut self.to_guest {
            for (token, _) in self.loan.drain(..).rev() {
                half.ring.put_back(token);
            }
        }
    }

    fn publish(&mut self) {
        self.halves().for_each(Half::publish);
    }

    fn end_turn(&mut self, _now: Nanos, busy: bool) {
        self.halves().for_each(|half| half.end_turn(busy));
    }

    /// Only the transmit queue wakes: for a frame that waits for buffers, the switch polls.
    fn arm(&mut self) -> Arm {
        self.halves().for_each(Half::settle);
        let Some(half) = &mut self.from_guest else { return Arm::Armed };
        half.check();
        if !half.is_usable() {
            return Arm::Armed;
        }
        if half.notices().kick().is_none() {
            return Arm::CannotSleep;
        }
        match half.ring.arm_kicks(&half.memory) {
            Ok(false) => Arm::Armed,
            Ok(true) => {
                half.ring.suppress_kicks();
                Arm::WorkPending
            }
            Err(error) => {
                half.break_with(&error);
                Arm::Armed
            }
        }
    }

    fn disarm(&mut self) {
        if let Some(half) = &mut self.from_guest {
            half.ring.suppress_kicks();
        }
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.from_guest.as_ref().and_then(|half| half.notices().kick()).map(watch);
    }

    fn on_wake(&mut self) {
        self.halves().for_each(|half| half.count_kicks());
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}

/// Lends the frames at the head of the ring that have one descriptor each. Returns their number.
#[inline]
fn take_simple(half: &mut Half, lent: &mut VecDeque<Token>, frames: &mut Frames) -> u64 {
    if !half.is_enabled || !half.is_usable() {
        return 0;
    }
    let Half { ring, memory, hint, .. } = half;
    let taken = ring.pop_each(memory, false, frames.room(), |token, part| {
        lent.push_back(token);
        frames.append(|segments| {
            segments.bind(memory);
            segments
                .push(part.address, part.len_bytes.into(), hint)
                .map_err(|_| DropReason::Fragmented)?;
            segments.prefetch_last_for_read();
            Ok(())
        })
    });
    match taken {
        Ok(taken) => taken as u64,
        Err(error) => {
            half.break_with(&error);
            0
        }
    }
}

/// Adds the chain's buffers to the loan, as far as `left` bytes need them. Returns the number of
/// bytes that they take.
#[inline]
fn fill(half: &mut Half, left: u32, loan: &mut Loan) -> Result<u32, MemoryError> {
    let mut filled = 0_u32;
    for part in half.chain.writable() {
        let count = part.len_bytes.min(left.saturating_sub(filled));
        if count == 0 {
            break;
        }
        loan.segments.push(part.address, count.into(), &mut half.hint)?;
        filled = filled.saturating_add(count);
    }
    Ok(filled)
}
