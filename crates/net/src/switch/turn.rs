//! A turn of the switch: frames that wait, new frames, and what need not be done every time.

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use super::decide::Targets;
use super::drops::Sent;
use super::{Switch, SwitchEvent};
use crate::deliver::Parcel;
use crate::flow::flow;
use crate::frames::BATCH;
use crate::head::Head;
use crate::ports::{Lane, PortSet};
use crate::{DropReason, NoBuffers, StageFrame, Way};

/// Turns that a frame waits for a buffer of its receiver.
pub const WAIT_TURNS: u64 = 8;
/// Bytes of frames that one turn takes, or one frame of more: a longer turn would keep the other
/// units of the sidecore waiting.
const TURN_BYTES: usize = 64 << 10;
/// The time between two looks at ages, states and blocked ports.
pub(super) const LOOK: Nanos = Nanos::from_millis(1);

impl Switch {
    /// Runs one turn, which takes up to `budget` frames. Returns the number of frames that were
    /// delivered, dropped or taken.
    pub fn turn(&mut self, now: Nanos, budget: usize) -> usize {
        self.turn = self.turn.wrapping_add(1);
        self.now = now;
        if now.since(self.looked_at) >= LOOK {
            self.looked_at = now;
            self.look(now);
        }
        let count = self.order.len();
        let first = (self.turn as usize).checked_rem(count).unwrap_or(0);
        let (mut frames, mut bytes) = (budget, TURN_BYTES);
        let mut work = self.serve_waiters(first, &mut bytes);
        if !self.holders.is_empty() {
            work = work.saturating_add(self.release_held(now));
        }
        for at in 0..count {
            let Some(index) = self.at_turn(first, at) else {
                break;
            };
            let Some(mut lane) = self.take_lane(index) else {
                continue;
            };
            work = work.saturating_add(self.poll(now, index, &mut lane, &mut frames, &mut bytes));
            self.put_lane(index, lane);
            self.publish_all();
        }
        for lane in self.lanes.iter_mut().flatten() {
            let is_busy = std::mem::take(&mut lane.is_busy);
            lane.queue.end_turn(now, is_busy);
        }
        work
    }

    pub(super) fn take_lane(&mut self, index: u16) -> Option<Box<Lane>> {
        self.lanes.get_mut(usize::from(index))?.take()
    }

    pub(super) fn put_lane(&mut self, index: u16, lane: Box<Lane>) {
        if let Some(place) = self.lanes.get_mut(usize::from(index)) {
            *place = Some(lane);
        }
    }

    /// Shows all stations what they were given.
    pub(super) fn publish_all(&mut self) {
        while let Some(index) = self.touched.pop() {
            if let Some(lane) = self.lanes.get_mut(usize::from(index)).and_then(Option::as_mut) {
                lane.publish();
            }
        }
    }

    /// Takes a batch of a queue's frames, and decides on them.
    fn poll(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        frames: &mut usize,
        bytes: &mut usize,
    ) -> usize {
        if lane.undecided == 0 {
            let before = lane.frames.len();
            lane.frames.make_room(BATCH.min(*frames));
            if lane.frames.room() > 0 {
                lane.queue.receive(now, &mut lane.frames);
            }
            lane.undecided = lane.frames.len().saturating_sub(before);
            copy_heads(lane);
        }
        // One question for a batch: frames of a port without stages are not asked.
        let has_stages = self.port_at(lane.port).is_some_and(|port| !port.stages.is_empty());
        let mut work = if has_stages {
            self.forward_by_stages(now, index, lane, (frames, bytes))
        } else {
            self.forward_all::<false>(now, index, lane, (frames, bytes))
        };
        if lane.waiting > 0 {
            work = work.saturating_add(self.expire(lane));
        }
        self.finish(lane);
        work
    }

    /// Decides on frames of a port that has stages, which keeps that code out of the way of others.
    #[inline(never)]
    fn forward_by_stages(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        budget: (&mut usize, &mut usize),
    ) -> usize {
        self.forward_all::<true>(now, index, lane, budget)
    }

