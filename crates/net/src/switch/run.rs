//! Runs: frames of a queue that follow each other from one station to another one, which is what
//! most frames do. The switch decides on the way of a run once, and each of its frames is only
//! compared with it.

use sidecore_units::Nanos;

use super::Switch;
use super::decide::REFRESH;
use super::drops::Sent;
use crate::frames::BATCH;
use crate::guard;
use crate::head::{Between, TAG_BYTES};
use crate::ports::{Lane, Port, PortSet};
use crate::stage::RunSizes;
use crate::{MacAddress, PlainFlow, StageRun, Verdict, Way};

/// The way of a run, as the queue's last frame went.
struct RunWay {
    to: MacAddress,
    from: MacAddress,
    between: Between,
    vlan: u16,
    /// The receiver's port, and its only queue.
    port: u16,
    queue: u16,
    /// A port on the way has stages.
    has_stages: bool,
}

/// The frames of a run that were delivered; with stages, those that were decided on.
#[derive(Default)]
pub(super) struct Run {
    pub frames: usize,
    pub bytes: usize,
    /// The next frame belongs to the run, and has no buffer of its own.
    pub is_short: bool,
}

impl Switch {
    /// Delivers the next frames of a queue, within the budget of frames and bytes, for as long as
    /// they go the way of its last one, ask for no offload and find a buffer each.
    ///
    /// All other frames, and those that are dropped or wait, are left to
    /// [`forward`](Self::forward), but for those of ports with stages.
    #[inline]
    pub(super) fn run(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        budget: (usize, usize),
    ) -> Run {
        let Some(way) = self.run_way(now, lane) else {
            return Run::default();
        };
        if way.has_stages {
            return self.run_by_stages(now, index, lane, &way, budget);
        }
        let Some(mut to) = self.take_lane(way.queue) else {
            return Run::default();
        };
        let run = match self.port_at(lane.port) {
            Some(from) => deliver(from, lane, &way, &mut to, budget),
            None => Run::default(),
        };
        self.end_run(way.queue, to, run.frames > 0);
        if run.frames > 0 {
            self.count_from(lane.port, (run.frames, run.bytes), run.frames);
            self.count_to(way.port, (run.frames, run.bytes));
        }
        run
    }

    /// The way of the queue's last frame, if it is still one on which nothing but the addresses
    /// and the stages decide.
    #[inline]
    fn run_way(&self, now: Nanos, lane: &Lane) -> Option<RunWay> {
        let (source, noted_at, source_version) = lane.memo.source;
        let (target, port, target_version) = lane.memo.target;
        let version = self.table.version();
        let is_known = source_version == version
            && target_version == version
            && now.since(noted_at) < REFRESH
            && source.vlan() == target.vlan();
        if !is_known {
            return None;
        }
        let (from, to) = (self.port_at(lane.port)?, self.port_at(port)?);
        let is_untagged = from.config.vlans.untagged() == Some(source.vlan())
            && to.tag(target.vlan(), None).is_none();
        let [queue] = *to.up.as_slice() else {
            return None;
        };
        let waits = !self.lane(queue)?.waiters.is_empty();
        let is_own = from.config.guard.as_ref().is_none_or(|own| own.mac == source.mac());
        if !from.runs || !to.runs || !is_untagged || !is_own || waits {
            return None;
        }
        let has_stages = !from.is_plain || !to.is_plain;
        let (to, from, vlan) = (target.mac(), source.mac(), source.vlan());
        let between = Between::new(to, from);
        Some(RunWay { to, from, between, vlan, port, queue, has_stages })
    }

    /// Puts the receiver's queue back, which was given frames or not.
    #[inline]
    fn end_run(&mut self, queue: u16, mut to: Box<Lane>, has_frames: bool) {
        if has_frames && !std::mem::replace(&mut to.is_touched, true) {
            self.touched.push(queue);
        }
        self.put_lane(queue, to);
    }

    /// Counts frames and bytes of a station, and how many of them went on.
    #[inline]
    fn count_from(&self, port: u16, (frames, bytes): (usize, usize), copies: usize) {
        if let Some(from) = self.port_at(port) {
            from.stats.in_frames.add(frames as u64);
            from.stats.in_octets.add(bytes as u64);
            from.stats.in_copies.add(copies as u64);
        }
    }

