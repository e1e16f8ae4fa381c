//! The stage.

use std::any::Any;
use std::sync::Arc;

use sidecore_net::{DropCause, FrameStage, PlainFlow, StageFrame, StageRun, Verdict, Way};
use sidecore_units::Nanos;

use crate::classes::Classes;
use crate::connection::ticks;
use crate::counts::FirewallStats;
use crate::packet::{Fragment, Packet, kind};
use crate::rule::{Rules, state, way};
use crate::snapshot::{SNAPSHOT_MAX, Snapshot};
use crate::tracker::{Seen, Tracker};

/// The firewall of a port.
///
/// The first rule that matches a frame decides on it; a frame that no rule matches passes. A rule
/// that has decided on a packet of a connection decides on the later ones of that side, until the
/// connection is answered or the rules are replaced: all that rules look at is the same in them.
///
/// A frame of the same [flow](PlainFlow) as the last one of its way has the same decision, without
/// a look at the table, if nothing but times has changed there since.
pub struct Firewall {
    rules: Arc<Rules>,
    classes: Classes,
    stats: Arc<FirewallStats>,
    /// Counts the replacements of rules: decisions in the table are of one set of rules.
    generation: u32,
    /// There if a rule asks for a state.
    tracker: Option<Tracker>,
    /// The decisions on the last frames, by their ways.
    pub(crate) memos: [Memo; 2],
}

/// A decision on a frame: the rule, if one matched.
type Decided = Result<Option<u16>, DropCause>;

/// The decision on a frame, for the ones that follow it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Memo {
    /// The flow of the frame; that of no frame at the beginning.
    flow: PlainFlow,
    vlan: u16,
    /// The version of the table behind the frame.
    version: u64,
    /// The time of the decision, in ticks: until the next one, connections neither end nor have
    /// another time noted.
    tick: u32,
    pub rule: Option<u16>,
    pub passes: bool,
}

/// Frames in a row that one rule has decided on.
#[derive(Default)]
struct Tally {
    rule: Option<u16>,
    frames: usize,
    bytes: usize,
}

impl Firewall {
    /// A firewall with these rules. If one of them asks for the state of a connection, there is a
    /// table for about `connections`. The seeds make its places unpredictable: random numbers.
    #[must_use]
    pub fn new(rules: Arc<Rules>, connections: usize, seeds: [u64; 2]) -> Self {
        let stats = Arc::new(FirewallStats::new(rules.texts().len()));
        let tracker = rules.tracks().then(|| Tracker::new(connections, seeds));
        let classes = Classes::new(&rules);
        Self { rules, classes, stats, generation: 0, tracker, memos: Default::default() }
    }

    /// Its counters.
    #[must_use]
    pub const fn stats(&self) -> &Arc<FirewallStats> {
        &self.stats
    }

    /// The connections of the table, for the firewall of a later process.
    #[must_use]
    pub fn snapshot(&self, now: Nanos) -> Snapshot {
        let tracker = self.tracker.as_ref();
        let connections = tracker.map(|tracker| tracker.connections(ticks(now), SNAPSHOT_MAX));
        Snapshot { connections: connections.unwrap_or_default() }
    }

    /// Enters connections that the firewall of an earlier process has tracked, as far as there is
    /// room. Its decisions are not among them: the rules decide anew. Returns the number of
    /// connections that were entered.
    pub fn resume(&mut self, now: Nanos, snapshot: &Snapshot) -> usize {
        let Some(tracker) = &mut self.tracker else { return 0 };
        let known = snapshot.connections.iter();
        let entered = known.filter(|known| tracker.restore(known, ticks(now))).count();
        self.stats.table.connections.set(tracker.len() as u64);
        entered
    }

    #[inline]
    fn version(&self) -> u64 {
        self.tracker.as_ref().map_or(0, Tracker::version)
    }