    /// Decides on the frames of a queue within the budget of frames and bytes, and delivers them.
    /// Returns their number.
    #[inline]
    fn forward_all<const STAGES: bool>(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        (frames, bytes): (&mut usize, &mut usize),
    ) -> usize {
        let mut work = 0_usize;
        let mut may_run = true;
        while lane.undecided > 0 && *frames > 0 && *bytes > 0 {
            if may_run {
                let run = self.run(now, index, lane, (*frames, *bytes));
                // Further frames would find the same buffers.
                may_run = !run.is_short;
                if run.frames > 0 {
                    *frames = frames.saturating_sub(run.frames);
                    *bytes = bytes.saturating_sub(run.bytes);
                    work = work.saturating_add(run.frames);
                    continue;
                }
            }
            let at = lane.frames.len().saturating_sub(lane.undecided);
            lane.undecided = lane.undecided.saturating_sub(1);
            let len_bytes = self.forward::<STAGES>(now, index, lane, at);
            *frames = frames.saturating_sub(1);
            *bytes = bytes.saturating_sub(len_bytes);
            work = work.saturating_add(1);
        }
        work
    }

    /// Gives back the frames that are done.
    fn finish(&mut self, lane: &mut Lane) {
        let count = lane.frames.take_done();
        if count > 0 {
            lane.queue.give_back(count);
            lane.is_touched = true;
            lane.publish();
        }
    }

    /// Decides on the frame at `at`, and delivers it. Returns its size.
    #[inline]
    fn forward<const STAGES: bool>(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        at: usize,
    ) -> usize {
        let from = lane.port;
        let Some(slot) = lane.frames.get_mut(at) else {
            return 0;
        };
        slot.is_done = true;
        let decided = match slot.fault {
            Some(reason) => Err(reason.into()),
            None => {
                let of_queue = (&lane.properties, &mut lane.memo);
                self.decide::<STAGES>(now, from, of_queue, (&mut slot.head, &slot.segments))
            }
        };
        // A frame that is not looked at has no size.
        let len_bytes = if slot.fault.is_none() { slot.head.len_bytes() } else { 0 };
        let Some(port) = self.port_at(from) else {
            return len_bytes;
        };
        port.stats.in_frames.add(1);
        port.stats.in_octets.add(len_bytes as u64);
        let (vlan, targets) = match decided {
            Ok(decided) => decided,
            Err(dropped) => {
                let frame = slot.fault.is_none().then_some((&slot.head, &slot.segments));
                self.drop_frame(from, dropped, 0, frame);
                return len_bytes;
            }
        };
        port.stats.in_group.add(slot.head.to.is_group().into());
        let mut pending = PortSet::NONE;
        let (head, segments) = (&mut slot.head, &slot.segments);
        match targets {
            Targets::One(target) => {
                port.stats.in_copies.add(1);
                if !self.copy_to(target, vlan, head, segments, false) {
                    pending.add(target);
                }
            }
            Targets::All(targets) => {
                port.stats.in_copies.add(targets.iter().count() as u64);
                for target in targets.iter() {
                    if !self.copy_to(target, vlan, head, segments, false) {
                        pending.add(target);
                    }
                }
            }
        }
        if !pending.is_empty() {
            self.keep(index, lane, at, (vlan, pending));
        }
        len_bytes
    }

    /// Keeps the frame at `at`, which has no buffers of these ports yet.
    pub(super) fn keep(
        &mut self,
        index: u16,
        lane: &mut Lane,
        at: usize,
        (vlan, pending): (u16, PortSet),
    ) {
        let Some(slot) = lane.frames.get_mut(at) else { return };
        (slot.vlan, slot.pending, slot.since) = (vlan, pending, self.turn);
        slot.is_done = false;
        lane.waiting = lane.waiting.saturating_add(1);
        self.wait(index, pending, &slot.head);
    }