    /// Counts frames and bytes that a station was given.
    #[inline]
    fn count_to(&self, port: u16, (frames, bytes): (usize, usize)) {
        if let Some(to) = self.port_at(port) {
            to.stats.out_frames.add(frames as u64);
            to.stats.out_octets.add(bytes as u64);
            to.stats.out_copies.add(frames as u64);
        }
    }

    /// As [`run`](Self::run), with the stages of the two ports: those of the sender decide on all
    /// frames, those of the receiver on the ones that are left, and these are delivered. As stages
    /// are asked once, frames without a buffer each end here, too.
    // Not inline: the code of ports without stages stays short.
    #[inline(never)]
    fn run_by_stages(
        &mut self,
        now: Nanos,
        index: u16,
        lane: &mut Lane,
        way: &RunWay,
        budget: (usize, usize),
    ) -> Run {
        let mut sizes = match (self.port_at(lane.port), self.lane(way.queue)) {
            (Some(from), Some(to)) => look::<true>(from, lane, way, to, budget),
            _ => return Run::default(),
        };
        let count = sizes.len;
        if count == 0 {
            return Run::default();
        }
        let first = lane.frames.len().saturating_sub(lane.undecided);
        let mut stages = StageRun::new(way.vlan, &lane.frames, first, &sizes);
        self.pass_run(now, lane.port, Way::FromStation, &mut stages);
        let by_sender = stages.stopped();
        self.pass_run(now, way.port, Way::ToStation, &mut stages);
        let (stopped, verdicts) = (stages.stopped(), stages.verdicts());
        lane.undecided = lane.undecided.saturating_sub(count);
        let mut run = Run { frames: count, bytes: sizes.bytes(0, count), is_short: false };
        let copies = count.saturating_sub(by_sender.count_ones() as usize);
        self.count_from(lane.port, (count, run.bytes), copies);
        let mut slots: [usize; BATCH] = std::array::from_fn(|number| first.wrapping_add(number));
        if stopped != 0 {
            self.stop(lane, way, &mut sizes, &mut slots, (by_sender, stopped, &verdicts));
        }
        let slots = slots.get(..sizes.len).unwrap_or_default();
        run.is_short = self.deliver_passed(index, lane, way, slots, &sizes);
        run
    }

    /// Ends the frames of a run that stages have stopped, the `by_sender` ones at the port of the
    /// sender. The others close up in `sizes` and `slots`.
    fn stop(
        &mut self,
        lane: &mut Lane,
        way: &RunWay,
        sizes: &mut RunSizes,
        slots: &mut [usize; BATCH],
        (by_sender, stopped, verdicts): (u32, u32, &[Verdict; BATCH]),
    ) {
        let mut passed = 0_usize;
        for (number, verdict) in verdicts.iter().enumerate().take(sizes.len) {
            let has = |set: u32| set.wrapping_shr(number as u32) & 1 != 0;
            let Some(at) = slots.get(number).copied() else { break };
            if !has(stopped) {
                let size_bytes = sizes.sizes_bytes.get(number).copied();
                let places = (slots.get_mut(passed), sizes.sizes_bytes.get_mut(passed));
                if let ((Some(slot), Some(place)), Some(size_bytes)) = (places, size_bytes) {
                    (*slot, *place) = (at, size_bytes);
                    passed = passed.wrapping_add(1);
                }
                continue;
            }
            let Some(slot) = lane.frames.get_mut(at) else { break };
            slot.is_done = true;
            let (port, of_way) = if has(by_sender) {
                (lane.port, Way::FromStation)
            } else {
                (way.port, Way::ToStation)
            };
            if let Verdict::Drop(cause) = verdict {
                let frame = Some((&slot.head, &slot.segments));
                self.drop_frame(port, cause.dropped(of_way), way.vlan, frame);
            }
        }
        sizes.len = passed;
    }

    fn pass_run(&mut self, now: Nanos, port: u16, way: Way, stages: &mut StageRun<'_>) {
        if let Some(port) = self.ports.get_mut(usize::from(port)).and_then(Option::as_mut) {
            port.stages.run(now, way, stages);
        }
    }