    /// Decides on a frame, as on the last one of its way if that had the same flow.
    #[inline]
    fn decide(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Decided {
        let (ether_type, payload) = (frame.ether_type(), frame.payload());
        let Some((flow, tcp_flags)) = PlainFlow::read(ether_type, payload) else {
            return self.decide_on_packet(now, frame, &Packet::read(ether_type, payload)?);
        };
        if !flow.is_steady(tcp_flags) {
            return self.decide_on_packet(now, frame, &Packet::plain(&flow, tcp_flags));
        }
        let [from, to] = &self.memos;
        let memo = if frame.way() == Way::FromStation { from } else { to };
        let is_same = memo.flow == flow
            && memo.vlan == frame.vlan()
            && memo.version == self.version()
            && memo.tick == ticks(now);
        if !is_same {
            return self.decide_and_note(now, frame, flow, tcp_flags);
        }
        match memo.rule {
            Some(rule) if !memo.passes => Err(DropCause::Rule(rule)),
            rule => Ok(rule),
        }
    }

    fn decide_and_note(
        &mut self,
        now: Nanos,
        frame: &StageFrame<'_>,
        flow: PlainFlow,
        tcp_flags: u8,
    ) -> Decided {
        let decided = self.decide_on_packet(now, frame, &Packet::plain(&flow, tcp_flags));
        let (vlan, version, tick) = (frame.vlan(), self.version(), ticks(now));
        let [from, to] = &mut self.memos;
        let memo = if frame.way() == Way::FromStation { from } else { to };
        *memo = match decided {
            Ok(rule) => Memo { flow, vlan, version, tick, rule, passes: true },
            Err(DropCause::Rule(rule)) => {
                Memo { flow, vlan, version, tick, rule: Some(rule), passes: false }
            }
            Err(_) => Memo::default(),
        };
        decided
    }

    #[inline]
    fn decide_on_packet(&mut self, now: Nanos, frame: &StageFrame<'_>, packet: &Packet) -> Decided {
        let of_port = (frame.vlan(), frame.way());
        let is_ip = packet.kind & (kind::IPV4 | kind::IPV6) != 0;
        let Some(tracker) = self.tracker.as_mut().filter(|_| is_ip) else {
            return self.judge(packet, frame.way(), state::UNTRACKED);
        };
        if let Fragment::Later(id) = packet.fragment {
            let time = (now, self.generation);
            return tracker.rule_of_fragment(packet, of_port, id, time).ok_or(DropCause::Fragment);
        }
        let seen = tracker.see(packet, of_port, frame.payload(), now);
        let rule = self.decide_on_seen(now, frame, packet, &seen)?;
        if let (Fragment::First(id), Some(tracker)) = (packet.fragment, &mut self.tracker) {
            let time = (now, self.generation);
            tracker.note_fragment(packet, of_port, (id, rule), time, &self.stats.table);
        }
        Ok(rule)
    }

    #[inline]
    fn decide_on_seen(
        &mut self,
        now: Nanos,
        frame: &StageFrame<'_>,
        packet: &Packet,
        seen: &Seen,
    ) -> Decided {
        let generation = self.generation;
        let Some((place, of_beginner)) = seen.place else {
            let rule = self.judge(packet, frame.way(), seen.state)?;
            if let (Some(begins), Some(tracker)) = (&seen.begins, &mut self.tracker)
                && let Some(place) = tracker.insert(begins, frame.way(), now, &self.stats.table)
                && let Some(connection) = tracker.connection_mut(place)
            {
                connection.set_rule(true, generation, rule);
            }
            return Ok(rule);
        };
        let connection = self.tracker.as_mut().and_then(|tracker| tracker.connection_mut(place));
        let known = connection.and_then(|connection| connection.rule(of_beginner, generation));
        match known {
            Some(Some(rule)) if !self.rules.accepts(rule.into()) => Err(DropCause::Rule(rule)),
            Some(rule) => Ok(rule),
            None => {
                let decided = self.judge(packet, frame.way(), seen.state);
                let rule = match decided {
                    Ok(rule) => rule,
                    Err(DropCause::Rule(rule)) => Some(rule),
                    Err(_) => return decided,
                };
                if let Some(tracker) = &mut self.tracker
                    && let Some(connection) = tracker.connection_mut(place)
                {
                    connection.set_rule(of_beginner, generation, rule);
                }
                decided
            }
        }
    }

    /// The rule that lets a packet pass, if there is one.
    #[inline]
    fn judge(&self, packet: &Packet, of_way: Way, state: u8) -> Decided {
        let of_way = if of_way == Way::FromStation { way::FROM } else { way::TO };
        match self.classes.find(&self.rules, packet, of_way, state) {
            Some((rule, false)) => Err(DropCause::Rule(rule)),
            Some((rule, true)) => Ok(Some(rule)),
            None => Ok(None),
        }
    }

    /// Counts a decision on so many frames of so many bytes with those before it. Returns the
    /// verdict.
    #[inline]
    fn count(
        &self,
        tally: &mut Tally,
        decided: Decided,
        (frames, bytes): (usize, usize),
    ) -> Verdict {
        let (rule, verdict) = match decided {
            Ok(rule) => (rule, Verdict::Pass),
            Err(DropCause::Rule(rule)) => (Some(rule), Verdict::Drop(DropCause::Rule(rule))),
            Err(cause) => return Verdict::Drop(cause),
        };
        if tally.rule != rule {
            self.finish(tally);
            *tally = Tally { rule, ..Tally::default() };
        }
        tally.frames = tally.frames.wrapping_add(frames);
        tally.bytes = tally.bytes.wrapping_add(bytes);
        verdict
    }

    /// Shows the frames of a tally in the counters.
    #[inline]
    fn finish(&self, tally: &Tally) {
        if tally.frames == 0 {
            return;
        }
        let counts = match tally.rule {
            Some(rule) => self.stats.rules.get(usize::from(rule)),
            None => Some(&self.stats.unmatched),
        };
        if let Some(counts) = counts {
            counts.count(tally.frames, tally.bytes);
        }
    }
}

impl FrameStage for Firewall {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let decided = self.decide(now, frame);
        let mut tally = Tally::default();
        let verdict = self.count(&mut tally, decided, (1, frame.len_bytes()));
        self.finish(&tally);
        verdict
    }