    /// The queue of a port that this frame goes to.
    #[inline]
    fn lane_of(&self, port: u16, head: &Head) -> Option<u16> {
        let up = &self.port_at(port)?.up;
        match up.as_slice() {
            [only] => Some(*only),
            several => {
                let at = (flow(head) as usize).checked_rem(several.len())?;
                several.get(at).copied()
            }
        }
    }

    /// Copies a frame to a port. False if it has to wait: `is_last` says that it must not.
    #[inline]
    pub(super) fn copy_to(
        &mut self,
        target: u16,
        vlan: u16,
        head: &mut Head,
        segments: &Segments,
        is_last: bool,
    ) -> bool {
        if self.port_at(target).is_some_and(|port| port.is_plain) {
            return self.copy_to_open(target, vlan, head, segments, is_last) != Sent::Waits;
        }
        self.copy_by_stages(target, vlan, head, segments, is_last)
    }

    /// Copies a frame to a port that is not plain, if its stages let it pass.
    #[inline(never)]
    fn copy_by_stages(
        &mut self,
        target: u16,
        vlan: u16,
        head: &mut Head,
        segments: &Segments,
        is_last: bool,
    ) -> bool {
        let Some(port) = self.port_at(target) else { return true };
        // The stages decide on frames that a station can get.
        if !port.is_open() || port.up.is_empty() {
            self.drop_frame(target, DropReason::PortDown.into(), vlan, Some((head, segments)));
            return true;
        }
        self.copy_through_stages(target, vlan, head, segments, is_last)
    }

    /// As [`copy_by_stages`](Self::copy_by_stages), to a port that stands by, too.
    pub(super) fn copy_through_stages(
        &mut self,
        target: u16,
        vlan: u16,
        head: &mut Head,
        segments: &Segments,
        is_last: bool,
    ) -> bool {
        let now = self.now;
        let Some(port) = self.ports.get_mut(usize::from(target)).and_then(Option::as_mut) else {
            return true;
        };
        let frame = StageFrame::new(Way::ToStation, vlan, head, segments);
        match port.stages.pass(now, &frame, None) {
            Ok(true) => {}
            Ok(false) => return true,
            Err(dropped) => {
                self.drop_frame(target, dropped, vlan, Some((head, segments)));
                return true;
            }
        }
        let sent = self.copy_to_open(target, vlan, head, segments, is_last);
        if sent == Sent::Delivered {
            self.show_sent(target, vlan, head, segments);
        }
        sent != Sent::Waits
    }

    /// Copies a frame to a port that may have it.
    // Twice in the program, once for plain ports.
    #[inline(always)]
    pub(super) fn copy_to_open(
        &mut self,
        target: u16,
        vlan: u16,
        head: &mut Head,
        segments: &Segments,
        is_last: bool,
    ) -> Sent {
        let lane = self.lane_of(target, head);
        let Some(port) = self.ports.get(usize::from(target)).and_then(Option::as_ref) else {
            return Sent::Dropped;
        };
        let found = lane
            .and_then(|lane| Some((lane, self.lanes.get_mut(usize::from(lane))?.as_deref_mut()?)));
        let Some((index, lane)) = found else {
            self.drop_frame(target, DropReason::PortDown.into(), vlan, Some((head, segments)));
            return Sent::Dropped;
        };
        let was_touched = lane.is_touched;
        let sent = if lane.waiters.is_empty() {
            let tag = port.tag(vlan, head.tag);
            Parcel { head, segments }.deliver(lane, tag, &mut self.copy, &port.stats)
        } else {
            // Others wait already: their turn comes first.
            Err(NoBuffers::Later)
        };
        if lane.is_touched && !was_touched {
            self.touched.push(index);
        }
        let reason = match sent {
            Ok(()) => return Sent::Delivered,
            Err(NoBuffers::Later) if !is_last => return Sent::Waits,
            Err(NoBuffers::Later) => DropReason::NoBuffers,
            Err(NoBuffers::Never(reason)) => reason,
        };
        self.drop_frame(target, reason.into(), vlan, Some((head, segments)));
        Sent::Dropped
    }

