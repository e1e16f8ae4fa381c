//! Runs: frames of a queue that follow each other from one station to another one, which is what
//! most frames do. The switch decides on the way of a run once, and each of its frames is only
//! compared with it.

use sidecore_units::Nanos;

use super::Switch;
use super::decide::REFRESH;
use crate::frames::BATCH;
use crate::guard;
use crate::head::{Between, TAG_BYTES};
use crate::ports::{Lane, Port};

/// The way of a run, as the queue's last frame went.
struct RunWay {
    between: Between,
    /// The receiver's port, and its only queue.
    port: u16,
    queue: u16,
}

/// The frames of a run that were delivered.
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
    /// [`forward`](Self::forward).
    #[inline]
    pub(super) fn run(&mut self, now: Nanos, lane: &mut Lane, budget: (usize, usize)) -> Run {
        let Some(way) = self.run_way(now, lane) else {
            return Run::default();
        };
        let Some(mut to) = self.take_lane(way.queue) else {
            return Run::default();
        };
        let run = match self.port_at(lane.port) {
            Some(from) => deliver(from, lane, &way, &mut to, budget),
            None => Run::default(),
        };
        if run.frames > 0 {
            if !std::mem::replace(&mut to.is_touched, true) {
                self.touched.push(way.queue);
            }
            self.count(lane.port, way.port, &run);
        }
        self.put_lane(way.queue, to);
        run
    }

    /// The way of the queue's last frame, if it is still one on which nothing but the addresses
    /// decides.
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
        if !from.is_plain || !to.is_plain || !is_untagged || !is_own || waits {
            return None;
        }
        Some(RunWay { between: Between::new(target.mac(), source.mac()), port, queue })
    }

    #[inline]
    fn count(&self, from: u16, to: u16, run: &Run) {
        let (frames, bytes) = (run.frames as u64, run.bytes as u64);
        if let Some(from) = self.port_at(from) {
            from.stats.in_frames.add(frames);
            from.stats.in_octets.add(bytes);
            from.stats.in_copies.add(frames);
        }
        if let Some(to) = self.port_at(to) {
            to.stats.out_frames.add(frames);
            to.stats.out_octets.add(bytes);
            to.stats.out_copies.add(frames);
        }
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
    let header_bytes = to.properties.header_bytes;
    let mut sizes_bytes = [0; BATCH];
    let count = if to.is_up { sizes(from, lane, way, to, budget, &mut sizes_bytes) } else { 0 };
    let Some(sizes_bytes) = sizes_bytes.get(..count).filter(|sizes| !sizes.is_empty()) else {
        return Run::default();
    };
    let lent = to.queue.lend_each(sizes_bytes, &mut to.loan);
    let mut run = Run { frames: lent, bytes: 0, is_short: lent < count };
    if lent == 0 {
        return run;
    }
    let first = lane.frames.len().saturating_sub(lane.undecided);
    for at in 0..lent {
        let Some(slot) = lane.frames.get_mut(first.wrapping_add(at)) else { break };
        let (skip, _) = slot.head.rest();
        let head = slot.head.simple_with_header(header_bytes);
        slot.segments.copy_to_piece(head, skip, &to.loan.segments, at);
        slot.is_done = true;
        run.bytes = run.bytes.saturating_add(slot.head.len_bytes());
    }
    to.queue.commit();
    lane.undecided = lane.undecided.saturating_sub(lent);
    run
}

/// The sizes of the frames of a run at the receiver, with its virtio header, and their number.
#[inline]
fn sizes(
    from: &Port,
    lane: &mut Lane,
    way: &RunWay,
    to: &Lane,
    (frames, mut bytes): (usize, usize),
    sizes_bytes: &mut [usize; BATCH],
) -> usize {
    let frame_bytes = lane.properties.frame_bytes.min(to.properties.frame_bytes);
    let guard = from.config.guard.as_ref();
    let first = lane.frames.len().saturating_sub(lane.undecided);
    let mut count = 0_usize;
    for size_bytes in sizes_bytes.iter_mut().take(frames.min(lane.undecided)) {
        let Some(slot) = lane.frames.get_mut(first.wrapping_add(count)) else { break };
        let len_bytes = slot.head.len_bytes();
        // As long as with a tag: the limit is the same with and without.
        if bytes == 0 || slot.fault.is_some() || len_bytes.saturating_add(TAG_BYTES) > frame_bytes {
            break;
        }
        let Some((ether_type, payload)) = slot.head.simple(&way.between) else { break };
        if guard.is_some_and(|own| guard::check_payload(own, ether_type, payload).is_err()) {
            break;
        }
        slot.head.write_simple_header(to.properties.header_bytes);
        bytes = bytes.saturating_sub(len_bytes);
        *size_bytes = to.properties.header_bytes.wrapping_add(len_bytes);
        count = count.wrapping_add(1);
    }
    count
}
