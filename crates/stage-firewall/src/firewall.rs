//! The stage.

use std::any::Any;
use std::sync::Arc;

use sidecore_net::{DropCause, FrameStage, StageFrame, Verdict, Way};
use sidecore_units::Nanos;

use crate::counts::FirewallStats;
use crate::packet::{Fragment, Packet, kind};
use crate::rule::{Rules, state, way};
use crate::tracker::{Seen, Tracker};

/// The firewall of a port.
///
/// The first rule that matches a frame decides on it; a frame that no rule matches passes. A rule
/// that has decided on a packet of a connection decides on the later ones of that side, until the
/// connection is answered or the rules are replaced: all that rules look at is the same in them.
pub struct Firewall {
    rules: Arc<Rules>,
    stats: Arc<FirewallStats>,
    /// Counts the replacements of rules: decisions in the table are of one set of rules.
    generation: u32,
    /// There if a rule asks for a state.
    tracker: Option<Tracker>,
}

impl Firewall {
    /// A firewall with these rules. If one of them asks for the state of a connection, there is a
    /// table for about `connections`. The seeds make its places unpredictable: random numbers.
    #[must_use]
    pub fn new(rules: Arc<Rules>, connections: usize, seeds: [u64; 2]) -> Self {
        let stats = Arc::new(FirewallStats::new(rules.texts().len()));
        let tracker = rules.tracks().then(|| Tracker::new(connections, seeds));
        Self { rules, stats, generation: 0, tracker }
    }

    /// Its counters.
    #[must_use]
    pub const fn stats(&self) -> &Arc<FirewallStats> {
        &self.stats
    }

    fn decide(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Result<Option<u16>, DropCause> {
        let packet = Packet::read(frame)?;
        let of_port = (frame.vlan(), frame.way());
        let is_ip = packet.kind & (kind::IPV4 | kind::IPV6) != 0;
        let Some(tracker) = self.tracker.as_mut().filter(|_| is_ip) else {
            return judge(&self.rules, &packet, frame.way(), state::UNTRACKED);
        };
        if let Fragment::Later(id) = packet.fragment {
            let time = (now, self.generation);
            return tracker.rule_of_fragment(&packet, of_port, id, time).ok_or(DropCause::Fragment);
        }
        let seen = tracker.see(&packet, of_port, frame.payload(), now);
        let rule = self.decide_on_seen(now, frame, &packet, seen)?;
        if let (Fragment::First(id), Some(tracker)) = (packet.fragment, &mut self.tracker) {
            let time = (now, self.generation);
            tracker.note_fragment(&packet, of_port, (id, rule), time, &self.stats.table);
        }
        Ok(rule)
    }

    #[inline]
    fn decide_on_seen(
        &mut self,
        now: Nanos,
        frame: &StageFrame<'_>,
        packet: &Packet,
        seen: Seen,
    ) -> Result<Option<u16>, DropCause> {
        let generation = self.generation;
        let Some(tracker) = &mut self.tracker else { return Ok(None) };
        let connection = seen.place.and_then(|(place, _)| tracker.connection_mut(place));
        let (Some(connection), Some((_, of_beginner))) = (connection, seen.place) else {
            let rule = judge(&self.rules, packet, frame.way(), seen.state)?;
            let place = seen
                .begins
                .and_then(|key| tracker.insert(key, frame.way(), now, &self.stats.table));
            if let Some(connection) = place.and_then(|place| tracker.connection_mut(place)) {
                connection.set_rule(true, generation, rule);
                connection.note(true, packet.tcp_flags, crate::connection::ticks(now));
            }
            return Ok(rule);
        };
        match connection.rule(of_beginner, generation) {
            Some(Some(rule)) if !self.rules.accepts(rule.into()) => Err(DropCause::Rule(rule)),
            Some(rule) => Ok(rule),
            None => {
                let decided = judge(&self.rules, packet, frame.way(), seen.state);
                match decided {
                    Ok(rule) => connection.set_rule(of_beginner, generation, rule),
                    Err(DropCause::Rule(rule)) => {
                        connection.set_rule(of_beginner, generation, Some(rule));
                    }
                    Err(_) => {}
                }
                decided
            }
        }
    }
}

/// The rule that lets a packet pass, if there is one.
fn judge(rules: &Rules, packet: &Packet, of_way: Way, state: u8) -> Result<Option<u16>, DropCause> {
    let of_way = if of_way == Way::FromStation { way::FROM } else { way::TO };
    match rules.find(packet, of_way, state) {
        Some((rule, false)) => Err(DropCause::Rule(rule)),
        Some((rule, true)) => Ok(Some(rule)),
        None => Ok(None),
    }
}

impl FrameStage for Firewall {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let decided = self.decide(now, frame);
        let (rule, verdict) = match decided {
            Ok(rule) => (rule, Verdict::Pass),
            Err(DropCause::Rule(rule)) => (Some(rule), Verdict::Drop(DropCause::Rule(rule))),
            Err(cause) => return Verdict::Drop(cause),
        };
        let counts = match rule {
            Some(rule) => self.stats.rules.get(usize::from(rule)),
            None => Some(&self.stats.unmatched),
        };
        if let Some(counts) = counts {
            counts.count(frame.len_bytes());
        }
        verdict
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