    /// Has a frame of this queue wait for buffers of these ports.
    fn wait(&mut self, index: u16, pending: PortSet, head: &Head) {
        for target in pending.iter() {
            if let Some(port) = self.port_at(target) {
                port.stats.out_waits.add(1);
            }
            let to = self.lane_of(target, head);
            let to = to.and_then(|to| self.lanes.get_mut(usize::from(to))?.as_mut());
            if let Some(to) = to.filter(|to| !to.waiters.contains(&index)) {
                to.waiters.push_back(index);
            }
        }
    }

    /// Delivers frames that wait, to every queue that has buffers again.
    fn serve_waiters(&mut self, first: usize, bytes: &mut usize) -> usize {
        let mut work = 0_usize;
        for at in 0..self.order.len() {
            let Some(to) = self.at_turn(first, at) else {
                break;
            };
            let waits = self.lane(to).is_some_and(|lane| !lane.waiters.is_empty());
            if waits && let Some(mut lane) = self.take_lane(to) {
                work = work.saturating_add(self.serve(to, &mut lane, bytes));
                lane.publish();
                self.put_lane(to, lane);
            }
        }
        work
    }

    /// The queue whose place in this turn is `at`: each turn begins with another one.
    #[inline]
    fn at_turn(&self, first: usize, at: usize) -> Option<u16> {
        let (place, count) = (first.wrapping_add(at), self.order.len());
        let place = if place < count { place } else { place.wrapping_sub(count) };
        self.order.get(place).copied()
    }

    /// Delivers frames that wait for `to`, one of each sender in turn, for as long as there are
    /// buffers. Returns their number.
    fn serve(&mut self, to: u16, lane: &mut Lane, bytes: &mut usize) -> usize {
        let mut work = 0_usize;
        // As many as the senders can have lent in a turn: the rest waits for the next one.
        while work < BATCH
            && *bytes > 0
            && let Some(from) = lane.waiters.pop_front()
        {
            let Some(mut sender) = self.take_lane(from) else {
                continue;
            };
            let served = self.serve_one(to, lane, &mut sender);
            if let Some(Some(len_bytes)) = served {
                *bytes = bytes.saturating_sub(len_bytes);
                work = work.saturating_add(1);
                lane.waiters.push_back(from);
            }
            if sender.frames.get(0).is_some_and(|slot| slot.is_done) {
                self.finish(&mut sender);
            }
            self.put_lane(from, sender);
            if served == Some(None) {
                lane.waiters.push_front(from);
                break;
            }
        }
        work
    }

    /// Delivers the oldest frame of `sender` that waits for this queue, and returns its size in
    /// `Some`; or `None` in it if there are no buffers. Without such a frame, returns `None`.
    fn serve_one(&mut self, to: u16, lane: &mut Lane, sender: &mut Lane) -> Option<Option<usize>> {
        let target = lane.port;
        let decided = sender.frames.len().saturating_sub(sender.undecided);
        let port = self.ports.get(usize::from(target))?.as_ref()?;
        let at = (0..decided).find(|at| {
            sender.frames.get(*at).is_some_and(|slot| {
                !slot.is_done
                    && slot.pending.has(target)
                    && self.lane_of(target, &slot.head) == Some(to)
            })
        })?;
        let slot = sender.frames.get_mut(at)?;
        let tag = port.tag(slot.vlan, slot.head.tag);
        let mut parcel = Parcel { head: &mut slot.head, segments: &slot.segments };
        let sent = parcel.deliver(lane, tag, &mut self.copy, &port.stats);
        let (vlan, head, segments) = (slot.vlan, &slot.head, &slot.segments);
        match sent {
            Err(NoBuffers::Later) => return Some(None),
            Err(NoBuffers::Never(reason)) => {
                self.drop_frame(target, reason.into(), vlan, Some((head, segments)));
            }
            Ok(()) if port.is_plain => {}
            Ok(()) => self.show_sent(target, vlan, head, segments),
        }
        slot.pending.remove(target);
        if slot.pending.is_empty() {
            slot.is_done = true;
            sender.waiting = sender.waiting.saturating_sub(1);
        }
        Some(Some(slot.head.len_bytes()))
    }