    fn run(&mut self, now: Nanos, run: &mut StageRun<'_>) {
        let (mut tally, mut number) = (Tally::default(), 0_usize);
        while number < run.len() {
            let first = number;
            number = number.wrapping_add(1);
            let Some(frame) = run.frame(first) else { continue };
            let decided = self.decide(now, &frame);
            // All that repeat it have its decision, which the memo would give to each of them.
            let (repeats, bytes) = run.repeated(first);
            let count = (repeats.wrapping_add(1), bytes.wrapping_add(frame.len_bytes()));
            let verdict = self.count(&mut tally, decided, count);
            number = number.wrapping_add(repeats);
            if verdict != Verdict::Pass {
                (first..number).for_each(|number| run.decide(number, verdict));
            }
        }
        self.finish(&tally);
    }

    fn look(&mut self, now: Nanos) {
        if let Some(tracker) = &mut self.tracker {
            tracker.look(now);
            self.stats.table.connections.set(tracker.len() as u64);
        }
    }

    fn inherit(&mut self, old: &mut dyn FrameStage) {
        let old: &mut dyn Any = old;
        let Some(old) = old.downcast_mut::<Self>() else { return };
        self.generation = old.generation.wrapping_add(1);
        let same = |own: &Tracker, old: &Tracker| own.capacity() == old.capacity();
        if let (Some(own), Some(known)) = (&mut self.tracker, &mut old.tracker)
            && same(own, known)
        {
            // The old stage leaves with the empty table.
            std::mem::swap(own, known);
            self.stats.table.connections.set(own.len() as u64);
        }
    }
}
