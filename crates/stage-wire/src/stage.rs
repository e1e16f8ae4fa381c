//! The stage.

use std::any::Any;
use std::io;
use std::sync::Arc;

use sidecore_net::{DropCause, FrameStage, Harm, HeldFrames, StageFrame, Verdict, Way};
use sidecore_telemetry::counters;
use sidecore_units::Nanos;
use sidecore_wire_faults::{Fate, Fates, Faults};

use crate::parse::Wire;

/// The most frames on their way, in both directions: 68 KiB each, where frames are that long.
pub const HELD_MAX: usize = 1024;

counters! {
    /// The counters of a wire.
    pub struct WireStats;

    /// The counters of a wire at one moment.
    pub struct WireCounts;

    /// Frames that were lost.
    pub lost: Counter = "lost_total",
    /// Frames that were lost because too many were on their way.
    pub crowded_out: Counter = "crowded_out_total",
    /// Frames that went on twice.
    pub doubled: Counter = "doubled_total",
    /// Frames that may have been overtaken by later ones.
    pub overtaken: Counter = "overtaken_total",
    /// Frames with a wrong bit.
    pub damaged: Counter = "damaged_total",
    /// Frames that lost their end.
    pub cut_short: Counter = "cut_short_total",
}

/// A bad wire.
pub struct WireStage {
    wire: Wire,
    stats: Arc<WireStats>,
    /// From the station, and to it.
    ways: [OneWay; 2],
    held: HeldFrames,
}

/// One direction.
struct OneWay {
    fates: Fates,
    /// The arrival of the last frame that kept its order.
    latest: Nanos,
}

impl WireStage {
    /// A wire with these faults.
    ///
    /// # Errors
    /// There is no memory for frames on their way.
    pub fn new(wire: &Wire) -> io::Result<Self> {
        let way = |seed: u64| OneWay { fates: Fates::new(seed), latest: Nanos::ZERO };
        let ways = [way(wire.seed), way(!wire.seed)];
        let held = HeldFrames::new(HELD_MAX)?;
        Ok(Self { wire: wire.clone(), stats: Arc::default(), ways, held })
    }

    /// Its counters.
    #[must_use]
    pub const fn stats(&self) -> &Arc<WireStats> {
        &self.stats
    }

    /// Puts a copy of the frame on its way. False if there are too many.
    fn fly(&mut self, frame: &StageFrame<'_>, at: Nanos, fate: &Fate) -> bool {
        let payload_bytes = frame.payload_bytes();
        let can_harm = payload_bytes > 0;
        let harm = Harm {
            wrong_bits: (fate.is_damaged && can_harm).then(|| fate.wrong_bit(payload_bytes)),
            rest: (fate.is_cut_short && can_harm).then(|| fate.rest(payload_bytes)),
        };
        let is_held = self.held.hold(frame, at, harm);
        if !is_held {
            self.stats.crowded_out.add(1);
        }
        is_held
    }

    fn arrival(&mut self, faults: &Faults, now: Nanos, way: Way) -> Nanos {
        let [from, to] = &mut self.ways;
        let way = if way == Way::FromStation { from } else { to };
        let arrival = way.fates.arrival(faults, now, &mut way.latest);
        self.stats.overtaken.add(arrival.is_overtaken.into());
        arrival.at
    }
}

impl FrameStage for WireStage {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let (faults, way) = (self.wire.faults, frame.way());
        if self.wire.way.is_some_and(|only| only != way) {
            return Verdict::Pass;
        }
        let [from, to] = &mut self.ways;
        let fates = if way == Way::FromStation { &mut from.fates } else { &mut to.fates };
        let fate = fates.draw(&faults);
        if fate.is_lost {
            self.stats.lost.add(1);
            return Verdict::Drop(DropCause::Lost);
        }
        self.stats.damaged.add(fate.is_damaged.into());
        self.stats.cut_short.add(fate.is_cut_short.into());
        if fate.is_doubled {
            self.stats.doubled.add(1);
            let at = self.arrival(&faults, now, way);
            self.fly(frame, at, &fate);
        }
        let at = self.arrival(&faults, now, way);
        let is_whole = !fate.is_damaged && !fate.is_cut_short;
        // A double goes on first, at the same time at the earliest.
        if at <= now && is_whole && !fate.is_doubled && self.held.is_empty() {
            return Verdict::Pass;
        }
        if self.fly(frame, at, &fate) { Verdict::Held } else { Verdict::Drop(DropCause::Lost) }
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, old: &mut dyn FrameStage) {
        let old: &mut dyn Any = old;
        if let Some(old) = old.downcast_mut::<Self>() {
            // Frames on their way keep the times that they have.
            std::mem::swap(&mut self.held, &mut old.held);
            for (way, old) in self.ways.iter_mut().zip(&old.ways) {
                way.latest = old.latest;
            }
        }
    }

    fn held(&mut self) -> Option<&mut HeldFrames> {
        Some(&mut self.held)
    }

    fn next_release(&self) -> Option<Nanos> {
        self.held.deadline()
    }
}