    /// Drops the frames of a queue that have waited for too long. Returns their number.
    fn expire(&mut self, lane: &mut Lane) -> usize {
        let mut dropped = 0_usize;
        let decided = lane.frames.len().saturating_sub(lane.undecided);
        for at in 0..decided {
            let is_late = lane.frames.get(at).is_some_and(|slot| {
                !slot.is_done && self.turn.wrapping_sub(slot.since) >= WAIT_TURNS
            });
            if is_late {
                self.drop_pending(lane, at, |_| true);
                dropped = dropped.saturating_add(1);
            }
        }
        dropped
    }

    /// Drops the copies of a frame that wait for these ports.
    pub(super) fn drop_pending(&mut self, lane: &mut Lane, at: usize, which: impl Fn(u16) -> bool) {
        let Some(slot) = lane.frames.get_mut(at).filter(|slot| !slot.is_done) else {
            return;
        };
        if slot.pending.is_empty() {
            return;
        }
        for target in slot.pending.iter().filter(|target| which(*target)) {
            slot.pending.remove(target);
            let frame = Some((&slot.head, &slot.segments));
            self.drop_frame(target, DropReason::NoBuffers.into(), slot.vlan, frame);
        }
        if slot.pending.is_empty() {
            slot.is_done = true;
            lane.waiting = lane.waiting.saturating_sub(1);
        }
    }

    /// Drops all frames that wait for a port, and those of its own that wait for others.
    pub(super) fn drop_waiting(&mut self, port: u16) {
        for at in 0..self.order.len() {
            let Some(index) = self.order.get(at).copied() else {
                break;
            };
            let Some(mut lane) = self.take_lane(index) else {
                continue;
            };
            let is_own = lane.port == port;
            let decided = lane.frames.len().saturating_sub(lane.undecided);
            for at in 0..decided {
                self.drop_pending(&mut lane, at, |target| is_own || target == port);
            }
            self.finish(&mut lane);
            self.put_lane(index, lane);
        }
    }

    /// Looks at what need not be looked at in every turn.
    fn look(&mut self, now: Nanos) {
        self.table.age(now, self.options.age);
        self.refresh();
        if self.next_announcement.is_some_and(|due| due <= now) {
            self.announce_due(now);
        }
        if self.next_probe.is_some_and(|due| due <= now) {
            self.send_probes(now);
        }
        if !self.taking_over.is_empty() {
            self.announce_taken_over();
        }
        for index in 0..u16::try_from(self.ports.len()).unwrap_or(u16::MAX) {
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            let Some(port) = port.filter(|port| !port.is_plain) else {
                continue;
            };
            port.stages.look(now);
            self.note_failure(index);
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            let Some(port) = port else { continue };
            if port.blocked_until.is_some_and(|until| until <= now) {
                port.block(None);
                let name = port.name.clone();
                self.event(SwitchEvent::Opened { port: name });
            }
        }
    }
}

/// Copies the heads of the frames that a batch has brought. Together, so that the CPU fetches the
/// stations' memory of several frames at a time.
#[inline]
fn copy_heads(lane: &mut Lane) {
    let header_bytes = lane.properties.header_bytes;
    for at in lane.frames.len().saturating_sub(lane.undecided)..lane.frames.len() {
        if let Some(slot) = lane.frames.get_mut(at)
            && slot.fault.is_none()
        {
            slot.fault = slot.head.copy(&slot.segments, header_bytes).err();
        }
    }
}