    /// Delivers the frames of a run that have passed the stages, each to a buffer of its own, and
    /// the rest, for which there are none, one by one. Returns whether there was a rest.
    #[inline]
    fn deliver_passed(
        &mut self,
        index: u16,
        lane: &mut Lane,
        way: &RunWay,
        slots: &[usize],
        sizes: &RunSizes,
    ) -> bool {
        if slots.is_empty() {
            return false;
        }
        let Some(mut to) = self.take_lane(way.queue) else {
            return false;
        };
        let sizes_bytes = sizes.sizes_bytes.get(..slots.len()).unwrap_or_default();
        let lent = to.queue.lend_each(sizes_bytes, &mut to.loan).min(slots.len());
        let bytes = fill(lane, &to, slots.iter().take(lent).copied());
        if lent > 0 {
            to.queue.commit();
            self.count_to(way.port, (lent, bytes));
        }
        self.end_run(way.queue, to, lent > 0);
        for at in slots.iter().skip(lent).copied() {
            let Some(slot) = lane.frames.get_mut(at) else { break };
            slot.is_done = true;
            let (head, segments) = (&mut slot.head, &slot.segments);
            let sent = self.copy_to_open(way.port, way.vlan, head, segments, false);
            if sent == Sent::Waits {
                self.keep(index, lane, at, (way.vlan, PortSet::of(way.port)));
            }
        }
        lent < slots.len()
    }
}

/// Delivers the frames of a run to the queue `to`: all of them are looked at, then all get their
/// buffers, whose memory the CPU fetches meanwhile, and then all are copied.
#[inline]
fn deliver(
    from: &Port,
    lane: &mut Lane,
    way: &RunWay,
    to: &mut Lane,
    budget: (usize, usize),
) -> Run {
    let sizes = look::<false>(from, lane, way, to, budget);
    let sizes_bytes = sizes.sizes_bytes.get(..sizes.len);
    let Some(sizes_bytes) = sizes_bytes.filter(|sizes| !sizes.is_empty()) else {
        return Run::default();
    };
    let lent = to.queue.lend_each(sizes_bytes, &mut to.loan);
    let mut run = Run { frames: lent, bytes: 0, is_short: lent < sizes.len };
    if lent == 0 {
        return run;
    }
    let first = lane.frames.len().saturating_sub(lane.undecided);
    run.bytes = fill(lane, to, first..first.wrapping_add(lent));
    to.queue.commit();
    lane.undecided = lane.undecided.saturating_sub(lent);
    run
}

/// Copies the frames in these slots to the pieces of the loan, in their order. Returns the bytes.
#[inline]
fn fill(lane: &mut Lane, to: &Lane, slots: impl Iterator<Item = usize>) -> usize {
    let header_bytes = to.properties.header_bytes;
    let mut bytes = 0_usize;
    for (piece, at) in slots.enumerate() {
        let Some(slot) = lane.frames.get_mut(at) else { break };
        let (skip, _) = slot.head.rest();
        let head = slot.head.simple_with_header(header_bytes);
        slot.segments.copy_to_piece(head, skip, &to.loan.segments, piece);
        slot.is_done = true;
        bytes = bytes.saturating_add(slot.head.len_bytes());
    }
    bytes
}

/// Looks for the frames of a run, and at their sizes. `STAGES` says that stages look further.
#[inline]
fn look<const STAGES: bool>(
    from: &Port,
    lane: &mut Lane,
    way: &RunWay,
    to: &Lane,
    (frames, mut bytes): (usize, usize),
) -> RunSizes {
    let mut sizes = RunSizes::new(to.properties.header_bytes);
    if !to.is_up {
        return sizes;
    }
    let frame_bytes = lane.properties.frame_bytes.min(to.properties.frame_bytes);
    let guard = from.config.guard.as_ref();
    let first = lane.frames.len().saturating_sub(lane.undecided);
    let mut flow = None;
    for number in 0..frames.min(lane.undecided).min(BATCH) {
        let Some(slot) = lane.frames.get_mut(first.wrapping_add(number)) else { break };
        let len_bytes = slot.head.len_bytes();
        // As long as with a tag: the limit is the same with and without.
        if bytes == 0 || slot.fault.is_some() || len_bytes.saturating_add(TAG_BYTES) > frame_bytes {
            break;
        }
        let Some((ether_type, payload)) = slot.head.simple(&way.between) else { break };
        if guard.is_some_and(|own| guard::check_payload(own, ether_type, payload).is_err()) {
            break;
        }
        let mut repeats = false;
        if STAGES {
            let last = std::mem::replace(&mut flow, PlainFlow::steady(ether_type, payload));
            repeats = flow.is_some() && flow == last;
            slot.head.set_simple(way.to, way.from, ether_type);
        }
        slot.head.write_simple_header(to.properties.header_bytes);
        bytes = bytes.saturating_sub(len_bytes);
        sizes.push(len_bytes, repeats);
    }
    sizes
}
